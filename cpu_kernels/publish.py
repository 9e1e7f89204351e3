"""Publish: hidden rows of any float type to the activation records that all lanes read.

A row is widened to float32 and, where a quantised format needs it, quantised once; 4 bytes read and up to
5.25 written per element.
"""

from __future__ import annotations

import functools
from typing import Any

from trilane.cpu_kernels.activation import copy_row_f32, load_hidden, quantize_row
from trilane.cpu_kernels.float_env import TASK_SIGNATURE
from trilane.cpu_kernels.words import Publish, set_word, word
from trilane.jit import compiled, native


@compiled
def publish_rows(block, first, last):
    """Rows ``first`` to ``last``; marks those with an element that is not finite as BAD."""
    hidden, element = word(block, Publish.HIDDEN), word(block, Publish.ELEMENT)
    for row in range(first, last):
        source = word(block, Publish.INPUT) + row * word(block, Publish.INPUT_STRIDE)
        floats = word(block, Publish.FLOATS) + row * word(block, Publish.FLOATS_STRIDE)
        load_hidden(element, source, hidden, floats)
        bad = copy_row_f32(floats, hidden, floats)
        if word(block, Publish.INT8) != 0:
            record = word(block, Publish.INT8) + row * word(block, Publish.INT8_STRIDE)
            quantize_row(floats, hidden, record)
        set_word(word(block, Publish.BAD), row, bad)


@functools.cache
def publish_task() -> Any:
    @native(TASK_SIGNATURE)
    def publish(block, task, worker):
        rows = word(block, Publish.ROWS_PER_TASK)
        publish_rows(block, task * rows, min((task + 1) * rows, word(block, Publish.NUM_ROWS)))
        return 0

    return publish
