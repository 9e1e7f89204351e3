"""Filling a store: several threads, each the first to touch the pages that it writes; progress as it goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from trilane.cpu_kernels.cpus import read_cpu_budget
from trilane.cpu_kernels.float_env import exact_floats
from trilane.errors import StoreError
from trilane.store_layers import LayerSource

Progress = Callable[[int, int], None]
AUTO = "auto"


def fill(
    sources: Sequence[LayerSource],
    room_of: Callable[[int, int], np.ndarray],
    threads: int | None,
    progress: Progress | str | None,
) -> None:
    """Pack all experts; neighbouring experts go to different threads.

    Parameters
    ----------
    sources : sequence of LayerSource
    room_of : callable
        (layer, expert) -> the bytes to write, uint8.
    threads : int or None
        None: the CPUs that this process may use.
    progress : callable, "auto" or None
        Called with (experts done, experts in all); "auto" draws a bar if stderr is a terminal.
    """
    if threads is not None and threads < 1:
        raise StoreError(f"threads: {threads}, but at least 1 is needed to fill a store; leave it out for all CPUs")
    jobs = [(layer, e) for layer, source in enumerate(sources) for e in range(source.num_experts)]

    def pack(job: tuple[int, int]) -> None:
        with exact_floats():  # threads inherit the caller's mode, and quantised bytes must not depend on it
            sources[job[0]].pack(job[1], room_of(*job))

    num_threads = threads or read_cpu_budget().num_concurrent
    with _reporter(progress) as report, ThreadPoolExecutor(num_threads, "trilane-fill") as pool:
        for done, _ in enumerate(pool.map(pack, jobs), start=1):
            if report is not None:
                report(done, len(jobs))


@contextmanager
def _reporter(progress: Progress | str | None) -> Iterator[Progress | None]:
    """What to call as experts are done."""
    if isinstance(progress, str) and progress != AUTO:
        raise StoreError(f"progress: {progress!r} is no choice; pass a function, 'auto' or None")
    if not isinstance(progress, str):
        yield progress
    elif not sys.stderr.isatty():
        yield None
    else:
        with _bar() as report:
            yield report


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("loading experts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
