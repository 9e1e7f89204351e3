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
        function = self._functions[launch.kernel]
        most = self._most_shared_nbytes - int(function.shared_size_bytes)
        if launch.shared_nbytes > most:
            raise ValueError(
                f"rows of {self.variant} need {launch.shared_nbytes} bytes of shared memory to be read in place, and "
                f"this GPU has {most}: leave the zero-copy lane out, or store these experts in a smaller format"
            )
        function.max_dynamic_shared_size_bytes = launch.shared_nbytes

    def launch(self, launch: Launch, stream: Any) -> None:
        """Put a launch on a CuPy stream (captured, if the stream captures)."""
        grid = (*launch.grid, 1)
        self._functions[launch.kernel](
            grid, (launch.threads, 1, 1), launch.arguments, shared_mem=launch.shared_nbytes, stream=stream
        )

    def address(self, kernel: str) -> int:
        """The driver's handle (CUfunction) of a kernel, for launches that do not go through CuPy."""
        return int(self._functions[kernel].ptr)
