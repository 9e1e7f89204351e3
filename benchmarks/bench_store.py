"""How fast a store loads from a model file, against a plain copy of the same bytes.

Method: the file is in the page cache (it was written just now, or is read once before). Three sides take turns in the
same rounds, each into a fresh private arena in huge pages, with the same number of threads: ``ExpertStore.from_gguf``
as a whole (header, layout, packing), a bare read of the experts' bytes (``preadv`` into the arena) and a bare copy from
a mapping of the same file, both one matrix of one expert at a time. Medians of the rounds count; GB/s are 1e9 bytes of
experts in the file a second. On a machine that others use too, time on the clock says little: the ratio of processor
time (each side's least) stands beside. Without FILE, a model of the shape of Qwen3-30B-A3B with a few layers of random
blocks is written to a temporary folder.

    python -m benchmarks.bench_store [FILE] [--layers 3] [--format q4_k] [--down q6_k] [--threads 2] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trilane.cpu_kernels.arena import allocate_arena
from trilane.cpu_kernels.cpus import read_cpu_budget
from trilane.probes.machine import describe_machine
from trilane.readers.finder import find_experts
from trilane.readers.gguf import open_gguf
from trilane.readers.gguf_types import BLOCK_TYPES
from trilane.readers.moe import expert_tensors
from trilane.store import ExpertStore

HIDDEN, INTERMEDIATE, EXPERTS = 2048, 768, 128
ALIGNMENT = 32
NUMBER_OF_TYPE = {kind.name: number for number, kind in BLOCK_TYPES.items()}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def write_model(
    path: Path, layers: int, fmt: str, down: str, *,
    hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, experts: int = EXPERTS,
    bytes_of: Callable[[str, int], bytes | memoryview] | None = None,
) -> None:  # fmt: skip
    """A GGUF file with the experts of ``layers`` layers and nothing else; ``bytes_of``(format, size) is what they are.

    Random bytes where it is None: of no use as weights.
    """
    infos, sizes, offset = [], [], 0
    for layer in range(layers):
        for name, kind in (("gate", fmt), ("up", fmt), ("down", down)):
            rows, columns = (hidden, intermediate) if name == "down" else (intermediate, hidden)
            number = NUMBER_OF_TYPE[kind]
            block = BLOCK_TYPES[number]
            head = _text(f"blk.{layer}.ffn_{name}_exps.weight") + struct.pack("<I3Q", 3, columns, rows, experts)
            infos.append(head + struct.pack("<IQ", number, offset))
            sizes.append((kind, experts * rows * columns // block.block_size * block.block_nbytes))
            offset += -(-sizes[-1][1] // ALIGNMENT) * ALIGNMENT
    key = _text("general.architecture") + struct.pack("<I", 8) + _text("qwen3moe")
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), 1) + key + b"".join(infos)
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(header + bytes(-len(header) % ALIGNMENT))
        for kind, size in sizes:
            file.write(rng.bytes(size) if bytes_of is None else bytes_of(kind, size))
            file.write(bytes(-size % ALIGNMENT))


class Seconds(NamedTuple):
    """Time on the clock, and of the processor (all threads)."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, work: Callable[[], object]) -> Seconds:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return cls(time.perf_counter() - wall, time.process_time() - cpu)


def read_into(fd: int, target: np.ndarray, offset: int) -> None:
    """All bytes of ``target``, from ``offset`` of the file on."""
    left = memoryview(target)
    while left:
        got = os.preadv(fd, [left], offset + len(target) - len(left))
        if not got:
            raise EOFError(f"the file ends at byte {offset + len(target) - len(left)}")
        left = left[got:]


def copy_experts(path: Path, threads: int, mapped: bool) -> Seconds:
    """Time to copy the experts' bytes into a fresh arena, and nothing else: by calls, or from a mapping."""
    files = open_gguf(path)
    model = find_experts(files)
    pieces, end = [], 0
    for tensor in sorted(expert_tensors(model.layers), key=lambda t: t.offset):
        step = tensor.nbytes // (tensor.shape[0] if len(tensor.shape) > 2 else 1)
        for start in range(0, tensor.nbytes, step):
            pieces.append((tensor, start, step, end))
            end += step
    arena = allocate_arena(end)
    views = {tensor: files.bytes_of(tensor) for tensor, *_ in pieces}

    def copy(piece: tuple) -> None:
        tensor, start, step, target = piece
        if mapped:
            np.copyto(arena.view(target, step), views[tensor][start : start + step])
        else:
            read_into(files.files[tensor.path].fd, arena.view(target, step), tensor.offset + start)

    def copy_all() -> None:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(copy, pieces):
                pass

    return Seconds.of(copy_all)


def load_store(path: Path, threads: int) -> Seconds:
    """Time of ``from_gguf``."""
    return Seconds.of(lambda: ExpertStore.from_gguf(path, threads=threads, gate="silu_glu"))


SIDES = ("load", "read", "mapped copy")


def measure(path: Path, threads: int, rounds: int) -> Iterator[tuple[Seconds, ...]]:
    """Times of the sides for each round, in turns; the first round, which compiles, is not among them."""
    works = (
        lambda: load_store(path, threads), lambda: copy_experts(path, threads, False),
        lambda: copy_experts(path, threads, True),
    )  # fmt: skip
    for number in range(rounds + 1):
        turn = number % len(works)  # no side always has the same neighbour before it
        times = {k: works[k]() for k in (*range(turn, len(works)), *range(turn))}
        if number:
            yield tuple(times[k] for k in range(len(works)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--format", default="q4_k", choices=sorted(NUMBER_OF_TYPE))
    parser.add_argument("--down", choices=sorted(NUMBER_OF_TYPE))
    parser.add_argument("--threads", type=int, default=read_cpu_budget().num_concurrent)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "model.gguf"
        if args.file is None:
            write_model(path, args.layers, args.format, args.down or args.format)
        nbytes = find_experts(open_gguf(path)).expert_nbytes
        times = list(measure(path, args.threads, args.rounds))
    sides = list(zip(*times, strict=True))
    rates = [nbytes / statistics.median(t.wall for t in side) / 1e9 for side in sides]
    print(describe_machine().line)
    print(f"{nbytes / 1e9:.2f} GB of experts, {args.threads} threads, {args.rounds} rounds")
    print(", ".join(f"{name} {rate:.2f} GB/s" for name, rate in zip(SIDES, rates, strict=True)))
    for number, name in enumerate(SIDES[1:], start=1):
        ratio = statistics.median(t[number].wall / t[0].wall for t in times)
        least = [min(t.cpu for t in sides[k]) for k in (number, 0)]
        print(f"load : {name}, median ratio {ratio:.2f}, ratio of processor time {least[0] / least[1]:.2f}")


if __name__ == "__main__":
    main()
