"""The memory of prefill on one GPU: buffers of a pass, two stages that experts are copied to, rows of host callers.

All of it is made at the start, so that no step allocates. How much there is decides how many rows go in one pass.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.formats import align_up
from trilane.gpu_kernels.driver import Driver
from trilane.gpu_kernels.prefill_launch import batches_nbytes, prefill_sizes, step_sizes
from trilane.gpu_kernels.words import TYPES

MOST_NBYTES = 512 << 20  # of device memory
FREE_PART = 16  # one part in so many of the device memory that is free, at most
STAGES = 2
LAYER_PART = 16  # of a layer in one stage: the last stage's arithmetic has no copy beside it
STAGES_PART = 4  # one part in so many of the memory for the stages, at most
MAX_ROWS, MAX_POSITIONS = 4096, 32768  # of a pass; rows x ranks
HOST_ROWS_NBYTES = 32 << 20  # of pinned memory for rows of callers whose arrays are in host memory
BOUNCE_NBYTES, BOUNCES = 4 << 20, 2  # pinned memory on the way of weights that are pageable
LISTS = 8  # passes that the host may be ahead
ALIGNMENT = 256


@dataclass(frozen=True)
class PrefillShape:
    """Sizes of a pass: rows, rows x ranks, bytes of a stage, rows of host callers; the largest layer's for the rest."""

    max_rows: int
    max_positions: int
    stage_nbytes: int
    host_rows: int
    hidden: int
    max_experts: int
    max_shards: int

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each buffer in device memory."""
        inner = prefill_sizes(self.hidden, self.max_experts, self.max_shards, self.max_positions)
        stages = {f"stage{k}": self.stage_nbytes for k in range(STAGES)}
        return step_sizes(self.hidden, self.max_rows, self.max_positions) | inner | stages

    @property
    def nbytes(self) -> int:
        """Device memory in all."""
        return sum(align_up(nbytes, ALIGNMENT) for nbytes in self.sizes.values())


def shape_within(
    nbytes: int, hidden: int, max_experts: int, max_shards: int, expert_nbytes: int, layer_nbytes: int
) -> PrefillShape | None:
    """The largest shape that takes no more than ``nbytes`` of device memory; None if not even one row fits.

    A stage holds whole experts: a part of a layer, or what fits beside the rows, and at least one.
    """
    stage = align_up(
        max(expert_nbytes, min(-(-layer_nbytes // LAYER_PART), nbytes // STAGES_PART // STAGES)), ALIGNMENT
    )
    rows = MAX_ROWS
    while rows > 0:
        positions = min(MAX_POSITIONS, rows * MAX_POSITIONS // MAX_ROWS)
        host_rows = max(1, min(rows, HOST_ROWS_NBYTES // (4 * hidden)))
        shape = PrefillShape(rows, positions, stage, host_rows, hidden, max_experts, max_shards)
        if shape.nbytes <= nbytes:
            return shape
        rows //= 2
    return None


class PrefillMemory:
    """Buffers, streams and events of prefill.

    Parameters
    ----------
    driver : Driver
    shape : PrefillShape

    Attributes
    ----------
    address : dict
        Addresses of the buffers in device memory, by name.
    stages : list of int
        Addresses of the stages.
    copied, freed : list of int
        An event for each stage: its copies have landed; what was computed from it is done.
    bounces : list of (int, int)
        Address and event of pinned memory for pageable weights; none before :meth:`add_bounces`.
    """

    def __init__(self, driver: Driver, shape: PrefillShape) -> None:
        self.driver, self.shape = driver, shape
        self._device_blocks: list[int] = []
        self._mapped_blocks: list[int] = []
        self._events: list[int] = []
        self.stream = 0
        self.bounces: list[tuple[int, int]] = []
        try:
            self._allocate()
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        shape, driver = self.shape, self.driver
        self._device_blocks.append(driver.allocate(shape.nbytes))
        self.address, end = {}, self._device_blocks[0]
        for name, nbytes in shape.sizes.items():
            self.address[name] = end
            end += align_up(nbytes, ALIGNMENT)
        self.stages = [self.address[f"stage{k}"] for k in range(STAGES)]
        self.stream = driver.make_stream()
        self.copied, self.freed = ([self._event() for _ in range(STAGES)] for _ in range(2))
        size = align_up(batches_nbytes(shape.max_experts, shape.max_shards), ALIGNMENT)
        lists = self._mapped(LISTS * size)
        self.lists = [(lists + k * size, self._event()) for k in range(LISTS)]
        self._list_nbytes = size
        rows, positions = shape.host_rows, shape.host_rows * (shape.max_positions // shape.max_rows)
        self.host = {"rows": self._mapped(4 * shape.hidden * rows)}
        self.host |= {"ids": self._mapped(8 * positions), "weights": self._mapped(4 * positions)}
        self.host_positions = positions

    def _event(self) -> int:
        self._events.append(self.driver.make_event())
        return self._events[-1]

    def _mapped(self, nbytes: int) -> int:
        self._mapped_blocks.append(self.driver.allocate_mapped(nbytes))
        return self._mapped_blocks[-1]

    def add_bounces(self) -> None:
        """Make pinned memory for copies of weights that are pageable."""
        self.bounces = [(self._mapped(BOUNCE_NBYTES), self._event()) for _ in range(BOUNCES)]

    def list_array(self, address: int) -> NDArray[np.uint8]:
        """A list of batches as bytes."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self._list_nbytes).from_address(address))

    def step_words(self, step: NDArray[np.void]) -> NDArray[np.void]:
        """The ``Step`` of a layer with the buffers of prefill, and no mailbox; a field that is 0 stays so."""
        step["mail_records"] = step["mail_floats"] = 0
        for name in step_sizes(1, 1, 1):
            if step[name]:
                step[name] = self.address[name]
        return step

    def prefill_words(self, host: int, host_stride: int) -> NDArray[np.void]:
        """The ``Prefill`` of a layer whose experts are at ``host`` in host memory."""
        words = np.zeros((), TYPES["Prefill"])
        for name in prefill_sizes(1, 1, 1, 1):
            words[name] = self.address[name]
        words["host"], words["host_stride"] = host, host_stride
        return words

    def close(self) -> None:
        """Free everything; nothing may be running any more."""
        for event in self._events:
            self.driver.destroy_event(event)
        for block in self._device_blocks:
            self.driver.free(block)
        for block in self._mapped_blocks:
            self.driver.free_mapped(block)
        if self.stream:
            self.driver.destroy_stream(self.stream)
        self._events, self._device_blocks, self._mapped_blocks, self.stream = [], [], [], 0
