"""What can go wrong on a GPU, made to happen: each must end in a clear error, or go on and be named by `stats`.

Faults of the control thread and of copies come through `CudaRunner.inject_fault`; memory that cannot be had, through a
driver that refuses it. After a failure the next step must fail too, and closing must free everything.

    python -m benchmarks.cuda_faults
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import NamedTuple

import numpy as np

from benchmarks.cuda_identity import made_profile
from trilane.cuda_words import Fault

STALL_S = 1.0


class Case(NamedTuple):
    """A fault and what must come of it: "error" (``text`` is in it) or "degraded" (``text``: the note's name)."""

    name: str
    outcome: str
    text: str
    fault: Fault = Fault.NONE
    force: str | None = None
    host: dict = {}
    driver: dict = {}


CASES = (
    Case("control thread stops", "error", "stall_timeout_s", Fault.DEAF, "cpu"),
    Case("copy fails", "error", "refused a copy", Fault.COPY, "stream"),
    Case("copies do not land", "degraded", "copies", Fault.LOST_FLAG, "stream"),
    Case("no device memory at all", "error", "out of memory", driver={"allocations": 0}),
    Case("device memory for few slots", "degraded", "cache", driver={"free_slots": 5}),
    Case("pinning refused", "degraded", "pinned", driver={"registrations": 0}),
    Case("pinning capped", "degraded", "pinned", host={"pin_limit": 1 << 20}),
)


def refusing(base, slot_nbytes, *, allocations=None, free_slots=None, registrations=None):
    """A driver class like ``base`` that has only so much to give."""
    from trilane.gpu_kernels.cuda_device import RESERVE_NBYTES
    from trilane.gpu_kernels.driver import DriverError

    class RefusingDriver(base):
        def free_nbytes(self):
            return super().free_nbytes() if free_slots is None else RESERVE_NBYTES + free_slots * slot_nbytes

        def allocate(self, nbytes):
            if allocations is not None:
                raise DriverError("cuMemAlloc_v2: out of memory (CUDA error 2)")
            return super().allocate(nbytes)

        def register(self, address, nbytes):
            return super().register(address, nbytes) if registrations is None else "out of memory (CUDA error 2)"

    return RefusingDriver


@contextlib.contextmanager
def using_driver(made):
    """Let schedulers on a GPU use another class of driver."""
    import trilane.cuda_runner

    before, trilane.cuda_runner.CudaDriver = trilane.cuda_runner.CudaDriver, made
    try:
        yield
    finally:
        trilane.cuda_runner.CudaDriver = before


def run_case(case, store, profile, wanted, step, threads="auto"):
    """What came of a case, as one line; the bits of whatever ran are compared.

    Raises
    ------
    AssertionError
        It ended in another way than it must.
    """
    import trilane.cuda_runner
    from trilane import Config, ExpertScheduler, TrilaneError

    made = trilane.cuda_runner.CudaDriver
    if case.driver:
        made = refusing(made, int(max(layer.layout.shard_nbytes.max() for layer in store.layers)), **case.driver)
    config = Config(
        cache={"fraction": 0.5}, policy={"force": case.force, "admit": "always"}, host=case.host,
        cpu={"stall_timeout_s": STALL_S, "threads": threads},
    )  # fmt: skip
    begin = time.perf_counter()
    try:
        with using_driver(made), ExpertScheduler(store, profile=profile, config=config, device="cuda") as scheduler:
            scheduler._runner.inject_fault(case.fault)
            try:
                for _ in range(2):
                    assert_same(scheduler.forward(*step), wanted)
            except TrilaneError:
                assert_fails(scheduler, step)  # nothing runs after a failure
                raise
            inactive = scheduler.stats().inactive
    except TrilaneError as error:
        text = f"{type(error).__name__}: {error}"
        assert case.outcome == "error" and case.text in str(error), f"{case.name}: {text}"
    else:
        assert case.outcome == "degraded" and case.text in inactive, f"{case.name}: went on; stats: {inactive}"
        text = f"goes on with the same bits; stats: {case.text}: {inactive[case.text]}"
    return f"{case.name}: {time.perf_counter() - begin:.1f} s: {text}"


def assert_same(got, wanted):
    assert (got.view(np.uint32) == wanted.view(np.uint32)).all(), "other bits than the host's"


def assert_fails(scheduler, step):
    from trilane import TrilaneError

    try:
        scheduler.forward(*step)
    except TrilaneError:
        return
    raise AssertionError("a step ran after a failure")


def run_cases(store, top_k, cases=CASES, threads="auto", report=print):
    """Every case; how many did not end as they must."""
    from trilane import Config, ExpertScheduler

    profile, rng = made_profile(store), np.random.default_rng(6)
    ids = rng.choice(store.layers[0].num_experts, top_k, False)[None]
    x = rng.standard_normal((1, store.hidden)).astype(np.float32)
    step = 0, x, ids, np.full((1, top_k), 1 / top_k, np.float32)
    with ExpertScheduler(store, profile=profile, config=Config(policy={"force": "cpu"}), device="host") as host:
        wanted = host.forward(*step).copy()
    failed = 0
    for case in cases:
        try:
            report(run_case(case, store, profile, wanted, step, threads), flush=True)
        except AssertionError as error:
            failed += 1
            report(f"NOT HELD: {error}", flush=True)
    return failed


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args(words)
    from trilane.random_store import StepShape, random_store

    failed = run_cases(random_store(StepShape(2048, 768, 16, 4)), 4)
    print(f"{len(CASES)} faults: {f'{failed} NOT HELD' if failed else 'each ended as it must'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
