"""The kernels of one layer's formats on one GPU, loaded through CuPy and ready to launch."""

from __future__ import annotations

from typing import Any

from trilane.gpu_kernels.build import KERNELS, Variant, cubin
from trilane.gpu_kernels.launch import STAGE_NBYTES, Launch


class Kernels:
    """The kernels, loaded on CuPy's current device.

    Parameters
    ----------
    variant : Variant
        The formats of the layer.

    Raises
    ------
    CompilerMissing, CompileError
        From :mod:`.nvrtc`, where no cubin is in the cache.
    """

    def __init__(self, variant: Variant) -> None:
        import cupy

        self.variant = variant
        device = cupy.cuda.Device()
        self._most_shared_nbytes = int(device.attributes["MaxSharedMemoryPerBlockOptin"])
        self._driver = cupy.cuda.driver
        self._module = cupy.cuda.function.Module()
        self._module.load(cubin(variant, int(device.compute_capability)))
        self._functions: dict[str, Any] = {name: self._module.get_function(name) for name in KERNELS}

    def prepare(self, launch: Launch) -> None:
        """Ask for the shared memory of a launch, once, before it is launched or captured.

        Raises
        ------
        ValueError
            If the GPU does not have that much.
        """
        if launch.shared_nbytes <= STAGE_NBYTES:
            return
        driver, function = self._driver, self._functions[launch.kernel].ptr
        own = int(driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        if own + launch.shared_nbytes > self._most_shared_nbytes:
            raise ValueError(
                f"rows of {self.variant} need {own + launch.shared_nbytes} bytes of shared memory and this GPU gives a "
                f"block {self._most_shared_nbytes}: store these experts in a format with fewer bytes a weight"
            )
        driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_nbytes)
        driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)

    def launch(self, launch: Launch, stream: Any) -> None:
        """Put a launch on a CuPy stream (captured, if the stream captures)."""
        grid = (*launch.grid, 1)
        self._functions[launch.kernel](
            grid, (launch.threads, 1, 1), launch.arguments, shared_mem=launch.shared_nbytes, stream=stream
        )

    def address(self, kernel: str) -> int:
        """The driver's handle (CUfunction) of a kernel, for launches that do not go through CuPy."""
        return int(self._functions[kernel].ptr)
