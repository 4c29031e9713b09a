"""An expert on its server: requests that came over the wire, to its pools; and its checkpoints."""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pymoe._errors import describe_error
from pymoe.remote import wire
from pymoe.remote.checkpoints import Checkpoint, folder_of, read_newest, try_checkpoint, write_checkpoint
from pymoe.remote.errors import RemoteExpertError
from pymoe.remote.event_loop import in_thread
from pymoe.remote.folder_lock import FolderLock
from pymoe.remote.journal import IN_PART, Applied, Journal
from pymoe.remote.restoring import check_loadable, load_exactly
from pymoe.remote.schemas import write_schema
from pymoe.runtime import ExpertBackend, QueueFull, TaskPool
from pymoe.runtime.numbered import numbered_backward_pool

logger = logging.getLogger("pymoe.remote")

_journals: weakref.WeakKeyDictionary[ExpertBackend, Journal] = weakref.WeakKeyDictionary()
"""Of every backend that was served: who takes one out of a server and into one again must know what it holds."""


class HostedExpert:
    """A backend, a pool for its keyed backward requests, and the journal of their keys.

    Raises:
        TypeError: ``backend`` is not an ExpertBackend, or its schemas cannot be described to other machines.
    """

    def __init__(self, backend: ExpertBackend, incarnation: str) -> None:
        if not isinstance(backend, ExpertBackend):
            raise TypeError(f"ExpertServer: expected an ExpertBackend to serve, got {type(backend).__name__}")
        if not wire.is_name(backend.name):
            raise ValueError(f"ExpertServer: a name has 1 to {wire.MOST_NAME} bytes, got {backend.name!r}")
        self.backend = backend
        self.name: str = backend.name
        self.journal = _journals.setdefault(backend, Journal(incarnation))
        self.journal.incarnation = incarnation
        self.keyed_pool, self._partly_applied = numbered_backward_pool(backend)
        self._names = itertools.count(1)
        info = backend.get_info()
        self._schemas = write_schema(self.name, info["forward_schema"]), write_schema(self.name, info["outputs_schema"])
        self._root: Path | None = None  # of checkpoints
        self._lock: FolderLock | None = None  # on the expert's folder, until this server has saved for the last time
        self._saved_updates: int | None = None
        self._saved_digest: int | None = None
        self._answered = self._answered_at_save = 0  # requests: they may change buffers without an update
        self._first: asyncio.Task[None] | None = None  # looks whether the state of the first update can be saved
        self._unsavable: Exception | None = None
        # A state that was taken earlier must not be written later, also where nobody waits for it any more.
        self._saving, self._writing = asyncio.Lock(), asyncio.Lock()
        self._writes: set[asyncio.Future[None]] = set()  # tasks that nobody holds may be collected

    def get_pools(self) -> tuple[TaskPool, ...]:
        """Return the pools that a runtime must serve: the backend's own, and that of keyed requests."""
        return (*self.backend.get_pools(), self.keyed_pool)

    def info(self) -> wire.ExpertInfo:
        """Return what clients must know."""
        backend = self.backend
        return wire.ExpertInfo(*self._schemas, backend.trains, backend.updates, self.keyed_pool.max_batch_size)

    # --- requests ---

    async def forward(self, request: wire.Request, tensors: Sequence[Tensor], seconds: float) -> list[Tensor]:
        """Return the tensors among the expert's outputs. A request that has not begun within ``seconds`` never runs."""
        future = admit(self.backend.forward_pool, tensors, seconds)
        try:
            leaves = await future
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise RemoteExpertError(describe_error(error)) from None
        finally:
            self._answered += 1
        return self.backend._schema.output_tensors(leaves)

    async def backward(
        self, request: wire.Request, tensors: Sequence[Tensor], seconds: float
    ) -> tuple[Sequence[Tensor], bool]:
        """Return the gradients of the inputs, from this or an earlier attempt, and whether from an earlier one.

        Raises:
            ValueError: no key.
            AppliedError: see :meth:`pymoe.remote.journal.Journal.once`.
            TypeError: the expert has a state by now that cannot be saved.
        """
        if not wire.is_name(request.client) or request.seq < 0:
            raise ValueError(f"{self.name}: a backward request needs a key: client and seq")

        def run() -> tuple[Awaitable[Applied], Callable[[], Any]]:
            if self._unsavable is not None:
                raise TypeError(f"{self.name}: what it learns would be lost: {self._unsavable}")
            rows = len(tensors[0])
            name = next(self._names) if rows > self.keyed_pool.max_batch_size else 0
            future = admit(self.keyed_pool, (*tensors, torch.full((rows,), name)), seconds)
            return self._applied(future, rows, name), future.cancel

        try:
            answer = await self.journal.once(
                request.client, request.seq, request.ack, run,
                attempt=request.attempt, incarnation=request.incarnation, age=request.age,
            )  # fmt: skip
        finally:
            self._answered += 1
        if self._root is not None and self._first is None:
            self._first = asyncio.ensure_future(self._try_first_update(self._root))
        return answer

    async def _applied(self, future: Any, rows: int, name: int) -> Applied:
        try:
            *gradients, numbers = await future
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # An update that broke off has applied what nobody knows.
            broken = getattr(error, "pymoe_may_retry", True) is False
            in_part = broken or name in self._partly_applied
            if not isinstance(error, Exception):  # SystemExit and its like would end the event loop
                error = RemoteExpertError(describe_error(error))
            return Applied(IN_PART if in_part else None, error=error)
        finally:
            self._partly_applied.discard(name)
        # Of a request of several batches the first update: a state that has seen that one holds a part of it.
        update = int(numbers.min()) if rows else self.backend.updates
        return Applied(update, [one.clone() for one in gradients])  # a view would keep the whole batch's rows

    # --- checkpoints ---

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being made: with an expert or a folder that hangs, for as long as it does."""
        return self._saving.locked() or self._writing.locked()

    @property
    def unsaved(self) -> bool:
        """Whether no checkpoint holds the expert's updates. Other changes take a look at its state: :meth:`save`."""
        return self._saved_updates != self.backend.updates

    @property
    def may_be_unsaved(self) -> bool:
        """Whether it was updated, or a request may have changed its buffers, since the last checkpoint."""
        changes = self._answered != self._answered_at_save and any(True for _ in self.backend.buffers())
        return self.unsaved or changes

    async def save(self, root: Path) -> bool:
        """Write a checkpoint; return False, without one, if the newest holds the expert as it is.

        Whoever is cancelled meanwhile leaves a checkpoint that is being written to be written.

        Raises:
            OSError: it cannot be written there.
            TypeError: the expert's state is none that can be saved; until it is, the expert is trained no more.
        """
        async with self._saving:
            try:
                saved = await self._save(root)
            except Exception as error:
                raise self._note(error, root) from None
            self._unsavable = None
            return saved

    async def _save(self, root: Path) -> bool:
        # The state first: whatever it holds was running by then, and once that has settled its keys are known.
        answered = self._answered
        state = await in_thread(self.backend.state_dict)
        updates: int = state["_extra_state"]["updates"]
        checkpoint = Checkpoint(state, updates, {})
        digest = await in_thread(lambda: checkpoint.digest)
        changed = (updates, digest) != (self._saved_updates, self._saved_digest)
        if changed:
            await self.journal.settled()
            checkpoint.keys = self.journal.keys(updates)
            write = asyncio.ensure_future(self._write(root, checkpoint))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)
            await asyncio.shield(write)
        self._answered_at_save = answered
        return changed

    async def _write(self, root: Path, checkpoint: Checkpoint) -> None:
        async with self._writing:  # first come, first served
            self._claim(root)
            await in_thread(write_checkpoint, folder_of(root, self.name), checkpoint)
            self._saved_updates, self._saved_digest = checkpoint.updates, checkpoint.digest

    async def _try_first_update(self, root: Path) -> None:
        """Look whether the state can still be saved: what an optimizer keeps often comes with its first step."""
        async with self._saving:
            try:
                await in_thread(self._try, root)
            except Exception as error:
                logger.error("%s", self._note(error, root))

    def _try(self, root: Path) -> None:
        try_checkpoint(folder_of(root, self.name), Checkpoint(self.backend.state_dict(), 0, {}))

    def _note(self, error: Exception, root: Path) -> Exception:
        """Return what to say of a checkpoint that was not written, and remember it where the state is why."""
        reason = describe_error(error).partition("\n")[0]  # behind it torch may tell its own calls in C++
        text = f"{self.name!r} cannot be saved in {folder_of(root, self.name)}: {reason}"
        if isinstance(error, OSError):
            return OSError(text)
        self._unsavable = TypeError(text)
        return TypeError(text)

    def load(self, root: Path) -> bool:
        """Load the newest checkpoint, before the expert is served; return False if there is none.

        Raises:
            RuntimeError: the state of another expert.
            ValueError: all checkpoints are damaged, another optimizer has made the newest, or the expert has updates
                that it does not hold.
            TypeError: the expert's state cannot be saved.
            OSError: checkpoints cannot be written there, or another server writes them.
        """
        try:
            self._claim(root)
        except OSError as error:
            raise self._note(error, root) from None
        try:
            return self._load(root)
        except BaseException:
            self.release()
            raise

    def _load(self, root: Path) -> bool:
        found = read_newest(folder_of(root, self.name))
        if found is not None:
            if self.backend.updates > found.updates:
                raise ValueError(
                    f"ExpertServer: {self.name!r} has seen {self.backend.updates} updates, and its newest checkpoint "
                    f"in {folder_of(root, self.name)} only {found.updates}, which would undo the others: expected a "
                    f"backend that was just made, or another folder"
                )
            load_exactly(self.backend, found.state)
            self.journal.restore(found.keys)
            self._saved_updates, self._saved_digest = found.updates, found.digest
        try:
            check_loadable(self.backend)
            self._try(root)
        except Exception as error:
            raise self._note(error, root) from None
        self._root = root
        return found is not None

    def _claim(self, root: Path) -> None:
        """Keep other servers from the expert's checkpoints."""
        if self._lock is None:
            self._lock = FolderLock(folder_of(root, self.name))

    def release(self) -> None:
        """Let another server have the expert's checkpoints: this one has loaded or saved for the last time."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def admit(pool: TaskPool, tensors: Sequence[Tensor], seconds: float) -> Any:
    """Submit a request; raises QueueFull where there is no room: its client tries again, and nobody here waits."""
    future = pool._try_submit(*tensors, timeout=seconds)
    if future is None:
        raise QueueFull(f"{pool.name}: the queue has no room")
    return future
