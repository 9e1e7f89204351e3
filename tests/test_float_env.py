"""The float mode: a caller's flush-to-zero reaches no result, and the caller gets it back."""

from __future__ import annotations

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numba import config, types

from trilane.cpu_kernels import float_env
from trilane.cpu_kernels.float_env import EXACT, FLUSH, call_exactly, exact_floats, float_mode, set_float_mode
from trilane.jit import compiled, native

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")
TINY = np.float32(1e-38)


@compiled
def halve(x):
    return x * np.float32(0.5)


@pytest.fixture
def flushing():
    """Flush-to-zero on in the test's thread, as a fast-math library leaves it."""
    before = set_float_mode(EXACT | FLUSH)
    yield EXACT | FLUSH
    set_float_mode(before)


def make_task():
    @native(types.int64(types.int64, types.int64, types.int64))
    def keeps_denormals(arg, task, worker):
        return np.int64(np.float32(task) * np.float32(1e-38) * np.float32(0.5) > np.float32(0))

    return keeps_denormals


def test_a_flushing_thread_loses_denormals(flushing):
    assert halve(TINY) == 0  # the fixture does what it says


def test_with_exact_floats_keeps_denormals_and_restores(flushing):
    with exact_floats():
        assert halve(TINY) == np.float32(0.5e-38)
    assert float_mode() & FLUSH == flushing & FLUSH
    assert halve(TINY) == 0


def test_call_exactly_keeps_denormals_and_restores(flushing):
    task = make_task()
    assert call_exactly(task.address, 0, 1, 0) == 1
    assert float_mode() & FLUSH == flushing & FLUSH


def test_exact_floats_restores_after_an_error(flushing):
    with pytest.raises(KeyError), exact_floats():
        raise KeyError
    assert float_mode() & FLUSH == flushing & FLUSH


def test_is_exact_tells_modes_apart():
    assert float_env.is_exact(EXACT)
    assert not float_env.is_exact(EXACT | FLUSH)
    assert not float_env.is_exact(EXACT | float_env.ROUNDING)


@pytest.mark.parametrize(
    ("machine", "triple", "opcodes"),
    [
        ("aarch64", "aarch64-unknown-linux-gnu", ("mrs", "msr")),
        ("x86_64", "x86_64-unknown-linux-gnu", ("stmxcsr", "ldmxcsr")),
        ("riscv64", "x86_64-unknown-linux-gnu", ()),
    ],
)
def test_each_machine_gets_its_own_instructions(machine, triple, opcodes):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(word, [word]), "swap")
    builder = ir.IRBuilder(function.append_basic_block())
    before = float_env.emit_read(builder, machine)
    float_env.emit_write(builder, function.args[0], machine)
    builder.ret(before)
    target = llvm.Target.from_triple(triple).create_target_machine()
    text = target.emit_assembly(llvm.parse_assembly(str(module)))
    assert all(opcode in text for opcode in opcodes)
    assert opcodes or "mxcsr" not in text
