"""``trilane run`` and ``trilane identity`` as users run them: streams, comparisons that can fail, what is refused."""

import dataclasses
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from hf_models import build_model  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from trilane.bundled_model import tiny_path, tiny_prompts  # noqa: E402
from trilane.cli import app  # noqa: E402
from trilane.commands.status_line import StatusLine  # noqa: E402
from trilane.errors import ModelFileError, TrilaneError  # noqa: E402
from trilane.integrations.generation import open_text_model  # noqa: E402
from trilane.integrations.generation import session as run_session  # noqa: E402
from trilane.traces.trace_file import read_trace  # noqa: E402
from trilane.verify import verify  # noqa: E402

PROMPT = "And the king said unto the prophet,"


@pytest.fixture(autouse=True)
def torch_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*args, **options):
    return CliRunner().invoke(app, [*map(str, args)], **options)


def text_of(*args, **options):
    result = run(*args, **options)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_a_prompt_goes_on_and_its_text_is_the_same_for_any_slots():
    few, many = (
        text_of("run", "tiny", "--prompt", PROMPT, "--max-tokens", 24, "--slots", slots).stdout for slots in (1, 16)
    )
    assert few == many and few.startswith(PROMPT) and len(few) > len(PROMPT) + 24


@pytest.mark.parametrize(("args", "wanted"), [((), 1), (("--torch-threads", 2), 2)])
def test_threads_of_torch(args, wanted):
    torch.set_num_threads(2)
    text_of("run", "tiny", "--prompt", PROMPT, "--max-tokens", 1, *args)
    assert torch.get_num_threads() == wanted


def test_what_is_piped_in_is_the_prompt():
    assert text_of("run", "tiny", "--max-tokens", 4, input=f"{PROMPT}\n").stdout.startswith(PROMPT)


def test_drawn_tokens_follow_the_seed():
    one, again, other = (
        text_of("run", "tiny", "--prompt", PROMPT, "--max-tokens", 16, "--temperature", 0.8, "--seed", seed).stdout
        for seed in (1, 1, 2)
    )
    assert one == again != other


class ChatTokenizer:
    """A tokenizer with a template, over the bundled model's."""

    chat_template = "{{ messages }}"

    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __call__(self, text):
        return self.real(text)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"[{one['role']}] {one['content']}\n" for one in messages)


def test_typed_lines_make_one_conversation(monkeypatch, capsys):
    opened = open_text_model("tiny", slots=4, device="host")
    chat, asked = dataclasses.replace(opened, tokenizer=ChatTokenizer(opened.tokenizer)), []
    lines = iter(["first", "second", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with opened.handle:
        session = run_session.Session(chat, 4, 0.0, 0, False, False)
        real = session.run_text
        monkeypatch.setattr(session, "run_text", lambda text: (asked.append(text), real(text))[1])
        run_session.ask(session)
    answer = asked[1].removeprefix("[user] first\n[assistant] ").removesuffix("\n[user] second\n")
    assert asked[0] == "[user] first\n" and answer and f"{answer}\n" in capsys.readouterr().out


def test_the_decoder_that_gpus_use_gives_the_same_text(monkeypatch):
    """Here its steps run one operation at a time, over the same static cache."""
    plain = text_of("run", "tiny", "--prompt", PROMPT, "--max-tokens", 20).stdout
    real = run_session.Session.__init__

    def init(self, model, *args):
        real(self, model, *args)
        self._decoder = run_session.Decoder(model.handle)

    monkeypatch.setattr(run_session.Session, "__init__", init)
    assert text_of("run", "tiny", "--prompt", PROMPT, "--max-tokens", 20).stdout == plain


def test_compile_is_refused_where_no_decoder_runs():
    result = run("run", "tiny", "--prompt", PROMPT, "--max-tokens", 2, "--device", "host", "--compile")
    assert result.exit_code == 1 and "--compile: is for the likeliest tokens on a GPU" in str(result.exception)


def test_verify_says_so_and_stats_show_all_lanes():
    result = text_of("run", "tiny", "--prompt", PROMPT, "--max-tokens", 12, "--slots", 2, "--verify", "--stats")
    assert "verified: 12 tokens and all their logits" in result.stderr
    assert all(lane in result.stderr for lane in ("hit", "stream", "zero_copy", "cpu"))


def test_verify_fails_loudly_at_the_first_difference(monkeypatch):
    """Another logit in one step of the run under test."""
    real, calls = run_session.decode, []

    def decode(handle, *args):
        calls.append(handle)
        for token, step in enumerate(real(handle, *args)):
            if len(calls) == 2 and token == 5:  # the second run is the one that is verified
                step.logits[0, 17] += 1e-3
            yield step

    monkeypatch.setattr(run_session, "decode", decode)
    result = run("run", "tiny", "--prompt", PROMPT, "--max-tokens", 12, "--verify")
    assert isinstance(result.exception, TrilaneError)
    assert "token 5 differs" in str(result.exception) and "1 of 6144 logits" in str(result.exception)
    assert "verified" not in result.stderr


def test_a_file_of_prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(tiny_prompts()[:2]) + "\n\n")
    result = text_of("run", "tiny", "--prompts", tmp_path / "prompts.txt", "--max-tokens", 3, "--verify")
    assert result.stdout.count("\n") >= 2 and "2 of 2 prompts: identical" in result.stderr
    (tmp_path / "empty.txt").write_text("\n")
    assert "holds no prompt" in str(run("run", "tiny", "--prompts", tmp_path / "empty.txt").exception)


def test_routing_is_recorded_and_its_plans_verify(tmp_path):
    text_of("run", "tiny", "--prompt", PROMPT, "--max-tokens", 8, "--slots", 4, "--record", tmp_path / "run.trace")
    trace = read_trace(tmp_path / "run.trace")
    assert trace.meta.num_experts == (16,) * 4
    found = verify(trace)
    assert found.plans >= 8 * 4 and not found.differences


def test_a_checkpoint_of_transformers(tmp_path):
    from trilane.integrations.gguf import gguf_tokenizer

    build_model("qwen3_moe", vocab_size=6144).save_pretrained(tmp_path)
    gguf_tokenizer(tiny_path()).save_pretrained(tmp_path)
    result = text_of("run", tmp_path, "--prompt", PROMPT, "--max-tokens", 4, "--slots", 2, "--verify")
    assert result.stdout.startswith(PROMPT) and "verified" in result.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("run", "tiny", "--prompt", "a", "--prompts", "tiny"), "one of --prompt and --prompts"),
        (("run", "tiny", "--prompt", "a", "--slots", "1", "--vram", "1MiB"), "one of --slots and --vram"),
        (("run", "tiny", "--slots", "four"), "'four' must be a whole number, 0 or more: give one such as 8"),
        (("run", "tiny", "--max-tokens", "9" * 20), "must be a whole number, at most 2147483647: give one such as 128"),
        (("run", "tiny", "--seed", "-1"), "'-1' must be a whole number, 0 or more"),
        (("run", "tiny", "--temperature", "nan"), "'nan' must be a number from 0"),
        (("run", "tiny", "--torch-threads", "9" * 11), "must be a whole number, at most 1024: give one such as 2"),
        (("run", "tiny", "--device", "tpu"), "'tpu' is no device to choose here: use auto, host or cuda"),
        (("identity", "--device", "tpu"), "'tpu' is no device to choose here: use auto, host or cuda"),
        (("serve", "tiny", "--port", "99999"), "'99999' must be a whole number, at most 65535: give one such as 8000"),
    ],
)
def test_wrong_usage(args, text):
    result = run(*args)
    assert result.exit_code == 2 and text in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--slots", 99), "--slots 99 is more than the model needs: slots for all 64 experts, 16 a layer, are used"),
        (("--vram", "1GiB"), "--vram 1GiB is more than the model needs: slots for every expert, are used"),
        (("--slots", 16), ""),
        (("--vram", "2MiB"), ""),
    ],
)
def test_more_slots_than_experts_are_told(args, told):
    result = text_of("run", "tiny", "--prompt", PROMPT, "--max-tokens", 1, "--device", "host", *args)
    assert result.stderr == (f"trilane: {told}\n" if told else "")


@pytest.mark.parametrize("command", [("run", "tiny", "--prompt", PROMPT), ("identity",)])
def test_a_text_longer_than_the_model_is_made_for_is_refused(command):
    error = run(*command, "--max-tokens", 1025, "--device", "host").exception
    assert isinstance(error, ModelFileError) and "--max-tokens 1,025 is more than the 1,024" in str(error)


def test_what_is_no_model_is_refused(tmp_path):
    assert isinstance(run("run", tmp_path, "--prompt", "a").exception, ModelFileError)
    refused = run("run", "tiny", "--prompt", "a", "--format", "q8_0").exception
    assert "used as they are" in str(refused)


def test_without_the_extra_it_is_named(monkeypatch):
    from trilane.commands import text_extra

    monkeypatch.setattr(text_extra, "NEEDED", ("torch_that_is_not_there",))
    result = run("run", "tiny", "--prompt", "a")
    assert isinstance(result.exception, TrilaneError) and "trilane[hf]" in str(result.exception)


def test_the_example_of_the_document_runs():
    text = (Path(__file__).parent.parent / "docs" / "run.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "[]"


def test_identity_prints_twenty_of_twenty():
    result = text_of("identity", "--quick", "--max-tokens", 6)
    assert "20 of 20 prompts identical to all-resident under all 8 settings" in result.stdout


def test_the_status_line_stays_in_the_last_row(monkeypatch):
    leader, follower = pty.openpty()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((40, 24)))
    with open(follower, "w", buffering=1) as stream, StatusLine(stream) as line:
        line.show("7 tokens, 3.5/s | hits 50% | stream 20%, zero_copy 10%, cpu 20%")
        line.show("dropped, since it comes too soon")
    shown = ""
    while "\x1b[r" not in shown:
        shown += os.read(leader, 4096).decode()
    os.close(leader)
    assert "\x1b[1;23r" in shown and "\x1b[24;1H" in shown and "\x1b[r" in shown
    assert "7 tokens, 3.5/s | hits 50% | stream" in shown and "dropped" not in shown
    assert "cpu 20%" not in shown  # cut to the terminal's width


def test_no_status_line_where_no_terminal_is(capsys):
    with StatusLine() as line:
        line.show("nothing")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nope.gguf"], "there is no such file or folder"),
        (["Tiny"], "the bundled model is 'tiny'"),
        (["tiny", "--policy", "typo.yaml"], "typo.yaml"),
        (["tiny", "--tokenizer", "empty"], "no tokenizer can be read there"),
        (["tiny", "--tokenizer", "nope"], "--tokenizer nope: there is no such folder"),
        (["tiny", "--prompts", "binary"], "binary: has the byte 0xff at 1, which is not UTF-8"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "typo.yaml").write_text("cach:\n  slots: 3\n")
    (tmp_path / "binary").write_bytes(b"a\xff")
    prompt = [] if "--prompts" in arguments else ["--prompt", "x"]
    result = run("run", *arguments, *prompt, "--device", "host")
    assert result.exit_code == 1 and isinstance(result.exception, TrilaneError) and text in str(result.exception)
