"""How trilane compiles: one place for the flags and for the on-disk cache.

Every nopython function of the project is made by :func:`compiled` or :func:`native`, so that no kernel can
be built with fast-math or with a stale helper. The file is a leaf: it knows no kernel and no decision, and
both sides may import it.

Numba's own cache looks at the file of the cached function alone, so an edit of a helper in another file would
go unnoticed. Ours is stamped with a hash of that file and of every file of the package that it imports; code of other
versions stays beside it until nobody has used it for KEPT_DAYS.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numba
import platformdirs
from numba import config as numba_config
from numba.core import caching, sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from trilane.compile_notice import CompileNotice
from trilane.linked import LinkedDispatcher

FLAGS = {"nogil": True, "fastmath": False, "error_model": "numpy"}


PACKAGE = "trilane"
KEPT_DAYS = 60  # that compiled code is kept after its last use
log = logging.getLogger(PACKAGE)
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+)?import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)
_ALIAS, _WORD = re.compile(r"\bas[ \t]+\w+"), re.compile(r"[\w.]+")
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE if (_HERE / "cpu_kernels").is_dir() else _HERE.parent  # installed wheel, or a checkout


def _source_file(module: str) -> Path | None:
    """The file of a module of this package, or None (another package, or a name that is no module)."""
    package, _, rest = module.partition(".")
    if package != PACKAGE or not rest:
        return None
    *folders, name = rest.split(".")
    paths = (root.joinpath(*folders, f"{name}.py") for root in (_HERE, _ROOT))
    return next((path for path in paths if path.is_file()), None)


@functools.cache
def _read_module(module: str) -> tuple[bytes, tuple[str, ...]] | None:
    """Source of a module of this package and the names of all that it imports (some have no file); else None."""
    path = _source_file(module)
    if path is None:
        return None
    source = path.read_bytes()
    parent = module.rpartition(".")[0]
    return source, tuple(_imported_names(source.decode(), parent))


def _imported_names(source: str, parent: str) -> Iterator[str]:
    """What a module imports, in functions too, found line by line: to parse all files would take a third of a second.

    Formatted code has each import on lines of its own. A name too many has no file, and does no harm.
    """
    for base, names in _IMPORT.findall(source):
        words = _WORD.findall(_ALIAS.sub("", names))
        if not base:
            yield from words
            continue
        package = ".".join(filter(None, (parent, base.lstrip(".")))) if base.startswith(".") else base
        yield package
        yield from (f"{package}.{word}" for word in words)


@functools.cache
def module_stamp(module: str) -> str:
    """Hash of a module's source and of all sources of this package that it imports, however indirectly."""
    seen: dict[str, bytes] = {}
    queue = [module]
    while queue:
        name = queue.pop()
        found = None if name in seen else _read_module(name)
        if found is not None:
            seen[name], imported = found
            queue.extend(imported)
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(seen):
        digest.update(name.encode() + b"\0" + seen[name])
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where compiled code is kept: ``$NUMBA_CACHE_DIR`` if set, else the user's cache folder."""
    return Path(numba_config.CACHE_DIR or platformdirs.user_cache_dir(PACKAGE)) / "compiled"


@functools.cache
def _warn_not_kept(folder: str, reason: str) -> None:
    """Once a process."""
    log.warning(
        "trilane cannot keep compiled code in %s (%s), so each process compiles it anew, which can take minutes: "
        "set NUMBA_CACHE_DIR to a folder that can be written",
        folder,
        reason,
    )


class _PackageLocator(caching._CacheLocator):
    """Locates the cache by the hash of a module and of what it imports, not by one file's time stamp."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        self._py_file = py_file
        self._lineno = py_func.__code__.co_firstlineno
        self._module = py_func.__module__

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return module_stamp(self._module)

    def get_disambiguator(self) -> str:
        return f"{self._module}-{self._lineno}"

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _PackageLocator | None:
        if _source_file(py_func.__module__) is None:
            return None  # a test or a script: its imports cannot be followed, so it is not cached
        locator = cls(py_func, py_file)
        try:
            locator.ensure_cache_path()
        except OSError as error:
            _warn_not_kept(str(cache_folder()), error.strerror or str(error))
            return None
        return locator


class _PackageCacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = [_PackageLocator]


class _KeyedCacheFile(caching.IndexDataCacheFile):
    """Names a data file by what it holds. Numba numbers them, and two processes that save different functions
    of one factory at the same time take the same number: later, one kernel would be loaded for the other.

    The index has the versions of sources and compiler in its name: with one name for all, two environments of one
    user would write over each other's and compile at every start.
    """

    def __init__(self, cache_path: str, filename_base: str, source_stamp: str) -> None:
        version = hashlib.blake2b(f"{numba.__version__} {source_stamp}".encode(), digest_size=6).hexdigest()
        super().__init__(cache_path, f"{filename_base}.{version}", source_stamp)

    def load(self, key: Any) -> Any:
        found = super().load(key)
        if found is not None:
            with contextlib.suppress(OSError):
                os.utime(self._index_path)  # still of use: see `prune_cache`
        return found

    def save(self, key: Any, data: Any) -> None:
        text = repr((self._source_stamp, key)).encode()
        name = self._data_name_pattern.format(number=int.from_bytes(hashlib.blake2b(text, digest_size=12).digest()))
        self._save_data(name, data)
        overloads = self._load_index()  # a lost entry of another process only costs its next compilation
        overloads[key] = name
        self._save_index(overloads)

    def _load_index(self) -> Any:
        """The index, or an empty one where it cannot be read: cut off, or of a version with other modules."""
        try:
            return super()._load_index()
        except OSError:
            raise
        except Exception:  # unpickling may raise anything; what is not found is compiled and written anew
            return {}


def prune_cache(folder: Path, *, before_s: float) -> int:
    """Delete compiled code that was last used before this time (s since the epoch); files deleted."""
    old, known = set(), set()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            known.add(entry.name)
            if entry.is_file() and entry.stat().st_mtime < before_s:
                old.add(entry.name)
    deleted = 0
    for name in old:
        index = name if name.endswith(".nbi") else f"{name.rsplit('.', 2)[0]}.nbi"
        if index in known and index not in old:
            continue  # data of an index that is in use
        with contextlib.suppress(OSError):
            os.unlink(folder / name)
            deleted += 1
    return deleted


@functools.cache
def _prune_once(folder: Path) -> None:
    prune_cache(folder, before_s=time.time() - KEPT_DAYS * 86_400)


class _PackageCache(caching.FunctionCache):
    _impl_class = _PackageCacheImpl
    notice = CompileNotice(cache_folder)  # of the process

    def __init__(self, py_func: Callable[..., Any]) -> None:
        super().__init__(py_func)
        locator = self._impl.locator
        self._cache_file = _KeyedCacheFile(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=locator.get_source_stamp(),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None:
            self.notice.begin()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
            _prune_once(cache_folder())
        except OSError as error:  # a full disk, say, costs the next process its time and this one nothing
            _warn_not_kept(str(cache_folder()), error.strerror or str(error))

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        """Numba's key, but with closures described by what they hold: it pickles them, and a pickled
        dispatcher differs from process to process, so functions made by factories would never be found."""
        return (sig, codegen.magic_tuple(), _describe(self._py_func))


def _describe(value: Any) -> str:
    """A text that tells two functions of one factory apart: code and, recursively, what the closure holds.

    With the stamp of its module, since what a closure holds may come from one that the factory's does not import.
    """
    fn = getattr(value, "py_func", None) or getattr(value, "_defn", None) or getattr(value, "_pyfunc", None)
    fn = fn or (value if isinstance(value, FunctionType) else None)
    if fn is None:
        return repr(value)
    cells = ",".join(_describe(cell.cell_contents) for cell in fn.__closure__ or ())
    consts = [const for const in fn.__code__.co_consts if not isinstance(const, CodeType)]
    text = fn.__code__.co_code + repr((consts, fn.__code__.co_firstlineno, module_stamp(fn.__module__))).encode()
    code = hashlib.blake2b(text, digest_size=8).hexdigest()
    return f"{fn.__module__}.{fn.__qualname__}:{code}({cells})"


def _cached(dispatcher: Any, fn: Callable[..., Any]) -> None:
    """Give a dispatcher the package cache; without a writable folder it compiles each time."""
    if os.environ.get("TRILANE_NO_CACHE"):
        return
    try:
        dispatcher._cache = _PackageCache(fn)
    except RuntimeError:  # numba's word for "no locator available"
        return


class _Dispatcher(CPUDispatcher):
    """Compiles a function for Python, with what it calls; and apart from that for its compiled callers."""

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(fn, targetoptions=options)
        self.linked = LinkedDispatcher(fn, options)
        self._has_cache = False

    def compile(self, signature: Any) -> Any:
        with global_compiler_lock:  # a second thread must not compile what the first is about to find
            if not self._has_cache:  # most functions are only ever linked into others, and need none
                _cached(self, self.py_func)
                self._has_cache = True
            with _PackageCache.notice.around():
                return super().compile(signature)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return self.linked.get_call_template(args, kws)

    def get_overload(self, signature: Any) -> Any:
        return self.linked.get_overload(signature)

    def add_overload(self, result: Any) -> None:
        for environment in result._find_referenced_environments() if result.metadata is not None else ():
            result.library.codegen.set_env(environment.env_name, environment)
        super().add_overload(result)


def compiled(
    fn: Callable[..., Any] | None = None, *, inline: bool = False, merge: bool = False, counted: bool = True
) -> Any:
    """Compile ``fn`` in nopython mode, without the GIL and without fast-math.

    Parameters
    ----------
    fn : callable
        A function in Numba's subset.
    inline : bool
        Inline its source at every call (small helpers of kernels); such a function is not cached by itself.
    merge : bool
        Let LLVM merge its code into every caller: as quick to run, and far quicker to compile where functions
        are large, since each is typed once.
    counted : bool
        Count references to arrays. A function that gets tuples of many arrays spends most of its time on that, at
        run time and in the compiler; one that allocates nothing has nothing to count, and one that does would not
        compile without.

    Returns
    -------
    dispatcher, or ``fn`` itself where ``NUMBA_DISABLE_JIT`` is set.
    """
    if fn is None:
        return functools.partial(compiled, inline=inline, merge=merge, counted=counted)
    if numba_config.DISABLE_JIT:
        return fn
    if inline:
        return numba.njit(inline="always", **FLAGS)(fn)
    options = {"nopython": True, "boundscheck": None, "forceinline": merge, **FLAGS}
    if not counted:
        options["_nrt"] = False
    return _Dispatcher(fn, options)


def native(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with a C signature; its ``.address`` can be called from other compiled code.

    The result is compiled when it is decorated, so decorate on demand (inside a factory).
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        result = CFunc(fn, sigutils.normalize_signature(signature), locals={}, options=dict(FLAGS))
        _cached(result, fn)
        with global_compiler_lock, _PackageCache.notice.around():
            result.compile()
        return result

    return decorate
