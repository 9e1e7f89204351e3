"""GGUF headers: what is read, that it is quick, and that damaged files are refused with their place and value."""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from model_files import gguf_bytes, gguf_text, gguf_value

from trilane.errors import ModelFileError
from trilane.readers.gguf import open_gguf, parse_gguf
from trilane.readers.gguf_types import BLOCK_TYPES
from trilane.readers.model_file import ModelFile

HERE = Path("model.gguf")
RAW = bytes(range(32)) * 8


def f32(*shape):
    return ("f32", shape, RAW[: 4 * math.prod(shape)].ljust(4 * math.prod(shape), b"\1"))


def refuses(data, text):
    with pytest.raises(ModelFileError, match=text) as found:
        parse_gguf(data, HERE)
    assert "model.gguf" in str(found.value)


# ------------------------------------------------------------------------------------------------ what is read
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 32, 4096])
def test_tensors_and_metadata(version, alignment, tmp_path):
    keys = {
        "number": 7, "real": 0.5, "words": ["a", "", "grün"], "general.alignment": alignment,
        "ids": (5, struct.pack("<3i", 1, -2, 3), 3), "flags": (7, b"\1\0", 2), "none": (6, b"", 0),
    }  # fmt: skip
    tensors = {"a": f32(5), "b.weight": ("q8_0", (3, 2, 32), RAW[:204]), "c": f32(2, 3)}
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(tensors, keys, version=version, alignment=alignment))
    files = open_gguf(path)
    assert {name: (t.format, t.shape, t.nbytes) for name, t in files.tensors.items()} == {
        "a": ("f32", (5,), 20), "b.weight": ("q8_0", (3, 2, 32), 204), "c": ("f32", (2, 3), 24),
    }  # fmt: skip
    for name, (_, _, raw) in tensors.items():
        assert files.bytes_of(files.tensors[name]).tobytes() == raw
        assert files.tensors[name].offset % alignment == 0 and files.tensors[name].path == path
    assert files.metadata["number"] == 7 and files.metadata["real"] == 0.5
    assert files.metadata["words"] == ["a", "", "grün"]
    assert files.metadata["ids"].tolist() == [1, -2, 3] and files.metadata["flags"].tolist() == [True, False]
    assert len(files.metadata["none"]) == 0 and len(files.metadata) == len(keys) + 1
    assert "tensor 'a' (f32, (5,)) of" in str(files.tensors["a"])


def test_the_table_of_types_is_that_of_the_gguf_package():
    import gguf

    theirs = {int(t): (t.name.lower(), *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    assert {number: tuple(kind) for number, kind in BLOCK_TYPES.items()} == theirs


def test_a_file_without_tensors_and_one_that_ends_with_its_last_weight():
    tensors, metadata = parse_gguf(gguf_bytes({}), HERE)
    assert tensors == {} and metadata["general.architecture"] == "qwen3moe"
    tensors, _ = parse_gguf(gguf_bytes({"a": f32(5)}, pad_end=False), HERE)
    assert tensors["a"].nbytes == 20


@pytest.mark.alone
def test_a_large_vocabulary_opens_in_half_a_second(tmp_path):
    words = 151_936
    keys = {
        "tokenizer.ggml.tokens": [f"token {k}" for k in range(words)],
        "tokenizer.ggml.scores": (6, bytes(4 * words), words),
        "tokenizer.ggml.token_type": (5, bytes(4 * words), words),
        "tokenizer.ggml.merges": [f"a {k}" for k in range(words)],
    }
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({"a": f32(5)}, keys))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        files = open_gguf(path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5
    assert files.metadata["tokenizer.ggml.tokens"][-1] == f"token {words - 1}"
    assert files.metadata["tokenizer.ggml.scores"].shape == (words,)


# ---------------------------------------------------------------------------------------------------- shards
def write_shards(folder, count=3, **changes):
    for k in range(count):
        keys = {"split.no": (k), "split.count": count, "split.tensors.count": count} | changes
        name = f"big-{k + 1:05}-of-{count:05}.gguf"
        (folder / name).write_bytes(gguf_bytes({f"t{k}": f32(k + 1)}, keys))
    return [folder / f"big-{k + 1:05}-of-{count:05}.gguf" for k in range(count)]


def test_shards_are_found_from_any_of_them(tmp_path):
    paths = write_shards(tmp_path)
    for path in (*paths, tmp_path):
        files = open_gguf(path)
        assert {name: t.path for name, t in files.tensors.items()} == {f"t{k}": p for k, p in enumerate(paths)}
        assert files.nbytes == sum(p.stat().st_size for p in paths)


def test_missing_shards_are_named(tmp_path):
    paths = write_shards(tmp_path, 4)
    paths[1].unlink()
    paths[3].unlink()
    missing = "big-00002-of-00004.gguf, big-00004-of-00004.gguf; put all in one folder"
    with pytest.raises(ModelFileError, match=f"2 of 4 shards are missing from .*: {missing}"):
        open_gguf(paths[0])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"split.count": 2}, "split.count is 2, but its name says 3"),
        ({"split.no": 1}, "split.no is 1, but its name says 0"),
        ({"split.tensors.count": 9}, "split.tensors.count is 9, but the 3 shards hold 3 tensors"),
    ],
)
def test_shards_that_do_not_belong_together(changes, text, tmp_path):
    paths = write_shards(tmp_path, **changes)
    with pytest.raises(ModelFileError, match=text):
        open_gguf(paths[2])


def test_names_of_shards_that_lie(tmp_path):
    paths = write_shards(tmp_path)
    with pytest.raises(ModelFileError, match="is named shard 7 of 3; rename it"):
        open_gguf(tmp_path / "big-00007-of-00003.gguf")
    paths[1].rename(tmp_path / "alone.gguf")
    with pytest.raises(ModelFileError, match=r"is one of 3 shards \(split.count\), but its name does not say which"):
        open_gguf(tmp_path / "alone.gguf")
    with pytest.raises(ModelFileError, match="must hold one model in .gguf files, but holds alone.gguf, big-"):
        open_gguf(tmp_path)


def test_the_same_tensor_in_two_shards(tmp_path):
    paths = write_shards(tmp_path, 2)
    keys = {"split.no": 1, "split.count": 2}
    paths[1].write_bytes(gguf_bytes({"t0": f32(2)}, keys))
    with pytest.raises(ModelFileError, match="tensor 't0'.* is in big-00001-of-00002.gguf too"):
        open_gguf(paths[0])


# ------------------------------------------------------------------------------------------- files that are not
def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(ModelFileError, match=r"nowhere.gguf': cannot be opened \(.*No such file"):
        open_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelFileError, match=r"a.x00b.gguf': cannot be opened \(embedded null byte\)"):
        open_gguf("a\0b.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelFileError, match=r"is empty \(0 bytes\)"):
        open_gguf(tmp_path / "empty.gguf")
    with pytest.raises(ModelFileError, match="must hold one model in .gguf files, but holds empty.gguf|is empty"):
        open_gguf(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="is no regular file"):  # and does not wait for a writer
        open_gguf(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="must hold one model in .gguf files, but holds no file of that kind"):
        (tmp_path / "folder").mkdir()
        open_gguf(tmp_path / "folder")


def test_a_file_that_shrinks_is_noticed_before_it_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({"a": f32(2000)}))
    files = open_gguf(path)
    os.truncate(path, 100)
    with pytest.raises(ModelFileError, match=r"was changed while it was read \(\d+ bytes before, 100 now\)"):
        files.bytes_of(files.tensors["a"])


def test_a_file_that_shrinks_is_noticed_while_it_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({"a": f32(2000)}, {"words": ["a" * 100] * 1000, "ids": (5, bytes(40000), 10000)}))
    files = open_gguf(path)
    (file,), tensor = files.files.values(), files.tensors["a"]
    os.truncate(path, 1000)
    with pytest.raises(ModelFileError, match=r"tensor 'a' .*: the file was changed while it was read"):
        file.read(tensor.offset, tensor.nbytes, tensor)
    for key in ("words", "ids"):  # values of the header that are read when they are asked for
        with pytest.raises(ModelFileError, match=r"model.gguf: the file was changed while it was read"):
            files.metadata[key]
    assert "cannot be read (Input/output error); check the disk" in str(file.read_error(errno.EIO, tensor))


def test_a_range_can_be_fetched_and_released(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 64)
    file = ModelFile(path)
    assert not file.prefetch(0, 0)
    file.prefetch(5000, 100)
    file.release(5000, 9000)
    file.release(0, 0)
    file.prefetch(5000, 9000)
    assert file.view(5000, 8).tolist() == file.read(5000, 8).tolist() == [(5000 + k) % 256 for k in range(8)]
    assert file[16000:99999] == (bytes(range(256)) * 64)[16000:]


def test_pages_are_asked_for_through_one_mapping_that_nothing_reads(tmp_path, monkeypatch):
    """Mappings that come and go stop the threads that fill a store. A file that was cut short meanwhile is no fault."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(5 * mmap.PAGESIZE))
    file, made, make = ModelFile(path), [], mmap.mmap
    monkeypatch.setattr("mmap.mmap", lambda *args, **options: made.append(args) or make(*args, **options))
    assert all([file._is_cached(k) for k in (0, 1, mmap.PAGESIZE - 1, mmap.PAGESIZE, 5 * mmap.PAGESIZE - 1)])
    os.truncate(path, 1)
    file._is_cached(4 * mmap.PAGESIZE)
    assert len(made) <= 1
    assert ModelFile(path)._is_cached(0)


def test_where_a_file_cannot_be_mapped_its_pages_count_as_in_memory(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(100))
    file = ModelFile(path)

    def refuse(*args, **options):
        raise OSError("no room")

    monkeypatch.setattr("mmap.mmap", refuse)
    assert file._is_cached(50) and not file.prefetch(0, 100)


# ------------------------------------------------------------------------------------------------ damaged headers
def header(num_tensors=0, num_keys=0, rest=b"", version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def info(name=b"a", dims=(5,), kind=0, offset=0):
    return gguf_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 1 << 63
WRONG_HEADERS = [
    (b"", "the magic number needs 4 bytes, but the file ends 0 bytes on"),
    (b"GGUF\3", "the version needs 4 bytes, but the file ends 1 bytes on: it is damaged or was not copied"),
    (header(magic=b"GGML"), "starts with b'GGML', but a GGUF file starts with b'GGUF'"),
    (header(version=1), "has version 1, but versions 2 and 3 are known"),
    (header(version=4), "has version 4"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian, but the weights are used as they are"),
    (header(num_tensors=HUGE), "has 9223372036854775808 tensors, but at most 131072"),
    (header(num_tensors=1000), "1000 tensors needs 24000 bytes, but the file ends 0 bytes on"),
    (header(num_keys=HUGE), "has 9223372036854775808 keys, but at most"),
    (header(num_keys=1000), "1000 keys needs 13000 bytes"),
    (header(0, 1, struct.pack("<Q", HUGE) + bytes(40)), "key 0 has 9223372036854775808 bytes, but at most 65535"),
    (header(0, 1, struct.pack("<Q", 60000) + bytes(40)), "key 0 needs 60000 bytes"),
    (header(0, 1, gguf_text(b"\xff\xfe") + bytes(40)), r"key 0 is b'\\xff\\xfe', which is no UTF-8"),
    (header(0, 1, gguf_text("k") + struct.pack("<I", 13) + bytes(40)), "'k' is of type 13, but types are 0 to 12"),
    (header(0, 1, gguf_text("k") + struct.pack("<IQ", 8, HUGE) + bytes(40)), "'k' needs 9223372036854775816 bytes"),
    (header(0, 1, gguf_text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(40)), "'k' is an array of arrays"),
    (header(0, 1, gguf_text("k") + struct.pack("<IIQ", 9, 99, 1) + bytes(40)), "'k' is of type 99"),
    (header(0, 1, gguf_text("k") + struct.pack("<IIQ", 9, 10, HUGE)), "'k', 9223372036854775808 items, needs"),
    (header(0, 1, gguf_text("k") + struct.pack("<IIQ", 9, 8, 1 << 62)), "lengths of 'k' needs"),
    (header(0, 1, gguf_text("k") + struct.pack("<IIQQQ", 9, 8, 2, 1, 0)), "'k' needs"),
    (header(0, 1, gguf_text("k") + struct.pack("<IIQQQ", 9, 8, 2, 2**64 - 1, 0)), "'k' needs"),
    (header(0, 2, 2 * (gguf_text("k") + gguf_value(1))), "key 'k' is there twice"),
    (header(1, 0, struct.pack("<Q", 5000) + bytes(6000)), "the name of tensor 0 has 5000 bytes, but at most 1024"),
    (header(1, 0, info(dims=(1,) * 5)), "tensor 'a' has 5 dimensions, but at most 4"),
    (header(1, 0, gguf_text("a") + struct.pack("<I", 1 << 31) + bytes(40)), "tensor 'a' has 2147483648 dimensions"),
    (header(1, 0, info(dims=(0, 5))), r"tensor 'a' has dimensions \[0, 5\], but each must be at least 1"),
    (header(1, 0, info(kind=99)), "tensor 'a' has type 99, which is unknown"),
    (header(1, 0, info(dims=(33,), kind=8)), "rows of 33 weights, but q8_0 needs multiples of 32"),
    (header(1, 0, info(offset=7)), "tensor 'a' has offset 7, but it must be a multiple of 32"),
    (header(1, 0, info(dims=(HUGE, HUGE, HUGE, HUGE))), r"tensor 'a' \(f32.* end behind the file"),
    (header(1, 0, info(dims=(1 << 32, 1 << 32))), r"its 73786976294838206464 bytes from byte \d+ on end behind"),
    (header(1, 0, info(offset=HUGE)), "end behind the file, which has"),
    (header(2, 0, 2 * info()) + bytes(99), "tensor 'a' is there twice"),
    (header(2, 0, info(dims=(9,)) + info(b"b", offset=32)) + bytes(99), "starts at byte .*inside of tensor 'a'"),
]


@pytest.mark.parametrize(("data", "text"), WRONG_HEADERS, ids=[text[:30] for _, text in WRONG_HEADERS])
def test_a_damaged_header_is_refused(data, text):
    refuses(data, text)


@pytest.mark.parametrize("value", [0, 24, 1 << 21, 2**32 - 1, -32.0, float("nan"), "32"])
def test_a_wrong_alignment(value):
    refuses(gguf_bytes({}, {"general.alignment": value}), "general.alignment is .*, but must be a power of two up to")


def test_a_file_cut_anywhere_is_refused():
    whole = gguf_bytes({"a": f32(5), "b": f32(7)}, {"words": ["a", "b"], "n": 3}, pad_end=False)
    for end in range(len(whole)):
        with pytest.raises(ModelFileError):
            parse_gguf(whole[:end], HERE)
    parse_gguf(whole, HERE)


@pytest.mark.alone
def test_strings_without_end_take_no_time():
    """Eight million empty strings are the most that a header may hold, whatever it says."""
    count = 10_000_000
    data = np.zeros(8 * count, np.uint8).tobytes()
    start = time.perf_counter()
    refuses(header(0, 1, gguf_text("k") + struct.pack("<IIQ", 9, 8, count) + data), "a header may have at most 8388608")
    assert time.perf_counter() - start < 1
