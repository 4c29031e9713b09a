"""ExpertServer: the experts of this process, for other machines."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from pymoe.remote import encodings, event_loop, wire
from pymoe.remote.addresses import check_address, held_for_binding, why_not_free
from pymoe.remote.hosted import HostedExpert
from pymoe.remote.security import TLS, check_server
from pymoe.remote.service import Service
from pymoe.runtime import ExpertBackend, Runtime
from pymoe.runtime.parameters import optimized

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("pymoe.remote")

LOOK_FOR_SIGNALS_S = 1.0
LAST_REPLIES_S = 1.0
"""How long calls may take that are left when everything is saved."""
PATIENCE_S = 5.0
"""How long an expert that may hang holds up the checkpoints of others, or the end of its server."""
MOST_CALLS = 8192
"""Calls under way at a time, those that stay included; more are refused with ``QueueFull``."""
OPTIONS = (
    ("grpc.max_receive_message_length", wire.MOST_READ),
    ("grpc.max_send_message_length", wire.MOST_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.so_reuseport", 0),
    # Identity alone: a small message that grows a thousandfold when it is decompressed is refused as it is.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Clients ask whether the server lives while they wait for it: that is no reason to hang up, however often they do.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class ExpertServer:
    """Serves experts to clients on other machines, which :func:`pymoe.remote.connect` to it.

    ::

        with pymoe.remote.ExpertServer([backend], "127.0.0.1:7000") as server:
            server.wait()

    It has a :class:`~pymoe.runtime.Runtime` of its own, which batches the requests of all clients, and of this process.
    A request has the deadline that its client gave it, and never begins after that; one whose client has gone is taken
    out of its queue. Every backward request is applied once, however often its client has to send it, also when the
    server is killed and comes back with its checkpoints.

    **Checkpoints.** An expert's state and the keys of the requests that it holds are one file. A server that is killed
    comes back with the last one: updates after that are lost, at most ``save_every`` seconds of them, though their
    clients may have had answers. :meth:`drain` and the end of the ``with`` block save what is there, or raise. Whether
    a state can be saved is tried when the server is made, and again after the expert's first update here; where it
    cannot, further gradients for the expert are refused with TypeError.

    Args:
        backends: one or several; others may follow (:meth:`add`). They must not be served by another Runtime.
        address: ``HOST:PORT``, port 0 for any free one; or ``unix:PATH``. An address that other machines can reach
            needs ``tls``, and a ``token`` or ``TLS(ca=)``.
        tls: the server's certificate, and whom clients' certificates must be signed by.
        token: what clients must show; without it, everybody who can connect may train.
        checkpoints: a folder; the newest checkpoint of each expert is loaded from there when it is added. Servers may
            share a folder, if no two have an expert of the same name.
        save_every: seconds between checkpoints.
        workers: threads that run batches; more than the experts that may hang at a time. None: one an expert, two at
            least.
        grace: seconds that requests have left when the server drains.

    Attributes:
        address: where it listens, with the port that it got.
        runtime: for statistics.
        stuck: whether an expert hung when the server drained. Its thread would hold up the end of the process, too.
        counts: calls by what became of them: ``forward``, ``backward``, ``repeated`` (backward requests that had been
            applied by an earlier attempt), ``failed``, ``malformed``, ``shed``, ``unauthenticated``, ``saved``,
            ``save_failed``.

    Raises:
        ValueError: strangers would be let in, or listen; two experts of one name; or with ``checkpoints`` experts that
            share parameters, buffers or an optimizer, which two files would hold at two times, or one whose checkpoints
            are all damaged, come from another kind of optimizer, or hold fewer updates than the backend has seen.
        TypeError: a backend that is not an ExpertBackend, or whose schemas cannot be described to other machines; or
            with ``checkpoints`` one whose state holds what cannot be saved: anything that is neither a dense tensor of
            a dtype that safetensors has, nor a number, text or None, in lists, tuples and dicts.
        OSError: nothing can be written in the folder ``checkpoints``, or another server has an expert of one of these
            names there.
    """

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
        members = [backends] if isinstance(backends, ExpertBackend) else list(backends)
        self.address = address
        self.incarnation = uuid.uuid4().hex
        self._tls = tls
        self._checkpoints = None if checkpoints is None else Path(checkpoints)
        self._save_every, self._grace = save_every, grace
        self._service = Service(token, self.info, self._drain_soon)
        self._service.incarnation = self.incarnation
        self.counts: Counter[str] = self._service.counts
        self._server: Any = None
        self._saving: set[asyncio.Task[Any]] = set()  # tasks that nobody holds may be collected
        self._changes = threading.RLock()
        self._began = time.monotonic()
        self._drained = threading.Event()
        self.stuck = False
        self._not_saved: dict[str, BaseException] = {}  # by the last save of all, and why
        hosted = [HostedExpert(backend, self.incarnation) for backend in members]
        for one in hosted:
            self._check(one)
            self._service.hosted[one.name] = one
        self.runtime = Runtime(hosted, num_workers=max(2, len(hosted)) if workers is None else workers)
        try:
            for one in hosted:
                self._load(one)
        except BaseException:
            self._release()
            raise

    def _check(self, coming: HostedExpert) -> None:
        if coming.name in self._service.hosted:
            raise ValueError(f"ExpertServer: expected names that differ, got two experts {coming.name!r}")
        if self._checkpoints is None:
            return
        own = tensors_of(coming.backend)
        for other in self._service.hosted.values():
            if own & tensors_of(other.backend):
                raise ValueError(
                    f"ExpertServer: {coming.name!r} and {other.name!r} share parameters, buffers or an optimizer, "
                    f"which checkpoints of each would hold at different times: serve them without checkpoints="
                )

    def _load(self, hosted: HostedExpert) -> None:
        if self._checkpoints is not None and hosted.load(self._checkpoints):
            logger.info("%s: restored after %d updates", hosted.name, hosted.backend.updates)

    # --- life ---

    def start(self) -> None:
        """Listen and serve.

        Raises:
            OSError: the address is taken, or not one of this machine; the folder of a socket is not there.
            RuntimeError: it was drained, a backend is served by another Runtime, or the process is a fork of one that
                has served.
        """
        with self._changes:
            if self._drained.is_set():
                raise RuntimeError("ExpertServer: a server that was drained does not start again; make another")
            if self._server is not None:
                return
            event_loop.check_process()
            self.runtime.start()
            try:
                with held_for_binding(self.address):
                    event_loop.run(self._listen())
            except BaseException:
                self.runtime.shutdown(drain=False)
                raise

    async def _listen(self) -> None:
        server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MOST_CALLS)
        server.add_generic_rpc_handlers((self._service,))
        try:
            if self._tls is None:
                port = server.add_insecure_port(self.address)
            else:
                port = server.add_secure_port(self.address, self._tls.server_credentials())
        except RuntimeError:
            raise OSError(f"cannot listen at {self.address}: {why_not_free(self.address)}") from None
        await server.start()
        self._service.stalls.begin()
        if not self.address.startswith("unix"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        self._server, self._began = server, time.monotonic()
        if self._checkpoints is not None and self._save_every > 0:
            self._keep(asyncio.ensure_future(self._save_again_and_again()))

    def _keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)
        return task

    def drain(self, grace: float | None = None) -> None:
        """Refuse further requests, answer those under way, save, and stop. May be called again, and from any thread.

        An expert that hangs is neither saved nor waited for.

        Args:
            grace: seconds for requests under way; then they are cancelled. None: as the server was made.

        Raises:
            OSError, TypeError, TimeoutError, RuntimeError: the server has stopped, and experts were not saved; see
                :meth:`save`, which may be called again. Or RuntimeError: this is a fork, and the server its parent's.
        """
        grace = self._grace if grace is None else check_seconds("ExpertServer.drain: grace", grace)
        with self._changes:
            server = self._server
            if server is not None:
                event_loop.check_process()
            try:
                if server is not None:
                    event_loop.run(self._stop(server, grace))
                elif self._checkpoints is not None and (
                    self._not_saved or any(one.unsaved for one in self._service.hosted.values())
                ):  # never started, or an earlier drain was cut off or could not save
                    event_loop.run(self._save_all(max(grace, 1.0)))
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
            logger.error("a batch of an expert does not end, and is waited for no longer")

    async def _stop(self, server: Any, grace: float) -> None:
        # Nobody else can listen here until all is saved: who takes the place of this server would load what is older.
        try:
            await self._service.drain(grace)  # which ends _save_again_and_again(), too
            if self._checkpoints is not None:
                # What still runs then is an expert that hangs: its checkpoint would wait for it.
                await self._save_all(max(grace, 1.0))
        except asyncio.CancelledError:  # Ctrl-C: who waits for the end is told, too
            hosted = self._service.hosted.values() if self._checkpoints is not None else ()
            unsaved = [one.name for one in hosted if one.may_be_unsaved]
            self._not_saved = {name: RuntimeError(f"{name!r}: the drain was interrupted") for name in unsaved}
            raise
        finally:
            self._service.saved.set()
            await server.stop(LAST_REPLIES_S)

    def _drain_soon(self) -> None:
        threading.Thread(target=self._drain_with_a_line, name="pymoe-drain", daemon=True).start()

    def _drain_with_a_line(self) -> None:
        try:
            self.drain()
        except Exception as error:  # whoever calls drain() again gets it, too
            logger.error("%s", error)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has drained; return False if that takes more than ``timeout`` seconds."""
        return self._drained.wait(timeout)

    def run(self, ready: Callable[[], Any] = lambda: None) -> None:
        """Start, call ``ready``, and serve until the server has drained; SIGTERM and Ctrl-C drain it.

        For the main thread of a program. Raises what :meth:`start`, ``ready`` and :meth:`drain` do, and ValueError in
        another thread.
        """
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {one: signal.signal(one, lambda *_: self._drain_soon()) for one in signals}
        try:
            self.start()
            ready()
            while not self.wait(LOOK_FOR_SIGNALS_S):
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
            except Exception as not_saved:  # the error of the block is the one to raise
                logger.error("%s", not_saved)

    # --- experts ---

    @property
    def experts(self) -> dict[str, ExpertBackend]:
        """The backends that are served, by name."""
        return {name: one.backend for name, one in self._service.hosted.items()}

    def add(self, backend: ExpertBackend) -> None:
        """Serve another expert as well, with its newest checkpoint.

        Raises:
            ValueError, TypeError: as when the server is made.
            RuntimeError: another Runtime serves it, or the server was drained.
        """
        with self._changes:
            if self._service.draining or self._drained.is_set():
                raise RuntimeError(f"ExpertServer.add: expected a server that serves, got {self!r}")
            hosted = HostedExpert(backend, self.incarnation)
            self._check(hosted)
            self._load(hosted)
            try:
                self.runtime.add(hosted)
            except BaseException:
                hosted.release()
                raise
            self._service.hosted[hosted.name] = hosted

    def remove(self, backend: str | ExpertBackend) -> ExpertBackend:
        """Refuse further requests of an expert, answer those under way, save it, and serve it no longer.

        Raises:
            KeyError: there is no such expert.
            OSError, TypeError: it cannot be saved, and so it stays.
        """
        name = backend if isinstance(backend, str) else backend.name
        with self._changes:
            if name not in self._service.hosted:
                raise KeyError(f"ExpertServer: there is no expert {name!r}, only {sorted(self._service.hosted)}")
            hosted = self._service.hosted.pop(name)
            try:
                self.runtime.remove(hosted)
                if self._checkpoints is not None:
                    event_loop.run(self._save(hosted))
            except BaseException:
                self._service.hosted[name] = hosted
                self.runtime.add(hosted)
                raise
            hosted.release()
            return hosted.backend

    @property
    def bytes_in_flight(self) -> int:
        """Of the calls that are being read or answered."""
        return self._service.room.used

    # --- checkpoints ---

    def save(self, timeout: float | None = None) -> int:
        """Write a checkpoint of every expert that has changed since its last; return how many these were.

        Args:
            timeout: seconds to wait for experts that are busy; None: as long as it takes, with one that hangs for ever.

        Raises:
            ValueError: the server was made without ``checkpoints``.
            OSError: a checkpoint cannot be written. The earlier ones are as they were.
            TypeError: an expert's state holds by now what cannot be saved.
            TimeoutError: an expert did not answer in time.
            RuntimeError: several of these. In all cases the message names the experts, and the others were saved.
        """
        if self._checkpoints is None:
            raise ValueError("ExpertServer.save: the server has no folder: expected checkpoints=, got None")
        if timeout is not None:
            check_seconds("ExpertServer.save: timeout", timeout)
        saved = event_loop.run(self._save_all(timeout))
        self._raise_not_saved("ExpertServer.save")
        return saved

    def _raise_not_saved(self, where: str) -> None:
        """Raise for the experts that were not saved by the last save of all; after a drain, let go of the others."""
        if self._drained.is_set():
            self._release()
        if self._not_saved:
            raise not_saved(where, self._not_saved)

    def _release(self) -> None:
        for name, one in self._service.hosted.items():
            if name not in self._not_saved:
                one.release()

    async def _save_all(self, timeout: float | None) -> int:
        """Save all experts; return how many have changed since their last checkpoint. The rest is in ``_not_saved``."""
        saves = {asyncio.ensure_future(self._save(one)): one for one in list(self._service.hosted.values())}
        done, late = await asyncio.wait(saves, timeout=timeout) if saves else (set(), set())
        failed = {saves[save].name: error for save in done if (error := save.exception()) is not None}
        for save in late:
            save.cancel()
            if (hosted := saves[save]).unsaved:
                failed[hosted.name] = TimeoutError(f"{hosted.name!r} did not answer within {timeout:g} s")
        self._not_saved = failed
        return sum(save.result() for save in done if save.exception() is None)

    async def _save(self, hosted: HostedExpert) -> bool:
        assert self._checkpoints is not None
        try:
            saved = await hosted.save(self._checkpoints)
        except Exception:
            self.counts["save_failed"] += 1
            raise
        self.counts["saved"] += saved
        return saved

    async def _save_again_and_again(self) -> None:
        while not await self._service.drains_within(self._save_every):
            for one in list(self._service.hosted.values()):
                if one.may_be_unsaved and not one.saving:  # one after the other, but for those that hang
                    await asyncio.wait([self._keep(asyncio.ensure_future(self._try_to_save(one)))], timeout=PATIENCE_S)

    async def _try_to_save(self, hosted: HostedExpert) -> None:
        try:
            await self._save(hosted)
        except Exception as error:
            logger.error("%s; no checkpoint was written, and the next try is in %g s", error, self._save_every)

    # --- what it says of itself ---

    def info(self) -> wire.Info:
        """Return what ``python -m pymoe.remote info`` shows and clients ask for."""
        from pymoe import __version__

        pools = {pool.name: pool._statistics() for pool in self.runtime.pools}
        return wire.Info(
            incarnation=self.incarnation,
            version=__version__,
            encodings=list(encodings.ENCODINGS),
            experts={name: one.info() for name, one in list(self._service.hosted.items())},
            draining=self._service.draining,
            counts=dict(self.counts),
            seconds=time.monotonic() - self._began,
            pid=os.getpid(),
            pools={name: dict(found) for name, found in pools.items()},
            not_saved={name: str(error) for name, error in self._not_saved.items()},
        )

    def __repr__(self) -> str:
        state = "draining" if self._service.draining else "not serving" if self._server is None else "serving"
        return f"<ExpertServer at {self.address}: {state} {', '.join(self._service.hosted)}>"


def check_seconds(what: str, seconds: Any) -> float:
    """Return ``seconds``; raise ValueError unless that is a number, 0 or more."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ValueError(f"{what} must be a number of seconds, 0 or more, got {seconds!r}")
    return seconds


def tensors_of(backend: ExpertBackend) -> set[int]:
    """Return the ids of all tensors that updates of the expert change."""
    return {id(one) for one in (*backend.parameters(), *backend.buffers(), *optimized(backend.opt))}


def not_saved(where: str, errors: Mapping[str, BaseException]) -> Exception:
    """Return one error of the kind that all ``errors`` of experts are."""
    kinds = (TimeoutError, OSError, TypeError)
    kind = next((kind for kind in kinds if all(isinstance(error, kind) for error in errors.values())), RuntimeError)
    return kind(f"{where}: not saved: {'; '.join(map(str, errors.values()))}")
