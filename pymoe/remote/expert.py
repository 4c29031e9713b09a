"""What a client knows of an expert on a server: how requests to it look, how they are numbered, what it said last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pymoe.remote import wire
from pymoe.remote.channel import Channel
from pymoe.remote.errors import ProtocolError
from pymoe.remote.keys import Keys
from pymoe.remote.schemas import read_schema
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.nested import nested_flatten
from pymoe.runtime.schema import RequestSchema


class KnownExpert:
    """An expert behind a channel, as its server describes it.

    Attributes:
        schema: of its requests.
        keys: the numbers of its backward requests.
        updates: how many it had seen by its last answer.
        answered_by: the incarnation of the server that last answered a backward request; empty before.
        max_batch_size: rows that the server runs at once.

    Raises:
        ProtocolError: the description is none.
    """

    def __init__(self, channel: Channel, name: str, info: wire.ExpertInfo) -> None:
        self.channel, self.name, self.trains, self.updates = channel, name, info.trains, info.updates
        if info.max_batch_size < 1:
            raise ProtocolError(f"{channel.address}: {name!r} has a max_batch_size of {info.max_batch_size}")
        self.max_batch_size = info.max_batch_size
        try:
            forward_schema = read_schema(info.forward_schema)
            self.outputs_schema = read_schema(info.outputs_schema)
            args, kwargs = forward_schema
            if not isinstance(args, tuple) or not isinstance(kwargs, dict):
                raise ValueError("expected (args, kwargs) as the forward schema")
            self.schema = RequestSchema(name, (args, kwargs), self.outputs_schema)
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"{channel.address}: the schema of {name!r} cannot be read: {error}") from None
        if not self.schema.inputs:
            raise ProtocolError(f"{channel.address}: {name!r} takes no tensor")
        self._leaves = nested_flatten(self.outputs_schema)
        self._constants = any(not isinstance(leaf, BatchTensorProto) for leaf in self._leaves)
        self.forward_schema: tuple[tuple[Any, ...], dict[str, Any]] = args, kwargs
        self.keys = Keys()
        self.answered_by = ""

    def heard(self, incarnation: str, updates: int, method: str) -> None:
        """Note what an answer says of the server."""
        self.updates = updates
        if method == "Backward":
            self.answered_by = incarnation

    def with_constants(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the flat outputs: the tensors, and in their places what the schema has as constants."""
        if not self._constants:
            return tuple(tensors)
        rest = iter(tensors)
        return tuple(next(rest) if isinstance(leaf, BatchTensorProto) else leaf for leaf in self._leaves)
