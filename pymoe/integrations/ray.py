"""Servers of experts that Ray places on machines and restarts, through the package ray (``pip install ray``).

::

    from pymoe.integrations import ray as pymoe_ray

    for number in range(4):
        make = functools.partial(make_expert, f"expert-{number}")  # a mixture requires distinct names
        pymoe_ray.serve(f"experts-{number}", make, checkpoints="/shared/experts", num_cpus=2)
    with pymoe_ray.ServedExperts([f"experts-{number}" for number in range(4)]) as served:
        mixture = pymoe.MixtureOfExpertBackends(served.backends(), top_k=2, forward_timeout=1, backward_timeout=1)
        served.follow(mixture)  # replaces the experts of actors that restart elsewhere
        train(mixture)

Each server runs in a named actor. Ray restarts the actor when it or its machine dies, or when a client drains its
server (``python -m pymoe.remote drain``), on a machine with the requested resources. The restarted server continues
from its newest checkpoint, if all machines can read the folder. ``ray.kill`` ends the actor for good. Requests do not
pass through Ray: clients send them to the server over gRPC.

Ray's own messages are pickles: anyone who can reach a cluster's ports can run code on it. So, whatever this package
does, use Ray only in clusters that strangers cannot reach.
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
    """A Ray actor that runs a server of the experts that ``make()`` returns.

    Args:
        make: returns one or several :class:`~pymoe.runtime.ExpertBackend`.
        host: the address on which the server listens; empty for the address of the actor's machine.
        options: options of :class:`~pymoe.remote.ExpertServer`.
    """

    def __init__(self, make: Callable[[], Any], host: str, options: dict[str, Any]) -> None:
        from pymoe.remote import ExpertServer

        self._server = ExpertServer(make(), f"{host or own_address()}:0", **options)
        self._server.start()
        self._drains = False
        threading.Thread(target=self._end_with_server, name="pymoe-ray-actor", daemon=True).start()

    def _end_with_server(self) -> None:
        """End the process after a client has drained the server, because an actor without a server is useless."""
        self._server.wait()
        if not self._drains:
            logger.warning("a client has drained the server: the actor ends")
            logging.shutdown()
            # Ray treats this exit status as a failure, and restarts the actor.
            os._exit(1)

    def address(self) -> str:
        """Return the current address of the server; it changes when the actor restarts."""
        return self._server.address

    def save(self) -> int:
        """Save the experts that changed since the last save; return how many were saved."""
        return self._server.save()

    def drain(self) -> None:
        """Complete pending requests, save the experts, and stop the server. The caller must then end the actor."""
        self._drains = True
        self._server.drain()


def own_address() -> str:
    """Return the address at which other machines of the cluster reach this one."""
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
    """Start an actor that serves the experts returned by ``make()``, and return Ray's handle of the actor.

    Args:
        name: the name by which clients find the actor; its experts are saved in a folder of this name.
        make: returns one or several :class:`~pymoe.runtime.ExpertBackend`; it is called whenever the actor starts.
        host: the address on which the server listens; empty for the address at which other machines reach the actor's
            machine, which requires ``tls`` and ``token``.
        tls: see :class:`~pymoe.remote.ExpertServer`; the files are read on the actor's machine.
        token: the token that clients must send.
        checkpoints: a folder that is shared by all machines on which the actor may run.
        save_every: seconds between checkpoints.
        namespace: the Ray namespace of the name.
        options: options of Ray actors: ``num_cpus``, ``num_gpus``, ``resources``, ``scheduling_strategy``... By default
            the actor is restarted without limit (``max_restarts=-1``).

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
    """The experts of servers that Ray runs, on any machine.

    Args:
        names: the names that were given to :func:`serve`.
        namespace: the Ray namespace of the names.
        timeout: seconds that the constructor waits for each actor.
        options: options of :func:`pymoe.remote.connect`; by default requests are not retried (``retries=False``).

    Raises:
        ImportError: ray is not installed.
        ValueError: there is no actor of one of the names.
        ray.exceptions.RayActorError: an actor could not start its server, for instance because ``make`` raised.
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
        """Replace backends of ``mixture`` with new ones of the same names when their actor restarts at a new address.

        A thread checks every ``every`` seconds, until :meth:`close`. Until the replacement, the mixture leaves out
        backends that cannot be reached. Several mixtures may be followed, at the shortest of their intervals.
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
                except Exception as error:  # the actor has not been restarted yet
                    logger.debug("%s: %s: %s", name, type(error).__name__, error)

    def _move(self, name: str) -> None:
        before = self._connections[name]
        address = self._address(name, ADDRESS_TIMEOUT_S)
        if address == before.address:
            # The address is the same, so the connection reconnects by itself.
            return
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
        """Stop following, wait for the thread that follows, and close the connections. The actors keep running."""
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
