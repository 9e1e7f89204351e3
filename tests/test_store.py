"""The store: what it takes, what it refuses and how it says so, and that its bytes are the given weights."""

from __future__ import annotations

import numpy as np
import pytest
from expert_cases import FORMATS, MIXED, random_layer

from trilane import ExpertStore, StoreError
from trilane.cpu_kernels import arena
from trilane.cpu_kernels.formats import format_of
from trilane.cpu_kernels.layout import unpack_expert
from trilane.cpu_kernels.quantize import quantize_matrix
from trilane.store import EXPERT_ALIGNMENT, Gate

HIDDEN, INTERMEDIATE, EXPERTS = 256, 512, 3


def layer(kind="silu_glu", bias=False, **changes):
    made = random_layer(np.random.default_rng(4), EXPERTS, HIDDEN, INTERMEDIATE, kind, bias)
    made |= changes
    return {name: value for name, value in made.items() if value is not None}


def store_of(*layers, formats="q8_0", **options):
    return ExpertStore.from_arrays(layers, formats=formats, **options)


def sources(store, index=0):
    layout = store.layers[index].layout
    return [unpack_expert(layout, store.expert_bytes(index, e)) for e in range(store.layers[index].num_experts)]


# ------------------------------------------------------------------------------------------- what it holds
@pytest.mark.parametrize("formats", [*FORMATS, *MIXED])
def test_bytes_are_the_quantised_weights(formats):
    arrays = layer(bias=True)
    wanted = MIXED.get(formats, dict.fromkeys(("gate", "up", "down"), formats))
    for e, source in enumerate(sources(store_of(arrays, formats=MIXED.get(formats, formats)))):
        for name, fmt in wanted.items():
            rows = quantize_matrix(arrays[name][e], format_of(fmt))
            np.testing.assert_array_equal(getattr(source, name), rows.reshape(len(arrays[name][e]), -1))
            bias = f"{name}_bias"
            np.testing.assert_array_equal(getattr(source, bias), arrays[bias][e])


@pytest.mark.parametrize("formats", FORMATS)
def test_source_blocks_are_taken_as_they_are(formats):
    fmt, arrays = format_of(formats), layer()
    blocks = {
        name: np.stack([quantize_matrix(expert, fmt).reshape(expert.shape[0], -1) for expert in values])
        for name, values in arrays.items()
    }
    assert all(values.dtype == np.uint8 for values in blocks.values())
    np.testing.assert_array_equal(
        store_of(blocks, formats=formats).arena.bytes, store_of(arrays, formats=formats).arena.bytes
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights(dtype):
    arrays = layer()
    if dtype == "float16":
        halves = {name: values.astype(np.float16) for name, values in arrays.items()}
        wide = {name: values.astype(np.float32) for name, values in halves.items()}
    else:
        halves = {name: (values.view(np.uint32) >> 16).astype(np.uint16) for name, values in arrays.items()}
        wide = {name: (values.astype(np.uint32) << 16).view(np.float32) for name, values in halves.items()}
    for formats in ("q4_k", "bf16"):
        np.testing.assert_array_equal(
            store_of(halves, formats=formats).arena.bytes, store_of(wide, formats=formats).arena.bytes
        )


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_merged(bias):
    arrays = layer(bias=bias)
    merged = dict(arrays)
    for end in ("", "_bias") if bias else ("",):
        merged[f"gate_up{end}"] = np.concatenate([merged.pop(f"gate{end}"), merged.pop(f"up{end}")], axis=1)
    np.testing.assert_array_equal(store_of(merged).arena.bytes, store_of(arrays).arena.bytes)


def test_strided_and_read_only_weights():
    arrays = layer()
    strided = {name: np.repeat(values, 2, axis=2)[:, :, ::2] for name, values in arrays.items()}
    strided["up"] = np.asfortranarray(arrays["up"])
    strided["down"].flags.writeable = False
    np.testing.assert_array_equal(store_of(strided).arena.bytes, store_of(arrays).arena.bytes)


def test_layers_of_different_sizes():
    rng = np.random.default_rng(0)
    shapes = [(3, HIDDEN, 512), (5, HIDDEN, 96), (1, HIDDEN, 288)]
    store = store_of(*(random_layer(rng, *shape) for shape in shapes))
    assert [place.num_experts for place in store.layers] == [3, 5, 1]
    assert [place.layout.num_shards for place in store.layers] == [2, 1, 2]
    for place in store.layers:
        assert place.offset % EXPERT_ALIGNMENT == 0 and place.layout.expert_nbytes % 64 == 0
    ends = [place.offset + place.num_experts * place.stride for place in store.layers]
    assert all(end <= place.offset for end, place in zip(ends, store.layers[1:], strict=False))
    assert ends[-1] == store.nbytes and store.arena.address % EXPERT_ALIGNMENT == 0
    assert "3 layers, 9 experts" in repr(store)


def test_threads_and_progress():
    calls = []
    arrays = [layer(), layer()]
    one = store_of(*arrays, threads=1, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(n, 2 * EXPERTS) for n in range(1, 2 * EXPERTS + 1)]
    np.testing.assert_array_equal(store_of(*arrays, threads=3).arena.bytes, one.arena.bytes)


def test_relu2_has_no_gate():
    store = store_of(layer("relu2"), gate="relu2")
    assert store.layers[0].layout.gate is None
    with pytest.raises(StoreError, match="layer 0, gate: given, but relu2 has no gate; leave it out"):
        store_of(layer(), gate="relu2")


# ------------------------------------------------------------------------------------------------ the arena
def test_huge_pages_are_asked_for_and_can_be_missing(monkeypatch):
    assert arena.allocate_arena(0).nbytes == 0
    asked = arena.allocate_arena(1 << 22)
    assert asked.address % 4096 == 0 and not asked.bytes.any() and len(asked.bytes) >= (1 << 22)
    assert not arena.allocate_arena(1 << 22, huge_pages=False).huge_pages

    def refuse(region):
        raise OSError("no huge pages here")

    monkeypatch.setattr(arena, "_advise_huge_pages", lambda region: False)
    assert not arena.allocate_arena(1 << 22).huge_pages


def test_an_arena_too_large_says_what_to_do():
    with pytest.raises(MemoryError, match=r"host arena of \d+ bytes: the system refused .*smaller weight format"):
        arena.allocate_arena(1 << 62)


# --------------------------------------------------------------------------------------------- what it refuses
def test_no_layers():
    with pytest.raises(StoreError, match="at least one MoE layer"):
        store_of()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gatee": np.ones((3, 512, 256))}, r"layer 1, gatee: no such matrix.*Did you mean 'gate'\?"),
        ({"up": None}, "layer 1, up: missing; a silu_glu layer needs gate, up, down"),
        ({"gate": None}, "layer 1, gate: missing"),
        ({"up": np.ones((3, 512, 256))}, "layer 1, up: dtype float64, but one of float32.*convert it"),
        ({"up": np.ones((3, 512), np.float32)}, r"layer 1, up: shape \(3, 512\).*stack them"),
        ({"gate": np.ones((3, 512, 255), np.float32)}, r"layer 1, gate: shape .* but \(3, 512, 256\) is needed"),
        ({"gate": np.ones((2, 512, 256), np.float32)}, r"layer 1, gate: shape .* but \(3, 512, 256\) is needed"),
        ({"down": np.ones((3, 300, 512), np.float32)}, r"layer 1, down: shape .* but \(3, 256, 512\) is needed beside"),
        ({"up": np.ones((3, 512, 300), np.float32)}, r"layer 1, up: shape .* but \(3, 512, 256\) is needed beside"),
        ({"up": np.ones((3, 500, 256), np.float32)}, r"layer 1, up: shape .* but \(3, 512, 256\) is needed beside"),
        ({"down": np.ones((3, 256, 511), np.float32)}, r"layer 1, down: shape .* but \(3, 256, 512\) is needed"),
        ({"down": np.ones((3, 256, 512), np.uint8)}, r"layer 1, down: shape .* but \(3, 256, 544\) is needed"),
        ({"up_bias": np.ones((3, 512), np.float32)}, "layer 1, gate_bias: missing"),
        ({"gate_up": np.ones((3, 1024, 256), np.float32)}, "layer 1, gate_up: given beside gate"),
        ({"gate": np.ones((3, 512, 256), ">f4")}, "layer 1, gate: byte order"),
        ({"gate": [[1.0]]}, "layer 1, gate: a list is no array"),
    ],
)
def test_a_wrong_layer_is_named(changes, text):
    with pytest.raises(ValueError, match=text):
        store_of(layer(), layer(**changes))


def test_wrong_biases():
    with pytest.raises(StoreError, match="layer 0, down_bias: missing"):
        store_of(layer(bias=True, down_bias=None))
    with pytest.raises(StoreError, match=r"layer 0, up_bias: shape \(3, 511\), but \(3, 512\)"):
        store_of(layer(bias=True, up_bias=np.ones((3, 511), np.float32)))
    with pytest.raises(StoreError, match="layer 0, up_bias: dtype float16, but one of float32"):
        store_of(layer(bias=True, up_bias=np.ones((3, 512), np.float16)))


def test_odd_merged_rows():
    merged = layer(gate=None, up=None, gate_up=np.ones((3, 1023, 256), np.float32))
    with pytest.raises(StoreError, match="layer 0, gate_up: 1023 rows, but an even number"):
        store_of(merged)


def test_hidden_sizes_must_agree():
    other = random_layer(np.random.default_rng(0), 3, 512, 512)
    with pytest.raises(StoreError, match="layer 1: hidden size 512, but layer 0 has 256"):
        store_of(layer(), other)


@pytest.mark.parametrize("empty", ["experts", "intermediate", "hidden"])
def test_nothing_to_hold(empty):
    sizes = {"experts": 3, "hidden": 256, "intermediate": 512} | {empty: 0}
    made = random_layer(np.random.default_rng(0), sizes["experts"], sizes["hidden"], sizes["intermediate"])
    with pytest.raises(StoreError, match="layer 0"):
        store_of(made)


@pytest.mark.parametrize("formats", ["q4_k", "q6_k"])
@pytest.mark.parametrize(("hidden", "intermediate", "matrix"), [(288, 512, "gate"), (256, 704, "down")])
def test_k_quants_need_rows_of_whole_blocks(formats, hidden, intermediate, matrix):
    made = random_layer(np.random.default_rng(0), 2, hidden, intermediate)
    with pytest.raises(StoreError, match=rf"layer 0: {matrix} of an expert .*{formats}.*256"):
        store_of(made, formats=formats)


@pytest.mark.parametrize("formats", ["q8_0", "mxfp4", "f32", "bf16"])
def test_rows_must_be_multiples_of_32(formats):
    made = random_layer(np.random.default_rng(0), 2, 256, 100)
    with pytest.raises(StoreError, match="layer 0: down of an expert .*32"):
        store_of(made, formats=formats)


@pytest.mark.parametrize(
    ("formats", "text"),
    [
        ("q4k", r"formats: unknown weight format 'q4k'.*did you mean 'q4_k'"),
        ({"gate": "q8_0", "up": "q8_0"}, "formats: none for 'down'; give one name"),
        ({"gate": "q8_0", "up": "q8_0", "down": "q8_0", "donw": "f32"}, "formats: 'donw' is no matrix"),
        (None, "formats: None is neither a name nor a mapping"),
    ],
)
def test_wrong_formats(formats, text):
    with pytest.raises(StoreError, match=text):
        store_of(layer(), formats=formats)


def test_wrong_gates():
    with pytest.raises(StoreError, match=r"gate: kind 'silu' is unknown.*Did you mean"):
        Gate("silu")
    with pytest.raises(StoreError, match="gate: limit"):
        Gate("swiglu_oai", limit=float("nan"))


def test_errors_of_the_progress_callback_get_through():
    def stop(done, total):
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        store_of(layer(), progress=stop)
