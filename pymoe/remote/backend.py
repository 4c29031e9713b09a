"""RemoteBackend: an expert of a server as a backend of this process."""

from __future__ import annotations

from typing import Any

from pymoe.remote import wire
from pymoe.remote.channel import Channel
from pymoe.remote.expert import KnownExpert
from pymoe.remote.pools import CoalescingPool, DirectPool


class RemoteBackend:
    """An expert that another process serves. Made by :meth:`Connection.backends`.

    It stands where an :class:`~pymoe.runtime.ExpertBackend` does: in :class:`~pymoe.runtime.ExpertClient`, in a
    :class:`~pymoe.mixture.MixtureOfExpertBackends`, and in code that calls ``submit_task`` of its pools. Answers are,
    bit for bit, those of the expert where it is, if nothing is sent in fewer bits (``encoding``).

    Attributes:
        name: of the expert.
        trains: whether backward passes update it.
        max_batch_size: rows that its server runs at once.
        forward_pool: as that of an ExpertBackend.
        backward_pool: the same.
    """

    def __init__(self, channel: Channel, name: str, info: wire.ExpertInfo) -> None:
        self._expert = expert = KnownExpert(channel, name, info)
        self.name, self.trains, self.max_batch_size = name, expert.trains, expert.max_batch_size
        kind = CoalescingPool if channel.coalesce else DirectPool
        inputs, outputs = expert.schema.inputs, expert.schema.outputs
        self.forward_pool: CoalescingPool | DirectPool = kind(expert, "Forward", inputs)
        self.backward_pool: CoalescingPool | DirectPool = kind(expert, "Backward", inputs + outputs)

    @property
    def updates(self) -> int:
        """How many updates the expert had seen by its last answer, here."""
        return self._expert.updates

    @property
    def address(self) -> str:
        """Where its server is."""
        return self._expert.channel.address

    def get_info(self) -> dict[str, Any]:
        """Return name, schemas and names of keyword arguments, as an ExpertBackend does."""
        forward_schema = self._expert.forward_schema
        return {
            "name": self.name,
            "forward_schema": forward_schema,
            "outputs_schema": self._expert.outputs_schema,
            "keyword_names": tuple(forward_schema[1]),
        }

    def get_pools(self) -> tuple[CoalescingPool | DirectPool, CoalescingPool | DirectPool]:
        """Return the pool of the forward pass and that of the backward pass."""
        return self.forward_pool, self.backward_pool

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteBackend:
        """Return the same: a copy of a model asks the same expert."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"RemoteBackend {self.name!r} cannot be pickled: it belongs to a connection of this process")

    def __repr__(self) -> str:
        return f"<RemoteBackend {self.name!r} at {self.address}>"
