"""``trilane serve`` as clients see it: the official client against a real process, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import httpx  # noqa: E402
import openai  # noqa: E402
from cuda_backends import gpu_missing  # noqa: E402
from hf_models import build_model  # noqa: E402
from test_metrics import scraped  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from trilane.bundled_model import tiny_path  # noqa: E402
from trilane.cli import app  # noqa: E402
from trilane.errors import ClosedError, TrilaneError  # noqa: E402
from trilane.integrations.generation import open_text_model  # noqa: E402
from trilane.integrations.gguf import gguf_tokenizer  # noqa: E402
from trilane.integrations.serving import build_app, open_socket, served_name  # noqa: E402
from trilane.integrations.serving.served_model import served_tokenizer  # noqa: E402
from trilane.integrations.serving.turnstile import Turnstile  # noqa: E402

PROMPT = "And the king said unto the prophet,"
START_S, END_S = 120, 20  # for machines that are busy


class Running:
    """A server in a process of its own; ``end`` sends a signal and gives what it printed."""

    def __init__(self, *args: object, device: str = "host") -> None:
        command = [sys.executable, "-m", "trilane", "serve", *map(str, args), "--port", "0", "--device", device]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as hf_models has it here: quicker at this size
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        found = re.fullmatch(r"(\S+): (http://127\.0\.0\.1:\d+)/v1, metrics at \2/metrics\n", line)
        assert found, (line, self.process.stderr.read())
        self.name, self.url = found.groups()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def metrics(self) -> dict:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            assert answer.headers["content-type"].startswith("text/plain")
            return scraped(answer.read().decode())

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, float]:
        """Exit code, what it wrote to stderr, and seconds until it had ended."""
        began = time.monotonic()
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=END_S + 20)
        return self.process.returncode, errors, time.monotonic() - began


@pytest.fixture(scope="module")
def tiny():
    running = Running("tiny", "--slots", 4)
    try:
        yield running
    finally:
        running.client.close()
        running.process.kill()
        running.process.communicate()


@pytest.fixture(scope="module")
def wanted():
    """What transformers' own generate writes with the same model in this process, greedily."""
    model = open_text_model("tiny", slots=16, device="host")
    with model.handle as handle:
        ids, _ = model.encode([PROMPT])
        found = handle.model.generate(ids, max_new_tokens=8, do_sample=False)
    return model.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_completion_is_the_models_own_text(tiny, wanted):
    found = tiny.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    assert found.choices[0].text == wanted and found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 8 and found.model == "tiny"


def test_a_stream_gives_the_same_text_in_pieces(tiny, wanted):
    with tiny.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, stream=True
    ) as stream:
        pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == wanted and sum(map(bool, pieces)) > 3


def test_a_chat_without_a_template_goes_on_from_the_last_message(tiny, wanted):
    messages = [{"role": "system", "content": "unused"}, {"role": "user", "content": PROMPT}]
    found = tiny.client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    assert found.choices[0].message.content == wanted
    with tiny.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True
    ) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted


def test_the_newer_form_of_a_conversation(tiny, wanted):
    asked = {"model": "tiny", "input": PROMPT, "max_output_tokens": 8, "temperature": 0}
    assert tiny.client.responses.create(**asked).output_text == wanted
    with tiny.client.responses.create(**asked, stream=True) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == wanted


def test_a_temperature_counts_and_a_seed_repeats(tiny, wanted):
    def text(seed):
        options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": seed}
        return tiny.client.completions.create(**options).choices[0].text

    found = [text(seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] and len({*found, wanted}) == 3


def test_a_client_that_leaves_makes_room_for_the_next(tiny):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1000, "temperature": 0}
    tokens = "trilane_steps_total"
    for url in ("completions", "chat/completions"):
        asked = body if url == "completions" else body | {"messages": [{"role": "user", "content": PROMPT}]}
        if url != "completions":
            del asked["prompt"]
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{tiny.url}/v1/{url}", json=asked, timeout=1.5)
        began = time.monotonic()
        found = tiny.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, temperature=0)
        assert found.usage.completion_tokens == 3 and time.monotonic() - began < 15
    before = tiny.metrics()
    time.sleep(1.0)
    names = [name for name in before if tokens in str(name)]
    assert names and all(before[name] == tiny.metrics()[name] for name in names)  # nobody is written for


def test_a_text_longer_than_the_model_is_made_for_is_refused(tiny):
    with pytest.raises(openai.BadRequestError, match="max_tokens: '99999999', but it must be at most"):
        tiny.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=99999999)


def test_it_lists_its_model_and_refuses_another(tiny):
    assert [model.id for model in tiny.client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="tiny"):
        tiny.client.completions.create(model="gpt-4", prompt=PROMPT, max_tokens=1)


def test_metrics_count_what_requests_did(tiny):
    before = tiny.metrics()
    tiny.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0)
    after = tiny.metrics()
    layers, passes = 4, 4  # the prompt, and each token but the last
    assert after["trilane_steps_total", "tiny"] - before["trilane_steps_total", "tiny"] == layers * passes
    assert sum(after["trilane_lane_shards_total", lane, "tiny"] for lane in ("stream", "zero_copy", "cpu")) > 0
    assert after["process_resident_memory_bytes",] > 1e6


def test_the_example_of_the_document_runs(tiny, wanted):
    """Torch's sums, and so the words, are the processor's: here as `wanted`, in the document alike in form."""
    text = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    example, shown = re.search(r"```python\n(from openai.*?)```\n\n```\n(.*?)```", text, re.DOTALL).groups()
    code = example.replace("http://127.0.0.1:8000", tiny.url)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(wanted)
    for printed in (found.stdout, shown):
        whole, pieces = printed.strip("\n").split("\n")
        assert pieces.replace("|", "") == whole and pieces.count("|") > 10


def test_a_reset_leaves_the_model_where_it_is(tiny, wanted):
    request = urllib.request.Request(f"{tiny.url}/reset", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer) == {"status": "ok"}
    found = tiny.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    assert found.choices[0].text == wanted


def test_the_port_of_a_running_server_is_refused(tiny):
    with pytest.raises(TrilaneError, match="in use.*--port"):
        open_socket("127.0.0.1", int(tiny.url.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": ["a", "b"]}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a", "top_p": 2}, "top_p"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "role"),
        ("chat/completions", {"messages": "a"}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}]}, "no chat template"),
        ("responses", {"input": ""}, "input"),
        ("responses", {"input": "a", "max_output_tokens": 0.5}, "max_output_tokens"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(tiny, path, body, text):
    with pytest.raises(openai.BadRequestError, match=text):
        tiny.client.post(f"/{path}", body=body, cast_to=object)


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_a_body_that_is_no_json_is_told_so(tiny, kind):
    answer = httpx.post(f"{tiny.url}/v1/completions", content='{"model": ', headers={"Content-Type": kind}, timeout=30)
    assert answer.status_code == 400 and "must be a JSON object" in answer.json()["error"]["message"]


def test_there_is_no_ear(tiny):
    with pytest.raises(openai.NotFoundError, match="text only"):
        tiny.client.audio.transcriptions.create(model="tiny", file=b"RIFF")


def test_sigterm_ends_it_within_seconds_in_the_midst_of_two_long_texts(tiny):
    """The last test on this server: one text streams, another waits behind it; both end with an error."""
    tiny.metrics()
    endless = {"model": "tiny", "prompt": PROMPT, "generation_config": json.dumps({"max_new_tokens": 50_000})}
    ended = []

    def ask_whole():
        try:
            tiny.client.post("/completions", body=endless, cast_to=object)
        except openai.APIError as error:
            ended.append(error)

    waiting, began = threading.Thread(target=ask_whole), None
    with pytest.raises(openai.APIError) as streamed:
        with tiny.client.completions.create(stream=True, extra_body=endless, model="tiny", prompt=PROMPT) as stream:
            for number, _ in enumerate(stream):
                if number == 2:
                    waiting.start()
                    time.sleep(0.3)
                    began = time.monotonic()
                    tiny.process.send_signal(signal.SIGTERM)
    waiting.join()
    _, errors = tiny.process.communicate(timeout=END_S)
    assert tiny.process.returncode == 0 and time.monotonic() - began < END_S
    assert "stopping" in str(streamed.value.body)
    assert len(ended) == 1 and ended[0].status_code == 503 and "stopping" in str(ended[0])
    assert "Traceback" not in errors and "hit rate" in errors  # what its lanes did, at the end
    assert "[transformers]" not in errors and "INFO" not in errors  # after all the requests above


# --------------------------------------------------------------------------------- without a process of its own
@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model as a safetensors folder, with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("models") / "mine"
    build_model("qwen3_moe", vocab_size=6144).save_pretrained(folder)
    tokenizer = gguf_tokenizer(tiny_path())
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}<assistant>"
    tokenizer.save_pretrained(folder)
    return folder


async def asked(application, path: str, body: dict) -> dict:
    """A request to an application without a socket."""
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        answer = await client.post(path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_safetensors_folder_with_a_chat_template(checkpoint):
    model = open_text_model(str(checkpoint), slots=2, device="host")
    messages = [{"role": role, "content": f"{role} says"} for role in ("user", "assistant", "user")]
    with model.handle as handle:
        body = {"model": "mine", "messages": messages, "max_completion_tokens": 6, "temperature": 0}
        found = asyncio.run(asked(build_app(model, "mine"), "/v1/chat/completions", body))
        ids, _ = model.encode([model.chat_text(messages)])
        text = handle.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert found["usage"]["prompt_tokens"] == ids.shape[1] and found["usage"]["completion_tokens"] == len(text)
    assert found["choices"][0]["message"]["content"] == model.tokenizer.decode(text, skip_special_tokens=True)


def test_a_first_token_that_a_gguf_file_asks_for_is_put_first():
    model = open_text_model("tiny", slots=1, device="host")
    with model.handle:
        model.tokenizer.bos_token, model.tokenizer.add_bos_token = "<|endoftext|>", True
        served = served_tokenizer(model)
        ids, _ = model.encode(["hello you"])
        assert served("hello you").input_ids == ids[0].tolist() and ids[0, 0] == served.bos_token_id
        messages = [{"role": "user", "content": "hello you"}]
        chat = served.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        assert chat["input_ids"] == ids[0].tolist()
        assert model.tokenizer.chat_template is None  # the owner's is as it was


def test_a_stopped_turnstile_lets_nothing_through_and_waits_for_what_is_inside():
    class Slow(torch.nn.Module):
        def forward(self, x):
            inside.set()
            assert leave.wait(10)
            return x + 1

    inside, leave, model = threading.Event(), threading.Event(), Slow()
    turnstile, found = Turnstile(model), []
    caller = threading.Thread(target=lambda: found.append(model(torch.ones(1)).item()))
    caller.start()
    assert inside.wait(10)
    stopper = threading.Thread(target=turnstile.stop)
    stopper.start()
    stopper.join(0.2)
    assert stopper.is_alive()
    leave.set()
    stopper.join(10)
    caller.join(10)
    assert found == [2.0] and not stopper.is_alive()
    with pytest.raises(ClosedError, match="stopping"):
        model(torch.ones(1))
    turnstile.remove()
    assert model(torch.ones(1)).item() == 2.0


def test_a_pass_that_fails_leaves_the_turnstile():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise ValueError("broken")

    model = Broken()
    turnstile = Turnstile(model)
    with pytest.raises(ValueError, match="broken"):
        model(1)
    turnstile.stop()  # would wait for ever


def run(*args):
    return CliRunner().invoke(app, ["serve", *map(str, args)])


@pytest.mark.parametrize(
    ("words", "asked", "is_told"),
    [
        ([], "warning", {"error"}),
        ([], "debug", {"error", "warning", "info", "debug"}),
        (["--verbose"], "warning", {"error", "warning", "info"}),
    ],
)
def test_only_our_lines_are_printed_unless_more_is_asked_for(monkeypatch, words, asked, is_told):
    from transformers.utils import logging

    found = {}

    def serve(model, name, taken, ready, *, verbose):
        log = logging.get_logger("transformers.cli.serving.utils")
        found["told"] = {level for level in logging.log_levels if log.isEnabledFor(logging.log_levels[level])}
        found["verbose"] = verbose

    monkeypatch.setattr("trilane.integrations.serving.serve", serve)
    before = logging.get_verbosity()
    logging.set_verbosity(logging.log_levels[asked])
    try:
        result = CliRunner().invoke(app, ["serve", "tiny", "--port", "0", "--device", "host", "--slots", "99", *words])
        assert logging.get_verbosity() == logging.log_levels[asked]
    finally:
        logging.set_verbosity(before)
    assert result.exit_code == 0 and "--slots 99 is more than the model needs" in result.stderr
    levels = {"error", "warning", "info", "debug"}
    assert found["told"] & levels == is_told and found["verbose"] == bool(words)


def test_a_port_in_use_is_named_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr("trilane.integrations.generation.open_text_model", None)  # would fail
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = run("tiny", "--port", port).exception
    assert isinstance(error, TrilaneError) and f"127.0.0.1:{port}: the port is in use" in str(error)


def test_an_address_of_another_machine_is_refused():
    assert "no address of this machine" in str(run("tiny", "--host", "192.0.2.1", "--port", 0).exception)
    assert "--host no.such.host.invalid" in str(run("tiny", "--host", "no.such.host.invalid", "--port", 0).exception)


def test_no_such_model_is_named():
    error = run("no-such-model.gguf", "--port", 0).exception
    assert isinstance(error, (TrilaneError, OSError)) and "no-such-model.gguf" in str(error)


def test_without_the_extra_it_is_named(monkeypatch):
    from trilane.commands import text_extra

    monkeypatch.setattr(text_extra, "NEEDED_TO_SERVE", ("openai", "fastapi_that_is_not_there"))
    error = run("tiny").exception
    assert isinstance(error, TrilaneError) and "trilane[serve]" in str(error)
    assert "fastapi_that_is_not_there" in str(error) and "openai" not in str(error)


def test_wrong_usage():
    assert run("tiny", "--slots", 1, "--vram", "1MiB").exit_code == 2
    assert run("tiny", "--port", 70_000).exit_code == 2


@pytest.mark.parametrize(
    ("model", "name", "wanted"),
    [
        ("tiny", None, "tiny"), ("models/Qwen3-30B-A3B-Q4_K_M.gguf", None, "Qwen3-30B-A3B-Q4_K_M"),
        ("models/mine/", None, "mine"), ("tiny", "other/name", "other/name"),
    ],
)  # fmt: skip
def test_what_clients_call_a_model(model, name, wanted):
    assert served_name(model, name) == wanted


@pytest.mark.parametrize("name", ["", "a:b.gguf", "a\nb"])
def test_a_name_that_requests_cannot_use_is_refused(name):
    with pytest.raises(TrilaneError, match="--name"):
        served_name("tiny", name)


@pytest.mark.gpu
def test_on_a_gpu_text_and_metrics_come_while_it_works():
    """Metrics are read on another thread than the one that generates, so the GPU must be reached from both."""
    if gpu_missing() or not torch.cuda.is_available():
        pytest.skip(gpu_missing() or "needs a GPU that torch sees")
    running = Running("tiny", "--slots", 4, device="cuda")
    try:
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 64, "temperature": 0}
        whole = running.client.completions.create(**asked).choices[0].text
        pieces, steps = [], []
        with running.client.completions.create(**asked, stream=True) as stream:
            for chunk in stream:
                pieces.append(chunk.choices[0].text)
                steps.append(running.metrics()["trilane_steps_total", "tiny"])
        assert "".join(pieces) == whole and steps == sorted(steps) and steps[-1] > steps[0]
        code, errors, seconds = running.end()
        assert code == 0 and seconds < END_S and "Traceback" not in errors
    finally:
        running.client.close()
        running.process.kill()
        running.process.communicate()
