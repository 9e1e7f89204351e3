"""What every test shares: the settings of hypothesis, and the rule that a skip must name what is missing."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import platformdirs
import pytest
from hypothesis import HealthCheck, settings

# A skip is fine where the machine lacks a part. Any other reason could hide a test that runs nowhere.
ALLOWED_SKIPS = (
    "needs avx512",
    "needs avx2",
    "needs linux",
    "affinity masks exist on linux",
    "needs two cpus",
    "needs ggml",
    "needs a gpu",
    "needs torch",
    "needs transformers",
    "needs compiled code",
)

# Compiling takes seconds, so a deadline says nothing; the same examples every time, so a failure is a change.
settings.register_profile(
    "trilane", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("trilane")

# A shell that starts the tests in the background ignores Ctrl-C for them, and so for the programs that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiled code is kept where users keep it; everything else that is cached belongs to this run alone.
os.environ.setdefault("NUMBA_CACHE_DIR", platformdirs.user_cache_dir("trilane"))
_cache = tempfile.TemporaryDirectory(prefix="trilane-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name

_bad_skips: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def saved_profile() -> None:
    """Schedulers that are given no profile find a made-up one, so that no test waits for a measurement."""
    if not os.environ.get("NUMBA_DISABLE_JIT"):
        from made_profile import save_made_profile

        save_made_profile()


@pytest.fixture
def scheduler_of() -> Any:
    """Opens schedulers (see expert_cases.open_scheduler); in the end each one's state is checked and it is closed."""
    from expert_cases import open_scheduler

    from trilane.state import check

    opened = []

    def open_one(store: Any, rates: Any = None, **sections: Any) -> Any:
        opened.append(open_scheduler(store, rates, **sections))
        return opened[-1]

    yield open_one
    for scheduler in opened:
        check(scheduler._runner.state, scheduler._runner.geometry)
        scheduler.close()


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """One thread for torch's sums, whose order depends on their number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    """The bundled model, open on the host device."""
    from trilane.integrations.generation import open_text_model

    opened = open_text_model("tiny", device="host")
    with opened.handle:
        yield opened


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens schedulers on played GPUs; in the end each one's state is checked and nothing is left of its memory."""
    from expert_cases import profile_for
    from played_driver import PlayedDriver

    import trilane.cuda_runner
    from trilane import ExpertScheduler
    from trilane.state import check

    opened = []

    def open_one(store: Any, driver: Any = None, **sections: Any) -> Any:
        driver = driver or PlayedDriver()
        monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", lambda: driver)
        sections.setdefault("cpu", {}).setdefault("threads", 1)
        opened.append(ExpertScheduler(store, profile=profile_for(store), config=sections, device="cuda"))
        return opened[-1]

    yield open_one
    for scheduler in opened:
        runner = scheduler._runner
        check(runner.state, runner.geometry)
        scheduler.close()
        assert not runner.driver.blocks and not runner.driver.registered and not runner.driver.streams


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With several processes, the one that starts the others hears of each of their tests too."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason.removeprefix("Skipped: ").lower().startswith(ALLOWED_SKIPS):
            _bad_skips.append(f"{report.nodeid}: {reason}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in _bad_skips:
        terminalreporter.write_line(f"SKIPPED FOR NO ALLOWED REASON {line}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _bad_skips and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    _cache.cleanup()
