"""``trilane serve`` as clients see it: the official client against a real process, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import openai  # noqa: E402
from hf_models import build_model  # noqa: E402
from test_metrics import scraped  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from trilane.bundled_model import tiny_path  # noqa: E402
from trilane.cli import app  # noqa: E402
from trilane.errors import ClosedError, TrilaneError  # noqa: E402
from trilane.integrations.generation import open_text_model  # noqa: E402
from trilane.integrations.serving import open_socket, served_name  # noqa: E402
from trilane.integrations.serving.served_model import served_tokenizer  # noqa: E402
from trilane.integrations.serving.turnstile import Turnstile  # noqa: E402

PROMPT = "And the king said unto the prophet,"
START_S, END_S = 120, 10


class Running:
    """A server in a process of its own; ``end`` sends a signal and gives what it printed."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-m", "trilane", "serve", *map(str, args), "--port", "0", "--device", "host"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
        found = handle.model.generate(ids, max_new_tokens=12, do_sample=False)
    return model.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_completion_is_the_models_own_text(tiny, wanted):
    found = tiny.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    assert found.choices[0].text == wanted and found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 12 and found.model == "tiny"


def test_a_stream_gives_the_same_text_in_pieces(tiny, wanted):
    with tiny.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stream=True
    ) as stream:
        pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == wanted and sum(map(bool, pieces)) > 3


def test_a_chat_without_a_template_goes_on_from_the_last_message(tiny, wanted):
    messages = [{"role": "system", "content": "unused"}, {"role": "user", "content": PROMPT}]
    found = tiny.client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert found.choices[0].message.content == wanted
    with tiny.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True
    ) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted


def test_a_temperature_counts_and_a_seed_repeats(tiny, wanted):
    def text(seed):
        options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": seed}
        return tiny.client.completions.create(**options).choices[0].text

    found = [text(seed) for seed in (1, 1, 2, 3)]
    assert found[0] == found[1] and len({*found, wanted}) > 2


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


def test_a_reset_leaves_the_model_where_it_is(tiny, wanted):
    request = urllib.request.Request(f"{tiny.url}/reset", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer) == {"status": "ok"}
    found = tiny.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    assert found.choices[0].text == wanted


def test_the_port_of_a_running_server_is_refused(tiny):
    with pytest.raises(TrilaneError, match="in use.*--port"):
        open_socket("127.0.0.1", int(tiny.url.rpartition(":")[2]))


def test_sigterm_ends_it_within_seconds_in_the_midst_of_two_long_texts(tiny):
    """The last test on this server: one text streams, another waits behind it; both end with an error."""
    ended = []

    def ask_whole():
        try:
            tiny.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=50_000, temperature=1, seed=5)
        except openai.APIError as error:
            ended.append(error)

    waiting = threading.Thread(target=ask_whole)
    with pytest.raises(openai.APIError):
        with tiny.client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=50_000, stream=True, extra_body={"generation_config": ENDLESS}
        ) as stream:
            for number, _ in enumerate(stream):
                if number == 2:
                    waiting.start()
                    time.sleep(0.2)
                    tiny.process.send_signal(signal.SIGTERM)
                    began = time.monotonic()
    waiting.join()
    _, errors = tiny.process.communicate(timeout=END_S)
    assert tiny.process.returncode == 0 and time.monotonic() - began < END_S
    assert len(ended) == 1 and "stopping" in str(ended[0])
    assert "Traceback" not in errors and "hit rate" in errors  # what its lanes did, at the end
