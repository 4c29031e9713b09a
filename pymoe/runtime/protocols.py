"""Interfaces of a backend and its pools for clients and mixtures, whichever process the expert is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from pymoe.runtime.room import RoomLine


class RequestPool(Protocol):
    """Takes requests for one pass of an expert, as :class:`~pymoe.runtime.TaskPool` does.

    Only for this package: clients and mixtures use methods of pools that are not public.
    """

    _line: RoomLine
    """The queue of requests that wait for room."""

    @property
    def name(self) -> str:
        """Return the name of the pool in errors, logs and statistics."""

    @property
    def served(self) -> bool:
        """True if requests are answered, as far as is known."""

    @property
    def why_unserved(self) -> str:
        """Return a clause for error messages that says why the pool is not served."""

    def submit_task(self, *tensors: Any, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Queue a request and return its future, which is used like a :class:`~pymoe.runtime.Future`."""

    def _try_submit(self, *tensors: Any, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Queue a request and return its future, or return None if there is no room now."""

    async def _queue(self, tensors: Sequence[Any], timeout: float | None, priority: float = 0.0) -> Any:
        """Queue a request once there is room, without blocking the event loop, and return its future."""

    def _idle_is_known(self) -> None:
        """Record that waiting clients have been told that no runtime serves this pool."""


@runtime_checkable
class Backend(Protocol):
    """A served expert, as :class:`~pymoe.runtime.ExpertClient` and mixtures use it.

    :class:`~pymoe.runtime.ExpertBackend` is one, for an expert of this process; the backends of
    :func:`pymoe.remote.connect` are others.
    """

    @property
    def name(self) -> str:
        """Return the name of the backend in pools, statistics and errors."""

    @property
    def trains(self) -> bool:
        """True if backward passes update the expert."""

    def get_info(self) -> dict[str, Any]:
        """Return ``name``, ``forward_schema``, ``outputs_schema`` and ``keyword_names``."""

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
    """Return the end of an error message for a value that should have been a backend; "" unless it is a module."""
    if not isinstance(value, nn.Module):
        return ""
    return ": make a backend of the module with ExpertBackend(name, module, opt, args_schema=[BatchTensorProto(...)])"
