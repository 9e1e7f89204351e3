"""The demo on a small model: the bundled routing, all lanes, and a verdict that can fail."""

import dataclasses

from trilane import demo
from trilane.traces.trace_import import bundled_trace


def test_bundled_trace_is_a_real_conversation():
    trace = bundled_trace()
    ids, weights = trace.tokens()
    assert ids.shape == weights.shape == (240, 24, 4) and trace.meta.num_experts == (32,) * 24
    assert trace.meta.licence == "Apache-2.0" and "GPT-OSS" in trace.meta.source
    assert ids.max() < 32
    assert (0 < weights).all() and (abs(weights.sum(-1) - 1) < 0.02).all()


def test_demo_runs_and_finds_the_bits_identical(capsys):
    assert demo.main(["--tokens", "2", "--hidden", "96", "--own-speed", "--no-text"]) == 0
    text = capsys.readouterr().out
    assert "bit-identical" in text and "best single lane" in text and "the machine's own" in text
    for lane in ("hit", "stream", "zero_copy", "cpu"):
        assert lane in text


def test_demo_says_what_is_played(capsys):
    assert demo.main(["--tokens", "1", "--hidden", "96", "--no-text"]) == 0
    assert "PLAYED" in capsys.readouterr().out


def test_verdict_fails_on_one_different_output(capsys):
    trace = bundled_trace()
    store = demo.make_store(trace, 96, 96)
    run = demo.run_conversation("all resident", store, trace, 1, {"cache": {"fraction": 1.0}})
    other = dataclasses.replace(run, name="all lanes", digest="0" * 32)
    assert demo._print_verdict([run, run, run])
    assert not demo._print_verdict([run, run, other])
    assert "FAILED" in capsys.readouterr().out
