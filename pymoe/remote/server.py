"""A server that makes the experts of this process available to clients on other machines."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from pymoe._common.names import explain_arguments
from pymoe._common.seconds import check_seconds
from pymoe.remote import encodings, wire
from pymoe.remote.checkpoints import ExpertCheckpoints
from pymoe.remote.security import PORT, TLS, addresses_of, check_address, check_server, held_for_binding, why_not_free
from pymoe.remote.service import ExpertEntry, Service
from pymoe.runtime import ExpertBackend, Runtime
from pymoe.runtime.parameters import optimized

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("pymoe.remote")

CHECK_SIGNALS_S = 1.0
"""Maximum number of seconds until :meth:`ExpertServer.run` notices a signal."""
LAST_REPLIES_S = 1.0
"""Seconds for which calls may continue after everything has been saved."""
PATIENCE_S = 5.0
"""Maximum number of seconds for which an expert that hangs delays the checkpoints of others, or the end of the server;
for the latter, ``grace`` if that is longer."""
MAX_CALLS = 8192
"""The maximum number of calls at a time, including watches; further calls are refused with ``QueueFull``."""
PORT_TRIES = 8
"""For port 0: the number of ports that are tried to find a port that is free at every address of the host."""
OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_READ),
    ("grpc.max_send_message_length", wire.MAX_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.so_reuseport", 0),
    # Refuse compressed messages: a small one may grow a thousandfold when it is decompressed.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Clients ping the server while they wait for an answer. Do not disconnect those that ping often.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


T = TypeVar("T")


class ExpertServer:
    """Serves experts to clients on other machines, which connect to it with :func:`pymoe.remote.connect`.

    ::

        with pymoe.remote.ExpertServer([backend], "127.0.0.1:7000") as server:
            server.wait()

    The server has its own :class:`~pymoe.runtime.Runtime`, which batches the requests of all clients and of this
    process. A request never begins after the deadline that its client has set, and is removed from the queue if the
    client disconnects. A backward request is applied at most once, even if its client sends it repeatedly, and even if
    the server is killed and restarts from its checkpoints.

    **Checkpoints.** A checkpoint contains the state of an expert, and the keys of the requests whose updates the state
    includes. A server that was killed restarts from the newest checkpoints: the updates of about the last
    ``save_every`` seconds are lost, even if clients have received answers. :meth:`drain` and the end of the ``with``
    block save the present state, or raise (after an exception in the block, errors of saving are only logged). The
    constructor and :meth:`add` test whether the state of an expert can be saved, and the server tests it again after
    the expert's first update. If it cannot be saved, further backward requests to the expert are refused with
    TypeError.

    Args:
        backends: a backend or several; :meth:`add` adds others. No other Runtime may serve them.
        address: ``HOST:PORT``, with port 0 for any free one; or ``unix:PATH``. The server listens at every address of
            this machine that a name such as ``localhost`` has, and the port must be free at each. An address that other
            machines can reach needs ``tls``, and a ``token`` or ``TLS(ca=)``.
        tls: the server's certificate, and the authorities for clients' certificates.
        token: the token that clients must send; without one, everybody who can connect may train.
        checkpoints: the folder of the checkpoints; None: no checkpoints. When an expert is added, its newest checkpoint
            is loaded. Servers may share a folder if no two of them have an expert of the same name.
        save_every: seconds between checkpoints; 0: save only in :meth:`drain`, :meth:`save` and :meth:`remove`.
        workers: number of threads that run batches; it must exceed the number of experts that may hang at a time. None:
            one for each expert, at least two.
        grace: seconds that current requests have left when the server drains.

    Attributes:
        address: the address at which the server listens, with the actual port once it has started.
        runtime: the server's Runtime, for statistics.
        stuck: true if an expert hung when the server drained. Its thread would keep the process from ending.
        counts: number of calls by outcome: ``forward``, ``backward``, ``repeated`` (backward requests that an earlier
            attempt had applied), ``failed``, ``malformed``, ``shed`` (refused with QueueFull), ``unauthenticated``; and
            number of checkpoints: ``saved``, ``save_failed``.

    Raises:
        ValueError: other machines can reach ``address``, and encryption or a check of clients is missing; or two
            experts have the same name. With ``checkpoints`` also: experts share parameters, buffers or an optimizer,
            which two checkpoints would save at different times; or the checkpoints of an expert are all damaged, were
            saved with another kind of optimizer, or have fewer updates than the backend.
        TypeError: a backend is not an ExpertBackend, its schemas cannot be described to other machines, or a time is
            not a number. With ``checkpoints`` also: a state cannot be saved. It may contain dense tensors of the dtypes
            that safetensors has, numbers, text and None, in lists, tuples and dicts.
        OSError: the folder ``checkpoints`` is not writable, or another server has an expert of the same name there.
        RuntimeError: the newest checkpoint of an expert does not match its modules.

    Example:
        >>> import pymoe.remote
        >>> expert = pymoe.ExpertBackend("expert", torch.nn.Linear(8, 8), None, args_schema=[pymoe.BatchTensorProto(8)])
        >>> with pymoe.remote.ExpertServer(expert, "127.0.0.1:0") as server:  # port 0: any free one
        ...     with pymoe.remote.connect(server.address) as there:
        ...         print(list(there.info().experts))
        ['expert']
    """

    @explain_arguments(host=PORT, port=PORT, listen_on="address", num_workers="workers", checkpoint_dir="checkpoints")
    def __init__(
        self,
        backends: ExpertBackend | Iterable[ExpertBackend],
        address: str = "127.0.0.1:0",
        *,
        tls: TLS | None = None,
        token: str | None = None,
        checkpoints: str | Path | None = None,
        save_every: float = 60.0,
        workers: int | None = None,
        grace: float = 10.0,
    ) -> None:
        check_address("ExpertServer", address)
        check_server(address, tls, token)
        check_seconds("ExpertServer: save_every", save_every)
        check_seconds("ExpertServer: grace", grace)
        given: Any = backends
        alone = isinstance(given, ExpertBackend) or not isinstance(given, Iterable)
        members: list[Any] = [given] if alone else list(given)
        self.address = address
        self.incarnation = uuid.uuid4().hex
        self._tls = tls
        self._root = None if checkpoints is None else Path(checkpoints)
        self._save_every, self._grace = save_every, grace
        self._service = Service(token, self.info, self._drain_soon)
        self._service.incarnation = self.incarnation
        self.counts: Counter[str] = self._service.counts
        self._server: Any = None
        self._saves: set[asyncio.Task[Any]] = set()  # asyncio itself keeps only weak references to tasks
        self._changes = threading.RLock()
        self._began = time.monotonic()
        self._drained = threading.Event()
        self.stuck = False
        self._not_saved: dict[str, BaseException] = {}  # errors of the last _save_all(), by name of the expert
        entries = [ExpertEntry(backend, self.incarnation) for backend in members]
        for entry in entries:
            self._check(entry)
            self._service.entries[entry.name] = entry
        self.runtime = Runtime(entries, num_workers=max(2, len(entries)) if workers is None else workers)
        try:
            for entry in entries:
                self._load(entry)
        except BaseException:
            self._release()
            raise

    def _check(self, new: ExpertEntry) -> None:
        if new.name in self._service.entries:
            raise ValueError(f"ExpertServer: expected names that differ, got two experts {new.name!r}")
        if self._root is None:
            return
        own = tensors_of(new.backend)
        for other in self._service.entries.values():
            if own & tensors_of(other.backend):
                raise ValueError(
                    f"ExpertServer: {new.name!r} and {other.name!r} share parameters, buffers or an optimizer, "
                    f"which checkpoints of each would hold at different times: serve them without checkpoints="
                )

    def _load(self, entry: ExpertEntry) -> None:
        if self._root is None:
            return
        checkpoints = ExpertCheckpoints(entry.backend, entry.journal, self._root)
        if checkpoints.load():
            logger.info("%s: restored after %d updates", entry.name, entry.backend.updates)
        entry.checkpoints = checkpoints

    def _checkpoints(self) -> dict[str, ExpertCheckpoints]:
        """Return the ExpertCheckpoints of every expert, by name; an empty dict if the server saves no checkpoints."""
        entries = list(self._service.entries.values())
        return {one.name: one.checkpoints for one in entries if one.checkpoints is not None}

    # --- start and end ---

    def start(self) -> None:
        """Start to listen and serve. Do nothing if the server runs already.

        Raises:
            OSError: the address is in use or does not belong to this machine, the folder of a Unix socket does not
                exist, or a file of ``tls`` cannot be read.
            ValueError: ``tls`` has no certificate.
            RuntimeError: the server was drained, another Runtime serves a backend, or this process was forked from one
                that has served.
        """
        with self._changes:
            if self._drained.is_set():
                raise RuntimeError("ExpertServer: a server that was drained does not start again; make another")
            if self._server is not None:
                return
            check_process()
            try:
                self.runtime.start()
            except RuntimeError as error:
                if any(pool.served for pool in self.runtime.pools):
                    raise RuntimeError(
                        "ExpertServer: backends must not be served by another Runtime, as a server starts one of its "
                        "own, got some that are: leave the other Runtime out, or shut it down first"
                    ) from error
                raise
            try:
                with held_for_binding(self.address):
                    run(self._listen())
            except BaseException:
                self.runtime.shutdown(drain=False)
                raise

    async def _listen(self) -> None:
        credentials = None if self._tls is None else self._tls.server_credentials()
        for tries_left in reversed(range(PORT_TRIES)):
            server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
            server.add_generic_rpc_handlers((self._service,))
            try:
                port = self._bind(server, credentials)
                break
            except OSError:  # a port that is free at one address of the host may be taken at another
                await server.stop(None)
                if not tries_left or not self.address.endswith(":0"):
                    raise
        await server.start()
        self._service.stalls.begin()
        if not self.address.startswith("unix"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        self._server, self._began = server, time.monotonic()
        if self._root is not None and self._save_every > 0:
            self._keep(asyncio.ensure_future(self._save_regularly()))

    def _bind(self, server: grpc.aio.Server, credentials: grpc.ServerCredentials | None) -> int:
        """Bind the server to the same port at every address of the host, and return the port (1 for a Unix socket).

        Raises:
            OSError: the port is not free at one of the addresses.
        """
        port = 0
        for address in addresses_of(self.address):
            if port:
                address = f"{address.rpartition(':')[0]}:{port}"
            try:
                if credentials is None:
                    port = server.add_insecure_port(address)
                else:
                    port = server.add_secure_port(address, credentials)
            except RuntimeError:
                raise OSError(f"cannot listen at {self.address}: {why_not_free(address)}") from None
        return port

    def _keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)
        return task

    def drain(self, grace: float | None = None) -> None:
        """Refuse further requests, answer current ones, save, and stop. May be called again, and from any thread.

        An expert that hangs is not saved, and does not prevent the server from stopping.

        Args:
            grace: seconds after which current requests are cancelled. None: the server's ``grace``.

        Raises:
            OSError, TypeError, TimeoutError, RuntimeError: the server has stopped, but some experts were not saved. See
                :meth:`save`, which may then be called.
            RuntimeError: this process was forked from the one that runs the server.
        """
        grace = self._grace if grace is None else check_seconds("ExpertServer.drain: grace", grace)
        with self._changes:
            server = self._server
            if server is not None:
                check_process()
            try:
                if server is not None:
                    run(self._stop(server, grace))
                elif self._not_saved or any(one.outdated for one in self._checkpoints().values()):
                    # The server was never started, or an earlier drain was interrupted or could not save.
                    run(self._save_all(max(grace, 1.0)))
            finally:
                self._server = None
                try:
                    if server is not None:
                        self._end_runtime(max(grace, PATIENCE_S))
                finally:
                    self._drained.set()
        self._raise_not_saved("ExpertServer.drain")

    def _end_runtime(self, patience: float) -> None:
        ending = threading.Thread(target=self.runtime.shutdown, kwargs={"drain": False}, daemon=True)
        ending.start()
        ending.join(min(patience, threading.TIMEOUT_MAX))
        if ending.is_alive():
            self.stuck = True
            logger.error("a batch of an expert does not end, and the server no longer waits for it")

    async def _stop(self, server: Any, grace: float) -> None:
        # Keep listening until everything is saved: a server that takes over the address would load older checkpoints.
        try:
            await self._service.drain(grace)  # also ends _save_regularly()
            # An expert that is still running now probably hangs; saving it would wait forever without a time limit.
            await self._save_all(max(grace, 1.0))
        except asyncio.CancelledError:  # Ctrl-C; clients that wait for the drain also receive _not_saved
            names = [name for name, one in self._checkpoints().items() if one.may_be_outdated]
            self._not_saved = {name: RuntimeError(f"{name!r}: the drain was interrupted") for name in names}
            raise
        finally:
            self._service.saved.set()
            await server.stop(LAST_REPLIES_S)

    def _drain_soon(self) -> None:
        threading.Thread(target=self._drain_and_log, name="pymoe-drain", daemon=True).start()

    def _drain_and_log(self) -> None:
        try:
            self.drain()
        except Exception as error:  # the next drain() tries to save again, and raises if it cannot
            logger.error("%s", error)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has drained; return False if that takes more than ``timeout`` seconds."""
        return self._drained.wait(timeout)

    def run(self, ready: Callable[[], Any] = lambda: None) -> None:
        """Start, call ``ready``, and serve until the server has drained; SIGTERM and Ctrl-C drain it.

        Raises:
            ValueError: this thread is not the main thread.
            Exception: any exception of :meth:`start`, ``ready`` or :meth:`drain`.
        """
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {one: signal.signal(one, lambda *_: self._drain_soon()) for one in signals}
        try:
            self.start()
            ready()
            while not self.wait(CHECK_SIGNALS_S):
                pass
        finally:
            try:
                self.drain()
            finally:
                for one, handler in before.items():
                    signal.signal(one, handler)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.drain()
        else:
            try:
                self.drain(grace=0.0)
            except Exception as failed:  # log it: the exception of the `with` block is the one to raise
                logger.error("%s", failed)

    # --- experts ---

    @property
    def experts(self) -> dict[str, ExpertBackend]:
        """Return the served backends by name."""
        return {name: one.backend for name, one in self._service.entries.items()}

    def add(self, backend: ExpertBackend) -> None:
        """Serve another expert, after loading its newest checkpoint if there is one.

        Raises:
            ValueError, TypeError, OSError, RuntimeError: see the constructor.
            RuntimeError: another Runtime serves the expert, or the server drains or was drained.
        """
        with self._changes:
            if self._service.draining or self._drained.is_set():
                raise RuntimeError(f"ExpertServer.add: expected a server that serves, got {self!r}")
            entry = ExpertEntry(backend, self.incarnation)
            self._check(entry)
            self._load(entry)
            try:
                self.runtime.add(entry)
            except BaseException:
                if entry.checkpoints is not None:
                    entry.checkpoints.release()
                raise
            self._service.entries[entry.name] = entry

    def remove(self, backend: str | ExpertBackend) -> ExpertBackend:
        """Refuse further requests to an expert, answer current ones, save it, stop serving it, and return its backend.

        Raises:
            KeyError: there is no such expert.
            OSError, TypeError: the expert cannot be saved. It is served as before.
        """
        name = backend if isinstance(backend, str) else backend.name
        with self._changes:
            if name not in self._service.entries:
                raise KeyError(f"ExpertServer: there is no expert {name!r}, only {sorted(self._service.entries)}")
            entry = self._service.entries.pop(name)
            try:
                self.runtime.remove(entry)
                if entry.checkpoints is not None:
                    run(self._save(entry.checkpoints))
                    entry.checkpoints.release()
            except BaseException:
                self._service.entries[name] = entry
                self.runtime.add(entry)
                raise
            return entry.backend

    @property
    def bytes_in_flight(self) -> int:
        """Return the number of bytes that the messages and tensors of current calls occupy."""
        return self._service.budget.used

    # --- checkpoints ---

    def save(self, timeout: float | None = None) -> int:
        """Save every expert that has changed since its newest checkpoint, and return the number of new checkpoints.

        If some experts cannot be saved, the others are, and then one of the errors below is raised; its message names
        the experts that were not saved.

        Args:
            timeout: the maximum number of seconds to wait for busy experts; None: no limit, even for one that hangs.

        Raises:
            ValueError: the server was made without ``checkpoints``.
            OSError: a checkpoint cannot be written. The earlier ones are unchanged.
            TypeError: the state of an expert can no longer be saved.
            TimeoutError: an expert was busy until the timeout.
            RuntimeError: experts failed for different reasons.
        """
        if self._root is None:
            raise ValueError("ExpertServer.save: the server has no folder: expected checkpoints=, got None")
        if timeout is not None:
            check_seconds("ExpertServer.save: timeout", timeout)
        saved = run(self._save_all(timeout))
        self._raise_not_saved("ExpertServer.save")
        return saved

    def _raise_not_saved(self, where: str) -> None:
        """Raise an error if the last ``_save_all`` could not save some experts.

        After a drain, first unlock the checkpoints of the experts that were saved.
        """
        if self._drained.is_set():
            self._release()
        if self._not_saved:
            raise not_saved(where, self._not_saved)

    def _release(self) -> None:
        for name, one in self._checkpoints().items():
            if name not in self._not_saved:
                one.release()

    async def _save_all(self, timeout: float | None) -> int:
        """Save all experts that have changed; return how many were saved. Set ``_not_saved`` to the errors."""
        checkpoints = self._checkpoints()
        saves = {asyncio.ensure_future(self._save(one)): name for name, one in checkpoints.items()}
        done, late = await asyncio.wait(saves, timeout=timeout) if saves else (set(), set())
        failed = {saves[save]: error for save in done if (error := save.exception()) is not None}
        for save in late:
            save.cancel()
            if checkpoints[name := saves[save]].outdated:
                failed[name] = TimeoutError(f"{name!r} did not answer within {timeout:g} s")
        self._not_saved = failed
        return sum(save.result() for save in done if save.exception() is None)

    async def _save(self, checkpoints: ExpertCheckpoints) -> bool:
        try:
            saved = await checkpoints.save()
        except Exception:
            self.counts["save_failed"] += 1
            raise
        self.counts["saved"] += saved
        return saved

    async def _save_regularly(self) -> None:
        while not await self._service.drains_within(self._save_every):
            for one in self._checkpoints().values():
                if one.may_be_outdated and not one.saving:  # one at a time, but with a time limit for one that hangs
                    await asyncio.wait([self._keep(asyncio.ensure_future(self._try_to_save(one)))], timeout=PATIENCE_S)

    async def _try_to_save(self, checkpoints: ExpertCheckpoints) -> None:
        try:
            await self._save(checkpoints)
        except Exception as error:
            logger.error("%s; no checkpoint was written, and the next try is in %g s", error, self._save_every)

    # --- description ---

    def info(self) -> wire.Info:
        """Return the server's description, which clients and ``python -m pymoe.remote info`` receive."""
        from pymoe import __version__

        pools = {pool.name: pool._statistics() for pool in self.runtime.pools}
        return wire.Info(
            incarnation=self.incarnation,
            version=__version__,
            encodings=list(encodings.ENCODINGS),
            experts={name: one.info() for name, one in list(self._service.entries.items())},
            draining=self._service.draining,
            counts=dict(self.counts),
            seconds=time.monotonic() - self._began,
            pid=os.getpid(),
            pools={name: dict(found) for name, found in pools.items()},
            not_saved={name: str(error) for name, error in self._not_saved.items()},
        )

    def __repr__(self) -> str:
        state = "draining" if self._service.draining else "not serving" if self._server is None else "serving"
        return f"<ExpertServer at {self.address}: {state} {', '.join(self._service.entries)}>"


def tensors_of(backend: ExpertBackend) -> set[int]:
    """Return the ``id()`` of every tensor that an update of the expert may change."""
    return {id(one) for one in (*backend.parameters(), *backend.buffers(), *optimized(backend.opt))}


def not_saved(where: str, errors: Mapping[str, BaseException]) -> Exception:
    """Return one error for the ``errors`` of several experts.

    It is a TimeoutError, OSError or TypeError if all errors are of that type, and otherwise a RuntimeError.
    """
    kinds = (TimeoutError, OSError, TypeError)
    kind = next((kind for kind in kinds if all(isinstance(error, kind) for error in errors.values())), RuntimeError)
    return kind(f"{where}: not saved: {'; '.join(map(str, errors.values()))}")


# --- the event loop ---

# All of gRPC's asyncio servers in a process must share an event loop. It runs on a separate thread.
_loop_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_loop_process = 0


def check_process() -> None:
    """Raise RuntimeError in a process that was forked from one that has served.

    gRPC's threads do not exist in the child, and a server there would wait for them forever.
    """
    if _loop is not None and _loop_process != os.getpid():
        raise RuntimeError(
            "ExpertServer: gRPC cannot serve in a fork of a process that has served experts: fork before the parent "
            "starts its server, or start a process of its own (subprocess, or multiprocessing's 'spawn')"
        )


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all servers. The first call starts it; it runs until the process ends.

    Raises:
        RuntimeError: see :func:`check_process`.
    """
    global _loop, _loop_process
    check_process()
    with _loop_lock:
        if _loop is None:
            _loop, _loop_process = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="pymoe-remote", daemon=True).start()
        return _loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the servers' event loop, wait for it on this thread, and return its result.

    Ctrl-C during the wait cancels the coroutine.
    """
    try:
        loop = event_loop()
    except RuntimeError:
        coroutine.close()
        raise
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
