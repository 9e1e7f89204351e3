"""Text on a GPU: the same bits wherever the experts are, and the decoder that replays one graph."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from cuda_backends import gpu_missing  # noqa: E402

from trilane.bundled_model import tiny_prompts  # noqa: E402
from trilane.integrations.generation import open_text_model  # noqa: E402
from trilane.integrations.generation.proof import all_settings, decode_resident, prove  # noqa: E402
from trilane.integrations.transformers import Decoder  # noqa: E402

pytestmark = pytest.mark.gpu
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def tiny():
    if gpu_missing():
        pytest.skip(gpu_missing())
    with (opened := open_text_model("tiny", device="cuda", options={"cache": {"fraction": 0.25}})).handle:
        yield opened


def test_twenty_of_twenty_on_a_gpu(tiny):
    ids, mask = tiny.encode(tiny_prompts())
    wanted = decode_resident(tiny.handle, ids, mask, MAX_TOKENS)
    for outcome in prove(tiny.handle, ids, mask, wanted, all_settings(threads=(1,)), 8):
        assert not outcome.differences, f"{outcome.setting}: {outcome.differences[0]}"


def test_the_decoder_writes_text_from_a_graph(tiny):
    ids, _ = tiny.encode([tiny_prompts()[4]])
    decoder, seen = Decoder(tiny.handle), []
    found = decoder.generate(ids, MAX_TOKENS, on_token=lambda row: seen.append(row[0]))
    assert decoder.captured, decoder.why_not
    assert found[0, ids.shape[1] :].tolist() == seen and len(seen) == MAX_TOKENS
