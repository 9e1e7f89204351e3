"""The configuration: every option with its unit, its limits and its default, frozen once it is made.

``Config()`` is the default. A wrong configuration raises one :class:`~trilane.errors.ConfigError` that lists
everything that is wrong with it. The file knows option names and limits, and nothing of what they steer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from .errors import ConfigError, Problem, did_you_mean

DEFAULT_FRACTION = 0.25
_UNITS = {"": 1} | {
    f"{prefix}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}
_UNITS["b"] = 1
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


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
    return int(float(match[1]) * _UNITS[match[2].lower()])


Size = Annotated[int, BeforeValidator(parse_nbytes), Field(ge=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Lane = Literal["stream", "zero_copy", "cpu"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CacheConfig(_Section):
    """The slots of the device and who keeps them. Give the size at most once: slots, fraction or nbytes."""

    slots: int | None = Field(default=None, ge=0, description="slots in all; each holds one shard of an expert")
    fraction: float | None = Field(default=None, ge=0, le=1, description="slots as a part of all shards, 0 to 1")
    nbytes: Size | None = Field(default=None, description="bytes of device memory for slots, e.g. '4.5GiB'")
    pool: Literal["shared", "layer"] = Field(default="shared", description="one pool for all layers, or one a layer")
    eviction: Literal["lru", "decayed_frequency"] = Field(
        default="decayed_frequency",
        description="who goes first: the least recently, or the least often used of late",
    )
    half_life_steps: float = Field(
        default=16.0,
        gt=0,
        allow_inf_nan=False,
        description="steps after which a use counts half (decayed_frequency)",
    )

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        given = [name for name in ("slots", "fraction", "nbytes") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both set the size: keep one of them")
        return self

    def num_slots(self, num_shards: int, slot_nbytes: int) -> int:
        """Slots for a store of ``num_shards`` shards whose largest has ``slot_nbytes`` bytes."""
        if self.slots is not None:
            return min(self.slots, num_shards)
        if self.nbytes is not None:
            return min(self.nbytes // slot_nbytes, num_shards)
        return int((DEFAULT_FRACTION if self.fraction is None else self.fraction) * num_shards)


class PolicyConfig(_Section):
    """Which lanes may serve a miss, and what is admitted to the cache."""

    lanes: tuple[Lane, ...] = Field(
        default=("stream", "zero_copy", "cpu"),
        min_length=1,
        strict=False,
        description="lanes that may be used",
    )
    force: Lane | None = Field(default=None, description="send every miss to this lane; None: the fastest split")
    admit: Literal["always", "score"] = Field(
        default="score", description="fill a slot always, or only for an expert worth at least its victim"
    )
    fills: bool = Field(default=True, description="let idle link time fill slots in the background")

    @model_validator(mode="after")
    def _force_is_allowed(self) -> Self:
        if self.force is not None and self.force not in self.lanes:
            raise ValueError(f"force is {self.force!r}, which lanes does not allow: add it to lanes")
        return self


class CpuConfig(_Section):
    """The team of workers that computes on the processor."""

    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="worker threads; auto: physical cores allowed, less one for the driver"
    )
    spin_us: Annotated[float, Field(ge=0, le=1e6)] | Literal["auto"] = Field(
        default="auto", description="us that a worker spins before it sleeps; auto: 0 where cores are short"
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


class Config(BaseModel):
    """All options. Frozen; a wrong one raises a ConfigError that lists every problem.

    Parameters
    ----------
    **sections
        ``cache``, ``policy``, ``cpu`` and ``host_device``, each a mapping or a section object.

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
    host_device: HostDeviceConfig = Field(default_factory=HostDeviceConfig, description="rates to play")

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            problems = list(_problems(error))
        else:
            return
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
            problem = f"is {options!r}, but must be a mapping of sections ({', '.join(cls.model_fields)})"
            raise ConfigError([Problem("configuration", problem)], source)
        try:
            return cls(**{str(name): value for name, value in options.items() if value is not None})
        except ConfigError as error:
            problems = error.problems
        raise ConfigError(problems, source)


_RULES = {
    "model_type": "must be a mapping of options",
    "invalid_key": "must be the name of an option",
    "too_short": "must not be empty",
}


def _problems(error: ValidationError) -> Iterator[Problem]:
    """One problem per path; the branches of a union ("int or 'auto'") become one sentence."""
    rules: dict[str, list[str]] = {}
    first: dict[str, Any] = {}
    for detail in error.errors(include_url=False):
        path = _path(detail["loc"])
        rules.setdefault(path, []).append(_rule(detail))
        first.setdefault(path, detail)
    for path, texts in rules.items():
        rule = " or ".join(dict.fromkeys(texts)).replace(" or must be ", " or ")
        yield Problem(path, _sentence(first[path], rule))


def _path(location: Sequence[int | str]) -> str:
    """``("policy", "lanes", 1)`` -> ``policy.lanes.1``; names of union branches are dropped."""
    kept = [str(part) for part in location[:2]] + [str(part) for part in location[2:] if isinstance(part, int)]
    return ".".join(kept) or "configuration"


def _sentence(detail: Any, rule: str) -> str:
    location, value = detail["loc"], detail["input"]
    if detail["type"] == "extra_forbidden":
        names = _names_beside(location)
        return f"is no option: use {_alternatives(names)}.{did_you_mean(str(location[-1]), names)}"
    if detail["type"] == "value_error" and len(location) < 2:
        return f"{rule}."  # a rule across options names their values itself
    hint = did_you_mean(value, _literals(detail)) if isinstance(value, str) else ""
    return f"is {value!r}, but {rule}{_meaning(location)}.{hint}"


def _rule(detail: Any) -> str:
    if detail["type"] == "literal_error":
        return f"must be {_alternatives(_literals(detail))}"
    if detail["type"] in _RULES:
        return _RULES[detail["type"]]
    text = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return text if " both " in text or text.startswith(("must ", "force ")) else f"must be {text}"


def _literals(detail: Any) -> list[str]:
    return re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))


def _alternatives(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _names_beside(location: Sequence[int | str]) -> list[str]:
    """The option names that could stand where an unknown one stood."""
    section = Config.model_fields.get(str(location[0])) if len(location) > 1 else None
    return list((section.annotation if section else Config).model_fields)  # type: ignore[union-attr]


def _meaning(location: Sequence[int | str]) -> str:
    """The option's one line, so that the remedy needs no manual."""
    field = Config.model_fields.get(str(location[0])) if location else None
    if field is not None and len(location) > 1:
        field = field.annotation.model_fields.get(str(location[1]))  # type: ignore[union-attr]
    return f" ({field.description})" if field is not None and field.description else ""
