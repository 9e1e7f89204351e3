"""A model that text goes into and comes out of: what ``trilane run`` opens, a GGUF file or a checkpoint's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from trilane.bundled_model import TINY, tiny_path
from trilane.errors import ModelFileError
from trilane.integrations.gguf import gguf_tokenizer, load_gguf
from trilane.integrations.transformers import OffloadedModel, load
from trilane.readers.finder import open_model
from trilane.readers.model_config import read_model_config
from trilane.settings.effective_config import load_config
from trilane.store import ExpertStore
from trilane.store_fill import Progress

SHARD_NEURONS = 256  # of a slot
SMALL_HIDDEN = 1024  # up to it, threads of torch cost more than they bring


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer.

    Attributes
    ----------
    name : str
        As it was asked for.
    handle : OffloadedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    """

    name: str
    handle: OffloadedModel
    tokenizer: Any

    def encode(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask, both int64 (texts, tokens), shorter texts filled up on the left.

        Raises
        ------
        ModelFileError
            A text that has no token.
        """
        rows = [self.tokenizer(text).input_ids for text in texts]
        if getattr(self.tokenizer, "add_bos_token", False) and self.tokenizer.bos_token_id is not None:
            bos = self.tokenizer.bos_token_id
            rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
        if any(not row for row in rows):
            raise ModelFileError(f"{self.name}: a prompt gives no token, but at least one is needed; write some text")
        return padded(rows, self.tokenizer.pad_token_id or 0)

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as the model wants it; the last message as it is, for a model without a chat template."""
        if not self.tokenizer.chat_template:
            return messages[-1]["content"]
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a text, prompt included, that the model is made for; None where its configuration says nothing."""
        return getattr(self.handle.model.config, "max_position_embeddings", None)

    def check_length(self, tokens: int) -> None:
        """Refuse a text that is longer than the model is made for.

        Raises
        ------
        ModelFileError
        """
        most = self.most_tokens
        if most is not None and tokens > most:
            raise ModelFileError(
                f"{self.name}: --max-tokens {tokens:,} is more than the {most:,} that the model is made for, prompt "
                f"included; give {most} at most"
            )

    @property
    def stops(self) -> frozenset[int]:
        """Ids of tokens that end a text."""
        ends = [self.tokenizer.eos_token_id, self.handle.model.config.eos_token_id]
        ends += [getattr(self.handle.model.generation_config, "eos_token_id", None)]
        flat = [one for end in ends for one in (end if isinstance(end, list) else [end])]
        return frozenset(one for one in flat if one is not None)


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids as one tensor, with its mask; filled up on the left."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def open_text_model(
    name: str,
    *,
    slots: int | None = None,
    options: Mapping[str, Any] | None = None,
    policy: Path | None = None,
    device: str = "auto",
    formats: str | None = None,
    tokenizer: Path | None = None,
    store: ExpertStore | None = None,
    progress: Progress | str | None = None,
) -> TextModel:
    """Open a model for text.

    Parameters
    ----------
    name : str
        A GGUF file, a folder of a GGUF model or of a safetensors checkpoint, or "tiny" for the bundled model.
    slots : int, optional
        Slots for so many experts of each layer; for all of a layer that has fewer.
    options : mapping, optional
        Options of the configuration that go before all else.
    policy : Path, optional
        A configuration file.
    device : str
        "host", "cuda" or "auto".
    formats : str, optional
        What a checkpoint's experts are quantised to; None: as they are.
    tokenizer : Path, optional
        A folder with a tokenizer of transformers, in place of the model's own.
    store : ExpertStore, optional
        The experts of the GGUF file, if they were loaded before.
    progress : callable or "auto", optional
        As for :meth:`trilane.ExpertStore.from_gguf`.

    Raises
    ------
    ModelFileError, StoreError, ConfigError, DeviceError, MemoryError
    """
    path = tiny_path() if name == TINY else Path(name)
    own = path if tokenizer is None else tokenizer
    arguments: dict[str, Any] = {section: dict(values) for section, values in (options or {}).items()}
    if open_model(path).kind == "gguf":
        if formats is not None:
            raise ModelFileError(f"{path}: a GGUF file's experts are used as they are; leave out --format")
        store = ExpertStore.from_gguf(path, progress=progress) if store is None else store
        if slots is not None:
            shards = sum(min(slots, layer.num_experts) * layer.layout.num_shards for layer in store.layers)
            arguments.setdefault("cache", {})["slots"] = shards
        with quiet_transformers():
            handle = load_gguf(path, store=store, device=device, config=load_config(policy, arguments=arguments))
        found = gguf_tokenizer(path) if tokenizer is None else _read_tokenizer(own)
    else:
        if slots is not None:
            arguments.setdefault("cache", {})["slots"] = _slots_of_checkpoint(path, slots)
        with quiet_transformers():
            handle = load(
                _folder(path), formats=formats, device=device, config=load_config(policy, arguments=arguments),
                dtype=torch.float32 if device == "host" or not torch.cuda.is_available() else torch.bfloat16,
            )  # fmt: skip
        found = _read_tokenizer(_folder(own))
    handle.model.eval()
    return TextModel(name, handle, found)


def set_torch_threads(model: TextModel, wanted: int | None) -> int:
    """Set how many threads torch's own operations use in this process.

    Parameters
    ----------
    model : TextModel
    wanted : int, optional
        None: one for a small model on the host, where they would take turns with the workers on the same cores at each
        of many short operations; as torch has it otherwise.

    Returns
    -------
    int
        How many there are now.
    """
    is_small = model.handle.model.config.hidden_size <= SMALL_HIDDEN and not model.handle.scheduler.on_gpu
    if wanted is not None or is_small:
        torch.set_num_threads(wanted or 1)
    return torch.get_num_threads()


def _read_tokenizer(folder: Path) -> Any:
    """A tokenizer of transformers.

    Raises
    ------
    ModelFileError
        There is none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)  # a name is no reason to ask the network
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelFileError(
            f"{folder}: no tokenizer can be read there ({reason[:120]}); give a folder with tokenizer.json by "
            "--tokenizer"
        ) from None


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _slots_of_checkpoint(path: Path, slots: int) -> int:
    """Slots for so many experts a layer, by the checkpoint's config.json."""
    config = read_model_config(_folder(path) / "config.json")
    shards = -(-config.intermediate // SHARD_NEURONS)
    return sum(min(slots, layer.num_experts) * shards for layer in config.layers)


@contextmanager
def quiet_transformers(*, verbose: bool = False) -> Iterator[None]:
    """Without transformers' bars and notes, which would stand among ours; its errors are shown.

    Whoever asked it to tell more keeps that: by ``TRANSFORMERS_VERBOSITY=info`` or its own functions.

    Parameters
    ----------
    verbose : bool
        Let it tell what it does, too.
    """
    before, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    if verbose:
        transformers_logging.set_verbosity(min(before, transformers_logging.INFO))
    elif before >= transformers_logging.WARNING:
        transformers_logging.set_verbosity(max(before, transformers_logging.ERROR))
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()
