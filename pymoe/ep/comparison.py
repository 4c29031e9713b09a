"""What ranks are about to do to a model, compared before any of them does it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pymoe._errors import describe_error
from pymoe.ep.errors import GroupError

Described = dict[str, dict[str, Any]]
"""For every kind of thing (``"layer"``) what is known of each, by name."""


def compare(what: str, group: dist.ProcessGroup, mine: Described, problem: Exception | None) -> None:
    """Raise on all ranks of a group unless all of them say the same.

    Args:
        what: the function that they have called.
        group: the ranks; all of them call this.
        mine: what this rank says.
        problem: why this rank cannot go on; it raises it, and the others :class:`GroupError`.
    """
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (None if problem is None else describe_error(problem), mine), group=group)
    if problem is not None:
        raise problem
    for rank, (error, theirs) in enumerate(said):
        if error is not None:
            raise GroupError(f"{what}: rank {rank} of the group failed: {error}", "", (rank,))
        for kind in mine:
            _raise_unless_equal(what, kind, mine[kind], theirs[kind], rank)


def _raise_unless_equal(what: str, kind: str, mine: dict[str, Any], theirs: dict[str, Any], rank: int) -> None:
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(name, "none"), theirs.get(name, "none")
        if here != there:
            raise GroupError(
                f"{what}: all ranks of the group must have the same {kind} {name!r}, got {_difference(here, there)} on "
                f"rank {rank}",
                name if kind == "layer" else "",
                (rank,),
            )


def _difference(here: Any, there: Any) -> str:
    """Return what is first found to differ: of layers a part, unless one rank has no such layer."""
    if isinstance(here, dict) and isinstance(there, dict):
        part = next(name for name in [*here, *there] if here.get(name, "none") != there.get(name, "none"))
        return f"{part} {here.get(part, 'none')} here and {there.get(part, 'none')}"
    here, there = (one["options"] if isinstance(one, dict) else one for one in (here, there))
    return f"{here} here and {there}"
