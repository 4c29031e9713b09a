"""Tells a rank whether other ranks of its process group have failed, and ends its waits for other ranks.

The operating system says whether a process on the same host has ended (:class:`Process`). The store of the group
contains records that all ranks read and write (:class:`GroupStore`). :func:`abort_waits` ends the waits of this
process. Over gloo it closes connections, so it also ends the waits of other ranks for this rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

# No rank sends messages with this tag or a higher one; :func:`abort_waits` waits for such messages.
ABORT_TAG = 2**30


def this_host() -> str:
    """Return an ID shared by the processes of this PID namespace since the host's last boot; "" if it is unknown."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


class Process(NamedTuple):
    """Identifies a process to other processes of its host."""

    host: str
    """The result of :func:`this_host` in that process."""
    id: int
    started: str
    """The process's start time, since its ID may be reused later. Empty if unknown."""

    @classmethod
    def own(cls) -> Process:
        """Return the identification of the current process."""
        found = _state_and_start(os.getpid())
        return cls(this_host() if found else "", os.getpid(), found[1] if found else "")

    def is_here(self) -> bool:
        """Return whether this is a process of the current host and PID namespace. If not, :meth:`has_ended` is always
        False.
        """
        return bool(self.host) and self.host == this_host()

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended and closed its files, even if it has not been reaped."""
        if not self.is_here():
            return False
        try:
            os.kill(self.id, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # a process of another user
            pass
        found = _state_and_start(self.id)
        return found is not None and (found[1] != self.started or found[0] in "ZX")


def _state_and_start(process: int) -> tuple[str, str] | None:
    """Return the state (a letter) and start time of a process of this host; None if they cannot be read."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


_NOTHING = "no record"


class GroupStore:
    """Records in the store of a process group; every rank of the group can read and write them.

    Several threads may use one object. After a call to the store has failed or timed out, the methods write nothing and
    find no records, without an error: see :attr:`lost`.

    Args:
        group: the process group.
        prefix: the prefix of the keys.
        timeout_s: the longest time, in seconds, that a call waits for the store.

    Raises:
        RuntimeError: the group has no store, or its store allows no second connection.
    """

    def __init__(self, group: dist.ProcessGroup, prefix: str, timeout_s: float) -> None:
        # Keeping this store also keeps its server alive.
        self._shared = cast("Any", group.get_group_store())
        if self._shared is None:
            raise RuntimeError("the group has no store")
        # A separate connection, since another thread's wait may block the shared one.
        self._store = dist.PrefixStore(prefix, self._shared.clone())  # type: ignore[attr-defined]
        before = self._shared.timeout
        self._store.set_timeout(timedelta(seconds=timeout_s))
        # A HashStore has no second connection: its clone() returns the store itself, so restore the timeout.
        if self._shared.timeout != before:
            self._shared.set_timeout(before)
        self.lost: str | None = None
        """The message of the first call to the store that failed; None while all calls have succeeded."""

    def write(self, key: str, record: object) -> None:
        """Write ``record`` under ``key``, and return when the store has it."""
        self._call("set", key, pickle.dumps(record))
        # Wait until the store has the record, because set() does not wait.
        self._call("check", [key])

    def write_first(self, key: str, record: object) -> Any:
        """Write ``record`` unless ``key`` has a record already; return the record that the key has now.

        If the store is lost, return ``record`` without writing it.
        """
        found = self._call("compare_set", key, "", pickle.dumps(record))
        return record if found is None else pickle.loads(found)

    def read(self, key: str) -> Any:
        """Return the record under ``key``, or None if there is none; other ranks may delete it meanwhile."""
        # For a key without a value, compare_set returns the expected value and writes nothing. get() would not do: if
        # the key is deleted after check(), it waits or returns b"".
        found = self._call("compare_set", key, _NOTHING, _NOTHING)
        return None if found is None or found == _NOTHING.encode() else pickle.loads(found)

    def delete(self, key: str) -> None:
        """Remove the record under ``key``."""
        self._call("delete_key", key)

    def _call(self, method: str, *args: Any) -> Any:
        # After the store is lost, do not call torch: it would print many warnings per call.
        if self.lost is None:
            try:
                return getattr(self._store, method)(*args)
            except RuntimeError as error:
                self.lost = str(error)
        return None


def abort_waits(groups: Iterable[dist.ProcessGroup]) -> None:
    """End every wait of this process for messages of these groups now. The groups cannot be used after that.

    gloo cannot abort a wait, but it closes all connections of a context when a wait on one of them times out: the other
    waits then raise. So this function waits a millisecond for a message that is never sent. Operations of other
    backends are aborted; those of NCCL raise nothing, but streams no longer wait for them.
    """
    for group, device in [(one, device) for one in groups for device in one._device_types]:
        backend: Any = group._get_backend(device)
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps every backend.
        backend = getattr(backend, "wrapped_pg", backend)
        if backend.name() != "gloo":
            with contextlib.suppress(RuntimeError):
                backend.abort()
            continue
        # Gloo has a context per network device; the tag of a message selects the context. Try every peer: a wait on a
        # connection that is already broken raises immediately, without closing the other connections of its context.
        contexts = max(1, len(getattr(backend.options, "_devices", ())))
        others = set(range(group.size())) - {group.rank()}
        for peer, context in itertools.product(others, range(contexts)):
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1)], peer, ABORT_TAG + context).wait(timedelta(milliseconds=1))


def is_about_connections(error: BaseException) -> bool:
    """Return whether an error comes from torch.distributed, or its message is about gloo, NCCL or a connection."""
    pattern = r"gloo|nccl|pair closure|connection (was )?(closed|reset|refused|lost)|socket"
    says_so = isinstance(error, RuntimeError) and re.search(pattern, str(error), re.I)
    return isinstance(error, dist.DistError) or bool(says_so)
