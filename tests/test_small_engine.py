"""The engine of docs/embedding.md: the text of transformers' trunk, the same bits with few slots, and its limits."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from cuda_backends import gpu_missing  # noqa: E402

from docs.examples.small_engine import Group, SmallEngine, generate  # noqa: E402
from trilane import ArrayError, ExpertScheduler, ModelFileError  # noqa: E402
from trilane.bundled_model import tiny_path, tiny_prompts  # noqa: E402
from trilane.integrations.generation import all_resident, decode_all  # noqa: E402
from trilane.integrations.generation.identity import make_resident  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 16
LOGIT_BOUND = 0.25  # of logits of size 20: what rounding of the trunk moves, through eight-bit activations
RESIDENT = {"cache": {"fraction": 1.0}, "policy": {"force": "stream"}}


@pytest.fixture(scope="module", autouse=True)
def one_thread(one_torch_thread):
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(scope="module")
def prompts(tiny):
    return [tiny.tokenizer(text).input_ids for text in (tiny_prompts()[1], tiny_prompts()[4], tiny_prompts()[9])]


@pytest.fixture(scope="module")
def resident(tiny, prompts):
    """Text and logits of one group and of two, with all experts in slots."""
    with ExpertScheduler(tiny.handle.store, config=RESIDENT) as scheduler:
        make_resident(scheduler)
        engine = SmallEngine(tiny_path(), scheduler)
        with scheduler.request() as request:
            found = {groups: generate(engine, prompts, TOKENS, groups) for groups in (1, 2)}
        assert request.stats.hit_rate == 1.0
    return found


@pytest.fixture(scope="module")
def wanted(tiny, prompts):
    """What transformers writes for each prompt alone: tokens, and logits (tokens, vocabulary)."""
    found = []
    with all_resident(tiny.handle) as handle:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            steps = decode_all(handle, ids, torch.ones_like(ids), TOKENS)
            tokens, logits = [int(step.ids[0]) for step in steps], np.stack([step.logits[0].numpy() for step in steps])
            found.append((tokens, logits))
    return found


@pytest.mark.parametrize("num_groups", (1, 2))
def test_its_logits_are_those_of_transformers(tiny, prompts, wanted, num_groups):
    """Along the same tokens; each choice is the same too, unless two tokens are nearer than the trunks' rounding."""
    with ExpertScheduler(tiny.handle.store, config=RESIDENT) as scheduler:
        engine, decided, off = SmallEngine(tiny_path(), scheduler), 0, []
        texts = [engine.start(prompt, TOKENS) for prompt in prompts]
        groups = [Group(texts[first::num_groups]) for first in range(num_groups)]
        for step in range(TOKENS):
            engine.step(groups)
            for text, (tokens, logits) in zip(texts, wanted, strict=True):
                off.append(np.abs(text.logits[-1] - logits[step]).max())
                second, first = np.partition(logits[step], -2)[-2:]
                if first - second > 2 * LOGIT_BOUND:
                    decided += 1
                    assert text.logits[-1].argmax() == tokens[step]
                text.tokens.append(tokens[step])
    assert 0 < max(off) < LOGIT_BOUND and np.median(off) < LOGIT_BOUND / 100  # most are as near as float32 lets them
    assert decided > TOKENS


def bits_of(texts):
    return np.array([text.logits for text in texts]).view(np.int32)


@pytest.mark.parametrize("options", ({}, {"force": "stream"}, {"force": "cpu"}), ids=str)
@pytest.mark.parametrize("groups", (1, 2))
def test_an_eighth_of_the_slots_gives_the_same_bits(tiny, prompts, resident, groups, options):
    config = {"cache": {"fraction": 0.125}, "policy": options}
    with ExpertScheduler(tiny.handle.store, config=config) as scheduler:
        found = generate(SmallEngine(tiny_path(), scheduler), prompts, TOKENS, groups)
        assert scheduler.stats().hit_rate < 0.9
    assert [text.tokens for text in found] == [text.tokens for text in resident[groups]]
    assert (bits_of(found) == bits_of(resident[groups])).all()


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits(tiny, prompts, resident):
    if gpu_missing():
        pytest.skip(gpu_missing())
    with ExpertScheduler(tiny.handle.store, config={"cache": {"fraction": 0.125}}, device="cuda") as scheduler:
        found = generate(SmallEngine(tiny_path(), scheduler), prompts, TOKENS, 2)
    assert (bits_of(found) == bits_of(resident[2])).all()


def test_two_groups_have_a_step_in_flight_while_the_engine_attends(tiny, prompts, monkeypatch):
    with ExpertScheduler(tiny.handle.store, config={"cache": {"fraction": 0.125}}) as scheduler:
        engine, in_flight = SmallEngine(tiny_path(), scheduler), []
        attend = engine._attend
        monkeypatch.setattr(engine, "_attend", lambda *a: (in_flight.append(scheduler._ticket is not None), attend(*a)))
        for groups in (1, 2):
            in_flight.clear()
            generate(engine, prompts, 2, groups)
            assert sum(in_flight) == (0 if groups == 1 else len(in_flight) - 2)  # each step begins with nothing


def test_a_long_prompt_and_another_architecture_are_refused(tiny, tmp_path):
    from gguf import GGUFWriter

    engine = SmallEngine(tiny_path(), tiny.handle.scheduler)
    for prompt in ([], [1] * 1020):
        with pytest.raises(ArrayError, match=f"prompt: {len(prompt)} tokens, but 1 to 1008 fit"):
            engine.start(prompt, TOKENS)
    writer = GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="qwen3moe"):
        SmallEngine(tmp_path / "other.gguf", tiny.handle.scheduler)


def test_the_program_writes_text_and_its_hit_rate():
    run = [sys.executable, "-W", "error", "docs/examples/small_engine.py", "And the king said", "--tokens", "3"]
    result = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("And the king said") and "hit rate" in result.stdout
