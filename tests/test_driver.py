"""NVIDIA's driver with a library that only notes its calls: what is asked of it, without a GPU."""

from __future__ import annotations

import types

import pytest

from trilane.gpu_kernels import driver as driver_file
from trilane.gpu_kernels.driver import CudaDriver, DriverError


class Library:
    """Registers and unregisters as the real one does: each address once."""

    def __init__(self):
        self.pinned, self.refuse = {}, False

    def cuMemHostRegister_v2(self, address, nbytes, flags):
        if self.refuse or address.value in self.pinned:
            return 712
        self.pinned[address.value] = nbytes.value
        return 0

    def cuMemHostUnregister(self, address):
        return 0 if self.pinned.pop(address.value, None) else 713

    def cuGetErrorString(self, status, text):
        return 0


@pytest.fixture
def drivers(monkeypatch):
    """Two drivers of one process."""
    monkeypatch.setattr(driver_file, "_REGISTERED", {})
    library = Library()
    made = []
    for _ in range(2):
        one = CudaDriver.__new__(CudaDriver)
        one._library = library
        one._text = types.MethodType(lambda self, status: f"error {status}", one)
        made.append(one)
    return library, *made


def test_two_schedulers_of_one_store_share_its_pinned_memory(drivers):
    library, first, second = drivers
    assert first.register(4096, 8192) == "" and second.register(4096, 4096) == ""
    assert library.pinned == {4096: 8192}
    first.unregister(4096)
    assert library.pinned == {4096: 8192}  # the second still reads it
    second.unregister(4096)
    assert library.pinned == {}
    assert first.register(4096, 4096) == "" and library.pinned == {4096: 4096}


def test_more_than_is_shared_is_refused_and_a_refusal_leaves_nothing(drivers):
    library, first, second = drivers
    assert first.register(4096, 4096) == ""
    assert "4096 of 8192 bytes" in second.register(4096, 8192)
    library.refuse = True
    assert "712" in second.register(1 << 20, 4096)
    with pytest.raises(DriverError, match="713"):
        second.unregister(1 << 20)
