"""Traces in memory and from NumPy archives."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
from trace_cases import mixed_trace, random_tokens

from trilane import TraceError
from trilane.cpu_kernels.formats import format_of
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.traces.trace import REQUEST, STEP, TraceMeta, as_batches, check_events
from trilane.traces.trace_file import read_trace
from trilane.traces.trace_import import GPTOSS20B_SHARDS, bundled_trace
from trilane.traces.trace_summary import reuse_distances, summarise


def test_tokens_come_back_as_they_went_in():
    trace = random_tokens(20, weights=True, starts=(0, 7))
    ids, weights = trace.tokens()
    assert ids.shape == weights.shape == (20, 3, 2)
    assert weights.max() <= 1 and (trace.kind == REQUEST).sum() == 2
    assert trace.passes[-1] == 19 and (np.bincount(trace.passes) == 3).all()
    check_events(trace)


def test_a_part_of_a_trace_owns_its_ids():
    trace = random_tokens(20, starts=(0, 7, 12))
    part = trace.first_passes(8)
    np.testing.assert_array_equal(part.tokens()[0], trace.tokens()[0][:8])
    assert (part.kind == REQUEST).sum() == 2
    assert trace.first_passes(99) is trace
    check_events(part)


def test_batches_are_streams_side_by_side():
    trace = random_tokens(21)
    ids = trace.tokens()[0]
    batch = as_batches(trace, 4)  # 5 steps of 4 streams; one token is left out
    assert (batch.rows == 4).all() and batch.passes[-1] == 4
    shown = batch.ids.reshape(5, 3, 4, 2)
    for stream in range(4):
        np.testing.assert_array_equal(shown[:, :, stream], ids[5 * stream : 5 * stream + 5])
    with pytest.raises(TraceError, match="smaller batch"):
        as_batches(trace, 22)


def test_a_general_trace_is_no_sequence_of_tokens():
    with pytest.raises(TraceError, match="one row for every layer"):
        mixed_trace().tokens()
    assert summarise(mixed_trace()).repeat_rate is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": ()}, "0 layers"),
        ({"num_experts": (0,)}, "has 0 experts"),
        ({"num_experts": (70000,)}, "has 70000 experts"),
        ({"num_experts": (60000,) * 100}, "6000000 experts"),
        ({"shard_nbytes": ((1,),)}, "shard sizes of 1 layers"),
        ({"shard_nbytes": ((1,), ())}, "impossible shard sizes"),
        ({"shard_nbytes": ((1,), (0,))}, "impossible shard sizes"),
        ({"num_experts": (60000, 1), "shard_nbytes": ((1,) * 4000, (1,))}, "shards in all"),
    ],
)
def test_impossible_models_are_refused(change, text):
    with pytest.raises(TraceError, match=text):
        TraceMeta(**({"model": "m", "num_experts": (4, 4)} | change))


def test_the_sizes_of_gpt_oss_are_those_of_the_layout():
    mxfp4 = format_of("mxfp4")
    assert tuple(ExpertLayout(2880, 2880, mxfp4, mxfp4, mxfp4, True).shard_nbytes.tolist()) == GPTOSS20B_SHARDS
    assert bundled_trace().meta.shard_nbytes == (GPTOSS20B_SHARDS,) * 24


# --------------------------------------------------------------------------------------------- summary
def test_reuse_distances_are_those_of_a_plain_list():
    trace = random_tokens(120, layers=2, experts=6, top_k=2, seed=3)
    counts = np.zeros(7, int)
    recent: list[list[int]] = [[], []]  # most recent first; of one step the higher number
    for layer, ids in zip(trace.layer[trace.kind == STEP], trace.ids.reshape(-1, 2), strict=True):
        for expert in ids:
            counts[recent[layer].index(expert) if expert in recent[layer] else 6] += 1
        used = sorted(ids.tolist(), reverse=True)
        recent[layer] = used + [e for e in recent[layer] if e not in used]
    np.testing.assert_array_equal(reuse_distances(trace), counts)


def test_summary_of_the_bundled_conversation():
    found = summarise(bundled_trace())
    assert (found.layers, found.passes, found.steps, found.top_k) == (24, 240, 5760, (4, 4))
    assert 0.3 < found.repeat_rate < 0.6
    rates = list(found.lru_hit_rates.values())
    assert rates == sorted(rates) and 0.9 < rates[-1] < 1
    json.dumps(found.to_dict())


# ------------------------------------------------------------------------------------------- archives
def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_an_archive_is_read(tmp_path):
    ids = np.array([[[0, 1]], [[2, 3]]], np.uint8)
    w255 = np.full(ids.shape, 128, np.uint8)
    path = save(tmp_path / "a.npz", ids=ids, w255=w255, starts=np.array([0, 1, 2]), n_experts=np.int64(5))
    trace = read_trace(path)
    assert trace.meta.num_experts == (5,) and (trace.kind == REQUEST).sum() == 2 and (trace.kind == STEP).sum() == 2
    np.testing.assert_array_equal(trace.tokens()[0], ids)
    np.testing.assert_allclose(trace.tokens()[1], 128 / 255)


@pytest.mark.parametrize(
    "arrays",
    [
        {"other": np.zeros(3)},
        {"ids": np.zeros((2, 2), np.uint8)},
        {"ids": np.zeros((2, 2, 2))},
        {"ids": np.zeros((0, 2, 2), np.uint8)},
        {"ids": np.full((2, 2, 2), 9, np.uint8), "n_experts": np.int64(4)},
        {"ids": np.full((2, 2, 2), -1, np.int64)},
        {"ids": np.zeros((2, 2, 2), np.uint8), "n_experts": np.array("many")},
        {"ids": np.zeros((2, 2, 2), np.uint8), "n_experts": np.zeros(0)},
        {"ids": np.zeros((2, 2, 2), np.uint8), "w255": np.zeros((2, 2, 2))},
        {"ids": np.zeros((2, 2, 2), np.uint8), "w255": np.zeros(3, np.uint8)},
        {"ids": np.zeros((2, 2, 2), np.uint8), "starts": np.array([-5])},
        {"ids": np.zeros((2, 2, 2), np.uint8), "starts": np.array(["x"])},
        {"ids": np.zeros((2, 2, 2), object)},
    ],
)
def test_other_archives_are_refused(tmp_path, arrays):
    with pytest.raises(TraceError):
        read_trace(save(tmp_path / "a.npz", **arrays))


def test_an_archive_that_unpacks_to_more_than_is_allowed(tmp_path):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, ids=np.zeros((1 << 16, 4, 4), np.uint8))
    with pytest.raises(TraceError, match="unpacks to"):
        read_trace(path, max_nbytes=1 << 16)


def test_a_head_that_promises_more_than_there_is(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 4, 4)})
    path = tmp_path / "liar.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ids.npy", head.getvalue() + b"abc")
    with pytest.raises(TraceError, match="array ids"):
        read_trace(path)
