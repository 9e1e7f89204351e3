"""The compiled packer writes the bytes of the plain one, whatever was there before."""

from __future__ import annotations

import errno
import os
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout import layouts, packed, random_source

from trilane.cpu_kernels.file_read import CUT_SHORT
from trilane.cpu_kernels.formats import FORMATS
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.cpu_kernels.pack import DONE, DOWN, TILE_NBYTES, UP, ExpertPacker, Rows, address_of, pack_biases


def packed_by(layout, source, rows):
    out = np.full(layout.expert_nbytes + 64, 0xAA, np.uint8)
    assert ExpertPacker(layout).pack(out[:-64], *rows).code == DONE
    if layout.has_bias:
        pack_biases(layout, out[:-64], [source.gate_bias, source.up_bias, source.down_bias])
    assert (out[-64:] == 0xAA).all()  # nothing behind the expert
    return out[:-64]


def compiled_packed(layout, source):
    return packed_by(layout, source, [Rows() if rows is None else Rows(address_of(rows)) for rows in source[:3]])


def write_matrices(file, source):
    """The matrices one after another behind 7 bytes of something else; where each begins."""
    places = []
    file.write(b"before!")
    for rows in source[:3]:
        places.append(Rows() if rows is None else Rows(file.tell(), file.fileno()))
        file.write(b"" if rows is None else rows.tobytes())
    file.flush()
    return places


def packed_from_file(layout, source):
    with tempfile.TemporaryFile() as file:
        return packed_by(layout, source, write_matrices(file, source))


@settings(max_examples=60)
@given(layouts(), st.integers(0, 9))
def test_bytes_are_those_of_the_plain_packer(layout, seed):
    source = random_source(layout, seed)
    np.testing.assert_array_equal(compiled_packed(layout, source), packed(layout, source))
    np.testing.assert_array_equal(packed_from_file(layout, source), packed(layout, source))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_several_tiles_and_a_short_shard(name):
    fmt = FORMATS[name]
    layout = ExpertLayout(2048 + 256, 768 if fmt.block_size == 256 else 544, fmt, fmt, fmt)
    source = random_source(layout)
    assert source.down.nbytes > 2 * TILE_NBYTES
    np.testing.assert_array_equal(compiled_packed(layout, source), packed(layout, source))
    np.testing.assert_array_equal(packed_from_file(layout, source), packed(layout, source))


@pytest.mark.parametrize(("name", "matrix"), [("bf16", UP), ("bf16", DOWN), ("q4_k", DOWN)])
def test_a_file_that_ends_too_early_says_so(name, matrix):
    fmt = FORMATS[name]
    layout = ExpertLayout(1024, 768, fmt, fmt, fmt)
    source, out = random_source(layout), np.zeros(layout.expert_nbytes, np.uint8)
    with tempfile.TemporaryFile() as file:
        places = write_matrices(file, source)
        end = places[matrix].place + source[matrix].nbytes
        file.truncate(end - 1)
        assert ExpertPacker(layout).pack(out, *places) == (CUT_SHORT, matrix)
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    sound = [Rows(address_of(rows)) for rows in source[:3]]
    sound[matrix] = Rows(0, closed)
    assert ExpertPacker(layout).pack(out, *sound) == (errno.EBADF, matrix)
