"""Checkpoints of served experts: state and keys of applied requests in one file, which is there whole or not at all.

A file is in the safetensors format: the tensors of expert and optimizer, and in its metadata, as JSON, everything else
of the state and the keys of :class:`~pymoe.remote.journal.Journal`. Reading one runs no code. It is written under
another name, brought to the disk, and renamed. Each expert has a folder, in which the newest :data:`KEPT` files stay; a
damaged file is passed over for the one before. Names sort by age, also where the clock was set back or another machine
wrote the one before.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pymoe.remote.journal import Keys
from pymoe.remote.trees import from_tree, to_tree

FORMAT = 1
KEPT = 2
LONGEST_FOLDER = 200
"""Characters of a quoted name; file systems take names of 255."""
SUFFIX = ".safetensors"

logger = logging.getLogger("pymoe.remote")


class Checkpoint(NamedTuple):
    """An expert between two updates."""

    state: dict[str, Any]
    """What ``state_dict()`` of its backend returned."""
    updates: int
    keys: Keys


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
        TypeError: the state holds something that is neither a tensor nor JSON.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}

    def write(leaf: Any) -> str:
        name = f"{len(tensors)}"
        tensors[name] = _tensor(leaf).detach().to("cpu").clone(memory_format=torch.contiguous_format)
        return name

    content = json.dumps(
        {
            "state": to_tree(checkpoint.state, write),
            "updates": checkpoint.updates,
            "keys": {client: [low, applied] for client, (low, applied) in checkpoint.keys.items()},
        }
    )
    metadata = {"pymoe.remote": content, "format": str(FORMAT), "crc32": str(_crc(content, tensors))}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = folder / f".{uuid.uuid4().hex}.part"
    newest = max((int(one.name.partition("-")[0]) for one in _newest_first(folder)), default=0)
    path = folder / f"{max(time.time_ns(), newest + 1):020d}-{checkpoint.updates}{SUFFIX}"
    try:
        save_file(tensors, temporary, metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(folder)
    for old in _newest_first(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def check_state(name: str, state: dict[str, Any]) -> None:
    """Raise TypeError if the state of the expert ``name`` holds what :func:`write_checkpoint` does not take."""
    try:
        to_tree(state, lambda leaf: str(_tensor(leaf).dtype))
    except TypeError as error:
        raise TypeError(f"ExpertServer: {name!r} cannot be saved in checkpoints: {error}") from None


def _tensor(leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise TypeError(f"a state to save holds a {type(leaf).__name__}: expected tensors, numbers, text and None")
    return leaf


def read_newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, with a line in the log for each damaged one; None if there are none.

    Raises:
        ValueError: there are checkpoints, and all of them are damaged: to begin anew would replace them.
    """
    for left in folder.glob(".*.part"):  # of a writer that was killed
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
    if metadata.get("format") != str(FORMAT):
        raise ValueError(f"{path}: expected a checkpoint of format {FORMAT}, got {metadata.get('format')!r}")
    if str(_crc(metadata["pymoe.remote"], tensors)) != metadata.get("crc32"):
        raise ValueError(f"{path}: the content is not what was written")
    content = json.loads(metadata["pymoe.remote"])
    state = from_tree(content["state"], lambda name: tensors[name])
    keys = {
        str(client): (int(low), [int(one) for one in applied]) for client, (low, applied) in content["keys"].items()
    }
    return Checkpoint(state, int(content["updates"]), keys)


def _newest_first(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob(f"{'[0-9]' * 20}-*{SUFFIX}"), reverse=True)


def _crc(content: str, tensors: dict[str, Tensor]) -> int:
    found = zlib.crc32(content.encode())
    for name in sorted(tensors):
        if tensors[name].numel():
            flat = tensors[name].resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            array: Any = flat.numpy()
            found = zlib.crc32(array, found)
    return found


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
