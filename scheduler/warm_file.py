"""The file of a warm start: one for each model and machine in the user's cache folder, whole or not there.

A head of 32 bytes (magic, version, CRC-32 of the rest, bytes once unpacked), then a zlib stream of arrays and a few
values. Nothing in it is believed: a file that is damaged, of another version, model or machine is refused with the
reason, and what it claims is checked before anybody uses it (warm_start.py).
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs

from trilane.config import Config
from trilane.errors import ConfigError, Problem, TraceError
from trilane.expert import Geometry
from trilane.profile import Machine
from trilane.profile_cache import file_word, machine_name
from trilane.store import ExpertStore
from trilane.traces.block_file import pack_arrays, unpack_arrays
from trilane.warm_start import HotSet, Unusable, check_hot_set
from trilane.whole_file import replace_file

MAGIC = b"trilane warm"
VERSION = 2
HEAD = struct.Struct("<12sIIQ4x")
MAX_NBYTES = 1 << 26
LEVEL = 1  # of zlib: past passes are noise to it, the rest packs well at any level
SAMPLES, SAMPLE_NBYTES = 8, 32  # of each expert's bytes, for a model's name


@dataclass(frozen=True)
class WarmFile:
    """Where the hot set of a model on a machine is kept.

    Attributes
    ----------
    path : Path
    model, machine : str
        What the file must be of: `model_digest` and `profile_cache.machine_name`.
    is_ours : bool
        It lies in our cache folder, which is made where there is none; a folder that a user names is not.
    """

    path: Path
    model: str
    machine: str
    is_ours: bool = True

    def load(self, geometry: Geometry) -> HotSet | None:
        """What was saved; None where there is no file.

        Raises
        ------
        Unusable
        """
        try:
            if not self.path.exists():
                return None
            if not self.path.is_file():  # reading a pipe could wait for ever
                raise Unusable("it is no regular file")
            with open(self.path, "rb") as file:
                data = file.read(MAX_NBYTES + 1)
        except OSError as error:
            raise Unusable(f"it cannot be read ({error.strerror or error})") from None
        return decode(data, geometry, self.model, self.machine)

    def save(self, hot: HotSet) -> None:
        """Put it in place of what is there, if that is a file of a warm start.

        Raises
        ------
        OSError
        """
        if self.path.exists() and not self._may_be_replaced():
            raise FileExistsError(errno.EEXIST, "what is there is no file of a warm start", str(self.path))
        if self.is_ours:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, encode(hot, self.model, self.machine))

    def _may_be_replaced(self) -> bool:
        if not self.path.is_file():
            return False
        with open(self.path, "rb") as file:
            return file.read(len(MAGIC)) in (MAGIC, b"")


def warm_file(config: Config, store: ExpertStore, machine: Machine) -> WarmFile:
    """The file that a configuration names, or that of the model and machine in the user's cache folder.

    Raises
    ------
    ConfigError
        The configuration names a file in no folder: a slip would leave a file where nobody looks for it.
    """
    named = config.warm_start.path
    if named is not None and not os.path.isdir(named.parent):
        rule = f"is {str(named)!r}, but its folder does not exist: make it, or name another file."
        raise ConfigError([Problem("warm_start.path", rule)])
    model, name = model_digest(store), machine_name(machine)
    label = "experts" if store.model is None else store.model.path.stem
    usual = f"{file_word(label)[:60]}-{model[:16]}-{name[:150]}.warm"
    folder = Path(platformdirs.user_cache_dir("trilane")) / "warm"
    return WarmFile(named or folder / usual, model, name, is_ours=named is None)


def model_digest(store: ExpertStore) -> str:
    """A name for a store's experts: layouts, formats and gates, and samples of each expert's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for layer in store.layers:
        layout, gate = layer.layout, layer.gate
        formats = [fmt.name if fmt is not None else "" for fmt in (layout.gate, layout.up, layout.down)]
        shape = (layer.num_experts, layout.hidden, layout.intermediate, layout.has_bias, layer.stride)
        digest.update(repr((shape, formats, gate.kind, gate.alpha, gate.limit)).encode())
        experts = store.arena.view(layer.offset, layer.num_experts * layer.stride).reshape(layer.num_experts, -1)
        starts = np.linspace(0, max(0, layer.stride - SAMPLE_NBYTES), SAMPLES).astype(np.int64)
        columns = np.minimum((starts[:, None] + np.arange(SAMPLE_NBYTES)).ravel(), layer.stride - 1)
        digest.update(experts[:, columns].tobytes())
    return digest.hexdigest()


def encode(hot: HotSet, model: str, machine: str) -> bytes:
    """A hot set as it stands in a file."""
    values = {"model": model, "machine": machine, "half_life_steps": hot.half_life_steps, "profile": hot.profile}
    arrays: dict[str, np.ndarray] = {"resident": np.packbits(hot.is_resident), "worth": hot.worth, "past": hot.past}
    if hot.factors is not None:
        arrays["factors"] = hot.factors
    payload = pack_arrays(values, arrays)
    stored = zlib.compress(payload, LEVEL)
    return HEAD.pack(MAGIC, VERSION, zlib.crc32(stored), len(payload)) + stored


def decode(data: bytes, geometry: Geometry, model: str, machine: str) -> HotSet:
    """A file's bytes as a hot set, checked.

    Raises
    ------
    Unusable
    """
    values, arrays = _unpack(data)
    for what, name, wanted in (("model", values.get("model"), model), ("machine", values.get("machine"), machine)):
        if name != wanted:
            raise Unusable(f"it is of another {what} ({str(name)[:80]!r}, and here is {wanted!r})")
    half_life, profile = values.get("half_life_steps"), values.get("profile")
    if not isinstance(half_life, float) or not isinstance(profile, str):
        raise Unusable("its values are of other types")
    shards = int(geometry.first_shard[-1])
    bits = _array(arrays, "resident", np.dtype(np.uint8), 1)
    if bits.size != -(-shards // 8):
        raise Unusable("its shards are not those of the model")
    hot = HotSet(
        is_resident=np.unpackbits(bits, count=shards).astype(np.bool_),
        worth=_array(arrays, "worth", np.dtype(np.float64), 1),
        half_life_steps=half_life,
        past=_array(arrays, "past", np.dtype(np.uint32), 3),
        factors=_array(arrays, "factors", np.dtype(np.float64), 1) if "factors" in arrays else None,
        profile=profile,
    )
    check_hot_set(hot, geometry)
    return hot


def _unpack(data: bytes) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    if len(data) < HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise Unusable("it is no file of a warm start")
    _, version, crc, nbytes = HEAD.unpack_from(data)
    if version != VERSION:
        raise Unusable(f"it is of version {version}, but this release reads version {VERSION}")
    if len(data) > MAX_NBYTES or nbytes > MAX_NBYTES or zlib.crc32(memoryview(data)[HEAD.size :]) != crc:
        raise Unusable("it is damaged (its checksum does not fit)")
    try:
        unpacker = zlib.decompressobj()
        payload = unpacker.decompress(memoryview(data)[HEAD.size :], nbytes + 1)
        if len(payload) != nbytes:
            raise Unusable("it is damaged (it has another length than it says)")
        return unpack_arrays(payload)
    except (zlib.error, TraceError):
        raise Unusable("it is damaged (its content does not fit its own description)") from None


def _array(arrays: dict[str, np.ndarray], name: str, kind: np.dtype, dimensions: int) -> np.ndarray:
    found = arrays.get(name)
    if found is None or found.dtype != kind or found.ndim != dimensions:
        raise Unusable(f"{name} in it is missing, or of another type")
    return found
