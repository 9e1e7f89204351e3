"""What ``trilane run`` does once a model is open: prompts in, streamed text out, and the comparison if wanted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import typer

from trilane.bundled_model import TINY, tiny_prompts
from trilane.commands.status_line import StatusLine
from trilane.errors import TrilaneError
from trilane.integrations.generation.decode import Step, decode, sampler
from trilane.integrations.generation.identity import all_resident, compare_steps
from trilane.integrations.generation.text_model import TextModel
from trilane.integrations.transformers import Decoder
from trilane.stats import Stats

UNFINISHED = "\ufffd"  # what a decoder gives for the first bytes of a character


class TokenText:
    """Ids as they come, text as soon as it is whole."""

    def __init__(self, model: TextModel) -> None:
        self._tokenizer, self._shown = model.tokenizer, 0
        self._ids: list[int] = []

    def add(self, token: int) -> str:
        """The text that a further token brings; often "" before a character is complete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith(UNFINISHED):
            return ""
        piece, self._shown = text[self._shown :], len(text)
        return piece


class Session:
    """One open model and how text is wanted from it."""

    def __init__(
        self,
        model: TextModel,
        max_tokens: int,
        temperature: float,
        seed: int,
        raw: bool,
        verify: bool,
        compile: bool = False,
    ) -> None:
        self.model, self.max_tokens, self.verify, self.raw = model, max_tokens, verify, raw
        self._temperature, self._seed = temperature, seed
        is_plain = temperature == 0 and not verify
        has_decoder = is_plain and model.handle.scheduler.on_gpu
        if compile and not has_decoder:
            why = "--verify compares steps that are not compiled" if verify else f"--temperature is {temperature:g}"
            why = why if model.handle.scheduler.on_gpu else "the model is on the host"
            raise TrilaneError(f"--compile: is for the likeliest tokens on a GPU, but {why}; leave it out")
        self._decoder = Decoder(model.handle, compile=compile) if has_decoder else None

    def run_prompt(self, prompt: str) -> None:
        """Print a prompt's continuation.

        Raises
        ------
        TrilaneError
            With ``verify``: the first place where it differs from the all-resident run.
        """
        text = prompt if self.raw else self.model.chat_text([{"role": "user", "content": prompt}])
        if text == prompt:
            typer.echo(prompt, nl=False)
        self.run_text(text)

    def run_text(self, text: str) -> str:
        """Print and return what the model puts behind a text that is complete."""
        shown, pieces = TokenText(self.model), list[str]()
        before, began = self.model.handle.stats(), time.perf_counter()
        with StatusLine() as line:

            def take(token: int) -> None:
                pieces.append(shown.add(token))
                typer.echo(pieces[-1], nl=False)
                sys.stdout.flush()
                line.show(status_text(before, self.model.handle.stats(), len(pieces), time.perf_counter() - began))

            self._each_token(text, take)
        typer.echo()
        if self.verify:
            found = f"verified: {len(pieces)} tokens and all their logits, bit by bit, against all-resident"
            typer.echo(found, err=True)
        return "".join(pieces)

    def _each_token(self, text: str, take: Callable[[int], None]) -> None:
        """Call ``take`` with each id as it comes, up to one that ends the text."""
        stops = self.model.stops
        if self._decoder is not None:
            ids, _ = self.model.encode([text])  # one prompt, so nothing is filled up
            self._decoder.generate(
                ids, self.max_tokens, eos_token_id=stops or None,
                on_token=lambda row: None if row[0] in stops else take(row[0]),
            )  # fmt: skip
            return
        for step in self._steps(text):
            if int(step.ids[0]) in stops:
                return
            take(int(step.ids[0]))

    def _steps(self, text: str) -> Iterator[Step]:
        """Steps of the model; with ``verify``, each one compared with the all-resident run's before it is given."""
        ids, mask = self.model.encode([text])
        handle = self.model.handle
        found = decode(handle, ids, mask, self.max_tokens, sampler(self._temperature, self._seed))
        if not self.verify:
            yield from found
            return
        with all_resident(handle) as resident:
            wanted = []
            for step in decode(resident, ids, mask, self.max_tokens, sampler(self._temperature, self._seed)):
                wanted.append(step)
                if int(step.ids[0]) in self.model.stops:
                    break
        for token, (one, other) in enumerate(zip(wanted, found, strict=False)):
            differences = compare_steps([one], [other])
            if differences:
                typer.echo()
                raise TrilaneError(f"--verify: token {token} differs: {differences[0]}")
            yield other

    def run_file(self, prompts: list[str]) -> None:
        """All prompts, one after the other."""
        for number, prompt in enumerate(prompts, 1):
            typer.echo(f"--- {number} of {len(prompts)}", err=True)
            self.run_prompt(prompt)
        if self.verify:
            typer.echo(f"{len(prompts)} of {len(prompts)} prompts: identical to all-resident", err=True)


def ask(session: Session) -> None:
    """Read prompts: all of standard input as one, or line by line from a terminal, as a chat if the model has one."""
    if not sys.stdin.isatty():
        session.run_prompt(sys.stdin.read().rstrip("\n"))
        return
    is_chat = bool(session.model.tokenizer.chat_template) and not session.raw
    typer.echo("An empty line or Ctrl-D ends.", err=True)
    messages: list[dict[str, str]] = []
    while True:
        with ExitStack() as stack:
            stack.callback(sys.stdout.flush)
            try:
                typed = input(">>> ")
            except EOFError:
                return
        if not typed:
            return
        if not is_chat:
            session.run_prompt(typed)
            continue
        messages.append({"role": "user", "content": typed})
        messages.append({"role": "assistant", "content": session.run_text(session.model.chat_text(messages))})


def status_text(before: Stats, now: Stats, num_tokens: int, seconds: float) -> str:
    """Tokens a second, hit rate and the share of the routed shards that each lane had, since ``before``."""
    shards = {name: lane.shards - before.lanes[name].shards for name, lane in now.lanes.items()}
    total = sum(shards.values()) or 1
    lanes = ", ".join(f"{name} {count / total:.0%}" for name, count in shards.items() if name != "hit")
    return f"{num_tokens} tokens, {num_tokens / max(seconds, 1e-9):.1f}/s | hits {shards['hit'] / total:.0%} | {lanes}"


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file, one a line; empty lines are passed over.

    Raises
    ------
    TrilaneError
        There are none, or it is no text.
    """
    if str(file) == TINY:
        return tiny_prompts()
    try:
        found = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        byte = f"the byte 0x{error.object[error.start]:02x} at {error.start}"
        raise TrilaneError(f"{file}: has {byte}, which is not UTF-8: give a text file, one prompt a line") from None
    if not found:
        raise TrilaneError(f"{file}: holds no prompt, but one a line is needed")
    return found
