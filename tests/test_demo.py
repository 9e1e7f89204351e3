"""The demo on a small model: the bundled routing, all lanes, and a verdict that can fail."""

import dataclasses

import pytest

from trilane import demo
from trilane.shared_cores import sharing_text
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


@pytest.mark.parametrize(
    ("workers", "cpus", "ratio", "told"),
    [
        (2, 2, 2.5, "2 workers of the CPU lane, the link's thread and the device's are 4 threads on 2 CPUs."),
        (1, 1, 1.01, "1 worker of the CPU lane, the link's thread and the device's are 3 threads on 1 CPU."),
        (2, 2, 0.9, None),
        (2, 4, 2.5, None),
    ],
)
def test_shared_cores_are_told_where_they_are_the_reason(workers, cpus, ratio, told):
    found = sharing_text(workers, cpus, ratio)
    assert found is told if told is None else "since they share cores here: " + told in found


@pytest.mark.parametrize("played", [{}, demo.PLAYED])
def test_the_demo_says_why_all_lanes_are_slow(played, capsys):
    """Six times the best lane, on a machine of two CPUs; played lanes sleep, so there it is no reason."""
    trace = bundled_trace()
    store, options = demo.make_store(trace, 96, 96), {"cache": {"fraction": 1.0}, "host_device": dict(played)}
    run = demo.run_conversation("all resident", store, trace, 1, options)
    run = dataclasses.replace(run, num_workers=2, num_cpus=2)
    slow = dataclasses.replace(run, stats=dataclasses.replace(run.stats, step_us=6 * run.stats.step_us))
    assert demo._print_verdict([run, run, slow])
    assert ("4 threads on 2 CPUs" in capsys.readouterr().out) == (not played)
    assert demo._print_verdict([run, slow, run])
    assert "share cores" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--slots", "8"], "'8' must be a number from 0 to 1: give one such as 0.375"),
        (["--tokens", "0"], "'0' must be a whole number, 1 or more: give one such as 96"),
        (["--text-tokens", "many"], "'many' must be a whole number, 1 or more"),
        (["--hidden", "100"], "100 must be a multiple of 32: give 128"),
    ],
)
def test_wrong_numbers_of_the_demo_are_told(args, text, capsys):
    with pytest.raises(SystemExit) as ended:
        demo.main(args)
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_the_text_is_the_same_over_every_lane(capsys):
    pytest.importorskip("torch", reason="needs torch")
    assert demo._run_text(12)
    text = capsys.readouterr().out
    assert text.count(" identical") == 4 and "FAILED" not in text
    assert "And the king said unto the prophet," in text


def test_the_text_demo_fails_on_a_difference(capsys, monkeypatch):
    pytest.importorskip("torch", reason="needs torch")
    from trilane.integrations.generation import text_demo

    real, runs = text_demo.decode, []

    def decode(handle, *args):
        runs.append(handle)
        for step in real(handle, *args):
            step.logits[0, 0] += 1.0 if len(runs) == 4 else 0.0  # warming up, all resident, stream, zero-copy
            yield step

    monkeypatch.setattr(text_demo, "decode", decode)
    assert not text_demo.run_text_demo(4)
    (wrong,) = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert wrong.startswith("zero-copy alone") and "token 0" in wrong


def test_without_the_extra_the_text_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(demo, "missing_for_text", lambda: ["torch"])
    assert demo._run_text(4)
    assert "trilane[hf]" in capsys.readouterr().out
