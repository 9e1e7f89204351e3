"""Trace files: what goes in comes out, torn ends are dropped, damage is told, and no input does harm."""

from __future__ import annotations

import logging
import os
import random
import struct
import zlib

import numpy as np
import pytest
from trace_cases import assert_same_trace, mixed_trace, random_tokens

from trilane import TraceError
from trilane.traces import block_file as blocks
from trilane.traces.trace import Baseline
from trilane.traces.trace_file import (
    META,
    EventBlock,
    append_trace,
    encode_baseline,
    encode_events,
    open_appender,
    read_trace,
)

SEED = 5


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.trace"


@pytest.mark.parametrize("make", [random_tokens, mixed_trace])
@pytest.mark.parametrize("codec", [blocks.RAW, blocks.ZLIB, blocks.XZ])
def test_what_goes_in_comes_out(path, make, codec):
    trace = make()
    append_trace(path, trace, codec=codec)
    assert_same_trace(read_trace(path), trace)


def test_several_blocks_and_appending(path, monkeypatch):
    monkeypatch.setattr("trilane.traces.trace_file.EVENTS_PER_BLOCK", 64)
    monkeypatch.setattr("trilane.traces.trace_file.ENTRIES_PER_BLOCK", 100)
    one, two = mixed_trace(seed=1), mixed_trace(seed=2)
    append_trace(path, one)
    append_trace(path, two)
    found = read_trace(path)
    assert_same_trace(found.slice(slice(0, one.num_events)), one)
    assert_same_trace(found.slice(slice(one.num_events, None)), two)


def test_baselines_stay_beside_their_events(path):
    trace = random_tokens(10)
    rates = {"a": 1.5, "curve": np.array([0.1, np.inf])}
    state = {"slots": np.arange(6).reshape(2, 3), "growth": 1.0000001, "kind": 1}
    marks = tuple(Baseline(event, {"clock": event}, (rates, rates), state) for event in (0, 11, 30))
    append_trace(path, type(trace)(**{**vars(trace), "baselines": marks}))
    found = read_trace(path)
    assert_same_trace(found, trace)
    assert [(base.event, base.settings) for base in found.baselines] == [(e, {"clock": e}) for e in (0, 11, 30)]
    for base in found.baselines:
        assert base.rates[0] is base.rates[1] and base.rates[0]["a"] == 1.5
        np.testing.assert_array_equal(base.rates[0]["curve"], rates["curve"])
        np.testing.assert_array_equal(base.state["slots"], state["slots"])
        assert base.state["growth"] == state["growth"] and base.state["kind"] == 1


@pytest.mark.parametrize("cut", [1, 7, 19, 20, 40])
def test_a_torn_end_is_dropped_and_writing_goes_on_behind_what_is_sound(path, caplog, cut):
    one, two = mixed_trace(seed=1), mixed_trace(seed=2)
    append_trace(path, one)
    sound = path.stat().st_size
    append_trace(path, two)
    with open(path, "r+b") as file:
        file.truncate(sound + cut)
    with caplog.at_level(logging.WARNING, "trilane"):
        assert_same_trace(read_trace(path), one)
        assert f"the last {cut} bytes are left out" in caplog.text
        append_trace(path, two)
        assert "torn end" in caplog.text
    caplog.clear()
    assert read_trace(path).num_events == one.num_events + two.num_events
    assert not caplog.text


def test_a_file_cut_inside_its_first_blocks(path):
    append_trace(path, mixed_trace())
    whole = path.read_bytes()
    for size in range(40):
        path.write_bytes(whole[:size])
        with pytest.raises(TraceError):
            read_trace(path)
    path.write_bytes(whole[: blocks.FILE_HEAD.size])
    append_trace(path, mixed_trace())  # a recording that was killed before it began
    assert_same_trace(read_trace(path), mixed_trace())


def test_damage_in_the_middle_is_told_and_never_overwritten(path, caplog):
    append_trace(path, mixed_trace(seed=1))
    sound = path.stat().st_size
    append_trace(path, mixed_trace(seed=2))
    append_trace(path, mixed_trace(seed=3))
    data = bytearray(path.read_bytes())
    data[sound + 100] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "trilane"):
        assert_same_trace(read_trace(path), mixed_trace(seed=1))
    assert "checksum" in caplog.text
    with pytest.raises(TraceError, match="sound blocks follow"):
        append_trace(path, mixed_trace(seed=4))
    assert path.read_bytes() == data


def test_only_the_same_model_is_appended_to(path):
    append_trace(path, mixed_trace())
    before = path.read_bytes()
    with pytest.raises(TraceError, match="another model .its model is mixed, and not random"):
        append_trace(path, random_tokens())
    assert path.read_bytes() == before


def test_one_writer_at_a_time(path):
    first = open_appender(path, mixed_trace().meta)
    with pytest.raises(TraceError, match="another scheduler"):
        open_appender(path, mixed_trace().meta)
    first.close()
    append_trace(path, mixed_trace())


def test_a_write_that_fails_leaves_nothing_of_its_block(path, monkeypatch):
    appender = open_appender(path, mixed_trace().meta)
    before = path.stat().st_size

    class Full:
        def __getattr__(self, name):
            return getattr(appender_file, name)

        def write(self, data):
            appender_file.write(bytes(data)[:10])
            raise OSError(28, "No space left on device")

    appender_file, appender.file = appender.file, Full()
    with pytest.raises(OSError, match="No space"):
        appender.append(blocks.encode_block(9, b"x" * 100))
    assert path.stat().st_size == before
    appender_file.close()


def test_unknown_blocks_are_skipped(path):
    append_trace(path, mixed_trace())
    appender = open_appender(path, mixed_trace().meta)
    appender.append(blocks.encode_block(200, b"of a later version"))
    appender.close()
    append_trace(path, mixed_trace())
    assert read_trace(path).num_events == 2 * mixed_trace().num_events


def test_other_files_and_versions_are_refused(path):
    path.write_bytes(b"not a trace at all, but long enough to be one")
    with pytest.raises(TraceError, match="neither a trace file nor"):
        read_trace(path)
    path.write_bytes(blocks.FILE_HEAD.pack(blocks.MAGIC, 2))
    with pytest.raises(TraceError, match="version 2"):
        read_trace(path)
    with pytest.raises(TraceError, match="no trace file"):
        path.write_bytes(b"precious data that is no trace")
        append_trace(path, mixed_trace())
    assert path.read_bytes() == b"precious data that is no trace"


@pytest.mark.timeout(10)
def test_a_pipe_or_a_folder_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        for use in (read_trace, lambda path: append_trace(path, mixed_trace())):
            with pytest.raises(TraceError, match="no regular file"):
                use(place)


def test_memory_is_bounded(path):
    append_trace(path, random_tokens(tokens=400))
    with pytest.raises(TraceError, match="more than 5000 bytes"):
        read_trace(path, max_nbytes=5000)


def test_a_block_never_unpacks_to_more_than_it_says(path):
    bomb = zlib.compress(bytes(1 << 22))
    head = blocks.HEAD.pack(blocks.MARKER, META, blocks.ZLIB, 0, len(bomb), 100, 0)[: blocks.CHECKED]
    block = head + struct.pack("<I", zlib.crc32(bomb, zlib.crc32(head))) + bomb
    path.write_bytes(blocks.FILE_HEAD.pack(blocks.MAGIC, blocks.VERSION) + block)
    with pytest.raises(TraceError):
        read_trace(path)


# ------------------------------------------------------------------------------------------- hostile input
def payloads(data):
    """(kind, payload) of all blocks of a file's bytes."""
    at = blocks.FILE_HEAD.size
    while at < len(data):
        _, kind, codec, _, stored, raw, _ = blocks.HEAD.unpack_from(data, at)
        start = at + blocks.HEAD.size
        yield kind, blocks._decode(codec, data[start : start + stored], raw)
        at = start + stored


def mutated(rng, data):
    """The bytes with a few changes: bits, numbers, cuts, doubled parts."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data)) if data else 0
        change = rng.randrange(5)
        if change == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1 and data:
            data[at] = rng.choice(b'\x00\xff\x7f-9"]{')
        elif change == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif change == 3:
            data[at:at] = data[at : at + rng.randrange(1, 9)]
        else:
            data[at : at + 4] = rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF)).to_bytes(4, "little")
    return bytes(data)


def sample_file(path):
    trace = mixed_trace(40)
    rates = {"a": 1.5, "curve": np.ones(3)}
    mark = Baseline(0, {"clock": 3}, (rates,) * 3, {"x": np.arange(4), "growth": 1.5})
    append_trace(path, type(trace)(**{**vars(trace), "baselines": (mark,)}), codec=blocks.ZLIB)
    return path.read_bytes()


def read_or_refuse(path, data):
    path.write_bytes(data)
    try:
        read_trace(path, max_nbytes=1 << 24)
    except TraceError:
        return False
    return True


def test_thousands_of_damaged_files_are_read_in_part_or_refused(path, caplog):
    rng, data = random.Random(SEED), sample_file(path)
    assert read_or_refuse(path, data)
    with caplog.at_level(logging.CRITICAL, "trilane"):
        read = sum(read_or_refuse(path, mutated(rng, data)) for _ in range(3000))
    assert 0 < read < 3000


def test_thousands_of_forged_blocks_are_refused_or_consistent(path):
    """Checksums are right here, so that what is inside gets looked at."""
    rng, data = random.Random(SEED), sample_file(path)
    whole, read = list(payloads(data)), 0
    assert len(whole) == 3
    for _ in range(3000):
        chosen = rng.randrange(len(whole))
        forged = [(k, mutated(rng, p) if i == chosen else p) for i, (k, p) in enumerate(whole)]
        read += read_or_refuse(path, data[: blocks.FILE_HEAD.size] + b"".join(
            blocks.encode_block(kind, payload, blocks.RAW) for kind, payload in forged
        ))  # fmt: skip
    assert 0 < read < 3000


def test_events_out_of_range_are_refused(path):
    trace = mixed_trace(40)
    columns = {name: getattr(trace, name) for name in ("kind", "layer", "rows", "top_k", "digest")}
    for name, value in (("kind", 77), ("layer", 3), ("rows", 1000), ("top_k", 0x7FFFFFFF)):
        wrong = {**columns, name: np.full_like(columns[name], value)}
        appender = open_appender(path, trace.meta)
        appender.append(encode_events(EventBlock(wrong, trace.ids, trace.weights)))
        appender.close()
        with pytest.raises(TraceError):
            read_trace(path)
        path.unlink()


def test_a_baseline_must_be_complete(path):
    appender = open_appender(path, mixed_trace().meta)
    block = encode_baseline(Baseline(0, {}, (), {}))
    kind, payload = next(payloads(blocks.FILE_HEAD.pack(blocks.MAGIC, 1) + block))
    assert kind == 3
    appender.append(blocks.encode_block(3, payload.replace(b"settings", b"settinks")))
    appender.close()
    with pytest.raises(TraceError, match="incomplete"):
        read_trace(path)
