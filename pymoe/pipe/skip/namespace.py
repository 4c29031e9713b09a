"""Namespace: what keeps skips of one name apart."""

from __future__ import annotations

import uuid

__all__ = ["Namespace"]


class Namespace:
    """Skips of one name in different namespaces have nothing to do with each other.

    ::

        for _ in range(2):
            ns = Namespace()
            layers += [Down().isolate(ns), Up().isolate(ns)]

    Copies, also pickled ones, are the same namespace.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and other._id == self._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Namespace {self._id[:8]}>"
