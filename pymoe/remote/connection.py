"""connect(): a server's experts as backends of this process."""

from __future__ import annotations

import math
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pymoe.remote.backend import RemoteBackend
from pymoe.remote.channel import Channel
from pymoe.remote.errors import ServerLost
from pymoe.remote.security import TLS
from pymoe.runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Self

LOOK_AGAIN_S = 0.2
"""Between two attempts to find a server that is not there yet."""
MOST_THREADS = 64


class Connection(Channel):
    """A connection to one server, which comes back by itself after it broke. Made by :func:`connect`. Thread-safe.

    Attributes:
        address: of the server.
        client: the name by which the server knows this connection, with which its backward requests are numbered.
        counts: ``attempts``, ``retries`` and ``lost`` (attempts that ended with the connection).
    """

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self._changes = threading.Lock()
        self._backends: dict[str, RemoteBackend] = {}
        self._runtime: Runtime | None = None

    def backends(self, *names: str) -> list[RemoteBackend]:
        """Return the experts of these names, or all that the server has now; the same object for an expert every time.

        Raises:
            LookupError: an expert that the server does not have.
            ServerLost, PermissionError, ProtocolError, TimeoutError: see :meth:`info`.
        """
        experts = self.info().experts
        for name in names:
            if name not in experts:
                raise LookupError(f"{self.address}: there is no expert {name!r}, only {sorted(experts)}")
        with self._changes:
            self.check_usable()  # or nobody would end the runtime
            wanted = list(names or experts)
            new = [RemoteBackend(self, name, experts[name]) for name in wanted if name not in self._backends]
            if new and self.coalesce:
                self._serve(new, len(experts))
            self._backends.update({one.name: one for one in new})
            return [self._backends[name] for name in wanted]

    def _serve(self, new: list[RemoteBackend], experts: int) -> None:
        """Give the pools of new backends a runtime: each call waits in one of its threads, enough for all experts."""
        if self._runtime is None:
            self._runtime = Runtime(new, num_workers=min(2 * max(experts, 2), MOST_THREADS), monitor=False)
            self._runtime.start()
        else:
            for one in new:
                self._runtime.add(one)

    # --- its end ---

    def close(self) -> bool:
        """End what is under way with :class:`~pymoe.remote.ServerLost`, and hang up; return False if that was done
        before.
        """
        if not super().close():
            return False
        with self._changes:
            runtime = self._runtime
        if runtime is not None:
            runtime.shutdown()  # calls that have not begun raise ServerLost as they do
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "reachable" if self.reachable else "not reachable"
        return f"<Connection to {self.address}: {state}>"


def connect(
    address: str,
    *,
    tls: TLS | None = None,
    token: str | None = None,
    timeout: float = 30.0,
    encoding: str = "raw",
    gradient_encoding: str = "raw",
    coalesce: bool = True,
    retries: bool = True,
    wait: float = 0.0,
) -> Connection:
    """Connect to an :class:`~pymoe.remote.ExpertServer`; its ``backends()`` stand where backends of this process do.

    ::

        with pymoe.remote.connect("experts:7000", tls=TLS(ca="ca.pem"), token=token) as there:
            mixture = pymoe.MixtureOfExpertBackends([*there.backends(), local], top_k=2, forward_timeout=1)

    Args:
        address: ``HOST:PORT``, or another name that gRPC resolves: ``dns:///HOST:PORT``, ``ipv4:A:PORT,B:PORT`` for
            replicas of one server, ``unix:PATH``.
        tls: whom to trust, and what to show. None: no TLS, as with a server on this machine.
        token: what the server asks for; sent over TLS alone, but for a server on this machine.
        timeout: seconds that a request has where it has no timeout of its own.
        encoding: how activations travel, both ways: ``"raw"``, ``"bf16"`` or ``"int8"`` (see
            :mod:`pymoe.remote.encodings`). Fewer bytes pay on a slow network alone.
        gradient_encoding: the same for gradients, both ways.
        coalesce: put the rows of all callers of an expert into one call. False sends each request on its own, at once.
        retries: send requests again, until their deadline, while the server is gone or overloaded; backward requests
            under the same key, which is applied once. False for members of a mixture, which has others to ask.
        wait: seconds to wait for a server that is not there yet.

    Raises:
        ServerLost: nobody listens there, or TLS does not come about; the message has gRPC's reason.
        PermissionError: the server wants another token.
        ProtocolError: it is no ExpertServer, or one of another version.
        TimeoutError: it does not answer.
        ValueError: no such encoding, or a token that would be sent in clear.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"connect: timeout must be a positive, finite number of seconds, got {timeout!r}")
    made = Connection(
        address, tls=tls, token=token, timeout=timeout, encoding=encoding, gradient_encoding=gradient_encoding,
        coalesce=coalesce, retries=retries,
    )  # fmt: skip
    deadline = time.monotonic() + wait
    try:
        while True:
            try:
                made.info()
                break
            except ServerLost:
                if time.monotonic() + LOOK_AGAIN_S > deadline:
                    raise
                time.sleep(LOOK_AGAIN_S)
    except BaseException:
        made.close()
        raise
    made.watch()
    return made
