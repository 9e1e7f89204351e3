"""probe_gate: which activation an experts module has, and its numbers, found by trying it out; what is refused."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from transformers.integrations.moe import use_experts_implementation  # noqa: E402

from trilane.errors import StoreError  # noqa: E402
from trilane.integrations.transformers.experts import ModuleExperts  # noqa: E402
from trilane.integrations.transformers.gates import probe_gate  # noqa: E402
from trilane.integrations.transformers.versions import check_versions  # noqa: E402
from trilane.store import Gate  # noqa: E402


def made_module(apply=None, act=None, has_gate=True, is_concatenated=True, **flags):
    """An experts module with an activation of our own."""

    class Made(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.act_fn = act or torch.nn.SiLU()

        def forward(self, *arguments):
            raise AssertionError("the activation is all that is looked at")

        if apply is not None:

            def _apply_gate(self, both):
                return apply(both)

    kind = use_experts_implementation(has_gate=has_gate, is_concatenated=is_concatenated, **flags)(Made)
    return kind(None)


def clamped(limit):
    def apply(both):
        g, u = both.chunk(2, -1)
        return torch.nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)

    return apply


def oai(alpha, limit, interleaved):
    def apply(both):
        g, u = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return (u + 1) * g * torch.sigmoid(alpha * g)

    return apply


@pytest.mark.parametrize(
    ("module", "gate"),
    [
        (made_module(), Gate("silu_glu")),
        (made_module(act=torch.nn.GELU("tanh")), Gate("gelu_tanh_glu")),
        (made_module(act=lambda u: u.relu() ** 2, has_gate=False), Gate("relu2")),
        (made_module(clamped(0.75)), Gate("silu_glu_clamped", limit=0.75)),
        (made_module(clamped(100.0)), Gate("silu_glu_clamped", limit=100.0)),
        (made_module(oai(1.702, 7.0, True), is_concatenated=False), Gate("swiglu_oai", 1.702, 7.0)),
        (made_module(oai(1.5, 12.5, False)), Gate("swiglu_oai", 1.5, 12.5)),
    ],
)
def test_gates_and_their_numbers_are_measured(module, gate):
    found = probe_gate(module)
    assert found.kind == gate.kind
    if gate.kind in ("silu_glu_clamped", "swiglu_oai"):
        assert found.limit == gate.limit
    assert gate.kind != "swiglu_oai" or found.alpha == gate.alpha


@pytest.mark.parametrize(
    "module",
    [
        made_module(act=torch.nn.GELU()),  # by erf: not far from tanh's, but other bits of a model
        made_module(act=torch.nn.SiLU(), has_gate=False),
        made_module(act=torch.nn.ReLU()),
        made_module(lambda both: torch.nn.functional.silu(both.chunk(2, -1)[0].clamp(max=50)) * both.chunk(2, -1)[1]),
    ],
)
def test_other_activations_are_refused(module):
    with pytest.raises(StoreError, match="gives the results of none of silu_glu, "):
        probe_gate(module, "model.experts")


def test_a_layout_that_is_not_known_is_refused():
    module = made_module()
    with pytest.raises(StoreError, match="has no parameter 'gate_up_proj'"):
        ModuleExperts.of("experts", module)
    module.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 8, 4, dtype=torch.float8_e4m3fn), requires_grad=False)
    module.down_proj = torch.nn.Parameter(torch.zeros(2, 4, 4))
    with pytest.raises(StoreError, match="float8_e4m3fn.*without its quantisation"):
        ModuleExperts.of("experts", module)


# -------------------------------------------------------------------------------------------------- versions
@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"transformers": "5.17.0"}, r"needs torch 2.6 or newer, which is not installed; pip install 'trilane\[hf\]'"),
        ({"torch": "2.13.0+cpu"}, "needs transformers 5.17 or newer, which is not installed"),
        ({"torch": "2.13.0+cpu", "transformers": "5.9.1"}, "transformers 5.17 or newer, but 5.9.1 is installed"),
        ({"torch": "2.5.1", "transformers": "5.17.0"}, "torch 2.6 or newer, but 2.5.1 is installed"),
    ],
)
def test_what_is_not_there_or_too_old_is_said(versions, text):
    def version_of(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    with pytest.raises(ImportError, match=text):
        check_versions(version_of)


def test_newer_ones_are_fine():
    check_versions({"torch": "3.0.0a0+git1", "transformers": "5.17.dev0"}.__getitem__)
    with pytest.raises(ImportError, match="transformers below 5.18, but 5.24.0 is installed"):
        check_versions({"torch": "2.6.0", "transformers": "5.24.0"}.__getitem__)
