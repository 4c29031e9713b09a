"""What clients and mixtures ask of a backend and of its pools, whichever process its expert is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


class RequestPool(Protocol):
    """Takes requests of one pass of an expert. :class:`~pymoe.runtime.TaskPool` is one.

    For this package alone: clients and mixtures use what pools do not offer to others.
    """

    @property
    def name(self) -> str:
        """What errors, logs and statistics call it."""

    @property
    def served(self) -> bool:
        """Whether somebody answers, as far as is known."""

    @property
    def why_unserved(self) -> str:
        """What to say where it is not: a clause."""

    def submit_task(self, *tensors: Any, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Queue a request and return its future, which is used like a :class:`~pymoe.runtime.Future`."""

    def _try_submit(self, *tensors: Any, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Queue a request, or return None where that would have to wait for room."""

    async def _queue(self, tensors: Sequence[Any], timeout: float | None, priority: float = 0.0) -> Any:
        """Queue a request once there is room, without blocking the event loop."""

    def _idle_is_known(self) -> None:
        """Note that who waits has been told that nobody answers."""


@runtime_checkable
class Backend(Protocol):
    """An expert that is served: what :class:`~pymoe.runtime.ExpertClient` and a mixture need of it.

    :class:`~pymoe.runtime.ExpertBackend` is one, for an expert of this process, and those of
    :func:`pymoe.remote.connect` are others.
    """

    @property
    def name(self) -> str:
        """What pools, statistics and errors call it."""

    @property
    def trains(self) -> bool:
        """Whether backward passes update the expert."""

    def get_info(self) -> dict[str, Any]:
        """Return ``name``, ``forward_schema``, ``outputs_schema`` and ``keyword_names``."""

    def get_pools(self) -> Sequence[Any]:
        """Return the pool of the forward pass and that of the backward pass."""


def check_backend(owner: str, backend: Any) -> None:
    """Raise TypeError unless ``backend`` is a :class:`Backend`; ``owner`` says who asks."""
    if isinstance(backend, type) or not isinstance(backend, Backend):
        wanted = ("name", "trains", "get_info", "get_pools")
        missing = [one for one in wanted if isinstance(backend, type) or not hasattr(backend, one)]
        shown = f"the class {backend.__name__}" if isinstance(backend, type) else type(backend).__name__
        raise TypeError(
            f"{owner}: expected a backend, as ExpertBackend is one, got {shown}"
            + ("" if isinstance(backend, type) else f" without {', '.join(missing)}")
        )
