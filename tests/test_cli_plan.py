"""`trilane plan` as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from config_cases import GPT_OSS_20B, QWEN3_30B, write_config
from model_files import gguf_bytes, gguf_experts, random_experts, trunk
from numba import config
from test_cli import run, run_here

needs_compiled = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")


@pytest.fixture
def gguf(tmp_path):
    formats = {"gate": "q4_k", "up": "q4_k", "down": "q6_k"}
    tensors = gguf_experts(0, random_experts(np.random.default_rng(0), 8, 256, 512), formats) | trunk(0)
    keys = {"qwen3moe.block_count": 1, "qwen3moe.expert_used_count": 2}
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf_bytes(tensors, keys))
    return path


@pytest.fixture
def model(tmp_path):
    return write_config(tmp_path, QWEN3_30B)


TRACE = str(Path(__file__).parent.parent / "benchmarks" / "data" / "gptoss20b_160conv.trace")
ROOM = ("--ram", "64GiB", "--vram", "10GiB")


@needs_compiled
def test_a_plan_says_what_fits_where_the_bytes_go_and_how_fast(model):
    shown = run("plan", str(model), *ROOM, "--context", "4096").stdout
    for text in (
        "30.53 billion parameters", "128 of 2048 x 768, q4_k", "16.31", "q4_k: config.json names none",
        "10.74  as --vram says", "rtx3090-ddr4 (the default; see --machine)", "times are modelled",
        "uniform, ASSUMED routing", "skewed, ASSUMED routing", "here: ", "upper bounds", "it fits: slots for",
    ):  # fmt: skip
        assert text in shown
    assert max(map(len, shown.splitlines())) < 200 and "\x1b" not in shown


@needs_compiled
def test_json_has_everything(model):
    args = ("plan", str(model), *ROOM, "--machine", "h200-host", "--reserve", "1GiB", "--json")
    found = json.loads(run(*args).stdout)
    assert found["schema"] == 1 and found["fits"] is True and found["shortages"] == []
    layers, memory = found["model"]["layers"], found["memory"]
    assert len(layers) == 48 and layers[47]["experts_nbytes"] == 128 * layers[0]["expert_nbytes"]
    assert sum(layer["experts_nbytes"] for layer in layers) == found["model"]["store_nbytes"]
    assert memory["vram"] == {"free_nbytes": 10 << 30, "source": "as --vram says"}
    assert memory["reserve_nbytes"] == 1 << 30 and memory["num_slots"] == memory["room_nbytes"] // memory["slot_nbytes"]
    speed = found["speed"]
    assert speed["machine"]["name"] == "h200-host" and all(one["is_assumed"] for one in speed["routings"])
    here = [row for row in speed["by_slots"] if row["num_slots"] == memory["num_slots"]]
    assert [row["routing"] for row in here] == ["uniform", "skewed"]
    assert here[0]["vram_nbytes"] <= 10 << 30 and here[0]["tokens_a_second_with_trunk"] > 0


@needs_compiled
def test_the_bundled_conversation_is_gpt_oss_routing(tmp_path):
    path = write_config(tmp_path, GPT_OSS_20B)
    shown = run("plan", str(path), *ROOM, "--slots", "8").stdout
    assert "recorded, routing: 240 tokens of gpt-oss-20b" in shown and "as --slots says" in shown
    one = json.loads(run("plan", str(path), *ROOM, "--trace", TRACE, "--json").stdout)
    (routing,) = one["speed"]["routings"]
    assert routing["name"] == "recorded" and routing["about"] == "the first 2,048 of 51,488 tokens of gpt-oss-20b"


def test_what_does_not_fit_is_exit_code_1_with_what_would_help(model):
    shown = run("plan", str(model), "--ram", "8GiB", "--vram", "10GiB", "--no-speed", expect=1).stdout
    assert "DOES NOT FIT: experts in host memory: 7.72 GB too much. What would help: " in shown
    found = json.loads(run("plan", str(model), *ROOM, "--slots", "128", "--no-speed", "--json", expect=1).stdout)
    assert found["fits"] is False and found["speed"] is None
    assert found["shortages"][0]["what"] == "slots in device memory"


def test_more_slots_than_experts_are_told(model):
    found = json.loads(
        run("plan", str(model), "--ram", "64GiB", "--vram", "40GiB", "--slots", "500", "--no-speed", "--json").stdout
    )
    told = "--slots 500 is more than the model needs: slots for all 6,144 experts, 128 a layer, are used"
    assert told in found["notes"]
    assert found["memory"]["experts_a_layer"] == 128


def test_a_named_machine_lends_its_memory(gguf):
    found = json.loads(run("plan", str(gguf), "--machine", "rtx5090-ddr5", "--no-speed", "--json").stdout)
    assert found["memory"]["vram"] == {"free_nbytes": 32 << 30, "source": "all of rtx5090-ddr5's"}
    assert found["memory"]["kv_nbytes"] is None and "add it to --reserve" in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["/nowhere"], 1, "'/nowhere': cannot be opened"),
        (["/nowhere/config.json"], 1, "cannot be read (No such file or directory)"),
        (["{model}", "--format", "q4k"], 2, "did you mean 'q4_k'"),
        (["{model}", "--vram", "10G"], 2, "'10G' must be a number of bytes"),
        (["{model}", "--reserve", "much"], 2, "'much' must be a number of bytes"),
        (["{model}", "--context", "0"], 2, "'0' must be a whole number, 1 or more: give one such as 8192"),
        (["{model}", "--vram", "16"], 2, "'16' is 16 bytes, too few for a memory: write the unit, such as 16GiB"),
        ([TRACE], 1, "is no model but a routing trace: trilane replay takes it"),
        (["{text}"], 1, "is no model but a text file; pass a .gguf file"),
        (["{odd}"], 1, "is no model but a file of no kind that is known here"),
        (["{model}", "--machine", "mine"], 1, "machine 'mine': unknown"),
        (["{model}", "--trace", "/nowhere.trace"], 1, "No such file"),
        (["{model}", "--trace", TRACE], 1, "24 layers of 32 experts, but"),
        (["{dense}"], 1, "a dense model has no experts to schedule"),
        (["{cut}"], 1, "copy it again"),
        (["{empty}"], 1, "holds no .gguf file, no .safetensors file and no config.json"),
    ],
)
def test_mistakes_are_answered_in_a_line(model, gguf, tmp_path, args, code, text):
    names = {name: tmp_path / name for name in ("dense", "empty")}
    for folder in names.values():
        folder.mkdir()
    write_config(names["dense"], QWEN3_30B, num_experts=None)
    (tmp_path / "text").write_text("# A model\n")
    (tmp_path / "odd").write_bytes(bytes(range(64)))
    names |= {name: tmp_path / name for name in ("text", "odd")}
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:-9000])
    result = run_here("plan", *(arg.format(model=model, cut=cut, **names) for arg in args), expect=code)
    assert text in " ".join(result.stderr.replace("│", " ").split()) and not result.stdout


def test_the_bundled_model_has_a_name_here_too():
    result = run("plan", "tiny", "--json", "--no-speed")
    assert result.returncode == 0 and json.loads(result.stdout)["fits"] is True
