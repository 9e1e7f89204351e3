"""The proof on a trained model: 20 prompts, every setting, token for token and bit for bit; and that it can fail."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from trilane.bundled_model import tiny_prompts  # noqa: E402
from trilane.errors import TrilaneError  # noqa: E402
from trilane.integrations.generation import all_resident, decode  # noqa: E402
from trilane.integrations.generation.identity import compare_decoding, compare_steps, other_scheduler  # noqa: E402
from trilane.integrations.generation.proof import (  # noqa: E402
    FRACTIONS,
    LANES,
    Setting,
    all_settings,
    decode_resident,
    prove,
)

MAX_TOKENS, WARM_TOKENS = 128, 16
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.encode(tiny_prompts())


@pytest.fixture(scope="module")
def wanted(tiny, prompts):
    return decode_resident(tiny.handle, *prompts, MAX_TOKENS)


def test_there_are_twenty_different_prompts_of_different_lengths(prompts):
    _, mask = prompts
    assert len(set(tiny_prompts())) == len(mask) == 20
    assert mask[:, -1].all() and len(set(mask.sum(-1).tolist())) > 3  # filled up on the left


def test_the_texts_differ_and_are_no_loop_of_one_token(tiny, wanted):
    ids = torch.stack([step.ids for step in wanted])
    texts = {tiny.tokenizer.decode(row) for row in ids.T.tolist()}
    assert ids.shape == (MAX_TOKENS, 20) and len(texts) == 20
    assert min(len(set(row)) for row in ids.T.tolist()) >= 5


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_twenty_of_twenty(tiny, prompts, wanted, fraction, lanes):
    settings = all_settings((fraction,), (lanes,))
    outcomes = list(prove(tiny.handle, *prompts, wanted, settings, WARM_TOKENS))
    assert [one.setting.is_warm for one in outcomes] == [False, True] * 2
    assert {one.setting.threads for one in outcomes} == {1, 2}
    for outcome in outcomes:
        assert not outcome.differences, f"{outcome.setting}: {outcome.differences[0]}"
        assert outcome.num_identical == 20


def test_one_prompt_alone_matches_itself_over_all_lanes(tiny):
    ids, mask = tiny.encode([tiny_prompts()[4]])
    with all_resident(tiny.handle) as resident:
        alone = list(decode(resident, ids, mask, 24))
    with other_scheduler(tiny.handle, Setting(0.125, "all", 2).options) as other:
        assert compare_decoding(other, ids, mask, alone) == []


def test_one_flipped_bit_of_one_logit_is_found_and_placed(wanted):
    few = wanted[:3]
    logits = few[2].logits.clone()
    logits.view(torch.int32)[7, 100] ^= 1
    (found,) = compare_steps(few, [*few[:2], few[2]._replace(logits=logits)])
    assert (found.row, found.token, found.num_logits) == (7, 2, 1) and found.wanted == found.found
    assert "prompt 7, token 2" in str(found) and "1 of 6144 logits" in str(found)


def test_zero_and_minus_zero_are_different_bits(wanted):
    one = wanted[0]._replace(logits=torch.zeros(20, 4))
    other = wanted[0]._replace(logits=-torch.zeros(20, 4))
    assert len(compare_steps([one], [other])) == 20


def test_a_damaged_expert_is_found(tiny, prompts, wanted):
    """The comparison is of what the experts compute: one byte of one expert in the store changes the text's logits."""
    store = tiny.handle.store
    expert = store.expert_bytes(1, 3)
    kept = expert[4096:4352].copy()
    expert[4096:4352] ^= 0x55
    try:
        with other_scheduler(tiny.handle, Setting(0.25, "all", 1).options) as other:
            assert compare_decoding(other, *prompts, wanted)
    finally:
        expert[4096:4352] = kept


def test_a_shorter_run_is_no_identical_run(wanted):
    with pytest.raises(TrilaneError, match="ended before the other"):
        compare_steps(wanted[:2], wanted[:1])


def test_a_setting_without_misses_proves_nothing(tiny, prompts, wanted):
    """With room for all experts the warm run hits always."""
    with pytest.raises(TrilaneError, match="proves nothing"):
        list(prove(tiny.handle, *prompts, wanted[:4], [Setting(1.0, "stream", 1)]))
