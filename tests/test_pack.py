"""The compiled packer writes the bytes of the plain one, whatever was there before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout import layouts, packed, random_source

from trilane.cpu_kernels.formats import FORMATS
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.cpu_kernels.pack import TILE_ROWS, ExpertPacker, address_of, pack_biases


def compiled_packed(layout, source):
    out = np.full(layout.expert_nbytes + 64, 0xAA, np.uint8)
    addresses = [0 if rows is None else address_of(rows) for rows in source[:3]]
    ExpertPacker(layout).pack(out[:-64], *addresses)
    if layout.has_bias:
        pack_biases(layout, out[:-64], [source.gate_bias, source.up_bias, source.down_bias])
    assert (out[-64:] == 0xAA).all()  # nothing behind the expert
    return out[:-64]


@settings(max_examples=60)
@given(layouts(), st.integers(0, 9))
def test_bytes_are_those_of_the_plain_packer(layout, seed):
    source = random_source(layout, seed)
    np.testing.assert_array_equal(compiled_packed(layout, source), packed(layout, source))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_several_tiles_and_a_short_shard(name):
    fmt = FORMATS[name]
    layout = ExpertLayout(2 * TILE_ROWS + 256, 768 if fmt.block_size == 256 else 544, fmt, fmt, fmt)
    source = random_source(layout)
    np.testing.assert_array_equal(compiled_packed(layout, source), packed(layout, source))
