"""A line of Python in a process of its own, with decisions compiled or as plain Python."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(code: str, *, plain: bool) -> str:
    """What it prints; it runs in the folder of the tests, so that it can import them. A warning is an error."""
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1" if plain else "0", "PYTHONWARNINGS": "error"}
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run([sys.executable, "-c", code], cwd=here, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
