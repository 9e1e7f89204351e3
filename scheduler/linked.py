"""Functions compiled for nothing but compiled callers.

Numba makes every function callable from Python, and machine code of it, before it copies its code into each caller
and optimises it there once more; so the innermost functions of a deep program are made into machine code again and
again, on every level up. What a caller needs is the code alone. Here functions end as that, and only what is called
from outside is optimised as a whole and becomes machine code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher


class _LinkedLibrary(JITCodeLibrary):
    """Code to be linked into callers only: neither optimised as a whole nor made into machine code by itself."""

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True


class _LinkedCompiler(Compiler):
    def __init__(self, typing: Any, target: Any, library: Any, args: Any, returns: Any, flags: Any, local: Any) -> None:
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        library = _LinkedLibrary(target.codegen(), "linked")
        super().__init__(typing, target, library, args, returns, flags, local)


class LinkedDispatcher(CPUDispatcher):
    """Compiles a function for the compiled functions that call it."""

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(fn, targetoptions=options, pipeline_class=_LinkedCompiler)

    def add_overload(self, result: Any) -> None:
        result = result._replace(entry_point=object())  # Numba's key of the function: it has no address
        self.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result
