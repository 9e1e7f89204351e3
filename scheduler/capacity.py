"""Whether a model fits: host memory for its experts, device memory for trunk, KV cache and slots; if not, by how much.

The arithmetic of a start on a GPU, in advance: what is free, less what the model itself needs there, less the engine's
buffers for large batches, less what is left to others; the rest is slots, each of the largest shard. Rates are not
known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import psutil

from trilane.config import Config
from trilane.cpu_kernels.cgroups import read_memory_limit
from trilane.cpu_kernels.formats import FORMATS
from trilane.errors import DeviceError
from trilane.expert import Geometry
from trilane.gpu_kernels.cuda_device import RESERVE_NBYTES
from trilane.gpu_kernels.prefill_memory import FREE_PART, MOST_NBYTES
from trilane.machines import bundled_machines
from trilane.model_sizes import ModelSizes
from trilane.policy import num_slots
from trilane.probes.machine import available_nbytes

__all__ = ["RESERVE_NBYTES", "Capacity", "HostMemory", "Shortage", "Vram", "cut_text"]


@dataclass(frozen=True)
class HostMemory:
    """Main memory: in all, what this process may use of it, what can be had now; ``source`` says whose it is."""

    total_nbytes: int
    limit_nbytes: int | None
    available_nbytes: int
    source: str


@dataclass(frozen=True)
class Vram:
    """Device memory that is free; ``source`` says whose it is, or why it is not known (None)."""

    free_nbytes: int | None
    source: str


@dataclass(frozen=True)
class Shortage:
    """Something that does not fit: what, how many bytes are missing, what would help."""

    what: str
    nbytes: int
    remedies: tuple[str, ...]


def memory_here(root: Path = Path("/")) -> HostMemory:
    """This machine's memory, within the limits of its control groups; ``root`` replaces "/" for the system's files."""
    total, limit = psutil.virtual_memory().total, read_memory_limit(root)
    limit = None if limit is None or limit >= total else limit
    return HostMemory(total, limit, available_nbytes(root), "this machine")


def vram_here() -> Vram:
    """Free memory of the first visible GPU; its driver is only loaded here."""
    from trilane.cuda_errors import open_gpu
    from trilane.gpu_kernels.driver import DriverMissing

    try:
        driver = open_gpu()
    except DeviceError as error:
        return Vram(None, "no GPU here" if isinstance(error.__cause__, DriverMissing) else str(error))
    try:
        return Vram(driver.free_nbytes(), f"free on {driver.name()}")
    finally:
        driver.close()


def vram_of(machine: str) -> Vram:
    """All memory of the GPU of a bundled machine."""
    gib = float(bundled_machines()[machine]["vram_gib"])
    return Vram(int(gib * 2**30), f"all of {machine}'s")


@dataclass(frozen=True)
class Capacity:
    """A model on a machine.

    Attributes
    ----------
    sizes : ModelSizes
    memory : HostMemory
    vram : Vram
    context : int
        Tokens in the KV cache.
    reserve_nbytes : int
        Of device memory that is left to others.
    wanted : int or None
        Slots for so many experts of each layer; None: all that fit.
    """

    sizes: ModelSizes
    memory: HostMemory
    vram: Vram
    context: int
    reserve_nbytes: int = RESERVE_NBYTES
    wanted: int | None = None

    @cached_property
    def geometry(self) -> Geometry:
        return self.sizes.geometry

    @property
    def slot_nbytes(self) -> int:
        """Of a slot: the largest shard."""
        return int(self.geometry.shard_nbytes.max())

    @property
    def num_shards(self) -> int:
        """Of all experts: more slots are of no use."""
        return int(self.geometry.first_shard[-1])

    @property
    def layer_slots(self) -> int:
        """Slots for one expert of each layer."""
        return int(self.geometry.num_shards.sum())

    @property
    def kv_nbytes(self) -> int | None:
        return None if self.sizes.kv is None else self.sizes.kv.nbytes(self.context)

    @property
    def model_nbytes(self) -> int:
        """Device memory that the model takes beside slots: trunk and KV cache."""
        return self.sizes.trunk_nbytes + (self.kv_nbytes or 0)

    @property
    def prefill_nbytes(self) -> int | None:
        """The engine's buffers for large batches, at most; None: device memory is not known."""
        if self.vram.free_nbytes is None:
            return None
        return min(MOST_NBYTES, max(0, self.vram.free_nbytes - self.model_nbytes) // FREE_PART)

    @property
    def room_nbytes(self) -> int | None:
        """Device memory that is left for slots; below 0 where not even the rest fits."""
        if self.vram.free_nbytes is None or self.prefill_nbytes is None:
            return None
        return self.vram.free_nbytes - self.model_nbytes - self.prefill_nbytes - self.reserve_nbytes

    @property
    def num_slots(self) -> int | None:
        """Slots of one shard: those that are wanted, or that fit; None where neither is known."""
        if self.wanted is not None:
            return min(self.num_shards, self.wanted * self.layer_slots)
        if self.room_nbytes is None:
            return None
        return num_slots(Config(cache={"nbytes": max(0, self.room_nbytes)}), self.geometry)

    @property
    def experts_a_layer(self) -> float | None:
        """`num_slots` as experts of each layer."""
        return None if self.num_slots is None else self.num_slots / self.layer_slots

    def vram_nbytes(self, slots: int) -> int:
        """Device memory that it takes with so many slots: model, slots, buffers, what is left to others."""
        return self.model_nbytes + slots * self.slot_nbytes + (self.prefill_nbytes or 0) + self.reserve_nbytes

    @property
    def shortages(self) -> tuple[Shortage, ...]:
        """What does not fit; empty if all does."""
        found = []
        missing = self.sizes.store_nbytes - self.memory.available_nbytes
        if missing > 0:
            found.append(Shortage("experts in host memory", missing, self._memory_remedies(missing)))
        room = self.room_nbytes
        if room is None:
            return tuple(found)
        if room < 0:
            found.append(Shortage("trunk, KV cache and buffers in device memory", -room, self._trunk_remedies()))
        elif self.wanted is not None and (missing := (self.num_slots or 0) * self.slot_nbytes - room) > 0:
            most = room // (self.slot_nbytes * self.layer_slots)
            found.append(Shortage("slots in device memory", missing, (f"--slots {most}, the most that fit",)))
        return tuple(found)

    @property
    def read_nbytes(self) -> int:
        """Device memory that a token reads beside routed experts, at the end of the context."""
        return self.model_nbytes - self.sizes.lookup_nbytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about the figures."""
        found, kv, slots = list(self.sizes.notes), self.sizes.kv, self.num_slots
        if kv is None:
            found.append("the KV cache is not known from the files and counts 0: add it to --reserve")
        elif kv.max_context is not None and self.context > kv.max_context:
            found.append(
                f"a context of {self.context:,} is more than the {kv.max_context:,} that the model is made for"
            )
        if self.wanted is not None and self.wanted * self.layer_slots > self.num_shards:
            found.append(cut_text("--slots", self.wanted, [layer.num_experts for layer in self.sizes.moe_layers]))
        if slots is None:
            found.append("device memory is not known, so there is no number of slots: give --vram or --slots")
        elif slots == 0:
            found.append("no slots: every routed expert crosses the link or is computed on the CPU")
        elif slots == self.num_shards:
            found.append("there are slots for all routed experts: nothing is missing once they are filled")
        return tuple(found)

    def _memory_remedies(self, missing: int) -> tuple[str, ...]:
        sizes, room = self.sizes, self.memory.available_nbytes
        fitting = {name: nbytes for name, fmt in FORMATS.items() if (nbytes := sizes.store_nbytes_in(fmt)) is not None}
        fitting = {name: nbytes for name, nbytes in fitting.items() if nbytes <= room}
        best = max(fitting, key=fitting.__getitem__, default=None)
        if best is not None:
            first = f"the model in {best}, whose experts take {gb_text(fitting[best])}"
        else:
            bits = 8 * max(0, room) / sizes.num_expert_weights
            first = f"no format: experts would have to take {bits:.1f} bits a weight, fewer than any supported one"
        in_use = self.memory.total_nbytes - self.memory.available_nbytes
        is_limited = self.memory.limit_nbytes is not None
        found = [first]
        if is_limited or missing <= in_use:
            found.append("a higher limit of the control group" if is_limited else "memory that other programs use now")
        return (*found, f"{gb_text(missing)} more memory")

    def _trunk_remedies(self) -> tuple[str, ...]:
        longest = self._longest_context()
        first = f"--context {longest}, the longest that fits" if longest else "a smaller quantisation of the trunk"
        return (first, "a smaller --reserve", "more device memory")

    def _longest_context(self) -> int:
        """Tokens for which there is room beside all else, fewer than `context`; 0: none, or the cache is not known."""
        low, high = 0, self.context if self.sizes.kv is not None else 0
        while low < high:
            middle = (low + high + 1) // 2
            fits = (replace(self, context=middle).room_nbytes or 0) >= 0
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def cut_text(option: str, value: int | str, num_experts: Sequence[int]) -> str:
    """What people are told where an option asks for more slots than there are shards in layers of so many experts."""
    experts = "every expert" if option == "--vram" else f"all {sum(num_experts):,} experts"
    layers = f", {max(num_experts)} a layer" if option == "--slots" else ""
    return f"{option} {value} is more than the model needs: slots for {experts}{layers}, are used"


def gb_text(nbytes: float) -> str:
    """12345678901 -> "12.35 GB"."""
    return f"{nbytes / 1e9:,.2f} GB"
