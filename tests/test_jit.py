"""How functions are compiled: what the stamp of the cache sees, and code that exists for compiled callers only."""

from __future__ import annotations

import ast

import pytest
from numba import config
from test_package import SOURCES

from trilane import jit
from trilane.jit import compiled, module_stamp

IMPORTS = """
import trilane.first
def function():
    if True:
        from trilane import second
    try:
        pass
    except ValueError:
        from .third import name
    finally:
        with open() as file:
            import trilane.fourth as other
    match 1:
        case 1:
            import trilane.fifth
class Kind:
    def method(self):
        for _ in ():
            pass
        else:
            from trilane.sixth import name
from trilane.seventh import (
    eighth as other,
    ninth,  # and why
)
"""


def test_imports_are_seen_wherever_they_stand() -> None:
    names = set(jit._imported_names(IMPORTS, "trilane"))
    words = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "seventh.eighth", "seventh.ninth")
    assert {f"trilane.{word}" for word in words} <= names


def test_no_import_of_the_package_is_overlooked() -> None:
    """A file whose change a stamp does not see would leave old code in use."""
    for module, path in SOURCES.items():
        source, parent, wanted = path.read_text(), module.rpartition(".")[0], set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(filter(None, (parent if node.level else "", node.module)))
                wanted |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        assert wanted <= set(jit._imported_names(source, parent)), module


def test_a_stamp_changes_with_every_file_that_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = module_stamp("trilane.planner")
    read = jit._read_module

    def edited(module: str) -> tuple[bytes, tuple[str, ...]] | None:
        found = read(module)
        return (found[0] + b"#", found[1]) if found is not None and module == "trilane.cost" else found

    monkeypatch.setattr(jit, "_read_module", edited)
    assert module_stamp.__wrapped__("trilane.planner") != before
    assert module_stamp.__wrapped__("trilane.errors") == module_stamp("trilane.errors")


def test_a_function_in_a_closure_is_known_with_the_stamp_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory in a file that imports little may be handed a function of another, which calls many."""
    from trilane.planner import plan_layer

    def made(inner):
        return lambda: inner

    before = jit._describe(made(plan_layer))
    monkeypatch.setattr(jit, "module_stamp", lambda module: f"{module} was edited")
    assert jit._describe(made(plan_layer)) != before


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")
def test_a_function_is_compiled_apart_for_python_and_for_compiled_callers() -> None:
    @compiled
    def half(x):
        if x < 0:
            raise ValueError("negative")
        return x / 2

    @compiled
    def quarter(x):
        return half(half(x))

    assert quarter(6.0) == 1.5
    assert len(half.signatures) == 0 and len(half.linked.signatures) == 1
    with pytest.raises(ValueError, match="negative"):
        quarter(-1.0)
    assert half(6.0) == 3.0
    assert len(half.signatures) == 1 and len(half.linked.signatures) == 1
