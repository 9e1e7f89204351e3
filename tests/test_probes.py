"""The probes: they run what they say, check what they ran, and say what they do not know."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trilane import ProbeError
from trilane.cpu_kernels.arena import allocate_arena
from trilane.cpu_kernels.atomics import load_at, sleep_ns, store_at
from trilane.cpu_kernels.cpus import read_cpu_budget
from trilane.cpu_kernels.isa import available_isas
from trilane.cpu_kernels.rows import ROWS_SIGNATURE
from trilane.jit import native
from trilane.probes import copies, cpu_experts, ggml, handover, host_memory, lane_experts, lane_jobs, machine, timing

pytestmark = pytest.mark.alone
SMALL = 8 << 20  # bytes: a run is quick, and what it measures is the cache, which does not matter here
MANY = pytest.mark.skipif(machine.describe_machine().num_allowed < 2, reason="needs two CPUs")


@pytest.fixture(scope="module")
def arena():
    arena = allocate_arena(SMALL)
    arena.bytes[: arena.nbytes] = np.random.default_rng(0).integers(0, 256, arena.nbytes, np.uint8)
    return arena


# ---------------------------------------------------------------------------------------------------- timing
@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=MANY)])
def test_a_case_is_timed_and_its_steps_are_checked(arena, num_threads) -> None:
    sums = np.zeros(num_threads, np.int32)
    case = host_memory.read_case(arena, 1 << 20, num_threads, sums)
    (taken,) = timing.time_cases([case], num_samples=3, sample_us=200, most_rounds=9)
    assert 0 < taken.low_us <= taken.median_us <= taken.high_us
    assert taken.gb_s == pytest.approx(case.nbytes / taken.median_us / 1e3)
    assert taken.num_steps >= 1 and taken.num_samples >= 3


def test_a_wrong_result_is_refused(arena) -> None:
    sums = np.zeros(1, np.int32)
    case = host_memory.read_case(arena, 1 << 20, 1, sums)
    case.calls[0, 0, 1] += 64  # reads other bytes than it is checked against
    case.calls[0, 0, 6] = 0  # and fewer of them
    with pytest.raises(ProbeError, match="worthless"):
        timing.time_cases([case], num_samples=1)


def test_cases_take_turns_and_start_apart(arena) -> None:
    cases = [host_memory.read_case(arena, 1 << 20, 1, np.zeros(1, np.int32)) for _ in range(2)]
    runner = timing._Runner(cases)
    assert runner.next_step.tolist() == [0, 4] and runner.rings.tolist() == [[0, 8], [8, 8]]
    wall, cpu = runner.run(np.array([3, 2]), 5)
    assert wall.shape == cpu.shape == (1, 5, 2) and wall.min() > 0
    assert runner.next_step.tolist() == [(0 + 15) % 8, (4 + 10) % 8]


def test_steps_without_a_call_do_nothing() -> None:
    case = timing.Case("idle", 0, np.zeros((1, 4, timing.NUM_WORDS), np.int64))
    (taken,) = timing.time_cases([case], num_samples=2, sample_us=10)
    assert taken.median_us < 100 and taken.gb_s == 0


def test_a_busy_machine_is_told() -> None:
    case = timing.Case("x", 100, np.zeros((1, 1, timing.NUM_WORDS), np.int64))
    wall = np.array([[1000, 9000, 2000, 3000]])
    calm = timing._summary(case, wall, np.array([[1000, 900, 2000, 3000]]), 1, 3)
    assert (calm.median_us, calm.num_samples, calm.num_discarded, calm.disturbed) == (2.0, 3, 1, False)
    busy = timing._summary(case, wall, np.array([[1000, 900, 900, 900]]), 1, 3)
    assert (busy.median_us, busy.num_samples, busy.disturbed) == (0.9, 4, True)


def test_a_scattered_order_visits_everything() -> None:
    assert sorted(timing.scattered(100)) == list(range(100))
    assert not np.any(np.diff(timing.scattered(1000)) == 0)


def test_threads_that_wait_are_let_go_when_one_never_comes(arena, monkeypatch) -> None:
    case = host_memory.read_case(arena, 1 << 20, 3, np.zeros(3, np.int32))
    start, started = timing.threading.Thread.start, []

    def refuse_the_second(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(timing.threading.Thread, "start", refuse_the_second)
    with pytest.raises(RuntimeError, match="can't start"):
        timing.time_cases([case])
    started[0].join(20)
    assert not started[0].is_alive()


# ------------------------------------------------------------------------------------------------ host memory
def test_read_rates(arena) -> None:
    (rate,) = host_memory.measure_read([1], arena=arena)
    assert rate.num_threads == 1 and 0.1 < rate.gb_s < 2000


def test_the_probe_memory_is_larger_than_the_caches_if_there_is_room(monkeypatch) -> None:
    monkeypatch.setattr(host_memory, "allocate_arena", lambda nbytes: nbytes)
    monkeypatch.setattr(host_memory, "largest_cache_nbytes", lambda: 1 << 30)
    monkeypatch.setattr(host_memory, "available_nbytes", lambda: 64 << 30)
    assert host_memory.probe_arena() == 4 << 30
    assert host_memory.probe_arena(num_regions=8) == 2 << 30
    monkeypatch.setattr(host_memory, "largest_cache_nbytes", lambda: None)
    assert host_memory.probe_arena() == 512 << 20


# ------------------------------------------------------------------------------------------------ CPU experts
@pytest.mark.parametrize("isa", available_isas())
def test_kernel_rates_of_each_instruction_set(isa) -> None:
    arenas = (allocate_arena(SMALL), allocate_arena(SMALL))
    rates = list(
        cpu_experts.measure_cpu_experts(
            ["q4_k", "q8_0"], [1], shapes=[(36, 512), (64, 96)], isa=isa, arenas=arenas, num_samples=1
        )
    )
    assert [(r.format, r.shape) for r in rates] == [
        ("q4_k", (36, 512)),  # 96 columns are no multiple of 256
        ("q8_0", (36, 512)),
        ("q8_0", (64, 96)),
    ]
    assert all(r.gb_s > 0 and r.ratio == r.gb_s / r.limit_gb_s and r.ggml_gb_s is None for r in rates)


@MANY
def test_rows_are_shared_by_the_threads() -> None:
    arenas = (allocate_arena(SMALL), allocate_arena(SMALL))
    rates = cpu_experts.measure_cpu_experts(["f32"], [2], shapes=[(37, 256)], arenas=arenas, num_samples=1)
    assert next(rates).num_threads == 2  # its result was checked: every row was computed by someone


def test_a_wrong_kernel_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(cpu_experts, "rows_kernel", lambda name, isa: host_memory.read_kernel())
    arenas = (allocate_arena(SMALL), allocate_arena(SMALL))
    with pytest.raises(ProbeError, match="f32 kernel .* wrong product"):
        list(cpu_experts.measure_cpu_experts(["f32"], [1], shapes=[(36, 256)], arenas=arenas))


FOUND = ggml.find_ggml()


@pytest.mark.skipif(FOUND is None, reason="needs ggml")
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0", "mxfp4", "f16", "bf16"])
def test_ggml_computes_the_same_product(name) -> None:
    """Its result is checked like ours, so a rate means that it agreed."""
    arenas = (allocate_arena(SMALL), allocate_arena(SMALL))
    rates = cpu_experts.measure_cpu_experts([name], [1], shapes=[(36, 512)], ggml=FOUND, arenas=arenas, num_samples=1)
    assert (next(rates).ggml_gb_s or 0) > 0


def test_no_ggml_is_none(tmp_path: Path) -> None:
    assert ggml.find_ggml(tmp_path) is None
    (tmp_path / "libggml-cpu.so").write_bytes(b"no library")
    assert ggml.find_ggml(tmp_path) is None


def test_ggml_without_a_dot_for_a_format(tmp_path: Path) -> None:
    nothing = ggml.Ggml(tmp_path, object())
    assert nothing.dot("q4_k") is None and nothing.dot("f32") is None


# ------------------------------------------------------------------------------------------------------ lanes
@pytest.fixture(scope="module")
def lanes():
    with lane_jobs.open_lanes(1, read_cpu_budget()) as opened:
        yield opened


@pytest.fixture(scope="module")
def experts():
    return lane_experts.Experts(lane_experts.make_expert("q8_0"), allocate_arena(2 * SMALL))


@pytest.fixture(scope="module")
def slots():
    return allocate_arena(2 * SMALL)


@pytest.mark.parametrize("lane", lane_jobs.LANES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_lane_computes_what_numpy_computes(slots, lanes, experts, lane, num_rows) -> None:
    """The case checks its first step; a lane that did not run would leave NaN."""
    share = lane_jobs.Share(num_rows=num_rows, **{lane: 2})
    case = lane_jobs.lanes_case(lane_jobs.LaneRing(lanes, experts, slots, share))
    (taken,) = timing.time_cases([case], num_samples=2, sample_us=50)
    assert taken.gb_s > 0 and not taken.disturbed
    assert case.nbytes == 2 * experts.nbytes


def test_a_lane_that_computes_something_else_is_refused(slots, lanes, experts) -> None:
    case = lane_jobs.lanes_case(lane_jobs.LaneRing(lanes, experts, slots, lane_jobs.Share(hit=1)))
    case.calls[:, :, 5] = 0  # nothing is posted
    with pytest.raises(ProbeError, match="q8_0 .* wrong output"):
        timing.time_cases([case], num_samples=1, sample_us=50)


def test_all_lanes_at_once_compute_the_same(slots, lanes, experts) -> None:
    share = lane_jobs.Share(hit=1, stream=1, zero_copy=1, cpu=1)
    ring = lane_jobs.LaneRing(lanes, experts, slots, share)
    timing.time_cases([lane_jobs.lanes_case(ring)], num_samples=1, sample_us=50)
    assert set(ring.lane_us()) == {"hit", "zero_copy", "cpu"} and min(ring.lane_us().values()) > 0


def test_copies_are_checked_and_timed(arena, lanes) -> None:
    slots = allocate_arena(4 << 20)
    found = copies.measure_copies(lanes, arena, slots, [64 << 10, 1 << 20], num_samples=3)
    assert found.nbytes == (64 << 10, 1 << 20) and all(gb_s > 0 for gb_s in found.gb_s)


def test_hand_over_to_a_worker_that_sleeps_takes_some_us() -> None:
    found = handover.measure_handover(1, parked=True, num_samples=20)
    assert 0 < found.first_us <= found.all_us and found.first_us <= found.first_p90_us


def test_t15_first_samples_never_count() -> None:
    """A call that takes 50 ms at first, as page faults and a link that wakes up do, and nothing later."""

    @native(ROWS_SIGNATURE)
    def slow_at_first(counter, a, b, c, d, e, f, g, h, i, j):
        seen = load_at(counter)
        store_at(counter, seen + 1)
        if seen < 3:
            sleep_ns(50_000_000)

    counter = np.zeros(1, np.int64)
    calls = np.zeros((1, 8, timing.NUM_WORDS), np.int64)
    calls[:, :, 0], calls[:, :, 1] = slow_at_first.address, counter.ctypes.data
    for waits in (False, True):
        counter[:] = 0
        (taken,) = timing.time_cases([timing.Case("slow", 1, calls, waits=waits)], num_samples=5, sample_us=20)
        assert taken.high_us < 10_000 and counter[0] > 3


@pytest.mark.parametrize(("num_samples", "calls_made"), [(5, 1 + 3 + 3), (2, 1 + 3), (1, 1 + 3)])
def test_steps_that_are_as_long_as_a_sample_count_but_the_first(num_samples, calls_made) -> None:
    @native(ROWS_SIGNATURE)
    def slow(counter, a, b, c, d, e, f, g, h, i, j):
        store_at(counter, load_at(counter) + 1)
        sleep_ns(2_000_000)

    counter = np.zeros(1, np.int64)
    calls = np.zeros((1, 8, timing.NUM_WORDS), np.int64)
    calls[:, :, 0], calls[:, :, 1] = slow.address, counter.ctypes.data
    case = timing.Case("slow", 1, calls, waits=True)
    (taken,) = timing.time_cases([case], num_samples=num_samples, sample_us=20)
    assert taken.num_steps == 1 and counter[0] == calls_made and taken.median_us > 1000


# ---------------------------------------------------------------------------------------------------- machine
def test_this_machine() -> None:
    facts = machine.describe_machine()
    assert 1 <= facts.num_allowed <= facts.num_cpus and facts.isa in available_isas()
    assert "\n" not in facts.line and json.loads(json.dumps(facts.as_dict()))["line"] == facts.line


def test_a_made_up_machine(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "processor : 0\nmodel name\t: Fast 9000\n",
        "sys/devices/system/cpu/cpu0/cache/index0/size": "48K\n",
        "sys/devices/system/cpu/cpu0/cache/index3/size": "96M\n",
        "sys/devices/system/node/node0/cpulist": "0\n",
        "sys/devices/system/node/node1/cpulist": "1\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    files["proc/self/cgroup"] = "0::/"
    files["proc/self/mountinfo"] = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    files["sys/fs/cgroup/memory.max"] = str(1 << 30)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = machine.describe_machine(tmp_path)
    assert (facts.cpu, facts.cache_nbytes, facts.num_numa_nodes) == ("Fast 9000", 96 << 20, 2)
    assert facts.huge_pages == "madvise" and "2 NUMA" in facts.line
    assert facts.memory_limit_nbytes == facts.usable_memory_nbytes == 1 << 30 >= facts.available_nbytes


def test_what_is_unknown_is_none(tmp_path: Path) -> None:
    facts = machine.describe_machine(tmp_path)
    assert (facts.cache_nbytes, facts.num_numa_nodes, facts.huge_pages) == (None, None, None)
    assert facts.memory_limit_nbytes is None and facts.usable_memory_nbytes == facts.memory_nbytes
    assert "NUMA" not in facts.line
