"""What is read of a GPU's link: from NVML's functions, else from the system's files, else nothing."""

from __future__ import annotations

import ctypes

import pytest

from trilane.gpu_kernels import gpu_link
from trilane.gpu_kernels.gpu_link import GpuLink, LinkReader, while_busy

ADDRESS = "0000:65:00.0"


def made_system(root, **files):
    folder = root / "sys/bus/pci/devices" / ADDRESS
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    version = root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Sep  1\nGCC version:  gcc 12.3.0\n"
    )
    return root


class PlayedNvml:
    """NVML's functions as ctypes would call them; what is not in ``values`` is not supported."""

    def __init__(self, **values):
        self.values, self.closed = values, False

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlShutdown(self):  # noqa: N802
        self.closed = True

    def nvmlSystemGetDriverVersion(self, text, size):  # noqa: N802
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address, handle):  # noqa: N802
        assert address == ADDRESS.encode()
        handle._obj.value = 77
        return 0

    def __getattr__(self, name):
        def get(device, into):
            assert device.value == 77
            if name not in self.values:
                return 3  # not supported
            into._obj.value = self.values[name]
            return 0

        return get


@pytest.fixture
def nvml(monkeypatch):
    def use(**values):
        played = PlayedNvml(**values)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: played)
        return played

    return use


def test_nvml_is_asked_first_and_the_systems_files_for_the_rest(nvml, tmp_path):
    played = nvml(nvmlDeviceGetCurrPcieLinkWidth=8, nvmlDeviceGetMaxPcieLinkGeneration=5)
    root = made_system(tmp_path, current_link_width=16, max_link_width=16, current_link_speed="2.5 GT/s PCIe")
    with LinkReader(ADDRESS, root) as reader:
        assert reader.read() == GpuLink("580.1", 8, 16, 1, 5)
    assert played.closed


def test_without_nvml_the_system_tells(tmp_path):
    root = made_system(
        tmp_path, current_link_width=8, max_link_width=16, current_link_speed="16.0 GT/s PCIe", max_link_speed="Unknown"
    )
    with LinkReader(ADDRESS, root, "libno-such-library.so") as reader:
        assert reader.read() == GpuLink("580.159.03", 8, 16, 4, None)


def test_nothing_known_is_none_and_no_error(tmp_path):
    with LinkReader(ADDRESS, tmp_path, "libno-such-library.so") as reader:
        assert reader.read() == GpuLink()


def test_the_best_that_is_seen_while_copies_run_counts(monkeypatch):
    readings = iter([GpuLink("1", 16, 16, 1, 5), GpuLink("1", 16, 16, 5, 5), GpuLink("1", 16, 16, 3, 5)])

    class Reader:
        def read(self):
            return next(readings)

    assert while_busy(Reader(), iter([True, True, False])).generation == 5


def test_every_speed_has_a_generation():
    assert [gpu_link.GENERATIONS[speed] for speed in (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)] == [1, 2, 3, 4, 5, 6]
