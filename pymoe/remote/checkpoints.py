"""Checkpoints of served experts: state and keys of applied requests in one file, which is there whole or not at all.

A file is in the safetensors format: the tensors of expert and optimizer, and as JSON, in the bytes of one more tensor,
everything else of the state and the keys of :class:`~pymoe.remote.journal.Journal`. Reading one runs no code. It is
written under another name, compared with what it should hold, brought to the disk, and renamed. Each expert has a
folder, in which the newest :data:`KEPT` files stay; a damaged file is passed over for the one before. Names sort by
age, also where the clock was set back or another machine wrote the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import urllib.parse
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pymoe._errors import describe_error
from pymoe.remote.journal import Keys
from pymoe.remote.trees import from_tree, to_tree

FORMAT = 2
"""Files of format 1, which have their JSON in the metadata of safetensors, are read as well."""
KEPT = 2
CONTENT = "content"
"""The name of the tensor whose bytes are the JSON. Metadata may have 100 MB at most, and keys may have more."""
LONGEST_FOLDER = 200
"""Characters of a quoted name; file systems take names of 255."""
SUFFIX = ".safetensors"

logger = logging.getLogger("pymoe.remote")


@dataclass
class Checkpoint:
    """An expert between two updates."""

    state: Mapping[str, Any]
    """What ``state_dict()`` of its backend returned."""
    updates: int
    keys: Keys

    @cached_property
    def told(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The state as what JSON can hold, and copies of its tensors by the names that stand for them there.

        Raises what :func:`write_checkpoint` does.
        """
        tensors: dict[str, Tensor] = {}

        def write(leaf: Any, where: str) -> str:
            name = f"{len(tensors)}"
            tensors[name] = _dense(leaf, where)
            return name

        versions = getattr(self.state, "_metadata", None)
        return {"state": to_tree(self.state, write), "versions": to_tree(versions, write)}, tensors

    @cached_property
    def digest(self) -> int:
        """A number that tells the state from one of other content. Raises what :func:`write_checkpoint` does."""
        content, tensors = self.told
        return zlib.crc32(_json(content), _crc(tensors))


def folder_of(root: Path, name: str) -> Path:
    """Return the folder of the expert ``name``, which can be any text."""
    quoted = urllib.parse.quote(name, safe="")
    if len(quoted) > LONGEST_FOLDER:
        quoted = f"{quoted[: LONGEST_FOLDER // 2]}-{hashlib.sha256(name.encode()).hexdigest()}"
    return root / f"expert-{quoted}"


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint, remove those that it replaces, and return its path.

    Raises:
        OSError: no room, or no right to write there; the earlier checkpoints are as they were.
        TypeError: the state holds something that is neither a dense tensor nor JSON, or of a dtype that safetensors
            does not have; the message says where.
    """
    temporary = _written(folder, checkpoint)
    try:
        newest = max((int(one.name.partition("-")[0]) for one in _newest_first(folder)), default=0)
        path = folder / f"{max(time.time_ns(), newest + 1):020d}-{checkpoint.updates}{SUFFIX}"
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(folder)
    for old in _newest_first(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def try_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Raise what :func:`write_checkpoint` would; the folder's checkpoints stay as they are."""
    _written(folder, checkpoint).unlink()


def _written(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint under a name that is none of a checkpoint, and return its path."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state, tensors = checkpoint.told
    content = {
        **state,
        "updates": checkpoint.updates,
        "keys": {client: [low, applied] for client, (low, applied) in checkpoint.keys.items()},
    }
    try:
        _checkpoint_of(json.loads(_json({**content, "keys": {}})), tensors)
    except ValueError as error:
        raise _not_told(error) from None
    tensors = {**tensors, CONTENT: torch.frombuffer(bytearray(_json(content)), dtype=torch.uint8)}
    metadata = {"format": str(FORMAT), "crc32": str(_crc(tensors))}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = folder / f".{uuid.uuid4().hex}.part"
    try:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"{temporary}: {error}") from None
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        _compare(temporary, tensors)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _json(content: dict[str, Any]) -> bytes:
    try:
        return json.dumps(content).encode()
    except ValueError as error:  # an int of more digits than Python writes
        raise _not_told(error) from None


def _not_told(error: ValueError) -> TypeError:
    return TypeError(f"the state cannot be told by JSON: {error}")


def _dense(leaf: Any, where: str) -> Tensor:
    """Return a copy of ``leaf`` that safetensors can write, or raise TypeError."""
    from safetensors.torch import save

    if not isinstance(leaf, Tensor):
        raise TypeError(f"{where} holds a {type(leaf).__name__}: expected tensors, numbers, text and None")
    # A tensor of a class with a dispatch of its own (DTensor, MaskedTensor...) keeps its numbers somewhere else.
    own = type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if own or leaf.layout is not torch.strided or leaf.is_meta or leaf.is_quantized or leaf.is_nested:
        kind = type(leaf).__name__ if own else "nested" if leaf.is_nested else str(leaf.layout)
        raise TypeError(f"{where} holds a tensor of {leaf.dtype}, {kind}, on {leaf.device}: expected a dense one")
    try:
        dense = leaf.detach().to("cpu").clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        save({"": dense.flatten()[:0]})  # a dtype that safetensors does not have: here its place is known
    except Exception as error:
        reason = describe_error(error).partition("\n")[0]
        raise TypeError(f"{where} holds a tensor of {leaf.dtype}, which cannot be written ({reason})") from None
    return dense


def _compare(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise OSError unless the file holds ``tensors``."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name, expected in tensors.items():
            found = file.get_tensor(name)
            alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
            if not alike or not torch.equal(_bytes(found), _bytes(expected)):
                raise OSError(f"{path}: what was read back is not what was written")


def read_newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, with a line in the log for each damaged one; None if there are none.

    Raises:
        ValueError: there are checkpoints, and all of them are damaged: to begin anew would replace them.
    """
    for left in (*folder.glob(".*.part"), *folder.glob(".tmp*")):  # of a writer that was killed: ours, or safetensors'
        with suppress(OSError):
            left.unlink()
    found = _newest_first(folder)
    for path in found:
        try:
            return read_checkpoint(path)
        except Exception as error:
            logger.error("%s is damaged, and passed over: %s: %s", path, type(error).__name__, error)
    if found:
        raise ValueError(f"{folder}: expected a checkpoint that can be read, got {len(found)} that are damaged")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Return what a file holds.

    Raises:
        ValueError: it is damaged, or of another format.
        Exception: what reading a damaged file makes safetensors or the system raise.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.get("format") == "1":
        content = metadata["pymoe.remote"].encode()
        crc = _crc_of_format_1(content, tensors)
    elif metadata.get("format") == str(FORMAT):
        content = tensors[CONTENT].numpy().tobytes()
        crc = _crc(tensors)
    else:
        raise ValueError(f"{path}: expected a checkpoint of format {FORMAT}, got {metadata.get('format')!r}")
    if str(crc) != metadata.get("crc32"):
        raise ValueError(f"{path}: the content is not what was written")
    return _checkpoint_of(json.loads(content), tensors)


def _checkpoint_of(content: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    state: Any = OrderedDict(from_tree(content["state"], lambda name: tensors[name]))
    versions = from_tree(content.get("versions"), lambda name: tensors[name])
    if versions is not None:
        state._metadata = versions  # without them a module takes its own state for that of an older version
    keys = {
        str(client): (int(low), [int(one) for one in applied]) for client, (low, applied) in content["keys"].items()
    }
    return Checkpoint(state, int(content["updates"]), keys)


def _newest_first(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob(f"{'[0-9]' * 20}-*{SUFFIX}"), reverse=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _crc(tensors: dict[str, Tensor]) -> int:
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode(), found)
        found = zlib.crc32(_bytes(tensors[name]).numpy(), found)  # type: ignore[arg-type]
    return found


def _crc_of_format_1(content: bytes, tensors: dict[str, Tensor]) -> int:
    found = zlib.crc32(content)
    for name in sorted(tensors):
        found = zlib.crc32(_bytes(tensors[name]).numpy(), found)  # type: ignore[arg-type]
    return found


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
