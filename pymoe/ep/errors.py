"""What a rank is told when its group cannot go on."""

from __future__ import annotations


class GroupError(RuntimeError):
    """The ranks of an expert-parallel group disagree, one has failed, or rows would not fit.

    Where ranks disagree, rows would not fit, or a rank has failed before it announced its rows, every rank of the group
    raises it, from the same call, before any row was sent: the group can be used afterwards. (The rank that has failed
    raises its own error.) Where rows or an announcement did not arrive, as a rank has died or is late, it cannot.
    """

    def __init__(self, message: str, layer: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.layer = layer
        """The name of the layer in its model."""
        self.ranks = ranks
        """The ranks, numbered within the group, that the message is about; empty where that is not known."""

    def __reduce__(self) -> tuple[type[GroupError], tuple[str, str, tuple[int, ...]]]:
        return type(self), (str(self), self.layer, self.ranks)
