"""Servers of experts that Ray places on machines and restarts, through the package ray (``pip install ray``).

::

    from pymoe.integrations import ray as pymoe_ray

    for number in range(4):
        make = functools.partial(make_expert, f"expert-{number}")  # names that differ, since a mixture needs them
        pymoe_ray.serve(f"experts-{number}", make, checkpoints="/shared/experts", num_cpus=2)
    with pymoe_ray.ServedExperts([f"experts-{number}" for number in range(4)]) as served:
        mixture = pymoe.MixtureOfExpertBackends(served.backends(), top_k=2, forward_timeout=1, backward_timeout=1)
        served.follow(mixture)  # replaces the experts of actors that restart elsewhere
        train(mixture)

Each server runs in a named actor. If the actor or its machine dies, or a client drains its server (``python -m
pymoe.remote drain``), Ray restarts it on a machine with the resources that it requests, and it continues from its
newest checkpoint, if all machines share the folder. ``ray.kill`` ends it permanently. Requests do not pass through Ray:
they go to the server over gRPC.

Ray's own messages are pickles: anybody who can reach a cluster's ports can run code on it. Ray is for clusters that
strangers cannot reach; this package cannot change that.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

    from pymoe.mixture import MixtureOfExpertBackends
    from pymoe.remote import TLS, Connection, RemoteBackend

__all__ = ["ServedExperts", "serve"]

MISSING = "pymoe.integrations.ray needs ray: pip install ray"
ADDRESS_TIMEOUT_S = 10.0
"""Time limit in seconds for asking an actor for its address."""
FOREVER = -1
"""Value of Ray's ``max_restarts`` and ``max_task_retries`` that means without limit."""

logger = logging.getLogger("pymoe.remote")


class ExpertActor:
    """An actor that hosts a server; its arguments are those of :func:`serve`."""

    def __init__(self, make: Callable[[], Any], host: str, options: dict[str, Any]) -> None:
        from pymoe.remote import ExpertServer

        self._server = ExpertServer(make(), f"{host or own_address()}:0", **options)
        self._server.start()
        self._drains = False
        threading.Thread(target=self._end_with_server, name="pymoe-ray-actor", daemon=True).start()

    def _end_with_server(self) -> None:
        """End the process when a client has drained the server: an actor without a server is of no use."""
        self._server.wait()
        if not self._drains:
            logger.warning("a client has drained the server: the actor ends")
            logging.shutdown()
            os._exit(1)  # Ray treats this as a failure, and restarts the actor

    def address(self) -> str:
        """Return the address where the server listens until the actor restarts."""
        return self._server.address

    def save(self) -> int:
        """Save the experts; return the number of those that were updated since the last time."""
        return self._server.save()

    def drain(self) -> None:
        """Answer current requests, save, and stop; the caller ends the actor, which stays."""
        self._drains = True
        self._server.drain()


def own_address() -> str:
    """Return the address of this machine within the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def serve(
    name: str,
    make: Callable[[], Any],
    *,
    host: str = "127.0.0.1",
    tls: TLS | None = None,
    token: str | None = None,
    checkpoints: str | Path | None = None,
    save_every: float = 60.0,
    namespace: str | None = None,
    **options: Any,
) -> Any:
    """Start an actor that serves the experts that ``make()`` returns, and return Ray's handle of it.

    Args:
        name: the name by which clients find it; its experts are saved in a folder of that name.
        make: returns one or several :class:`~pymoe.runtime.ExpertBackend`; called again whenever the actor starts.
        host: the address of its machine where it listens; empty for the address that other machines use, which needs
            ``tls`` and ``token``.
        tls: as in :class:`~pymoe.remote.ExpertServer`, like the next three; the files are read where the actor runs.
        token: the token that clients must show.
        checkpoints: a folder that is shared by all machines on which the actor may run.
        save_every: seconds between checkpoints.
        namespace: Ray's namespace for the name.
        options: options of Ray's actors: ``num_cpus``, ``num_gpus``, ``resources``, ``scheduling_strategy``...
            Unless they say otherwise, the actor is restarted without limit (``max_restarts=-1``).

    Raises:
        ImportError: ray is not installed.
        ValueError: the name is taken.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(MISSING) from error
    folder = None if checkpoints is None else str(Path(checkpoints) / name)
    of_server = {"tls": tls, "token": token, "checkpoints": folder, "save_every": save_every}
    of_actor = {"max_restarts": FOREVER, "max_task_retries": FOREVER, **options}
    if namespace is not None:
        of_actor["namespace"] = namespace
    return ray.remote(ExpertActor).options(name=name, **of_actor).remote(make, host, of_server)


class ServedExperts:
    """The experts of servers that Ray runs, on whatever machines.

    Args:
        names: the names that :func:`serve` was given.
        namespace: Ray's namespace for the names.
        timeout: seconds to wait for each actor at first.
        options: options of :func:`pymoe.remote.connect`; the default of ``retries`` is False here.

    Raises:
        ImportError: ray is not installed.
        ValueError: there is no actor of that name.
        ServerLost, PermissionError, ProtocolError, TimeoutError: see :func:`pymoe.remote.connect`.
    """

    def __init__(
        self, names: Iterable[str], *, namespace: str | None = None, timeout: float = 60.0, **options: Any
    ) -> None:
        self._options = {"retries": False, **options}
        self._namespace = namespace
        self._connections: dict[str, Connection] = {}
        self._end = threading.Event()
        self._mixtures: list[MixtureOfExpertBackends] = []
        self._every = math.inf
        self._follower: threading.Thread | None = None
        try:
            for name in names:
                self._connections[name] = self._connect(self._address(name, timeout))
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str) -> Connection:
        from pymoe.remote import connect

        return connect(address, **self._options)

    def _address(self, name: str, timeout: float) -> str:
        try:
            import ray
        except ImportError as error:
            raise ImportError(MISSING) from error
        actor = ray.get_actor(name, namespace=self._namespace)
        return str(ray.get(actor.address.remote(), timeout=timeout))

    def backends(self) -> Sequence[RemoteBackend]:
        """Return the current experts of all servers."""
        return [backend for there in self._connections.values() for backend in there.backends()]

    def follow(self, mixture: MixtureOfExpertBackends, every: float = 1.0) -> None:
        """Replace backends of ``mixture`` by those of the same name whenever an actor has restarted elsewhere.

        A thread checks this every ``every`` seconds, until :meth:`close`. In between, the mixture leaves out experts
        whose server is gone. For several mixtures, the shortest of their intervals applies.
        """
        self._mixtures.append(mixture)
        self._every = min(self._every, every)
        if self._follower is None:
            self._follower = threading.Thread(target=self._follow, name="pymoe-ray", daemon=True)
            self._follower.start()

    def _follow(self) -> None:
        while not self._end.wait(self._every):
            for name, there in list(self._connections.items()):
                if there.reachable:
                    continue
                try:
                    self._move(name)
                except Exception as error:  # it is not back yet
                    logger.debug("%s: %s: %s", name, type(error).__name__, error)

    def _move(self, name: str) -> None:
        before = self._connections[name]
        address = self._address(name, ADDRESS_TIMEOUT_S)
        if address == before.address:
            return  # the connection reconnects by itself
        there = self._connect(address)
        try:
            for backend in there.backends():
                for mixture in self._mixtures:
                    if backend.name in mixture.backends:
                        mixture.replace_backend(backend.name, backend)
        except BaseException:
            there.close()
            raise
        self._connections[name] = there
        before.close()
        logger.info("%s: now at %s", name, address)

    def close(self) -> None:
        """Stop following, and disconnect. The actors continue."""
        self._end.set()
        if self._follower is not None:
            self._follower.join()
        for there in self._connections.values():
            there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
