"""Our layer-step beside FreeToken's, in one go: the same trace, slots and shape, and the ratios.

Shape by default: hidden 2048, intermediate 768, 128 experts, top-8, 8 layers, batch 1, 256 slots of 1024 experts; ours
in Q4_K, FreeToken in its NVFP4, both about 4.5 bits a weight. The trace is peer_trace.py's (zipf 0.8, reuse 0.3,
seed 1); what is called all resident runs the trace after a pass over all experts, with slots for all.

Method: each side runs in a process of its own, so that its memory is free again: FreeToken's default and its hybrid
mode, ours, then FreeToken with everything resident. Both sides launch one CUDA graph of all layers a token and are
timed by the GPU's events around it; a layer's time is that over the layers, and p50 is over 300 tokens after 100.
The limit is what the missed bytes of a layer take at the rate that CPU lane and link together reached in this run
(joint_rate.py). A side that fails is said so, and the rest is printed.

FreeToken needs torch, triton, and the wheels freetoken==0.2.1 (cp312), flashlib==0.4.0, apache_tvm_ffi==0.1.13.post3
and pyzmq==27.3.0, which --wheels installs to a folder that is deleted afterwards, or --freetoken names installed.

    python -m benchmarks.bench_peers --wheels FOLDER [--json peers.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.peer_trace import load_trace, sweep_trace, synth_trace

ROOT = Path(__file__).parents[1]
FIXED_US = 10.0  # of a step, beside its bytes
GOALS = {"split / FreeToken hybrid": 0.70, "split / FreeToken default": 0.50, "resident / FreeToken all hits": 0.70}


def run_process(command, limit_s, paths=()):
    """Output and what went wrong ("" if nothing) of a command with a time limit; it is echoed."""
    found = [str(ROOT), *map(str, paths), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=env)
        text, errors = done.stdout, done.stderr
        problem = "" if done.returncode == 0 else f"ended with {done.returncode}: {_last_line(errors)}"
    except subprocess.TimeoutExpired as late:
        text, errors = (_text(part) for part in (late.stdout, late.stderr))
        problem = f"took more than {limit_s:g} s"
    except OSError as error:
        text, errors, problem = "", "", str(error)
    print(text, end="", flush=True)
    if problem:
        print(f"--- {problem}\n{errors[-3000:]}", flush=True)
    return text, problem


def _text(part):
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""


def _last_line(text):
    return (text.strip().splitlines() or ["no message"])[-1]


def install_wheels(folder, target):
    """Put FreeToken's wheels into a folder; what went wrong."""
    wheels = sorted(map(str, Path(folder).glob("*.whl")))
    if not wheels:
        return f"{folder} holds no wheels"
    options = ["-q", "--no-index", "--no-deps", "--target", str(target)]
    return run_process([sys.executable, "-m", "pip", "install", *options, *wheels], 120)[1]


def run_freetoken(args, modes, slots, trace, warm, folder, paths):
    """Rows by mode, and what went wrong."""
    report = Path(folder) / f"freetoken-{slots}.json"
    command = [args.python, "-m", "benchmarks.freetoken_bench", "--mode", modes, "--slots", str(slots),
               "--trace", str(trace), "--warm", str(warm), "--json", str(report), *_shape(args)]  # fmt: skip
    if args.ahead == 1:
        command.append("--sync-each")
    print(f"--- FreeToken, {modes}, {slots} slots", flush=True)
    problem = run_process(command, args.limit, paths)[1]
    found = json.loads(report.read_text()) if report.exists() else {"modes": {}}
    return found, problem


def run_ours(args, trace):
    """Rows by part, and what went wrong."""
    command = [sys.executable, "-m", "benchmarks.trace_lanes", "--trace", str(trace), "--warm", str(args.warm),
               "--fraction", str(args.slots / (args.layers * args.experts)), "--ahead", str(args.ahead),
               "--format", args.format, *_shape(args)]  # fmt: skip
    print("--- ours", flush=True)
    text, problem = run_process(command, args.limit)
    rows = {}
    for line in text.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows[row.pop("part")] = row
    return rows, problem


def _shape(args):
    names = ("layers", "experts", "hidden", "inter", "top_k")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]


# ------------------------------------------------------------------------------------------------- the table
def ratios(ours, theirs):
    """{name: ratio} of medians where both are there."""
    pairs = {
        "split / FreeToken hybrid": ("split", "hybrid"),
        "split / FreeToken default": ("split", "offload"),
        "resident / FreeToken all hits": ("resident", "all hits"),
    }
    return {
        name: ours[a]["p50"] / theirs[b]["p50"]
        for name, (a, b) in pairs.items()
        if "p50" in ours.get(a, {}) and "p50" in theirs.get(b, {})
    }


def limit_of(ours, part="split"):
    """us that a part's missed bytes take at the joint rate, and (p50 - FIXED_US) over it; None without figures."""
    row, joint = ours.get(part, {}), ours.get("joint", {})
    if not row.get("missed_nbytes") or not joint.get("both"):
        return None
    limit_us = row["missed_nbytes"] / joint["both"] / 1e3
    return limit_us, (row["p50"] - FIXED_US) / limit_us


def table(ours, theirs, problems):
    """The lines that are printed in the end."""
    lines = [f"{'us a layer':32}{'p50':>8}{'p90':>8}{'p99':>8}{'mean':>8}{'wall':>8}   missed"]
    for side, rows in (("FreeToken", theirs), ("ours", ours)):
        for name, row in rows.items():
            if "p50" in row:
                times = "".join(f"{row[key]:8.1f}" for key in ("p50", "p90", "p99", "mean", "wall"))
                lines.append(f"{f'{side}, {name}':32}{times}   {_missed(row)}")
            elif "error" in row:
                lines.append(f"{f'{side}, {name}':32}FAILED: {row['error']}")
    lines += [f"{side}: FAILED: {problem}" for side, problem in problems.items() if problem]
    for name, ratio in ratios(ours, theirs).items():
        lines.append(f"{name:32}{ratio:8.3f}   goal {GOALS[name]:g}: {'held' if ratio <= GOALS[name] else 'NOT held'}")
    joint = ours.get("joint", {})
    if "both" in joint:
        lines.append(
            f"joint rate: CPU {joint['cpu_together']:.1f} + link {joint['link_together']:.1f} = {joint['both']:.1f} "
            f"GB/s (alone {joint['cpu_alone']:.1f} and {joint['link_alone']:.1f})"
        )
    for part in ("split", "split, admit always"):
        if limit := limit_of(ours, part):
            held = "held" if limit[1] <= 1.3 else "NOT held"
            lines.append(
                f"{part}: {ours[part]['missed_nbytes'] / 1e6:.2f} MB missed a layer, limit {limit[0]:.1f} us; "
                f"(p50 - {FIXED_US:g} us) / limit {limit[1]:.3f}   goal 1.3: {held}"
            )
    return lines


def _missed(row):
    if "miss" in row:
        return f"{row['miss']:.2f} experts ({row['fetch']:.2f} fetched, {row['cpu']:.2f} on the CPU)"
    shards = ", ".join(f"{name} {count:g}" for name, count in row["shards"].items() if count)
    return f"{row['missed_nbytes'] / 1e6:.2f} MB (shards: {shards}); plan {row['plan_us']:.1f} us"


def parse_args(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("layers", 8), ("experts", 128), ("hidden", 2048), ("inter", 768), ("top-k", 8), ("slots", 256),
                        ("tokens", 300), ("warm", 100)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--format", default="q4_k", help="of our weights")
    parser.add_argument("--ahead", type=int, default=4, help="tokens that we launch ahead; 1: both sides wait for each")
    parser.add_argument("--trace", help=".npy (tokens, layers, top_k) instead of the synthetic one")
    parser.add_argument("--wheels", help="folder with FreeToken's wheels")
    parser.add_argument("--freetoken", help="folder where FreeToken is installed")
    parser.add_argument("--python", default=sys.executable, help="interpreter with torch and triton, for FreeToken")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--limit", type=float, default=240.0, help="s for each process")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args(words)


def write_traces(args, folder):
    """Files of the trace, and of it after a pass over all experts; that pass's tokens."""
    shape = args.layers, args.experts, args.top_k
    trace = load_trace(args.trace, *shape) if args.trace else synth_trace(args.tokens + args.warm, *shape)
    sweep = sweep_trace(*shape)
    names = Path(folder) / "trace.npy", Path(folder) / "swept.npy"
    np.save(names[0], trace)
    np.save(names[1], np.concatenate([sweep, trace]))
    return *names, len(sweep)


def main(words=None):
    args = parse_args(words)
    theirs, problems, reports = {}, {}, []
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        trace, swept, sweep = write_traces(args, folder)
        paths = [args.freetoken] if args.freetoken else []
        if args.wheels and not args.only_ours:
            problems["FreeToken's wheels"] = install_wheels(args.wheels, Path(folder) / "site")
            paths.append(Path(folder) / "site")
        if not args.only_ours:
            report, problems["FreeToken"] = run_freetoken(
                args, "offload,hybrid", args.slots, trace, args.warm, folder, paths
            )
            theirs |= report["modes"]
            reports.append(report)
        ours, problems["ours"] = run_ours(args, trace)
        if not args.only_ours:
            report, problems["FreeToken, all hits"] = run_freetoken(
                args, "offload", args.layers * args.experts, swept, args.warm + sweep, folder, paths
            )
            if "offload" in report["modes"]:
                theirs["all hits"] = report["modes"]["offload"]
            reports.append(report)
    lines = table(ours, theirs, problems)
    print("\n" + "\n".join(lines))
    if args.json:
        found = {"ours": ours, "freetoken": reports, "problems": problems, "ratios": ratios(ours, theirs)}
        Path(args.json).write_text(json.dumps(found, indent=1, default=str))
    return 0 if any("p50" in row for row in ours.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
