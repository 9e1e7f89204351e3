"""Decoder: the text that generate gives, along given tokens, ended early; and steps that a CUDA graph can hold."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from hf_models import ARCHITECTURES, ONE_THREAD, build_model, greedy, token_ids  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

from trilane.errors import ArrayError, ClosedError  # noqa: E402
from trilane.integrations.transformers import Decoder, offload  # noqa: E402
from trilane.integrations.transformers.decode_step import DecodeStep  # noqa: E402
from trilane.integrations.transformers.decoder import AHEAD  # noqa: E402

HOST_SIDE = {"phimoe": "makes its rotary frequencies in host memory at each step"}
NEW = 10


@pytest.fixture
def decoder_of():
    opened = []

    def make(kind="qwen3_moe", **changes):
        opened.append(offload(build_model(kind, **changes), device="host", config=ONE_THREAD))
        return Decoder(opened[-1])

    yield make
    for handle in opened:
        handle.close()


# ---------------------------------------------------------------------------------------------------- tokens
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "qwen3_next", "jamba", "lfm2_moe", "deepseek_v4"])
def test_text_of_padded_prompts_and_of_another_run(decoder_of, kind):
    decoder, ids = decoder_of(kind), token_ids()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    wanted = greedy(decoder.model, ids, NEW), greedy(decoder.model, ids, NEW, attention_mask=mask)
    assert torch.equal(decoder.generate(ids, NEW), wanted[0])
    assert torch.equal(decoder.generate(ids, NEW, attention_mask=mask), wanted[1])
    first = decoder._step
    assert torch.equal(decoder.generate(ids[:, :7], 3, attention_mask=mask[:, :7]), greedy(
        decoder.model, ids[:, :7], 3, attention_mask=mask[:, :7]
    ))  # fmt: skip
    assert decoder._step is first  # its tensors are used again
    assert torch.equal(decoder.generate(ids, NEW, attention_mask=mask), wanted[1])


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma4_text"])
def test_text_beyond_a_sliding_window(decoder_of, kind):
    decoder, ids = decoder_of(kind, sliding_window=4), token_ids()
    assert torch.equal(decoder.generate(ids, NEW), greedy(decoder.model, ids, NEW))


def test_given_tokens_are_fed_and_what_the_model_would_take_is_kept(decoder_of):
    decoder, ids = decoder_of(), token_ids()
    text = greedy(decoder.model, ids, NEW)
    found = decoder.generate(ids, NEW, given=text[:, ids.shape[1] :])
    assert torch.equal(found, text) and torch.equal(decoder.picks[:, :NEW], text[:, ids.shape[1] :])
    tokens = torch.arange(20, 20 + 4)
    found = decoder.generate(ids, NEW, given=tokens)
    assert torch.equal(found[:, ids.shape[1] :][:, :4], tokens.expand(2, -1))
    assert torch.equal(decoder.generate(found[:, :15], NEW - 4), found)  # greedy after them
    assert torch.equal(decoder.generate(ids, 3, given=tokens)[0, -3:], tokens[:3])
    with torch.no_grad():
        last = decoder.model(found[:, :-1], use_cache=False).logits[:, -1]
    decoder.generate(ids, NEW, given=found[:, ids.shape[1] :])
    assert torch.allclose(decoder.logits, last, rtol=1e-4, atol=1e-4)


def test_tokens_come_one_by_one_and_may_end_a_run(decoder_of):
    decoder, ids = decoder_of(), token_ids()
    text, seen = decoder.generate(ids, NEW), []
    assert torch.equal(decoder.generate(ids, NEW, on_token=seen.append), text)
    assert torch.equal(torch.tensor(seen).T, text[:, ids.shape[1] :])
    found = decoder.generate(ids, NEW, on_token=lambda tokens: seen.append(tokens) or len(seen) == NEW + 3)
    assert torch.equal(found, text[:, : ids.shape[1] + 3])
    assert torch.equal(decoder.generate(ids, 0), ids) and decoder.generate(ids, 1).shape[1] == ids.shape[1] + 1


def test_an_end_token_ends_its_row(decoder_of):
    decoder, ids = decoder_of(), token_ids()
    text = decoder.generate(ids, NEW)
    new = text[:, ids.shape[1] :]
    end = int(new[0, 2])
    assert end not in new[0, :2].tolist() + new[1].tolist()  # so that the other row goes on
    found = decoder.generate(ids, NEW, eos_token_id=end)[:, ids.shape[1] :]
    assert torch.equal(found[1], new[1]) and found[0].tolist() == new[0, :3].tolist() + [end] * (NEW - 3)
    ends = [end, int(new[1, 4])]
    both = decoder.generate(ids, NEW, eos_token_id=ends)[:, ids.shape[1] :]
    firsts = [next(k for k, token in enumerate(row) if token in ends) for row in new.tolist()]
    assert both.shape[1] == max(firsts) + 1
    assert torch.equal(both[1, : firsts[1] + 1], new[1, : firsts[1] + 1])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "input_ids: shape"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "of at least one token"),
        ({"max_new_tokens": -1}, "max_new_tokens: -1"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask: shape"),
        ({"attention_mask": torch.tensor([[1] * 10 + [0]] * 2)}, "pad at the left"),
        ({"given": torch.tensor([3, -1])}, "given: token -1"),
        ({"given": torch.zeros(3, 4, dtype=torch.int64)}, r"given: shape \(3, 4\)"),
    ],
)
def test_arguments_that_do_not_fit(decoder_of, arguments, text):
    with pytest.raises(ArrayError, match=text):
        decoder_of().generate(**({"input_ids": token_ids(), "max_new_tokens": 2} | arguments))


def test_nothing_is_there_before_a_run_and_a_closed_model_does_not_run(decoder_of):
    decoder = decoder_of()
    for name in ("picks", "logits"):
        with pytest.raises(ArrayError, match=f"{name}: nothing has been decoded"):
            getattr(decoder, name)
    decoder.handle.close()
    with pytest.raises(ClosedError):
        decoder.generate(token_ids(), 2)


def test_why_steps_are_not_captured(decoder_of, caplog):
    decoder = decoder_of()
    assert decoder.why_not == ""
    decoder.generate(token_ids(), 5)
    assert not decoder.captured and decoder.why_not == "the model is not on a GPU" and not caplog.records
    decoder._give_up("of this")
    assert decoder.why_not == "of this"
    assert [r.levelno for r in caplog.records if "since of this" in r.message] == [logging.WARNING]


# ----------------------------------------------------------------------------------- what a graph can hold
class Rehearsal(TorchDispatchMode):
    """Runs operations on the meta device, and keeps those between it and host memory: a graph can hold none of them."""

    def __init__(self):
        super().__init__()
        self.crossing, self.count = [], 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        self.count += 1
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        places = {t.device.type for t in given if t.ndim} | {
            t.device.type for t in tree_leaves(found) if isinstance(t, torch.Tensor)
        }
        if len(places) > 1:
            self.crossing.append(str(operation))
        return found


def rehearse(kind):
    """A step of a model on the meta device, where values cannot be read: its experts give rows of nothing."""
    if "rehearsed" not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register("rehearsed", lambda module, x, *routing, **named: torch.empty_like(x))
    model = build_model(kind)
    model.set_experts_implementation("rehearsed")
    step = DecodeStep(model.to("meta"), 1, 64, padded=False)
    with torch.no_grad():
        step.begin(torch.zeros((1, 5), dtype=torch.int64, device="meta"), None, None)
        with Rehearsal() as rehearsal:
            step.advance()
    assert rehearsal.count > 50
    return rehearsal


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_step_stays_on_the_device(kind):
    assert bool(rehearse(kind).crossing) == (kind in HOST_SIDE)


class Recording(TorchDispatchMode):
    """Keeps operations with their tensors; replayed, they are done once more over the same ones, and no more is."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, found))
        return found

    def replay(self):
        for operation, args, kwargs, before in self.calls:
            found = operation(*args, **kwargs)
            for into, new in zip(tree_leaves(before), tree_leaves(found), strict=True):
                if isinstance(into, torch.Tensor) and into.data_ptr() != new.data_ptr():
                    into.copy_(new)


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "deepseek_v4"])
def test_a_step_moves_on_by_itself(kind):
    """What a graph relies on: a step's operations over its tensors are the next step's too. Python counts nothing."""
    model, ids = build_model(kind), token_ids()
    text = greedy(model, ids, NEW)
    model.set_experts_implementation("batched_mm")  # operations alone, as ours are not on the CPU
    step = DecodeStep(model, 2, 64, padded=False)
    with torch.no_grad():
        step.begin(ids, None, None)
        step.advance()
        with Recording() as recording:
            step.advance()
        for _ in range(NEW - 3):
            recording.replay()
    assert torch.equal(step.tokens[:, :NEW], text[:, ids.shape[1] :])


class PlayedGraph:
    """In place of a CUDA graph: a capture runs nothing, a replay runs the step."""

    step, fails = None, False

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1
        self.step.advance()

    @staticmethod
    @contextlib.contextmanager
    def capture(graph, stream, capture_error_mode):
        assert stream.query() and capture_error_mode == "thread_local"
        step = graph.step = PlayedGraph.step
        if PlayedGraph.fails:
            raise RuntimeError("operation not permitted\nwhile a stream is captured")
        step.advance = lambda: None
        yield
        del step.advance


class PlayedEvent:
    """In place of a CUDA event: over as soon as somebody asks; how many were not asked yet, at most."""

    open = most = 0

    def record(self):
        PlayedEvent.open += 1
        PlayedEvent.most = max(PlayedEvent.most, PlayedEvent.open)

    def query(self):
        PlayedEvent.open -= 1
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_when_a_graph_is_made_and_used_again(decoder_of, monkeypatch, caplog, fails):
    decoder, ids = decoder_of(), token_ids()
    text = greedy(decoder.model, ids, NEW)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PlayedGraph)
    monkeypatch.setattr(torch.cuda, "graph", PlayedGraph.capture)
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    monkeypatch.setattr(PlayedEvent, "open", 0)
    monkeypatch.setattr(PlayedEvent, "most", 0)
    monkeypatch.setattr(PlayedGraph, "fails", fails)
    decoder._stream = SimpleNamespace(query=lambda: True)
    step = decoder._prepared(2, ids.shape[1] + NEW, False)
    monkeypatch.setattr(PlayedGraph, "step", step)
    assert torch.equal(decoder.generate(ids, NEW), text)
    assert decoder.captured != fails
    assert torch.equal(decoder.generate(ids, NEW, on_token=lambda tokens: None), text)
    if fails:
        assert decoder.why_not == "Qwen3MoeForCausalLM cannot be captured: operation not permitted"
        assert caplog.text.count("one operation at a time") == 1
    else:
        assert decoder._graph.replays == (NEW - 1 - 2) + (NEW - 1) > AHEAD == PlayedEvent.most
        decoder.generate(ids[:1], 4)  # other rows: another graph
        assert decoder._step is not step


def test_a_rehearsal_sees_what_no_graph_can_hold():
    with Rehearsal() as rehearsal:
        torch.tensor([1, 2]).to("meta")
    assert rehearsal.crossing
    with Rehearsal(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(2, device="meta").sum().item()


# -------------------------------------------------------------------------------------------------- compiled
@pytest.fixture
def eager_backend(monkeypatch):
    """What torch.compile traces is run as it is: no C compiler is needed, and no bit changes."""
    plain = torch.compile
    made = []

    def compiled(function, **options):
        made.append(plain(function, backend="eager", **options))
        return made[-1]

    monkeypatch.setattr(torch, "compile", compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield made
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4_text", "jamba"])
def test_a_model_is_compiled_in_one_piece(decoder_of, eager_backend, kind):
    plain, ids = decoder_of(kind), token_ids()
    decoder = Decoder(plain.handle, compile=True)
    assert not decoder.compiled
    assert torch.equal(decoder.generate(ids, NEW), plain.generate(ids, NEW)) and decoder.compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # whole, and once for all steps
    with offload_again(plain.handle) as other:
        again = Decoder(other, compile=True)
        assert torch.equal(again.generate(ids, NEW), plain.generate(ids, NEW))


@contextlib.contextmanager
def offload_again(handle):
    """The model with another scheduler, which compiled code must notice."""
    from trilane.integrations.generation.identity import other_scheduler

    with other_scheduler(handle, ONE_THREAD) as other:
        yield other
        assert other.scheduler.stats().steps > 0


def test_a_cache_that_grows_is_not_compiled(decoder_of, eager_backend):
    plain, ids = decoder_of("deepseek_v4"), token_ids()
    decoder = Decoder(plain.handle, compile=True)
    assert torch.equal(decoder.generate(ids, NEW), plain.generate(ids, NEW)) and not decoder.compiled


def test_what_cannot_be_compiled_runs_as_it_is_and_the_log_says_why(decoder_of, eager_backend, caplog):
    plain, ids = decoder_of(), token_ids()
    wanted = plain.generate(ids, NEW)
    plain.model.model.norm.register_forward_hook(lambda module, inputs, found: torch._dynamo.graph_break())
    decoder = Decoder(plain.handle, compile=True)
    assert torch.equal(decoder.generate(ids, NEW), wanted) and not decoder.compiled
    assert "steps are not compiled, since" in caplog.text


def test_compiled_code_of_a_scheduler_that_is_gone(decoder_of):
    from trilane.errors import TrilaneError
    from trilane.integrations.transformers.forward import experts_operation

    with pytest.raises(TrilaneError, match="compile the model again"):
        experts_operation(torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), 1 << 40)
