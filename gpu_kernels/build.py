"""From the ``.cu`` files to a cubin for one GPU architecture and one layer's weight formats, kept on disk.

One program holds all kernels; the formats of gate, up and down are fixed when it is compiled (``Variant``). The kernel
that only reads and the one that only waits, both for measurements, are programs of their own (``READER``, ``PAUSE``).
The options forbid what would change bits: no contraction, no flush-to-zero, IEEE division. A cubin's name is a
hash of everything that went into it, so an edit, another compiler or other options never meet an old file.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar

from trilane.cpu_kernels.formats import format_of
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.gpu_kernels import nvrtc
from trilane.gpu_kernels.words import c_header
from trilane.whole_file import replace_file

PROGRAM = ("publish.cu", "experts.cu", "combine.cu", "prefill.cu", "prefill_experts.cu")
KERNELS = (
    "publish", "experts_hit", "experts_plan", "combine",
    "prefill_rows", "prefill_group", "prefill_up", "prefill_hidden", "prefill_down", "prefill_combine",
)  # fmt: skip
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)  # compiled in every test run
NO_GATE = "none"


@dataclass(frozen=True)
class Variant:
    """The formats of a layer's matrices, lower-case names of the format table; ``gate`` may be ``"none"``."""

    gate: str
    up: str
    down: str
    files: ClassVar[tuple[str, ...]] = PROGRAM
    kernels: ClassVar[tuple[str, ...]] = KERNELS

    def __post_init__(self) -> None:
        for name in (self.up, self.down) if self.gate == NO_GATE else (self.gate, self.up, self.down):
            format_of(name)

    @property
    def defines(self) -> tuple[str, ...]:
        """Options that select the formats."""
        return tuple(f"-D{matrix.upper()}_FORMAT={getattr(self, matrix)}" for matrix in ("gate", "up", "down"))


@dataclass(frozen=True)
class Program:
    """Kernels that know no formats."""

    files: tuple[str, ...]
    kernels: tuple[str, ...]
    defines: tuple[str, ...] = ()


READER = Program(("read_pieces.cu",), ("read_pieces",))
PAUSE = Program(("pause.cu",), ("pause_cycles",))


def variant_of(layout: ExpertLayout) -> Variant:
    """The variant that computes experts of this layout."""
    return Variant(layout.gate.name if layout.gate else NO_GATE, layout.up.name, layout.down.name)


@functools.cache
def sources() -> Mapping[str, str]:
    """Name and text of every CUDA file, the generated ``words.cuh`` among them."""
    folder = resources.files("trilane.gpu_kernels")
    files = {entry.name: entry.read_text() for entry in folder.iterdir() if entry.name.endswith((".cu", ".cuh"))}
    return dict(sorted(files.items())) | {"words.cuh": c_header()}


def program_text(variant: Variant | Program) -> str:
    """The whole program."""
    return "".join(f'#include "{name}"\n' for name in variant.files)


def options_for(variant: Variant | Program, architecture: int) -> tuple[str, ...]:
    """All compiler options; ``architecture`` is 10 * major + minor of the compute capability."""
    return (f"--gpu-architecture=sm_{architecture}", *OPTIONS, *variant.defines)


def compile_variant(variant: Variant | Program, architecture: int) -> bytes:
    """The cubin, compiled now."""
    return nvrtc.compile_cubin(program_text(variant), sources(), options_for(variant, architecture))


def cache_folder() -> Path:
    """Where cubins are kept: the user's cache folder."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("trilane", "trilane")) / "cubins"


def cubin_name(variant: Variant | Program, architecture: int) -> str:
    """The file name of a cubin: a hash of sources, options and compiler."""
    parts = [program_text(variant), *options_for(variant, architecture), str(nvrtc.version())]
    parts += [f"{name}\0{text}" for name, text in sources().items()]
    return hashlib.sha256("\1".join(parts).encode()).hexdigest() + ".cubin"


def cubin(variant: Variant | Program, architecture: int, folder: Path | None = None) -> bytes:
    """The cubin from the cache, or compiled and put there; a folder that cannot be written is no fault."""
    path = (cache_folder() if folder is None else folder) / cubin_name(variant, architecture)
    try:
        return path.read_bytes()
    except OSError:
        made = compile_variant(variant, architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, made)
    except OSError:
        pass  # compiled again next time
    return made
