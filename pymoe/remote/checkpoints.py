"""Checkpoints of served experts: writes and reads their files, and restores exactly the state that was saved.

A checkpoint is one file, written completely or not at all. It contains the state of an expert, and the keys of the
requests whose updates the state includes (see :mod:`pymoe.remote.journal`). The format is safetensors: the tensors of
the expert and its optimizer, and one more tensor, whose bytes are JSON with the keys and the rest of the state. Reading
a file runs no code.

A file is written under a temporary name, flushed to the disk, read back and compared, and then renamed. Each expert has
a folder that keeps the newest :data:`KEPT` files; if the newest is damaged, the one before is read. The names of the
files sort by age, even if the clock was set back or another machine wrote the previous file.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
import urllib.parse
import uuid
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from pymoe._errors import describe_error
from pymoe.remote.journal import AppliedKeys, Journal
from pymoe.remote.wire import from_tree, to_tree
from pymoe.runtime import ExpertBackend

FORMAT = 2
"""Format of new files. Files of format 1, whose JSON is in the metadata of safetensors, are read as well."""
KEPT = 2
CONTENT = "content"
"""Name of the tensor whose bytes are the JSON. As metadata, safetensors would allow only 100 MB of JSON."""
MAX_FOLDER_NAME = 200
"""Maximum length of an expert's quoted name in the name of a folder. Longer names are shortened, because file systems
accept no more than 255 characters.
"""
SUFFIX = ".safetensors"

logger = logging.getLogger("pymoe.remote")
T = TypeVar("T")

# --- files ---


@dataclass
class Checkpoint:
    """The state of an expert between two updates, and the keys of the requests whose updates the state includes."""

    state: Mapping[str, Any]
    """The result of the backend's ``state_dict()``."""
    updates: int
    keys: AppliedKeys

    @cached_property
    def encoded(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state and its modules' versions in a form for JSON, with a name in place of each tensor; and
        copies of the tensors, by name.

        Raise TypeError as :func:`write_checkpoint` does.
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
        """Return a checksum of the state; raise TypeError as :func:`write_checkpoint` does."""
        content, tensors = self.encoded
        return zlib.crc32(_json(content), _crc(tensors))


def folder_of(root: Path, name: str) -> Path:
    """Return the folder of the expert ``name``, which may be any text."""
    quoted = urllib.parse.quote(name, safe="")
    if len(quoted) > MAX_FOLDER_NAME:
        quoted = f"{quoted[: MAX_FOLDER_NAME // 2]}-{hashlib.sha256(name.encode()).hexdigest()}"
    return root / f"expert-{quoted}"


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and return its path. Delete all but the newest :data:`KEPT` checkpoints in the folder.

    Raises:
        OSError: for example, the disk is full, or the folder is not writable. The earlier checkpoints are unchanged.
        TypeError: the state contains something that is neither a dense tensor nor representable in JSON, or a tensor of
            a dtype that safetensors does not have.
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
    """Raise the error that :func:`write_checkpoint` would raise, if any. No checkpoint is changed."""
    _written(folder, checkpoint).unlink()


def _written(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint to a file with a temporary name, read it back to compare it, and return the file's path."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state, tensors = checkpoint.encoded
    content = {
        **state,
        "updates": checkpoint.updates,
        "keys": {client: [low, applied] for client, (low, applied) in checkpoint.keys.items()},
    }
    try:
        _checkpoint_of(json.loads(_json({**content, "keys": {}})), tensors)
    except ValueError as error:
        raise _not_json(error) from None
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
    except ValueError as error:  # an int has more digits than Python converts to text
        raise _not_json(error) from None


def _not_json(error: ValueError) -> TypeError:
    return TypeError(f"the state cannot be represented in JSON: {error}")


def _dense(leaf: Any, where: str) -> Tensor:
    """Return a copy of the tensor ``leaf`` that safetensors can write; raise TypeError if that is impossible."""
    from safetensors.torch import save

    if not isinstance(leaf, Tensor):
        raise TypeError(f"{where} holds a {type(leaf).__name__}: expected tensors, numbers, text and None")
    # Subclasses with their own dispatch (DTensor, MaskedTensor...) keep their values in other tensors.
    own = type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if own or leaf.layout is not torch.strided or leaf.is_meta or leaf.is_quantized or leaf.is_nested:
        kind = type(leaf).__name__ if own else "nested" if leaf.is_nested else str(leaf.layout)
        raise TypeError(f"{where} holds a tensor of {leaf.dtype}, {kind}, on {leaf.device}: expected a dense one")
    try:
        dense = leaf.detach().to("cpu").clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        save({"": dense.flatten()[:0]})  # raise here, where `where` is known, if safetensors lacks the dtype
    except Exception as error:
        reason = describe_error(error).partition("\n")[0]
        raise TypeError(f"{where} holds a tensor of {leaf.dtype}, which cannot be written ({reason})") from None
    return dense


def _compare(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise OSError unless the file contains ``tensors``."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name, expected in tensors.items():
            found = file.get_tensor(name)
            alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
            if not alike or not torch.equal(_bytes(found), _bytes(expected)):
                raise OSError(f"{path}: the file does not hold what was written to it")


def read_newest(folder: Path) -> Checkpoint | None:
    """Delete unfinished files, and return the newest undamaged checkpoint; return None if there are no checkpoints.

    Newer checkpoints that are damaged are logged and skipped.

    Raises:
        ValueError: there are checkpoints, and all are damaged.
    """
    for left in (*folder.glob(".*.part"), *folder.glob(".tmp*")):  # left by a process that was killed while writing
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
    """Return the checkpoint in a file.

    Raises:
        ValueError: the checkpoint is damaged, or has another format.
        Exception: any exception that safetensors or the system raises for a damaged file.
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
        state._metadata = versions  # without versions, modules would take the state for an old one and convert it
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
    """Flush the folder to the disk, so that the new file's name survives a crash of the system."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- states ---


def check_loadable(backend: ExpertBackend) -> None:
    """Raise TypeError if the scheduler cannot be saved, or if a tensor of the state could not be loaded again."""
    scheduler = backend.scheduler
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise TypeError(
            f"the scheduler, a {type(scheduler).__name__}, has no state_dict(): expected one that can be saved"
        )
    for name, tensor in backend.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and _is_expanded(tensor):
            raise TypeError(f"{name} is an expanded tensor, which cannot be loaded: expected its clone()")


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def load_exactly(backend: ExpertBackend, state: Mapping[str, Any]) -> None:
    """Load a state, without changing the types of the saved optimizer state.

    torch's optimizers cast the state of each parameter to the parameter's dtype: masks and counters to float, complex
    numbers to real ones, and float32 moments of bfloat16 parameters to fewer bits. This function undoes these casts,
    unless the expert has other dtypes than the saved expert, or the backend's optimizer overrides ``load_state_dict``
    or ``state_dict``.

    Raises:
        ValueError: the state was saved with another kind of optimizer, without some options of the backend's, so the
            first update would fail. The state has been loaded all the same.
        RuntimeError: the state does not match the expert's modules.
    """
    opt, saved = backend.opt, state["_extra_state"].get("opt")
    options = [set(group) for group in getattr(opt, "param_groups", ())]
    backend.load_state_dict(state)
    for expected, group in zip(options, getattr(opt, "param_groups", ()), strict=False):
        if lost := sorted(map(str, expected - set(group))):
            raise ValueError(
                f"{backend.name!r}: expected a checkpoint made with the optimizer {type(opt).__name__}, got one made "
                f"with another, which has no {', '.join(lost)}: use that one, or remove the checkpoints"
            )
    if opt is None or saved is None or _dtypes(backend.state_dict(keep_vars=True)) != _dtypes(state):
        return
    if (type(opt).load_state_dict, type(opt).state_dict) != (Optimizer.load_state_dict, Optimizer.state_dict):
        return  # overridden methods may not cast, or may keep the state elsewhere
    for number, loaded in opt.state_dict()["state"].items():  # the values are the optimizer's own dicts, not copies
        for key, value in saved["state"].get(number, {}).items():
            loaded[key] = _as_saved(value, loaded.get(key))


def _dtypes(state: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {name: one.dtype for name, one in state.items() if isinstance(one, Tensor)}


def _as_saved(saved: Any, loaded: Any) -> Any:
    """Undo torch's casts: return the value ``saved`` with its original types, on the device of ``loaded``."""
    if isinstance(saved, Tensor):
        if not isinstance(loaded, Tensor):
            return saved
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _as_saved(one, loaded.get(key)) for key, one in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)) and len(saved) == len(loaded):
        return type(saved)(map(_as_saved, saved, loaded))
    return saved


# --- folders ---

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """A lock on a folder, so that no two servers use it: each would save states without the updates of the other.

    Making the object creates the folder if necessary and locks it. The lock ends with :meth:`release`, when the object
    is collected, or when the process ends. On a file system without locks, like some network file systems, a warning
    is logged and nothing is locked.

    Raises:
        OSError: another server has locked the folder, in this process or another one; or the folder cannot be created
            or opened.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                os.close(descriptor)
                reason = "another server, which has not drained, has its checkpoints there"
                raise BlockingIOError(error.errno, reason, str(folder)) from None
            logger.warning("%s cannot be locked (%s): make sure that no two servers use it", folder, error.strerror)
        self._descriptor = descriptor
        self._release = weakref.finalize(self, _unlock, descriptor)
        _held.add(self)

    def release(self) -> None:
        """Unlock the folder, so that other servers can use it."""
        self._release()


def _unlock(descriptor: int) -> None:
    try:
        with suppress(OSError):  # raised by file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # close() does not unlock while a forked child has the folder open
    finally:
        os.close(descriptor)


def _leave_to_parent() -> None:
    """In a forked child, close the inherited descriptors: they would keep the folders locked after the parent's end."""
    for one in list(_held):
        if one._release.detach() is not None:
            os.close(one._descriptor)


os.register_at_fork(after_in_child=_leave_to_parent)

# --- one served expert ---


class ExpertCheckpoints:
    """Saves and loads the checkpoints of one served expert.

    Args:
        backend: the expert.
        journal: the keys of its requests.
        root: the folder of the server's checkpoints.

    Attributes:
        answered: number of requests that have ended so far. Forward requests count, too: they may change buffers.
        cannot_save: the error that says why the state cannot be saved, from the last attempt; None if it can.
    """

    def __init__(self, backend: ExpertBackend, journal: Journal, root: Path) -> None:
        self._backend, self._journal = backend, journal
        self._folder = folder_of(root, backend.name)
        self.answered = 0
        self.cannot_save: Exception | None = None
        self._lock: FolderLock | None = None  # locked from load() or a save until release()
        self._saved_updates: int | None = None
        self._saved_digest: int | None = None
        self._answered_at_save = 0
        self._first_update: asyncio.Task[None] | None = None
        # The second lock is needed because a write continues when its save() is cancelled: the next save() must not
        # write a newer state before that write has ended.
        self._saving, self._writing = asyncio.Lock(), asyncio.Lock()
        self._writes: set[asyncio.Future[None]] = set()  # asyncio itself keeps only weak references to tasks

    @property
    def saving(self) -> bool:
        """True while the state is being tested, read or written, even if that hangs."""
        return self._saving.locked() or self._writing.locked()

    @property
    def outdated(self) -> bool:
        """True if there is no checkpoint or the newest one lacks an update. :meth:`save` detects other changes, too."""
        return self._saved_updates != self._backend.updates

    @property
    def may_be_outdated(self) -> bool:
        """True if :attr:`outdated` is true, or a request since the last save may have changed buffers."""
        changes = self.answered != self._answered_at_save and any(True for _ in self._backend.buffers())
        return self.outdated or changes

    # --- saving ---

    async def save(self) -> bool:
        """Write a checkpoint, unless the newest one contains the present state; return whether one was written.

        If the caller is cancelled, a checkpoint that is being written is completed all the same.

        Raises:
            OSError: the checkpoint cannot be written.
            TypeError: the expert's state cannot be saved. Until a later save succeeds, the server does not train the
                expert.
        """
        async with self._saving:
            try:
                saved = await self._save()
            except Exception as error:
                raise self._note(error) from None
            self.cannot_save = None
            return saved

    async def _save(self) -> bool:
        # Take the state first. All updates in it have begun by now, so once the requests that are running now have
        # ended, the journal has the keys of all these updates.
        answered = self.answered
        state = await in_thread(self._backend.state_dict)
        updates: int = state["_extra_state"]["updates"]
        checkpoint = Checkpoint(state, updates, {})
        digest = await in_thread(lambda: checkpoint.digest)
        changed = (updates, digest) != (self._saved_updates, self._saved_digest)
        if changed:
            await self._journal.settled()
            checkpoint.keys = self._journal.keys(updates)
            write = asyncio.ensure_future(self._write(checkpoint))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)
            await asyncio.shield(write)
        self._answered_at_save = answered
        return changed

    async def _write(self, checkpoint: Checkpoint) -> None:
        async with self._writing:  # writes wait here in the order in which their states were taken
            self._claim()
            await in_thread(write_checkpoint, self._folder, checkpoint)
            self._saved_updates, self._saved_digest = checkpoint.updates, checkpoint.digest

    def updated(self) -> None:
        """Test in the background whether the state can be saved. Call this after an update; only the first call does
        anything, because optimizers create their state in the first update.
        """
        if self._first_update is None:
            self._first_update = asyncio.ensure_future(self._try_first_update())

    async def _try_first_update(self) -> None:
        async with self._saving:
            try:
                await in_thread(self._try)
            except Exception as error:
                logger.error("%s", self._note(error))

    def _try(self) -> None:
        try_checkpoint(self._folder, Checkpoint(self._backend.state_dict(), 0, {}))

    def _note(self, error: Exception) -> Exception:
        """Return an error like ``error`` whose message also names the expert and the folder.

        If ``error`` is not an OSError, the state itself cannot be saved: set ``cannot_save``.
        """
        reason = describe_error(error).partition("\n")[0]  # torch may append a C++ stack trace
        text = f"{self._backend.name!r} cannot be saved in {self._folder}: {reason}"
        if isinstance(error, OSError):
            return OSError(text)
        self.cannot_save = TypeError(text)
        return TypeError(text)

    # --- loading ---

    def load(self) -> bool:
        """Lock the folder and load the newest checkpoint, before the expert is served; return False if there is none.

        Raises:
            RuntimeError: the state in the checkpoint does not match the expert's modules.
            ValueError: all checkpoints are damaged; or the newest one was saved with another kind of optimizer, or
                after fewer updates than the expert has made.
            TypeError: the expert's state cannot be saved.
            OSError: checkpoints cannot be written to the folder, or another server uses the folder.
        """
        try:
            self._claim()
        except OSError as error:
            raise self._note(error) from None
        try:
            return self._load()
        except BaseException:
            self.release()
            raise

    def _load(self) -> bool:
        backend = self._backend
        found = read_newest(self._folder)
        if found is not None:
            if backend.updates > found.updates:
                raise ValueError(
                    f"ExpertServer: {backend.name!r} has seen {backend.updates} updates, and its newest checkpoint in "
                    f"{self._folder} only {found.updates}, which would undo the others: expected a new backend, or "
                    f"another folder"
                )
            load_exactly(backend, found.state)
            self._journal.restore(found.keys)
            self._saved_updates, self._saved_digest = found.updates, found.digest
        try:
            check_loadable(backend)
            self._try()
        except Exception as error:
            raise self._note(error) from None
        return found is not None

    def _claim(self) -> None:
        """Lock the folder of the expert's checkpoints, unless this object has locked it already."""
        if self._lock is None:
            self._lock = FolderLock(self._folder)

    def release(self) -> None:
        """Unlock the folder, so that another server can use the expert's checkpoints."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function(*arguments)`` on a new daemon thread, and return the result.

    A function that never returns neither delays other calls, as in an executor with few threads, nor prevents the
    process from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def complete(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():  # the future is done already if the caller was cancelled
            set_outcome(outcome)

    def call() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            loop.call_soon_threadsafe(complete, done.set_exception, error)
        else:
            loop.call_soon_threadsafe(complete, done.set_result, result)

    threading.Thread(target=call, name="pymoe-remote-call", daemon=True).start()
    return await done
