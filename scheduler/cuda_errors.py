"""The GPU's driver, and public errors for those of the driver, the compiler, the GPU's error words and its threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trilane.cuda_words import Failure
from trilane.errors import DeviceError, RoutingError, WorkerError
from trilane.gpu_kernels import driver as gpu_driver
from trilane.gpu_kernels.driver import Driver, DriverError, DriverMissing
from trilane.gpu_kernels.nvrtc import CompileError, CompilerMissing


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Errors of the driver and of the compiler as public ones."""
    try:
        yield
    except DriverMissing as error:
        raise DeviceError(str(error)) from error
    except (DriverError, CompileError, CompilerMissing) as error:
        raise DeviceError(f"device 'cuda': {error}") from error


def open_gpu() -> Driver:
    """The driver of the first visible GPU.

    Raises
    ------
    DeviceError
        There is none, or it cannot be used.
    """
    with device_errors():
        return gpu_driver.CudaDriver()


def failure_error(failure: Failure, status: int, stall_s: float) -> WorkerError:
    """Why nothing runs any more; ``status`` is the driver's or the team's code that came with it."""
    why = {
        Failure.STALLED: f"a step waited for the host for more than {stall_s:g} s (cpu.stall_timeout_s)",
        Failure.COPY: f"the driver refused a copy to the GPU (CUDA error {status})",
        Failure.TEAM: f"the CPU lane failed (code {status})",
    }[failure]
    return WorkerError(f"{why}; outputs since then may be NaN; close the scheduler and make a new one")


def step_error(name: str, clock: int) -> RoutingError | WorkerError:
    """An error word of the GPU (``gpu_kernels.words.ERRORS``) and the clock of the last step with it."""
    if name == "bad_id":
        return RoutingError(
            f"topk_ids: layer-step {clock} named an expert that its layer does not have, and skipped it; check "
            "the router's output (ids are seen on the GPU, so a later call tells)"
        )
    return WorkerError(f"layer-step {clock} ended as {name}: its output is NaN; make a new scheduler")
