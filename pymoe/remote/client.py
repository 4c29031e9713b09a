"""Connects to a server, and provides its experts as backends that are used like backends of this process."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pymoe._common.names import explain_arguments, suggestion
from pymoe._common.seconds import check_seconds
from pymoe.remote import wire
from pymoe.remote.channel import Channel
from pymoe.remote.errors import ServerLost
from pymoe.remote.requests import CoalescingPool, DirectPool, ExpertStub
from pymoe.remote.security import PORT, TLS
from pymoe.runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Self

CONNECT_AGAIN_S = 0.2
"""Seconds between two attempts to connect to a server that cannot be reached yet."""
MAX_THREADS = 64


class RemoteBackend:
    """An expert that another process serves. Made by :meth:`Connection.backends`.

    It can be used like an :class:`~pymoe.runtime.ExpertBackend`: in :class:`~pymoe.runtime.ExpertClient`, in a
    :class:`~pymoe.mixture.MixtureOfExpertBackends`, and in code that calls ``submit_task`` of its pools. Its answers
    equal the expert's answers on the server bit for bit, unless encodings with fewer bits are used.

    Attributes:
        name: name of the expert.
        trains: true if backward passes update the expert.
        max_batch_size: the maximum number of rows that the server runs at once.
        forward_pool: the pool of the forward pass, used like the pool of an ExpertBackend.
        backward_pool: the same for the backward pass.
    """

    def __init__(self, channel: Channel, name: str, info: wire.ExpertInfo) -> None:
        self._stub = stub = ExpertStub(channel, name, info)
        self.name, self.trains, self.max_batch_size = name, stub.trains, stub.max_batch_size
        kind = CoalescingPool if channel.coalesce else DirectPool
        inputs, outputs = stub.schema.inputs, stub.schema.outputs
        self.forward_pool: CoalescingPool | DirectPool = kind(stub, "Forward", inputs)
        self.backward_pool: CoalescingPool | DirectPool = kind(stub, "Backward", inputs + outputs)

    @property
    def updates(self) -> int:
        """Return the expert's number of updates according to its last answer over this connection."""
        return self._stub.updates

    @property
    def address(self) -> str:
        """Return the server's address."""
        return self._stub.channel.address

    def get_info(self) -> dict[str, Any]:
        """Return a dictionary of the same information as :meth:`pymoe.runtime.ExpertBackend.get_info`."""
        forward_schema = self._stub.forward_schema
        return {
            "name": self.name,
            "forward_schema": forward_schema,
            "outputs_schema": self._stub.outputs_schema,
            "keyword_names": tuple(forward_schema[1]),
        }

    def get_pools(self) -> tuple[CoalescingPool | DirectPool, CoalescingPool | DirectPool]:
        """Return the pool of the forward pass and the pool of the backward pass."""
        return self.forward_pool, self.backward_pool

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteBackend:
        """Return the same object, so that a copy of a model sends its requests to the same expert."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"RemoteBackend {self.name!r} cannot be pickled: it belongs to a connection of this process")

    def __repr__(self) -> str:
        return f"<RemoteBackend {self.name!r} at {self.address}>"


class Connection(Channel):
    """A connection to one server, which reconnects automatically. Made by :func:`connect`. Thread-safe.

    Attributes:
        address: the server's address.
        client: a unique name of this connection for the server; it is part of the keys of backward requests.
        counts: the numbers of ``attempts``, ``retries`` and ``lost`` attempts (those that a broken connection ended).
    """

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self._changes = threading.Lock()
        self._backends: dict[str, RemoteBackend] = {}
        self._runtime: Runtime | None = None

    def backends(self, *names: str) -> list[RemoteBackend]:
        """Return the experts with these names. Without arguments, return all experts that the server has now.

        Each call returns the same object for the same expert.

        Raises:
            LookupError: the server does not have such an expert.
            ServerLost, PermissionError, ProtocolError, TimeoutError: see :meth:`info`.
        """
        experts = self.info().experts
        for name in names:
            if name not in experts:
                hint = suggestion(name, experts)
                raise LookupError(f"{self.address}: there is no expert {name!r}, only {sorted(experts)}{hint}")
        with self._changes:
            self.check_usable()  # a runtime that is started after close() would never be shut down
            wanted = list(names or experts)
            new = [RemoteBackend(self, name, experts[name]) for name in wanted if name not in self._backends]
            if new and self.coalesce:
                self._serve(new, len(experts))
            self._backends.update({one.name: one for one in new})
            return [self._backends[name] for name in wanted]

    def _serve(self, new: list[RemoteBackend], experts: int) -> None:
        """Serve the pools of the backends ``new`` with this connection's runtime, which the first call starts.

        A call occupies a thread of the runtime until its answer arrives, so the first call starts two threads for each
        expert of the server, at least 4 and at most :data:`MAX_THREADS`. ``experts`` is the number of these experts.
        """
        if self._runtime is None:
            self._runtime = Runtime(new, num_workers=min(2 * max(experts, 2), MAX_THREADS), monitor=False)
            self._runtime.start()
        else:
            for one in new:
                self._runtime.add(one)

    def close(self) -> bool:
        """End current requests with :class:`~pymoe.remote.ServerLost`, and disconnect.

        Returns:
            False if nothing was done: the connection was closed before, or this is a forked child.
        """
        if not super().close():
            return False
        with self._changes:
            runtime = self._runtime
        if runtime is not None:
            runtime.shutdown()  # queued requests raise ServerLost as soon as they run
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


@explain_arguments(host=PORT, port=PORT, compression="encoding", ssl="tls", credentials="tls")
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
    """Connect to an :class:`~pymoe.remote.ExpertServer`; its ``backends()`` are used like backends of this process.

    ::

        with pymoe.remote.connect("experts:7000", tls=TLS(ca="ca.pem"), token=token) as there:
            mixture = pymoe.MixtureOfExpertBackends([*there.backends(), local], top_k=2, forward_timeout=1)

    Args:
        address: ``HOST:PORT``, or another name that gRPC resolves: ``dns:///HOST:PORT``, ``ipv4:A:PORT,B:PORT`` for
            replicas of one server, ``unix:PATH``.
        tls: the authorities to trust, and the certificate to show. None: no TLS, as for a server on this machine.
        token: the token that the server expects; sent only over TLS or to a server on this machine.
        timeout: time limit in seconds for requests without a timeout of their own.
        encoding: encoding of activations in both directions: ``"raw"``, ``"bf16"`` or ``"int8"`` (see
            :mod:`pymoe.remote.encodings`). Fewer bytes are faster only on a slow network.
        gradient_encoding: the same for gradients.
        coalesce: combine the rows of all callers of an expert into one call. False sends each request separately and
            immediately.
        retries: repeat requests until their deadline while the server is gone or overloaded; all attempts of a backward
            request have the same key, so that the server applies the request once. Use False for the experts of a
            mixture, which can ask other experts instead.
        wait: seconds to wait for a server that cannot be reached yet.

    Raises:
        ServerLost: no server listens there, or the TLS handshake fails; the message has gRPC's reason.
        PermissionError: the server expects another token.
        ProtocolError: the server is not an ExpertServer, or is one of another version.
        TimeoutError: the server does not answer.
        OSError: a file of ``tls`` cannot be read.
        TypeError: ``timeout`` or ``wait`` is not a number, ``tls`` is not a TLS, or ``token`` not a string.
        ValueError: an invalid address, time, encoding or token, or a token that would be sent without encryption.

    Example:
        >>> import pymoe.remote
        >>> expert = pymoe.ExpertBackend("expert", torch.nn.Linear(8, 8), None, args_schema=[pymoe.BatchTensorProto(8)])
        >>> with pymoe.remote.ExpertServer(expert) as server, pymoe.remote.connect(server.address) as there:
        ...     (backend,) = there.backends("expert")
        ...     print(pymoe.runtime.ExpertClient(backend)(torch.randn(3, 8)).shape)
        torch.Size([3, 8])
    """
    check_seconds("connect: timeout", timeout, positive=True, finite=True)
    check_seconds("connect: wait", wait)
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
                if time.monotonic() + CONNECT_AGAIN_S > deadline:
                    raise
                time.sleep(CONNECT_AGAIN_S)
    except BaseException:
        made.close()
        raise
    made.watch()
    return made
