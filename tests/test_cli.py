"""The command line: output for people and for programs, and errors without a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from trilane import __version__, cli
from trilane.commands import bench
from trilane.errors import StoreError


def run(*args: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from trilane.cli import main; main()", *args]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == expect, result.stderr
    assert "Traceback" not in result.stderr
    return result


def run_here(*args: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """As `run`, in this process: for the many mistakes, where a new one would import for a second each."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(sys, "argv", ["trilane", *args])
        try:
            cli.main()
        except SystemExit as ending:
            code = ending.code
    assert code == expect, errors.getvalue()
    return subprocess.CompletedProcess(args, code, out.getvalue(), errors.getvalue())


def test_help_and_version_load_nothing_heavy() -> None:
    assert run("--version").stdout == f"trilane {__version__}\n"
    assert "bench" in run("--help").stdout
    code = """
import sys
from trilane import cli
print(sorted({"numba", "numpy", "llvmlite", "cupy", "pydantic"} & set(sys.modules)))"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["bench", "cpu", "--format", "q4k"], "did you mean 'q4_k'"),
        (["bench", "cpu", "--threads", "100000"], "threads are more than"),
        (["bench", "cpu", "--shape", "3x1"], "is no shape"),
        (["bench", "cpu", "--isa", "sse"], "is unknown"),
        (["bench", "cpu", "--ggml", "/nowhere"], "does not exist"),
        (["bench", "cpu", "--ggml", "."], "no libggml-cpu"),
        (["bench", "nothing"], "No such command"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(args: list[str], text: str) -> None:
    shown = " ".join(run_here(*args, expect=2).stderr.replace("│", " ").split())
    assert text in shown


@pytest.mark.parametrize("error", [StoreError("the store is empty"), MemoryError("no room"), OSError("gone")])
def test_failures_exit_with_1_and_one_line(error: Exception, monkeypatch: Any, capsys: Any) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"trilane: {error}\n"


def test_ctrl_c_exits_as_a_shell_expects(monkeypatch: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupt)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130


INTERRUPTED = """
import os, signal, sys
from trilane import cli
def app():
    {body}
cli.app = app
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    "body",
    [
        "os.kill(os.getpid(), signal.SIGINT)",
        "import swallows",
        "try: os.kill(os.getpid(), signal.SIGINT)\n    except KeyboardInterrupt: raise RecursionError from None",
        "try: os.kill(os.getpid(), signal.SIGINT)\n    except KeyboardInterrupt: sys.exit(1)",
    ],
    ids=["plain", "in an import that catches it", "as another error", "as an exit"],
)
def test_ctrl_c_is_told_as_what_it_is(tmp_path: Path, body: str) -> None:
    """One in an import, which may come out as anything, ends there and then."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: raise ImportError"
    )
    command = [sys.executable, "-c", INTERRUPTED.format(body=body)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "trilane: interrupted\n")


def test_a_signal_that_is_taken_in_order_is_no_interruption() -> None:
    body = "try: os.kill(os.getpid(), signal.SIGINT)\n    except KeyboardInterrupt: pass"
    subprocess.run([sys.executable, "-c", INTERRUPTED.format(body=body)], check=True)


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&-"])
def test_closed_streams_are_no_failure(closed: str) -> None:
    touched = "[sys.stdout.flush(), sys.stderr.flush(), sys.stdin.isatty()]"
    flush = f"import sys; from trilane import cli; cli.app = lambda: {touched}; cli.main()"
    subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", flush], check=True)


@pytest.fixture
def small_probe(monkeypatch: Any) -> None:
    """The command on little memory and with few samples: its form is tested here, not its figures."""
    from trilane.cpu_kernels.arena import allocate_arena
    from trilane.probes import cpu_experts

    monkeypatch.setattr(cpu_experts, "probe_arena", lambda num_regions: allocate_arena(8 << 20))
    measure = cpu_experts.measure_cpu_experts
    monkeypatch.setattr(cpu_experts, "measure_cpu_experts", lambda *a, **k: measure(*a, **k, num_samples=1))


def test_bench_cpu_json_has_exactly_the_documented_form(small_probe: None, capsys: Any) -> None:
    bench.bench_cpu(["Q8_0"], [1], ["36x512"], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "rows"}
    (row,) = found["rows"]
    assert list(row) == ["format", "shape", "threads", "gb_s", "limit_gb_s", "ratio", "ggml_gb_s"]
    assert (row["format"], row["shape"], row["threads"]) == ("q8_0", "36x512", 1)
    assert row["ratio"] == pytest.approx(row["gb_s"] / row["limit_gb_s"], rel=1e-2)


def test_bench_cpu_table_is_plain_where_there_is_no_terminal(small_probe: None, capsys: Any) -> None:
    bench.bench_cpu(["q8_0"], [1], ["36x512"])
    out = capsys.readouterr().out
    assert out.isascii() and "\x1b" not in out
    machine_line, heading, row = out.splitlines()
    assert heading.split()[:4] == ["format", "shape", "threads", "GB/s"]
    assert row.split()[:3] == ["q8_0", "36x512", "1"]


def test_a_busy_machine_is_told_on_stderr(capsys: Any) -> None:
    from trilane.probes.cpu_experts import ExpertRate

    bench._warn([ExpertRate("q4_k", "avx2", (4, 256), 1, 1.0, 2.0, None, True)], has_ggml=True)
    assert "1 rows are estimates" in capsys.readouterr().err


def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "trilane", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"trilane {__version__}\n"


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("trilane")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("trilane ")
