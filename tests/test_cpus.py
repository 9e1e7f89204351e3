"""What a process may use, on machines made of files: masks, quotas, siblings, slow cores, nodes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trilane.cpu_kernels.cgroups import read_cgroup_limits
from trilane.cpu_kernels.cpus import parse_cpu_list, read_cpu_budget, suggest_num_threads, suggest_spin_us

V2_MOUNT = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1_MOUNTS = (
    "31 20 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 20 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"
)


class FakeMachine:
    """A folder that looks like ``/`` to the code under test."""

    def __init__(self, root):
        self.root = root

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return self

    def cpu(self, cpu, name, text):
        return self.write(f"sys/devices/system/cpu/cpu{cpu}/{name}", text)

    def cores(self, num_cores, threads=1):
        """Logical CPU c and c + num_cores share a core, as most x86 machines number them."""
        self.write("sys/devices/system/cpu/online", f"0-{num_cores * threads - 1}")
        for cpu in range(num_cores * threads):
            siblings = ",".join(str(cpu % num_cores + i * num_cores) for i in range(threads))
            self.cpu(cpu, "topology/core_cpus_list", siblings)
        return self

    def v2(self, quota=None, group="/", cpuset=None):
        folder = f"sys/fs/cgroup{group}".rstrip("/")
        self.write("proc/self/cgroup", f"0::{group}").write("proc/self/mountinfo", V2_MOUNT)
        self.write(f"{folder}/cpu.max", quota or "max 100000")
        self.write(f"{folder}/cpu.stat", "usage_usec 10\nnr_periods 9\nnr_throttled 4\nthrottled_usec 77")
        return self.write(f"{folder}/cpuset.cpus.effective", cpuset or "")

    def v1(self, quota_us=-1, period_us=100_000, group="/"):
        folder = f"sys/fs/cgroup/cpu,cpuacct{group}".rstrip("/")
        self.write("proc/self/cgroup", f"4:cpu,cpuacct:{group}\n3:cpuset:{group}")
        self.write("proc/self/mountinfo", V1_MOUNTS)
        self.write(f"{folder}/cpu.cfs_quota_us", quota_us).write(f"{folder}/cpu.cfs_period_us", period_us)
        return self.write(f"{folder}/cpu.stat", "nr_periods 3\nnr_throttled 2\nthrottled_time 5")

    def budget(self, affinity):
        return read_cpu_budget(self.root, affinity)


@pytest.fixture
def machine(tmp_path):
    return FakeMachine(tmp_path)


def test_parse_cpu_list():
    assert parse_cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpu_list("") == ()


@pytest.mark.parametrize(
    ("quota_cpus", "num_concurrent", "num_threads", "spins"),
    [(1, 1, 1, False), (1.5, 1, 1, False), (4, 4, 3, True), (0.25, 1, 1, False), (2, 2, 2, False)],
)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_quota_is_rounded_down_and_one_is_left(machine, version, quota_cpus, num_concurrent, num_threads, spins):
    machine.cores(8)
    quota_us = int(quota_cpus * 100_000)
    machine.v1(quota_us) if version == "v1" else machine.v2(f"{quota_us} 100000")
    budget = machine.budget(range(8))
    assert budget.quota_cpus == pytest.approx(quota_cpus)
    assert budget.num_concurrent == num_concurrent
    assert suggest_num_threads(budget)[0] == num_threads
    assert (suggest_spin_us(budget, num_threads) > 0) == spins
    assert f"cgroup quota of {quota_cpus:g} CPUs" in " ".join(budget.reasons)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_no_quota(machine, version):
    machine.cores(8)
    machine.v1() if version == "v1" else machine.v2()
    budget = machine.budget(range(8))
    assert budget.quota_cpus is None and budget.num_concurrent == 8
    assert suggest_num_threads(budget) == (7, ("one core left for the thread that drives the workers",))


def test_a_parents_quota_counts(machine):
    machine.cores(8).v2("600000 100000", group="/pod/box").write("sys/fs/cgroup/pod/cpu.max", "300000 100000")
    assert machine.budget(range(8)).quota_cpus == 3


def test_a_container_sees_its_group_as_the_top(machine):
    machine.cores(8).v2("250000 100000")
    for group in ("/docker/abc", "/../other"):  # the host's path, or one outside of what is mounted
        machine.write("proc/self/cgroup", f"0::{group}")
        assert machine.budget(range(8)).quota_cpus == 2.5


def test_a_mount_below_the_top_is_followed(machine):
    machine.cores(4).v1(150_000, group="/job")
    mount = "31 20 0:27 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
    machine.write("proc/self/mountinfo", mount).write("proc/self/cgroup", "4:cpu,cpuacct:/docker/abc/job")
    assert machine.budget(range(4)).quota_cpus == 1.5


@pytest.mark.parametrize(("version", "throttled"), [("v1", 2), ("v2", 4)])
def test_throttling_counter_is_read_anew(machine, version, throttled):
    getattr(machine.cores(2), version)()
    limits = read_cgroup_limits(machine.root)
    assert limits.num_throttled() == throttled
    limits.stat_file.write_text("nr_throttled 99\n")
    assert limits.num_throttled() == 99
    limits.stat_file.unlink()
    assert limits.num_throttled() is None


def test_cpuset_narrows_the_mask(machine):
    budget = machine.cores(8).v2(cpuset="2-4").budget(range(4))
    assert budget.allowed == (2, 3)
    assert "cpuset 2-4" in " ".join(budget.reasons)


def test_a_cpuset_that_contradicts_the_mask_is_not_believed(machine):
    assert machine.cores(8).v2(cpuset="6-7").budget([0, 1]).allowed == (0, 1)


def test_affinity_mask_is_a_reason(machine):
    budget = machine.cores(8).v2().budget([1, 5])
    assert budget.allowed == (1, 5)
    assert budget.reasons == ("affinity mask of 2 of 8 CPUs",)


def test_siblings_count_once(machine):
    budget = machine.cores(4, threads=2).v2().budget(range(8))
    assert budget.cores == (0, 1, 2, 3)
    assert "8 logical CPUs are 4 physical cores" in budget.reasons
    assert suggest_num_threads(budget)[0] == 3


def test_only_the_upper_siblings_allowed(machine):
    assert machine.cores(4, threads=2).v2().budget([5, 6]).cores == (5, 6)


def test_x86_efficiency_cores_are_left_out(machine):
    machine.cores(12).v2().write("sys/devices/cpu_core/cpus", "0-7").write("sys/devices/cpu_atom/cpus", "8-11")
    budget = machine.budget(range(12))
    assert budget.fast_cores == tuple(range(8))
    assert "4 efficiency cores left out" in budget.reasons


def test_arm_capacity_tells_slow_cores(machine):
    machine.cores(8).v2()
    for cpu in range(8):
        machine.cpu(cpu, "cpu_capacity", 1024 if cpu >= 4 else 446)
    assert machine.budget(range(8)).fast_cores == (4, 5, 6, 7)


def test_favoured_cores_are_no_reason_to_drop_the_others(machine):
    machine.cores(4).v2()
    for cpu in range(4):
        machine.cpu(cpu, "cpufreq/cpuinfo_max_freq", 5_800_000 if cpu == 2 else 5_500_000)
    assert machine.budget(range(4)).fast_cores == (0, 1, 2, 3)


def test_highest_clock_tells_slow_cores_where_nothing_else_does(machine):
    machine.cores(4).v2()
    for cpu in range(4):
        machine.cpu(cpu, "cpufreq/cpuinfo_max_freq", 5_500_000 if cpu < 2 else 3_800_000)
    assert machine.budget(range(4)).fast_cores == (0, 1)


def test_only_efficiency_cores_allowed_are_used(machine):
    machine.cores(12).v2().write("sys/devices/cpu_atom/cpus", "8-11")
    assert machine.budget([8, 9]).fast_cores == (8, 9)


def test_one_cpu_is_one_worker_that_never_spins(machine):
    budget = machine.cores(8).v2().budget([3])
    count, _ = suggest_num_threads(budget)
    assert count == 1 and suggest_spin_us(budget, count) == 0


def test_workers_are_equal_on_nodes(machine):
    machine.cores(48).v2()
    machine.write("sys/devices/system/node/node0/cpulist", "0-23")
    machine.write("sys/devices/system/node/node1/cpulist", "24-47")
    budget = machine.budget(range(43))
    assert [len(node) for node in budget.nodes] == [24, 19]
    assert suggest_num_threads(budget)[0] == 42
    count, reasons = suggest_num_threads(budget, knee=25)
    assert count == 24 and reasons[-1] == "the same number of workers for each of 2 NUMA nodes"


def test_a_knee_limits_the_workers(machine):
    count, reasons = suggest_num_threads(machine.cores(32).v2().budget(range(32)), knee=28)
    assert count == 28 and "saturated by 28 threads" in reasons[-1]


def test_an_unknown_machine_gives_its_mask(tmp_path):
    budget = read_cpu_budget(tmp_path, [0, 1, 2])
    assert budget.allowed == budget.cores == budget.fast_cores == (0, 1, 2)
    assert budget.reasons == () and budget.limits.num_throttled() is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity masks exist on Linux")
def test_this_process_obeys_its_mask():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from trilane.cpu_kernels.cpus import *\n"
        "b = read_cpu_budget(); n, _ = suggest_num_threads(b)\n"
        "print(len(b.allowed), n, suggest_spin_us(b, n))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", "0.0"]
