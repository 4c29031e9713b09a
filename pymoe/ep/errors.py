"""What a rank is told when its group cannot go on."""

from __future__ import annotations


class GroupError(RuntimeError):
    """The ranks of an expert-parallel group disagree, one has failed, or rows would not fit.

    Where ranks disagree, or rows would not fit, every rank of the group raises it, from the same call of the same
    layer, before any row was sent: the group can be used afterwards. After a rank has died it cannot.
    """

    def __init__(self, message: str, layer: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.layer = layer
        """The name of the layer in its model."""
        self.ranks = ranks
        """The ranks, numbered within the group, that the message is about; empty where that is not known."""

    def __reduce__(self) -> tuple[type[GroupError], tuple[str, str, tuple[int, ...]]]:
        return type(self), (str(self), self.layer, self.ranks)
