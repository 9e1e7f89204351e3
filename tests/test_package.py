"""The package as a whole: who imports whom, what installs, what loads when, and what stays untouched."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import trilane

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS = {"scheduler": "trilane"} | {name: f"trilane.{name}" for name in ("cpu_kernels", "gpu_kernels", "probes")}

# The decision files: functions over plain arrays. They know no kernel, no device and no thread.
DECISIONS = {
    *("expert", "cost", "profile", "plan", "state", "eviction", "residency"),
    *(
        "neighbours",
        "lookup",
        "demotion",
        "link_order",
        "split",
        "subsets",
        "placement",
        "wanted",
        "planner",
        "observed",
    ),
    "guard",
}
LAZY = ("integrations",)  # only functions import these
LEAVES = {"jit", "records", "errors"}
# Who may import whom, as prefixes of module names below "trilane."; the first rule that fits a module counts.
# The rest (engine, store, stats, devices, command line, integrations) may import everything.
MAY_IMPORT: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("compile_notice", "linked", "records", "errors"), ()),
    (("jit",), ("compile_notice", "linked")),
    (("settings.config_problems",), ("errors",)),
    (("config",), ("settings.config_problems", "errors")),
    (tuple(sorted(DECISIONS)), (*sorted(DECISIONS), *sorted(LEAVES))),
    (("readers",), ("readers", "errors")),
    (("cpu_kernels",), ("cpu_kernels", "jit", "records")),
    (("gpu_kernels",), ("gpu_kernels", "cpu_kernels.formats", "cpu_kernels.layout", "jit", "whole_file")),
    (("probes",), ("probes", "cpu_kernels", "gpu_kernels", "profile", "jit", "errors")),
]
FOREIGN_TO_DECISIONS = {
    "cupy",
    "cuda",
    "torch",
    "threading",
    "multiprocessing",
    "concurrent",
    "ctypes",
    "asyncio",
}


def module_name(path: Path) -> str:
    """``probes/timing.py`` -> ``trilane.probes.timing``."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join([FOLDERS[folder], *rest])
    return name.removesuffix(".__init__")


SOURCES = {module_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def running_nodes(tree: ast.AST, in_functions: bool) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads, with or without what functions run when called."""
    for child in ast.iter_child_nodes(tree):
        if not is_type_checking(child) and (in_functions or not isinstance(child, ast.FunctionDef)):
            yield child
            yield from running_nodes(child, in_functions)


def imports_of(name: str, in_functions: bool = True) -> set[str]:
    """Absolute names of the modules that a module imports, wherever in the file or when it loads."""
    path = SOURCES[name]
    parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in running_nodes(ast.parse(path.read_text()), in_functions):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = parent.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, [up, node.module]))
            inner = {f"{base}.{alias.name}" for alias in node.names} & SOURCES.keys()
            found.update(inner or {base})
    return found


def ours(name: str, in_functions: bool = True) -> set[str]:
    return {target for target in imports_of(name, in_functions) if target.split(".")[0] == "trilane"}


def fits(name: str, prefixes: tuple[str, ...]) -> bool:
    inner = name.removeprefix("trilane.")
    return any(inner == prefix or inner.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_imports_point_inward(name: str) -> None:
    for importers, allowed in MAY_IMPORT:
        if fits(name, importers):
            outside = {target for target in ours(name) if not fits(target, allowed)}
            assert not outside, f"{name} may import {allowed or 'nothing of ours'} only"
            return


def test_the_import_table_is_the_one_in_the_documents() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for decision in DECISIONS:
        assert f"`{decision}`" in text


def test_no_module_needs_itself_to_load() -> None:
    graph = {name: ours(name, in_functions=False) & SOURCES.keys() for name in SOURCES if name != "trilane"}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError with the circle
    assert set(graph) <= set(order)


def test_adapters_of_other_libraries_load_when_they_are_asked_for() -> None:
    others = [name for name in SOURCES if not fits(name, LAZY)]
    assert [name for name in others if any(fits(t, LAZY) for t in ours(name, in_functions=False))] == []


@pytest.mark.parametrize("name", sorted(DECISIONS))
def test_decision_files_know_no_device_and_no_thread(name: str) -> None:
    tops = {target.split(".")[0] for target in imports_of(f"trilane.{name}")}
    assert not tops & FOREIGN_TO_DECISIONS


def test_decision_files_are_the_ones_whose_coverage_counts() -> None:
    files = PROJECT["tool"]["coverage"]["run"]["include"]
    assert files == [f"scheduler/{Path(file).name}" for file in files]
    assert {Path(file).stem for file in files} == DECISIONS


def test_the_listed_packages_are_the_folders_on_disk() -> None:
    on_disk = {module_name(path) for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
    with_python = {
        module_name(path.parent / "__init__.py") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }
    assert set(SETUPTOOLS["packages"]) == on_disk == with_python
    assert SETUPTOOLS["package-dir"] == {package: folder for folder, package in FOLDERS.items()}


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert trilane.__version__ == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.alone
def test_import_is_quick_and_loads_nothing_heavy() -> None:
    code = """
import json, sys, time
start = time.perf_counter()
import trilane
seconds = time.perf_counter() - start
heavy = {"numba", "numpy", "cupy", "llvmlite", "pydantic", "typer", "rich", "yaml", "psutil", "torch"}
dir(trilane)
print(json.dumps([seconds, sorted(heavy & set(sys.modules)), "scheduler" in sys.modules]))
"""
    runs = [json.loads(run_python(code)) for _ in range(3)]
    assert min(seconds for seconds, _, _ in runs) < 0.2
    assert all(heavy == [] and not outside for _, heavy, outside in runs)


def test_public_names_are_sorted_load_and_are_listed() -> None:
    assert trilane.__all__ == sorted(trilane.__all__)
    assert set(trilane.__all__) <= set(dir(trilane))
    for name in trilane.__all__:
        assert getattr(trilane, name).__module__.startswith("trilane.")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = trilane.no_such_name


def test_public_names_agree_with_what_a_type_checker_reads() -> None:
    tree = ast.parse(SOURCES["trilane"].read_text())
    block = next(node for node in tree.body if is_type_checking(node))
    names = [alias.name for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(names) == trilane.__all__


def test_loading_all_modules_changes_nothing_of_the_process() -> None:
    """No handler, signal, thread, variable or working directory is touched by an import."""
    modules = [name for name in SOURCES if not fits(name, LAZY)]  # those load torch
    code = f"""
import faulthandler, importlib, json, logging, os, signal, threading, warnings
import numba, numpy, pydantic, typer, rich  # what they do is theirs
def look():
    return [dict(os.environ), os.getcwd(), threading.active_count(), len(logging.getLogger().handlers),
            [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)], len(warnings.filters),
            numpy.geterr()]
before = look()
for name in {modules!r}:
    importlib.import_module(name)
after = look()
print(json.dumps([a == b for a, b in zip(before, after)]))
"""
    assert all(json.loads(run_python(code)))


def environment_reads(tree: ast.Module) -> Iterator[int]:
    """Lines at module level that read the environment."""
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            continue
        text = ast.unparse(statement)
        if "os.environ" in text or "getenv(" in text:
            yield statement.lineno


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_module_reads_the_environment_when_imported(name: str) -> None:
    assert list(environment_reads(ast.parse(SOURCES[name].read_text()))) == []


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_module_says_what_it_does(name: str) -> None:
    assert ast.get_docstring(ast.parse(SOURCES[name].read_text()))
