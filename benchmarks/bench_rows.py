"""Speed of the row kernels by instruction set, against the machine's read limit and against ggml.

Method (that of the product's own probe, :mod:`trilane.probes.cpu_experts`): matrices lie one after another
in far more memory than the caches hold and are visited in scattered order. The kernel, the limit (the same
bytes read as four streams and added up, nothing else) and ggml's dot product, where a library with it is
found, take turns in the same rounds; samples in which a thread lost its core are dropped; medians count.
Instruction sets are measured one after the other, each beside its own limit: compare their ratios. GB/s are
1e9 bytes of weights a second. ggml is looked for in ``$TRILANE_GGML`` (the library or its folder) and in
importable packages that ship it, such as pywhispercpp.

    python -m benchmarks.bench_rows [--formats q4_k q6_k] [--isas avx2 portable] [--threads 1 2]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from trilane.cpu_kernels.formats import FORMATS
from trilane.cpu_kernels.isa import available_isas
from trilane.probes.cpu_experts import SHAPES, ExpertRate, measure_cpu_experts
from trilane.probes.ggml import find_ggml
from trilane.probes.host_memory import probe_arena

HEAD = "format  shape      isa       threads   GB/s  limit  ratio   ggml  x ggml"


def line_of(rate: ExpertRate) -> str:
    """One row of the table under :data:`HEAD`."""
    shape = "x".join(map(str, rate.shape))
    cells = f"{rate.format:7} {shape:10} {rate.isa:9} {rate.num_threads:7}  "
    cells += f"{rate.gb_s:5.1f}  {rate.limit_gb_s:5.1f}  {rate.ratio:5.2f}"
    if rate.ggml_gb_s:
        cells += f"  {rate.ggml_gb_s:5.1f}  {rate.gb_s / rate.ggml_gb_s:6.2f}"
    return cells + ("  disturbed" if rate.disturbed else "")


def measure(args: argparse.Namespace) -> Iterator[ExpertRate]:
    """All rates asked for, as they are known."""
    arenas = (probe_arena(num_regions=2), probe_arena(num_regions=2))
    shapes = [tuple(map(int, text.split("x"))) for text in args.shapes]
    ggml = find_ggml()
    for name in args.formats:
        for shape in shapes:
            for isa in args.isas:
                yield from measure_cpu_experts(
                    [name], args.threads, shapes=[shape], isa=isa, ggml=ggml, arenas=arenas,
                    num_samples=args.samples,
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["q4_k", "q6_k"], choices=list(FORMATS))
    parser.add_argument("--isas", nargs="+", default=list(available_isas()))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, s)) for s in SHAPES])
    parser.add_argument("--samples", type=int, default=31)
    args = parser.parse_args()
    found = find_ggml()
    print(f"ggml: {found.path.name if found else 'not found'}\n{HEAD}", flush=True)
    for rate in measure(args):
        print(line_of(rate), flush=True)


if __name__ == "__main__":
    main()
