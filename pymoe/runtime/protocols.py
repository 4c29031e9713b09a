"""The interfaces of backends and pools that clients and mixtures use, for experts of this and of other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from pymoe.runtime.room import RoomLine


class RequestPool(Protocol):
    """Takes requests for one pass of an expert, as :class:`~pymoe.runtime.TaskPool` does.

    The interface includes private methods, so only classes of this package can implement it.
    """

    _line: RoomLine
    """The queue of requests that wait for room."""

    @property
    def name(self) -> str:
        """Return the name of the pool in errors, logs and statistics."""

    @property
    def served(self) -> bool:
        """True if requests will be answered, as far as is known now."""

    @property
    def why_unserved(self) -> str:
        """Return a clause for messages that says why the pool is not served."""

    def submit_task(self, *tensors: Any, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Queue a request and return its future, which is used like a :class:`~pymoe.runtime.Future`."""

    def _try_submit(self, *tensors: Any, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Queue a request and return its future; return None where :meth:`submit_task` would wait for room."""

    async def _queue(self, tensors: Sequence[Any], timeout: float | None, priority: float = 0.0) -> Any:
        """Wait until the queue has room, without blocking the event loop; queue a request and return its future."""

    def _idle_is_known(self) -> None:
        """Record that a warning has said that no runtime serves this pool, so that the pool does not repeat it."""


@runtime_checkable
class Backend(Protocol):
    """The interface of a served expert that :class:`~pymoe.runtime.ExpertClient` and mixtures use.

    It is implemented by :class:`~pymoe.runtime.ExpertBackend` for an expert of this process, and by
    :class:`pymoe.remote.RemoteBackend` for an expert of a server.
    """

    @property
    def name(self) -> str:
        """Return the name of the backend in pools, statistics and errors."""

    @property
    def trains(self) -> bool:
        """True if backward passes update the expert."""

    def get_info(self) -> dict[str, Any]:
        """Return a dictionary of ``name``, ``forward_schema``, ``outputs_schema`` and ``keyword_names``."""

    def get_pools(self) -> Sequence[Any]:
        """Return the pool of the forward pass and the pool of the backward pass."""


def check_is_backend(owner: str, backend: Any) -> None:
    """Raise TypeError unless ``backend`` is a :class:`Backend`; ``owner`` names the caller."""
    if isinstance(backend, type) or not isinstance(backend, Backend):
        wanted = ("name", "trains", "get_info", "get_pools")
        missing = [one for one in wanted if isinstance(backend, type) or not hasattr(backend, one)]
        shown = f"the class {backend.__name__}" if isinstance(backend, type) else type(backend).__name__
        raise TypeError(
            f"{owner}: expected a backend, as ExpertBackend is one, got {shown}"
            + ("" if isinstance(backend, type) else f" without {', '.join(missing)}")
            + how(backend)
        )


def how(value: Any) -> str:
    """Return the end of an error message about ``value``, which is not a backend.

    For a module, it says how to make a backend of the module; otherwise it is "".
    """
    if not isinstance(value, nn.Module):
        return ""
    return ": make a backend of the module with ExpertBackend(name, module, opt, args_schema=[BatchTensorProto(...)])"
