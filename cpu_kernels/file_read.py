"""Reads of files from compiled code: ``pread``, until all bytes are there or the system says why not.

A read of a mapping ends the process (SIGBUS) where the file was cut short or the disk fails; a call returns that.
It knows descriptors and addresses, no file format.
"""

from __future__ import annotations

import errno
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from trilane.jit import compiled

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ERRNO_PLACE = "__error" if sys.platform == "darwin" else "__errno_location"
_INTERRUPTED = errno.EINTR
CUT_SHORT = -1  # the file ends before the bytes that were asked for do


@intrinsic
def _pread(typingctx: Any, fd: Any, address: Any, nbytes: Any, offset: Any) -> Any:
    """pread(2): how many bytes were read, or -1."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I32, _I64, _I64, _I64])
        call = cgutils.get_or_insert_function(builder.module, kind, "pread")
        return builder.call(call, [builder.trunc(args[0], _I32), *args[1:]])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _errno(typingctx: Any) -> Any:
    """The calling thread's errno."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32.as_pointer(), [])
        place = builder.call(cgutils.get_or_insert_function(builder.module, kind, _ERRNO_PLACE), [])
        return builder.sext(builder.load(place), _I64)

    return types.int64(), codegen


@compiled
def read_all(fd, address, nbytes, offset):
    """Read ``nbytes`` of a file from ``offset`` on to ``address``: 0, CUT_SHORT, or the error's number."""
    while nbytes > 0:
        got = _pread(fd, address, nbytes, offset)
        if got == 0:
            return CUT_SHORT
        if got > 0:
            address, nbytes, offset = address + got, nbytes - got, offset + got
            continue
        code = _errno()
        if code != _INTERRUPTED:
            return code
    return 0
