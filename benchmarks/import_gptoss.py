"""Make benchmarks/data/gptoss20b_160conv.trace from a .npz of the same routing (see benchmarks/data/README.md).

    python -m benchmarks.import_gptoss gptoss20b_160conv.npz

The ids alone are kept, in rank order, with the starts of the conversations.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from trilane.traces.trace_file import append_trace, read_trace
from trilane.traces.trace_import import GPTOSS20B_SHARDS

TRACE = Path(__file__).parent / "data" / "gptoss20b_160conv.trace"
SOURCE = "AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, commit 72b368f (2025-08-13), 160 conversations, converted"


def import_gptoss(source: Path, target: Path) -> None:
    """Read the .npz and write the trace anew."""
    trace = read_trace(source)
    meta = replace(
        trace.meta,
        model="gpt-oss-20b",
        shard_nbytes=(GPTOSS20B_SHARDS,) * trace.meta.num_layers,
        source=SOURCE,
        licence="Apache-2.0",
    )
    target.unlink(missing_ok=True)
    append_trace(target, replace(trace, meta=meta, weights=None))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_gptoss", description=__doc__)
    parser.add_argument("npz", type=Path)
    import_gptoss(parser.parse_args().npz, TRACE)
