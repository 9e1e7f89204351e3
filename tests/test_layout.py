"""Where an expert's bytes are: alignment, no overlap, at most 2 % padding, and packing without loss."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilane.cpu_kernels import layout as lay
from trilane.cpu_kernels.formats import FORMATS
from trilane.cpu_kernels.layout import ExpertLayout, ExpertSource, pack_expert, shard_planes, unpack_expert

OFFSET_COLUMNS = range(lay.GATE_MAIN, lay.UP_BIAS + 1)


@st.composite
def layouts(draw, max_blocks=3):
    """Any layout that is allowed: row lengths that suit the formats drawn."""
    gate, up, down = (FORMATS[draw(st.sampled_from(list(FORMATS)))] for _ in range(3))
    gate = draw(st.sampled_from([gate, None]))
    step = max(up.column_multiple, gate.column_multiple if gate else 32)
    hidden = step * draw(st.integers(1, max_blocks * 256 // step))
    intermediate = down.column_multiple * draw(st.integers(1, max_blocks * 256 // down.column_multiple))
    return ExpertLayout(hidden, intermediate, gate, up, down, draw(st.booleans()))


def random_source(layout: ExpertLayout, seed: int = 0) -> ExpertSource:
    rng = np.random.default_rng(seed)

    def rows(num_rows, fmt, columns):
        return rng.integers(0, 256, (num_rows, fmt.row_source_nbytes(columns)), np.uint8)

    hidden, intermediate = layout.hidden, layout.intermediate
    gate = rows(intermediate, layout.gate, hidden) if layout.gate else None
    matrices = gate, rows(intermediate, layout.up, hidden), rows(hidden, layout.down, intermediate)
    if not layout.has_bias:
        return ExpertSource(*matrices)
    gate_bias, up_bias = rng.standard_normal((2, intermediate)).astype(np.float32)
    return ExpertSource(
        *matrices, gate_bias if layout.gate else None, up_bias, rng.standard_normal(hidden).astype(np.float32)
    )


def packed(layout: ExpertLayout, source: ExpertSource) -> np.ndarray:
    out = np.full(layout.expert_nbytes, 0xAA, np.uint8)
    pack_expert(layout, out, *source)
    return out


def extents(layout: ExpertLayout, shard: int) -> list[tuple[int, int]]:
    """(start, stop) in the shard of each part of the descriptor, from strides and row counts alone."""
    row = layout.descriptor[shard]
    neurons, hidden = layout.shard_neurons(shard), layout.hidden
    strides = (*layout.gate_strides(shard), *layout.up_strides(shard), *layout.down_strides(shard), 4, 4)
    counts = (neurons,) * 4 + (hidden,) * 2 + (neurons,) * 2
    return [
        (int(row[column]), int(row[column]) + count * stride)
        for column, count, stride in zip(OFFSET_COLUMNS, counts, strides, strict=True)
        if row[column] != lay.ABSENT
    ]


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_parts_are_aligned_ordered_and_inside(layout):
    descriptor = layout.descriptor
    assert descriptor.dtype == np.int64 and descriptor.shape == (layout.num_shards, lay.NUM_COLUMNS)
    assert descriptor[:, lay.NEURONS].sum() == layout.intermediate
    assert (descriptor[:, lay.NBYTES] % 64 == 0).all() and layout.expert_nbytes % 64 == 0
    for shard in range(layout.num_shards):
        end = 0
        for start, stop in extents(layout, shard):
            assert start % 16 == 0 and end <= start < end + 16 and stop > start
            end = stop
        assert end <= descriptor[shard, lay.NBYTES] < end + 64
        assert tuple(descriptor[shard, [lay.DOWN_STRIDE, lay.DOWN_SIDE_STRIDE]]) == layout.down_strides(shard)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_shards_follow_each_other(layout):
    ends = np.cumsum(layout.shard_nbytes)
    assert layout.shard_offset.tolist() == [0, *ends[:-1].tolist()]
    bias = 4 * layout.hidden if layout.has_bias else 0
    assert ends[-1] + bias <= layout.expert_nbytes < ends[-1] + bias + 64
    assert layout.down_bias_offset == (ends[-1] if layout.has_bias else -1)
    whole = layout.intermediate // 256
    assert len(set(layout.shard_nbytes[:whole].tolist())) <= 1


@settings(max_examples=300, deadline=None)
@given(layouts(max_blocks=5))
def test_padding_is_at_most_two_percent(layout):
    source_nbytes = sum(part.nbytes for part in random_source(layout) if part is not None)
    assert source_nbytes == layout.source_nbytes
    assert source_nbytes <= layout.expert_nbytes <= 1.02 * source_nbytes


@settings(max_examples=60, deadline=None)
@given(layouts(max_blocks=2), st.integers(0, 9))
def test_pack_and_unpack(layout, seed):
    source = random_source(layout, seed)
    out = packed(layout, source)
    for part, back in zip(source, unpack_expert(layout, out), strict=True):
        assert (part is None) == (back is None)
        assert part is None or (part.dtype == back.dtype and np.array_equal(part, back))


@settings(max_examples=30, deadline=None)
@given(layouts(max_blocks=2))
def test_padding_is_zero(layout):
    out = packed(layout, random_source(layout))
    used = np.zeros(layout.expert_nbytes, bool)
    for shard in range(layout.num_shards):
        for start, stop in extents(layout, shard):
            used[layout.shard_offset[shard] + start : layout.shard_offset[shard] + stop] = True
    if layout.has_bias:
        used[layout.down_bias_offset : layout.down_bias_offset + 4 * layout.hidden] = True
    assert not out[~used].any()


def test_kernels_find_their_rows():
    """Offsets and strides of the descriptor lead to the very bytes of a row, gate, up and down."""
    layout = ExpertLayout(256, 320, FORMATS["q6_k"], FORMATS["q8_0"], FORMATS["mxfp4"], True)
    source = random_source(layout)
    out, row, base = packed(layout, source), layout.descriptor[1], int(layout.shard_offset[1])
    assert row[lay.NEURONS] == 64
    stride, side_stride = layout.gate_strides(1)
    start = base + int(row[lay.GATE_MAIN]) + 5 * stride
    assert np.array_equal(out[start : start + 208], source.gate[256 + 5, :208])
    start = base + int(row[lay.GATE_SIDE]) + 5 * side_stride
    assert np.array_equal(out[start : start + 2], source.gate[256 + 5, 208:])
    start = base + int(row[lay.UP_SIDE]) + 7 * layout.up_strides(1)[1]
    assert np.array_equal(out[start : start + 16], source.up[256 + 7].reshape(8, 34)[:, :2].ravel())
    blocks = source.down[9].reshape(10, 17)[8:]  # columns 256 to 319 of row 9
    stride, side_stride = layout.down_strides(1)
    assert (stride, side_stride) == (32, 2)
    start = base + int(row[lay.DOWN_MAIN]) + 9 * stride
    assert np.array_equal(out[start : start + 32], blocks[:, 1:].ravel())
    start = base + int(row[lay.DOWN_SIDE]) + 9 * side_stride
    assert np.array_equal(out[start : start + 2], blocks[:, 0])
    start = base + int(row[lay.UP_BIAS])
    assert np.array_equal(out[start : start + 256].view(np.float32), source.up_bias[256:])
    start = layout.down_bias_offset
    assert np.array_equal(out[start : start + 1024].view(np.float32), source.down_bias)


def test_a_known_model():
    """gpt-oss: 11 shards of 256 neurons and one of 64, and no padding at all."""
    mxfp4 = FORMATS["mxfp4"]
    layout = ExpertLayout(2880, 2880, mxfp4, mxfp4, mxfp4, True)
    assert layout.num_shards == 12
    assert [layout.shard_neurons(j) for j in (0, 10, 11)] == [256, 256, 64]
    assert layout.expert_nbytes == layout.source_nbytes == 3 * 2880 * 90 * 17 + 3 * 2880 * 4


def test_without_a_gate():
    layout = ExpertLayout(64, 64, None, FORMATS["f16"], FORMATS["f16"])
    assert layout.gate_strides() == (0, 0) and layout.down_bias_offset == -1
    absent = [lay.GATE_MAIN, lay.GATE_SIDE, lay.UP_SIDE, lay.DOWN_SIDE, lay.GATE_BIAS, lay.UP_BIAS]
    assert (layout.descriptor[0, absent] == lay.ABSENT).all()
    assert [main.shape for _, main, _ in shard_planes(layout, packed(layout, random_source(layout)), 0)] == [
        (64, 128),
        (64, 128),
    ]


def test_layouts_compare_by_value_and_are_read_only():
    q8 = FORMATS["q8_0"]
    one, two = ExpertLayout(64, 96, q8, q8, q8), ExpertLayout(64, 96, q8, q8, q8)
    assert one == two and hash(one) == hash(two)
    with pytest.raises(ValueError, match="read-only"):
        one.descriptor[0, 0] = 1


def test_row_lengths_that_do_not_suit_are_refused():
    q4, q8 = FORMATS["q4_k"], FORMATS["q8_0"]
    with pytest.raises(ValueError, match=r"down of an expert \(hidden 2048, intermediate 704\).*q4_k.*256; use one"):
        ExpertLayout(2048, 704, q4, q4, q4)
    with pytest.raises(ValueError, match="gate of an expert .*K=2880"):
        ExpertLayout(2880, 2880, q4, q8, q8)
    with pytest.raises(ValueError, match="up of an expert .*K=48 .*no format"):
        ExpertLayout(48, 64, None, q8, q8)


def test_wrong_parts_are_named():
    q8 = FORMATS["q8_0"]
    layout = ExpertLayout(64, 96, q8, q8, q8)
    source, out = random_source(layout), np.zeros(layout.expert_nbytes, np.uint8)
    with pytest.raises(ValueError, match=r"down is uint8 of shape \(64, 101\) but must be uint8 of shape \(64, 102\)"):
        pack_expert(layout, out, source.gate, source.up, source.down[:, 1:])
    with pytest.raises(ValueError, match=r"gate must be given, of shape \(96, 68\)"):
        pack_expert(layout, out, None, source.up, source.down)
    with pytest.raises(ValueError, match="up_bias must be absent"):
        pack_expert(layout, out, *source[:3], None, np.zeros(96, np.float32))
    with pytest.raises(ValueError, match="up is int8 of shape"):
        pack_expert(layout, out, source.gate, source.up.view(np.int8), source.down)
    with pytest.raises(ValueError, match=rf"contiguous uint8 of shape \({layout.expert_nbytes},\)"):
        pack_expert(layout, out[1:], *source)
