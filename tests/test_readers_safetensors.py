"""safetensors headers: what is read, and that damaged ones are refused with the tensor, its value and the rule."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
from model_files import safetensors_bytes

from trilane.errors import ModelFileError
from trilane.readers.json_text import largest_text, parse_object
from trilane.readers.safetensors import ELEMENT_BITS, INDEX_NAME, open_safetensors, parse_safetensors

HERE = Path("model.safetensors")


def raw_file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**changes):
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def refuses(data, text):
    with pytest.raises(ModelFileError, match=text) as found:
        parse_safetensors(data, HERE)
    assert "model.safetensors" in str(found.value)


def test_tensors_and_their_bytes(tmp_path):
    tensors = {
        "a": ("F32", (2, 3), bytes(range(24))), "b": ("BF16", (3,), b"123456"), "c": ("U8", (0, 4), b""),
        "d": ("F16", (), b"xy"), "e": ("F4", (2, 2), b"zz"), "f": ("F8_E4M3", (5,), b"12345"),
    }  # fmt: skip
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(tensors, metadata={"format": "pt"}))
    files = open_safetensors(path)
    for name, (dtype, shape, raw) in tensors.items():
        tensor = files.tensors[name]
        assert (tensor.format, tensor.shape, files.bytes_of(tensor).tobytes()) == (dtype.lower(), shape, raw)
    assert files.metadata == {} and files.kind == "safetensors"
    (tmp_path / "config.json").write_text('{"model_type": "olmoe"}')
    assert open_safetensors(tmp_path).metadata == {"model_type": "olmoe"}


@pytest.mark.parametrize("dtype", sorted(ELEMENT_BITS))
def test_sizes_of_elements(dtype):
    raw = bytes(ELEMENT_BITS[dtype])
    assert parse_safetensors(safetensors_bytes({"t": (dtype, (8,), raw)}), HERE)["t"].nbytes == len(raw)


DEEP = b'{"t":' + b"[" * 200_000
LONG = b'{"t": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}'
WRONG = [
    (b"\1\2\3", "the length of the header needs 8 bytes, but the file ends 3 bytes on"),
    (struct.pack("<Q", 1 << 63), "has 9223372036854775808 bytes, but at most 1048576 are allowed"),
    (struct.pack("<Q", 2 << 20) + bytes(3 << 20), "has 2097152 bytes, but at most 1048576 are allowed in a file of"),
    (struct.pack("<Q", 500) + b"{}", "the header needs 500 bytes, but the file ends 2 bytes on"),
    (raw_file(b""), "the header is no valid JSON"),
    (raw_file(b"{"), "the header is no valid JSON"),
    (raw_file(b"\xff{}"), "the header is no valid JSON"),
    (raw_file(b"[1, 2]"), "the header is a JSON list, but must be an object"),
    (raw_file(b"null"), "the header is a JSON NoneType, but must be an object"),
    (raw_file(DEEP), "the header is nested too deeply"),
    (raw_file(LONG), "the header is no valid JSON"),
    (raw_file(b'{"t": 1, "t": 2}'), "the key 't' is there twice"),
    (raw_file({"t": 3}), "tensor 't' is 3, but must be an object"),
    (raw_file({"t": {}}), "tensor 't' has dtype None, but must have one of BOOL"),
    (raw_file(one(dtype="F12")), "tensor 't' has dtype 'F12', but must have one of"),
    (raw_file(one(dtype=["F32"])), r"tensor 't' has dtype \['F32'\]"),
    (raw_file(one(shape=[-2])), r"tensor 't' has shape \[-2\], but must have a list of at most 8 numbers"),
    (raw_file(one(shape=[2.0])), r"tensor 't' has shape \[2.0\]"),
    (raw_file(one(shape=[True])), r"tensor 't' has shape \[True\]"),
    (raw_file(one(shape="2")), "tensor 't' has shape '2'"),
    (raw_file(one(shape=[1] * 9)), r"tensor 't' has shape \[1, 1"),
    (raw_file(one(shape=[1 << 63])), r"tensor 't' has shape \[9223372036854775808\]"),
    (raw_file(one(data_offsets=[0])), r"tensor 't' has data_offsets \[0\], but must have its start and its end"),
    (raw_file(one(data_offsets=[8, 0])), r"tensor 't' has data_offsets \[8, 0\]"),
    (raw_file(one(data_offsets=["0", 8])), r"tensor 't' has data_offsets \['0', 8\]"),
    (raw_file(one(data_offsets=[0, 8.0])), r"tensor 't' has data_offsets \[0, 8.0\]"),
    (raw_file(one(data_offsets=None)), "tensor 't' has data_offsets None"),
    (raw_file(one(shape=[1 << 40] * 4)), r"needs \d+ bits, but its data_offsets \[0, 8\] hold 64"),
    (raw_file(one(shape=[3])), "needs 96 bits, but its data_offsets"),
    (raw_file(one(), bytes(7)), "has .* bytes, but its header promises .*: it is damaged or was not copied"),
    (raw_file(one(), bytes(9)), "has .* bytes, but its header promises"),
    (raw_file(one(data_offsets=[8, 16]), bytes(16)), "must start at .*: there is a hole before it"),
    (raw_file(one() | {"u": one()["t"]}, bytes(8)), "must start at .*: it shares bytes with another"),
]


@pytest.mark.parametrize(("data", "text"), WRONG, ids=[text[:30] for _, text in WRONG])
def test_a_damaged_header_is_refused(data, text):
    refuses(data, text)


@pytest.mark.parametrize("item", ['"%x":{}', '"%x":[]', '"%x":{"a":1}', '"%x":' + "[" * 400 + "]" * 400])
def test_a_header_needs_no_more_memory_than_the_file_has(item):
    text = ("{" + ",".join(item % number for number in range(100_000 // len(item))) + "}").encode()
    tracemalloc.start()
    try:
        parse_object(text, HERE, "the header")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    file_nbytes = 1 << 30
    assert peak / len(text) * largest_text(file_nbytes) < file_nbytes


def test_an_index_and_a_config_out_of_proportion_are_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(raw_file(one(), bytes(8)))
    for name in ("config.json", INDEX_NAME):
        (tmp_path / name).write_text("{" + " " * (1 << 20) + "}")
        with pytest.raises(ModelFileError, match=rf"{name}: has more than 1048576 bytes, which is out of proportion"):
            open_safetensors(tmp_path)


def test_a_file_cut_anywhere_is_refused():
    whole = safetensors_bytes({"a": ("F32", (2,), bytes(8)), "b": ("U8", (3,), b"abc")})
    for end in range(len(whole)):
        with pytest.raises(ModelFileError):
            parse_safetensors(whole[:end], HERE)


# ------------------------------------------------------------------------------------------------------- folders
@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("[]", "the file is a JSON list"),
        ("{}", "weight_map is None, but must name a file for each tensor"),
        ('{"weight_map": {}}', "weight_map is {}"),
        ('{"weight_map": {"t": 5}}', "the file of tensor 't' is 5, but must be a name in the same folder"),
        ('{"weight_map": {"t": "../other"}}', "is '../other', but must be a name in the same folder"),
        ('{"weight_map": {"t": "/etc/passwd"}}', "is '/etc/passwd', but must be a name"),
        ('{"weight_map": {"t": ".."}}', "is '..', but must be a name"),
        ('{"weight_map": {"t": "b.safetensors"}}', "1 of 1 files are missing from .*: b.safetensors"),
        ('{"weight_map": {"u": "a.safetensors"}}', "tensor 'u' is not in it, but the index says so"),
    ],
)
def test_a_wrong_index(index, text, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(raw_file(one(), bytes(8)))
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(ModelFileError, match=text):
        open_safetensors(tmp_path)


def test_folders_without_an_index(tmp_path):
    with pytest.raises(ModelFileError, match="must hold model.safetensors.index.json, .* of these holds none"):
        open_safetensors(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(raw_file(one(), bytes(8)))
    assert list(open_safetensors(tmp_path).tensors) == ["t"]
    (tmp_path / "b.safetensors").write_bytes(raw_file(one(), bytes(8)))
    with pytest.raises(ModelFileError, match="of these holds a.safetensors, b.safetensors; pass the path of a file"):
        open_safetensors(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="config.json: the file is no valid JSON"):
        open_safetensors(tmp_path / "a.safetensors")


def test_the_same_tensor_in_two_files(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(raw_file(one(), bytes(8)))
    weight_map = {"t": "a.safetensors", "u": "b.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFileError, match="tensor 't'.* is in a.safetensors too; the files are not of one model"):
        open_safetensors(tmp_path)
