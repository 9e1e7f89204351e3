"""What was measured on one machine, and the rates that follow for one format and shard size.

A `MachineProfile` names its machine and is refused on another. What was not measured is None, never a guess: a
lane without a known rate gets an infinite one, so no plan takes it unless it is forced. `play` replaces rates by
chosen ones, so that a lane can act as another machine's; such lanes are labelled. Nothing is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cost import Rates, make_rates
from trilane.errors import ProfileError

SCHEMA = 1
MAX_IN_FLIGHT = 64  # the in-place curve is tabled up to so many shards
LANES_PLAYED = ("hit", "link", "zero_copy", "cpu")
UNKNOWN_RATE = float("inf")
KNEE = 0.95  # of the best rate of a curve: threads beyond that only take cores from others
SAME_MEMORY = 0.02  # part by which a machine's memory may differ: systems reserve some of it at each start


@dataclass(frozen=True)
class Curve:
    """A measured curve: rising ``x`` (bytes, threads, pieces in flight) and GB/s ``y``."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.x, self.x[1:], strict=False))
        if not self.x or len(self.x) != len(self.y) or not rising or not all(0 < v < UNKNOWN_RATE for v in self.y):
            raise ProfileError(f"curve of x {self.x} and y {self.y}: give as many rates above 0 as x, and x rising")

    def at(self, x: float) -> float:
        """The value at ``x``: linear between points, flat outside."""
        return float(np.interp(x, self.x, self.y))

    def knee(self) -> float:
        """The smallest measured ``x`` from which on more brings almost nothing (`KNEE` of the best rate)."""
        return next(x for x, y in zip(self.x, self.y, strict=True) if y >= KNEE * max(self.y))


@dataclass(frozen=True)
class Machine:
    """What a profile is valid for (an idle link reports its lowest generation, so only its maximum counts).

    ``memory_nbytes`` is what the process may use: the machine's memory, or less where a control group limits it.
    """

    cpu: str | None = None
    cores_allowed: int | None = None
    memory_nbytes: int | None = None
    gpu: str | None = None
    driver: str | None = None
    link_width: int | None = None
    link_max_generation: int | None = None
    version: str | None = None


@dataclass(frozen=True)
class MachineProfile:
    """Measured rates (GB/s = 1e9 bytes/s) and fixed costs (us) of one machine; None is unknown.

    Attributes
    ----------
    machine : Machine
    pinned_to_device, pinned_to_host, pageable_to_device, pageable_to_host : Curve, optional
        Copies by size in bytes. The first is what streaming uses.
    zero_copy : Curve, optional
        In-place reads by pieces in flight, of ``zero_copy_nbytes`` each (None: as large as a shard).
    zero_copy_blocks : mapping of str to Curve
        On a GPU: the same by the number of thread blocks that read a piece; ``zero_copy`` has the best of them.
    host_read : Curve, optional
        Reads of host memory by threads.
    zero_copy_experts : mapping of format name to Curve
        Reads in place by the kernel that computes experts, where that is slower than the link; instead of
        ``zero_copy`` for these formats, and in the same units.
    cpu_experts, cpu_rows : mapping of format name to Curve
        Expert bytes at one row, and bytes x rows where arithmetic is the limit, by threads.
    device_experts, device_rows : mapping of format name to GB/s
        The same on the device, from its slots.
    both_gb_s : float, optional
        Host memory's limit with link and CPU running; None: it was never the limit, or was not measured.
    hit_slowdown, link_slowdown, cpu_slowdown : float, optional
        Parts of their rates, 0 to 1, that device and link lose while the CPU lane reads the same memory, and that
        the CPU lane loses while the link does.
    step_fix_us, miss_fix_us, hit_fix_us, stream_fix_us, stream_tail_us, zero_copy_fix_us, cpu_fix_us, cpu_shard_us
        Fixed costs as `cost.Rates` names them; an unknown one counts 0. The tail of streaming is what it takes
        beyond the device's time for one shard, which `rates` adds.
    copy_fix_us : float, optional
        Each copy; None: fitted to ``pinned_to_device``.
    zero_copy_on_device : bool
        Whether in-place reads and hits run after each other on the device.
    num_cores, hit_cores, link_cores, cpu_cores : float
        Cores that the lanes share (0: they run side by side) and how many each keeps busy; None for
        ``cpu_cores`` is one for each thread.
    played : tuple of str
        Lanes whose rates are chosen and not measured: hit, link, zero_copy, cpu.
    handover_us, parked_us : float, optional
        From a post to the first worker running, for a worker that spins and for one that sleeps.
    hit_step_us : Curve, optional
        On a GPU: us of a whole step, not GB/s, by its number of resident experts.
    round_trip_us : float, optional
        On a GPU: what a step with one missing expert, read in place, takes beyond a step without any and its bytes.
    link_width, link_generation : float, optional
        On a GPU: lanes and generation of the link while it copied.
    alone_gb_s, together_gb_s : mapping of lane name to GB/s
        Lanes one by one and all at once, each on its part of the same experts; on a GPU those that read host memory.
    quick : bool
        Measured in the quick mode: fewer samples and thread counts.
    skipped : mapping of str to str
        Measurements that could not be made, and why.
    """

    machine: Machine = field(default_factory=Machine)
    pinned_to_device: Curve | None = None
    pinned_to_host: Curve | None = None
    pageable_to_device: Curve | None = None
    pageable_to_host: Curve | None = None
    zero_copy: Curve | None = None
    zero_copy_nbytes: float | None = None
    zero_copy_blocks: Mapping[str, Curve] = field(default_factory=dict)
    host_read: Curve | None = None
    zero_copy_experts: Mapping[str, Curve] = field(default_factory=dict)
    cpu_experts: Mapping[str, Curve] = field(default_factory=dict)
    cpu_rows: Mapping[str, Curve] = field(default_factory=dict)
    device_experts: Mapping[str, float] = field(default_factory=dict)
    device_rows: Mapping[str, float] = field(default_factory=dict)
    both_gb_s: float | None = None
    hit_slowdown: float | None = None
    link_slowdown: float | None = None
    cpu_slowdown: float | None = None
    step_fix_us: float | None = None
    miss_fix_us: float | None = None
    hit_fix_us: float | None = None
    stream_fix_us: float | None = None
    stream_tail_us: float | None = None
    zero_copy_fix_us: float | None = None
    cpu_fix_us: float | None = None
    cpu_shard_us: float | None = None
    copy_fix_us: float | None = None
    zero_copy_on_device: bool = False
    num_cores: float = 0.0
    hit_cores: float = 0.0
    link_cores: float = 0.0
    cpu_cores: float | None = 0.0
    played: tuple[str, ...] = ()
    handover_us: float | None = None
    parked_us: float | None = None
    hit_step_us: Curve | None = None
    round_trip_us: float | None = None
    link_width: float | None = None
    link_generation: float | None = None
    alone_gb_s: Mapping[str, float] = field(default_factory=dict)
    together_gb_s: Mapping[str, float] = field(default_factory=dict)
    quick: bool = False
    skipped: Mapping[str, str] = field(default_factory=dict)

    def knows(self, formats: str | Mapping[str, float]) -> bool:
        """Whether there are rates for experts in these formats (see `rates`)."""
        names = _shares(formats)
        return all(name in self.cpu_experts and name in self.device_experts for name in names)

    def rates(self, formats: str | Mapping[str, float], *, shard_nbytes: int, threads: int) -> Rates:
        """The cost model's constants for shards of ``shard_nbytes``, with so many CPU threads.

        ``formats`` is the name of the experts' format; of experts whose matrices differ, a mapping of names to the
        bytes in each. What bytes take adds up.
        """
        shares = _shares(formats)
        stream_us_per_byte, fitted_us = fit_copies(self.pinned_to_device)
        hit = _mixed(shares, lambda name: us_per_byte(self.device_experts.get(name)))
        return make_rates(
            **{name: _known(getattr(self, name)) for name in FIXED_COSTS if name != "stream_tail_us"},
            hit_us_per_byte=hit,
            hit_row_us_per_byte=_mixed(shares, lambda name: _known(self.device_rows.get(name), us_per_byte)),
            run_fix_us=fitted_us if self.copy_fix_us is None else self.copy_fix_us,
            stream_us_per_byte=stream_us_per_byte,
            stream_tail_us=_known(self.stream_tail_us) + (shard_nbytes * hit if hit < UNKNOWN_RATE else 0.0),
            zero_copy_us_per_byte=self._in_place_us_per_byte(shares, shard_nbytes),
            zero_copy_on_device=self.zero_copy_on_device,
            cpu_us_per_byte=_mixed(shares, lambda name: _curve_us_per_byte(self.cpu_experts.get(name), threads)),
            cpu_row_us_per_byte=_mixed(
                shares, lambda name: us_per_byte(self.cpu_rows[name].at(threads)) if name in self.cpu_rows else 0.0
            ),
            both_us_per_byte=_known(self.both_gb_s, us_per_byte),
            hit_slowdown=_known(self.hit_slowdown),
            link_slowdown=_known(self.link_slowdown),
            cpu_slowdown=_known(self.cpu_slowdown),
            num_cores=self.num_cores,
            hit_cores=self.hit_cores,
            link_cores=self.link_cores,
            cpu_cores=float(threads) if self.cpu_cores is None else self.cpu_cores,
        )

    def knee(self) -> int | None:
        """Threads beyond which the CPU lane gains almost nothing in any format; None if unknown.

        All formats count: where memory is the limit it is so for all, and one disturbed curve decides nothing.
        """
        curves = self.cpu_experts.values()
        return max((int(curve.knee()) for curve in curves if len(curve.x) > 1), default=None)

    def _in_place_us_per_byte(self, shares: Mapping[str, float], shard_nbytes: int) -> NDArray[np.float64]:
        """us a byte by shards in flight; more of them never take less time than fewer."""
        shards = np.arange(1, MAX_IN_FLIGHT + 1)
        pieces = shards * (shard_nbytes / (self.zero_copy_nbytes or shard_nbytes))
        curves = {name: self.zero_copy_experts.get(name, self.zero_copy) for name in shares}
        rates = [sum(share * _curve_us_per_byte(curves[name], n) for name, share in shares.items()) for n in pieces]
        return np.maximum.accumulate(shards * rates) / shards

    def to_json(self) -> str:
        """The profile as JSON text with a schema number."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)


FIXED_COSTS = (
    "step_fix_us",
    "miss_fix_us",
    "hit_fix_us",
    "stream_fix_us",
    "stream_tail_us",
    "zero_copy_fix_us",
    "cpu_fix_us",
    "cpu_shard_us",
)
COPY_CURVES = ("pinned_to_device", "pinned_to_host", "pageable_to_device", "pageable_to_host")
CURVES = (*COPY_CURVES, "zero_copy", "host_read", "hit_step_us")


def _shares(formats: str | Mapping[str, float]) -> dict[str, float]:
    """Formats and the part of the bytes in each."""
    if isinstance(formats, str):
        return {formats: 1.0}
    whole = sum(formats.values())
    return {name: nbytes / whole for name, nbytes in formats.items()}


def _mixed(shares: Mapping[str, float], us_of: Callable[[str], float]) -> float:
    """us a byte of bytes in several formats."""
    return sum(share * us_of(name) for name, share in shares.items())


def _curve_us_per_byte(curve: Curve | None, x: float) -> float:
    return us_per_byte(curve.at(x) if curve else None)


def us_per_byte(gb_s: float | None) -> float:
    """us for a byte at a rate in GB/s (1e9 bytes/s); infinite if the rate is unknown."""
    return UNKNOWN_RATE if gb_s is None else 1e-3 / gb_s


def _known(value: float | None, convert: Any = float) -> float:
    return 0.0 if value is None else convert(value)


def fit_copies(curve: Curve | None) -> tuple[float, float]:
    """(us a byte, us a copy) of the affine time through a curve of copies by size.

    The largest size gives the rate; the fixed cost is the median of what the sizes take beyond it.
    """
    if curve is None:
        return UNKNOWN_RATE, 0.0
    sizes, rates = np.array(curve.x), np.array(curve.y)
    slope = us_per_byte(float(rates[-1]))
    beyond = sizes * (1e-3 / rates - slope)
    return slope, float(max(0.0, np.median(beyond[:-1]))) if len(sizes) > 1 else 0.0


def host_profile(
    *,
    num_cores: float,
    copy_gb_s: float,
    zero_copy_gb_s: float,
    device_experts: Mapping[str, float],
    cpu_experts: Mapping[str, Curve],
    **measured: Any,
) -> MachineProfile:
    """The profile of a host device: its lanes are threads of one machine and share ``num_cores`` cores.

    Copies and hits keep one thread busy each, the CPU lane all of its own; in-place reads are done by the thread
    that computes hits. ``measured`` holds further fields of `MachineProfile`.
    """
    return MachineProfile(
        pinned_to_device=_flat(copy_gb_s),
        zero_copy=_flat(zero_copy_gb_s),
        device_experts=dict(device_experts),
        cpu_experts=dict(cpu_experts),
        zero_copy_on_device=True,
        num_cores=num_cores,
        hit_cores=1.0,
        link_cores=1.0,
        cpu_cores=None,
        **measured,
    )


def play(
    profile: MachineProfile,
    *,
    link_gb_s: float | None = None,
    link_fix_us: float | None = None,
    zero_copy_gb_s: float | None = None,
    hit_gb_s: float | None = None,
    cpu_gb_s: float | None = None,
) -> MachineProfile:
    """A profile in which some lanes act at a chosen rate: they sleep, so they share no cores and no memory.

    None leaves a lane as it was measured. A chosen fixed cost of the link holds for each copy. A lane that is
    played ends when its bytes are due, counted from the post, so it has no fixed costs of its own.
    """
    changes: dict[str, Any] = {}
    played = set(profile.played)
    if link_gb_s is not None or link_fix_us is not None:
        rate = link_gb_s if link_gb_s is not None else 1e-3 / fit_copies(profile.pinned_to_device)[0]
        changes |= {"pinned_to_device": _flat(rate) if rate > 0 else None, "link_cores": 0.0}
        changes |= {"copy_fix_us": 0.0 if link_fix_us is None else link_fix_us, "stream_fix_us": None}
        played.add("link")
    if zero_copy_gb_s is not None:
        changes |= {"zero_copy": _flat(zero_copy_gb_s), "zero_copy_experts": {}, "zero_copy_fix_us": None}
        played.add("zero_copy")
    if hit_gb_s is not None:
        rates = dict.fromkeys(profile.device_experts, hit_gb_s)
        changes |= {"device_experts": rates, "device_rows": {}, "hit_cores": 0.0, "hit_fix_us": None}
        played.add("hit")
    if cpu_gb_s is not None:
        curves = dict.fromkeys(profile.cpu_experts, _flat(cpu_gb_s))
        changes |= {"cpu_experts": curves, "cpu_rows": {}, "cpu_cores": 0.0, "cpu_fix_us": None}
        played.add("cpu")
    if played & {"link", "cpu"}:
        changes["both_gb_s"] = None
    if played & {"link", "zero_copy", "cpu"}:
        changes |= {"link_slowdown": None, "cpu_slowdown": None}
    if played & {"hit", "cpu"}:
        changes["hit_slowdown"] = None
    return replace(profile, **changes, played=tuple(name for name in LANES_PLAYED if name in played))


def _flat(gb_s: float) -> Curve:
    return Curve((1.0,), (float(gb_s),))


def load_profile(text: str) -> MachineProfile:
    """Read a profile from JSON text.

    Raises
    ------
    ProfileError
        Not JSON, another schema, a name that is unknown or a value that does not fit.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ProfileError(f"the profile is no JSON ({error}): measure it again") from None
    schema = values.pop("schema", None) if isinstance(values, dict) else None
    if schema != SCHEMA:
        raise ProfileError(f"the profile has schema {schema!r} and this version reads {SCHEMA}: measure it again")
    known = {f.name for f in fields(MachineProfile)}
    if unknown := sorted(set(values) - known):
        raise ProfileError(f"the profile has unknown names {unknown}: measure it again with this version")
    try:
        return MachineProfile(**{name: _parsed(name, value) for name, value in values.items()})
    except (TypeError, AttributeError) as error:
        raise ProfileError(f"the profile has a value that does not fit ({error}): measure it again") from None


def _parsed(name: str, value: Any) -> Any:
    """A field's value from its JSON form."""
    if name == "machine":
        return Machine(**value)
    if name in CURVES:
        return None if value is None else _curve(value)
    if name in ("zero_copy_blocks", "zero_copy_experts", "cpu_experts", "cpu_rows"):
        return {key: _curve(curve) for key, curve in value.items()}
    if name == "skipped":
        return {key: str(reason) for key, reason in value.items()}
    if name in ("device_experts", "device_rows", "alone_gb_s", "together_gb_s"):
        return {key: _number(name, rate) for key, rate in value.items()}
    if name == "played":
        return tuple(str(lane) for lane in value)
    if name in ("zero_copy_on_device", "quick"):
        return bool(value)
    if name in ("hit_slowdown", "link_slowdown", "cpu_slowdown") and value is not None and not 0 <= value < 1:
        raise ProfileError(f"the profile's {name} has {value!r}: use a part of 0 or more and below 1, or null")
    return None if value is None else _number(name, value)


def _curve(value: Mapping[str, Any]) -> Curve:
    return (
        Curve(tuple(_number("x", x) for x in value["x"]), tuple(_number("y", y) for y in value["y"]))
        if set(value) == {"x", "y"}
        else Curve((), ())
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < UNKNOWN_RATE:
        raise ProfileError(f"the profile's {name} has {value!r}: use a finite number of 0 or more, or null")
    return float(value)


def machine_differences(profile: Machine, here: Machine) -> tuple[str, ...]:
    """Why a profile of one machine does not hold on another: one text for each difference, none if it holds."""
    return tuple(
        f"{f.name} was {getattr(profile, f.name)!r} and is {getattr(here, f.name)!r}"
        for f in fields(Machine)
        if not _same(f.name, getattr(profile, f.name), getattr(here, f.name))
    )


def _same(name: str, before: Any, now: Any) -> bool:
    if name == "memory_nbytes" and before is not None and now is not None:
        return abs(before - now) <= SAME_MEMORY * max(before, now)
    return bool(before == now)
