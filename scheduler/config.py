"""The configuration: every option with its unit, its limits and its default, frozen once it is made.

``Config()`` is the default. A wrong configuration raises one :class:`~trilane.errors.ConfigError` that lists
everything that is wrong with it. The file knows option names and limits, and nothing of what they steer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from trilane.settings.config_problems import find_problems, rule_error, shown

from .errors import ConfigError, Problem

DEFAULT_FRACTION = 0.25
MAX_COUNT = 2**31 - 1  # slots are numbered by int32
MAX_NBYTES = 2**60  # an EiB: above any memory, below what int64 arithmetic with sizes can hold
MAX_THREADS = 4096
_UNITS = {"": 1} | {
    f"{prefix}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}
_UNITS["b"] = 1
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


def parse_nbytes(value: int | str) -> int:
    """A size in bytes from a number or from text with a unit.

    Parameters
    ----------
    value : int or str
        Bytes, or a text such as "4.5GiB" (1024s) or "300 MB" (1000s); case does not matter.

    Raises
    ------
    ValueError
        If it is no size. "4G" is refused: it could mean either.

    >>> parse_nbytes("4.5GiB"), parse_nbytes("2 kB"), parse_nbytes(64)
    (4831838208, 2000, 64)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("must be a number of bytes or a text such as '4.5GiB' or '300MB'")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def parse_file(value: str | os.PathLike[str]) -> Path:
    """The name of a file, with a leading ``~`` as the home folder; relative names are relative to where we run.

    Raises
    ------
    ValueError
        If it can be no file's name.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(name := os.fspath(value), str):
        raise ValueError("must be the name of a file, as text (in quotes, if it looks like something else)")
    if not name.strip() or "\0" in name:
        raise ValueError("must be the name of a file: neither empty nor with a NUL character")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise ValueError("must be the name of a file: it has a character that no file's name can have") from None
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ValueError("must name a home folder that exists, or start with no '~'") from None


Size = Annotated[
    int,
    Field(ge=0, le=MAX_NBYTES),
    BeforeValidator(parse_nbytes),
    WithJsonSchema({"type": "string", "format": "size"}),
]
File = Annotated[Path, BeforeValidator(parse_file)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Lane = Literal["stream", "zero_copy", "cpu"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    one_of: ClassVar[tuple[str, ...]] = ()  # options that exclude each other: at most one may be set


class CacheConfig(_Section):
    """The slots of the device and who keeps them. Give the size at most once: slots, fraction or nbytes."""

    one_of = ("slots", "fraction", "nbytes")

    slots: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = Field(
        default=None, description="slots in all; each holds one shard of an expert"
    )
    fraction: float | None = Field(
        default=None, ge=0, le=1, description="slots as a part of all shards; with no size given, a quarter"
    )
    nbytes: Size | None = Field(default=None, description="bytes of device memory for slots, e.g. '4.5GiB'")
    pool: Literal["shared", "layer"] = Field(default="shared", description="one pool for all layers, or one a layer")
    eviction: Literal["lru", "decayed_frequency", "predicted"] = Field(
        default="predicted",
        description="who goes first: least recently used, least often of late, or least likely to come",
    )
    half_life_steps: float = Field(
        default=16.0,
        gt=0,
        allow_inf_nan=False,
        description="steps after which a use counts half (decayed_frequency, predicted)",
    )
    prediction: float = Field(
        default=2.0,
        ge=0,
        le=1000,
        allow_inf_nan=False,
        description="weight of what is foretold for the next step against use of late (predicted)",
    )

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        given = [name for name in self.one_of if getattr(self, name) is not None]
        for name in given[1:]:
            value = getattr(self, name)
            raise rule_error(name, f"is {value!r}, but {given[0]} sets the size of the cache already: keep one of them")
        return self

    def num_slots(self, num_shards: int, slot_nbytes: int) -> int:
        """Slots for a store of ``num_shards`` shards whose largest has ``slot_nbytes`` bytes."""
        if self.slots is not None:
            return min(self.slots, num_shards)
        if self.nbytes is not None:
            return min(self.nbytes // slot_nbytes, num_shards)
        return int((DEFAULT_FRACTION if self.fraction is None else self.fraction) * num_shards)


# By section; a stronger source's choice of these replaces a weaker's.
ONE_OF = {"cache": CacheConfig.one_of}


class PolicyConfig(_Section):
    """Which lanes may serve a miss, and what is admitted to the cache."""

    lanes: tuple[Lane, ...] = Field(
        default=("stream", "zero_copy", "cpu"),
        min_length=1,
        strict=False,
        description="lanes that may be used",
    )
    force: Lane | None = Field(default=None, description="send every miss to this lane; null: the fastest split")
    admit: Literal["always", "score"] = Field(
        default="score", description="fill a slot always, or only for an expert worth at least its victim"
    )
    fills: bool = Field(default=True, description="let idle link time fill slots in the background")
    prefill_rows: Annotated[int, Field(ge=1, le=MAX_COUNT)] | Literal["auto"] = Field(
        default="auto",
        description="rows from which on a GPU streams whole layers past the slots; auto: where that is faster",
    )
    split: Literal["makespan", "ratio"] = Field(
        default="makespan",
        description="misses over the lanes by the least step time, or by the ratio of rates alone",
    )
    learn_rates: bool = Field(
        default=False, description="let what lanes took move the rates that plans are made with (host device)"
    )
    guard: bool = Field(
        default=False,
        description="compare splits with each single lane now and then, and keep the faster (host device)",
    )
    background: bool = Field(
        default=True, description="these fills also bring what was missed of late, not hints alone"
    )

    @model_validator(mode="after")
    def _force_is_allowed(self) -> Self:
        if self.force is not None and self.force not in self.lanes:
            allowed = ", ".join(self.lanes)
            raise rule_error("force", f"is {self.force!r}, but policy.lanes allows only {allowed}: add it to lanes")
        return self

    @model_validator(mode="after")
    def _lanes_differ(self) -> Self:
        twice = next((lane for lane in self.lanes if self.lanes.count(lane) > 1), None)
        if twice is not None:
            raise rule_error("lanes", f"names {twice!r} more than once: name each lane once")
        return self


class CpuConfig(_Section):
    """The team of workers that computes on the processor."""

    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | Literal["auto"] = Field(
        default="auto", description="worker threads; auto: physical cores allowed, less one for the driver"
    )
    spin_us: Annotated[float, Field(ge=0, le=1e6)] | Literal["auto"] = Field(
        default="auto",
        description="us that a worker spins before it sleeps; auto: 100, on a GPU 5000, 0 where cores are short",
    )
    isa: Literal["auto", "avx512", "avx2", "portable"] = Field(
        default="auto", description="instruction set of the kernels; the bits are the same"
    )
    stall_timeout_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="s without progress until a worker counts as stalled",
    )


class HostConfig(_Section):
    """Host memory that a GPU reads."""

    pin_limit: Size | None = Field(
        default=None,
        description="bytes of the experts that may be pinned, e.g. '48GiB'; null: all that the system lets us pin",
    )


class HostDeviceConfig(_Section):
    """Rates that the host device plays. None: the machine's own speed, nothing is played."""

    link_gb_s: Rate | None = Field(default=None, description="GB/s (1e9 bytes) of copies over the link")
    link_fix_us: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="us that each copy over the link costs beside its bytes",
    )
    zero_copy_gb_s: Rate | None = Field(default=None, description="GB/s of reads in place over the link")
    hit_gb_s: Rate | None = Field(default=None, description="GB/s at which resident shards are computed")
    cpu_gb_s: Rate | None = Field(default=None, description="GB/s at which the CPU lane computes")


class ProfileConfig(_Section):
    """The machine profile that plans are made from, and what to do where there is none."""

    path: File | None = Field(
        default=None, description="file of the machine profile; null: the one that was saved for this machine"
    )
    missing: Literal["measure", "refuse"] = Field(
        default="measure", description="without a valid profile: measure this machine at start-up, or refuse to start"
    )


class RecordConfig(_Section):
    """What is written down while the scheduler runs."""

    path: File | None = Field(default=None, description="file to record the routing of all steps to; null: none")


class WarmStartConfig(_Section):
    """What the next start takes over: which experts lay in slots, and what was learned. Results never depend on it."""

    enabled: bool = Field(
        default=False, description="save the hot experts at the end, and begin with those of the run before"
    )
    path: File | None = Field(
        default=None,
        description="file that they are kept in; null: one for each model and machine, in the user's cache folder",
    )


class Config(BaseModel):
    """All options. Frozen; a wrong one raises a ConfigError that lists every problem.

    Parameters
    ----------
    **sections
        ``cache``, ``policy``, ``cpu``, ``host``, ``host_device``, ``profile``, ``record`` and ``warm_start``, each a
        mapping or a section object.

    Raises
    ------
    ConfigError
        With a path, the value, the rule and, for misspelt names, the nearest one, for every problem.

    >>> Config(cache={"slots": 64}).cache.slots
    64
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache: CacheConfig = Field(default_factory=CacheConfig, description="the slots and who keeps them")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="lanes and admission")
    cpu: CpuConfig = Field(default_factory=CpuConfig, description="the team of workers")
    host: HostConfig = Field(default_factory=HostConfig, description="host memory that a GPU reads")
    host_device: HostDeviceConfig = Field(default_factory=HostDeviceConfig, description="rates to play")
    profile: ProfileConfig = Field(default_factory=ProfileConfig, description="the machine profile")
    record: RecordConfig = Field(default_factory=RecordConfig, description="what is written down")
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig, description="what the next start takes over")

    def __init__(self, /, **sections: Any) -> None:
        try:
            super().__init__(**sections)
            return
        except ValidationError as error:
            problems, _ = find_problems(type(self), sections, error)
        raise ConfigError(problems)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], source: str | None = None) -> Config:
        """Make a configuration from nested mappings, as a YAML file gives them.

        Parameters
        ----------
        options : mapping
            Section names to mappings of options; an empty section (None) stands for its defaults.
        source : str, optional
            Where they came from; named in the error.
        """
        if not isinstance(options, Mapping):
            problem = f"is {shown(options)}, but must be a mapping of sections ({', '.join(cls.model_fields)})"
            raise ConfigError([Problem("configuration", problem)], source)
        try:
            return cls(**_given_sections(options))
        except ConfigError as error:
            problems = error.problems
        raise ConfigError(problems, source)


def sound_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """What of a mapping of sections can be used, and what is wrong with the rest."""
    given = _given_sections(options)
    try:
        BaseModel.__init__(Config.__new__(Config), **given)
    except ValidationError as error:
        problems, left = find_problems(Config, given, error)
        return left, problems
    return given, []


def _given_sections(options: Mapping[Any, Any]) -> dict[str, Any]:
    """What is not an empty section: an unknown name is kept, empty or not, since it is wrong."""
    names = {name if isinstance(name, str) else shown(name): value for name, value in options.items()}
    return {name: value for name, value in names.items() if value is not None or name not in Config.model_fields}
