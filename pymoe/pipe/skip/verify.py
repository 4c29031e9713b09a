"""Finds where skips of a model begin and end, and checks that they match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from pymoe.pipe.skip.skippable import Skippable
from pymoe.pipe.skip.tracker import Key


@dataclass(frozen=True)
class SkipRoute:
    """One skip: the part that stashes it, and the parts that pop it.

    ``pops`` has a part once for each module in it that pops; ascending, and possibly ``stash`` itself.
    """

    key: Key
    stash: int
    pops: tuple[int, ...]


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every pop of a sequential model has a stash before it, and every stash a pop.

    Modules count in the order of their assignment, nested ones too.

    Raises:
        TypeError: with a line for each fault: a name that is stashed twice in one namespace, popped before it is
            stashed or without it, or never popped.
    """
    faults: list[str] = []
    stashed: set[Key] = set()
    popped: set[Key] = set()
    for name, layer in _skippables(module):
        for key in layer.poppable():
            if key not in stashed:
                faults.append(f"'{name}' declared '{key[1]}' as poppable but it was not stashed")
            popped.add(key)
        for key in layer.stashable():
            if key in stashed:
                faults.append(f"'{name}' redeclared '{key[1]}' as stashable but not isolated by namespace")
            stashed.add(key)
    for key in sorted(stashed - popped, key=lambda key: key[1]):
        faults.append(f"no module declared '{key[1]}' as poppable but stashed")
    if faults:
        lines = "\n".join(f"* {fault}" for fault in faults)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{lines}")


def skip_routes(parts: Sequence[nn.Module]) -> list[SkipRoute]:
    """Return the routes of all skips of a model that was cut into ``parts``, in the order of their stashes.

    The model is one that :func:`verify_skippables` accepts.
    """
    routes: dict[Key, list[int]] = {}  # the part that stashes, and those that pop
    for number, part in enumerate(parts):
        for _, layer in _skippables(part):
            for key in layer.poppable():
                routes[key].append(number)
            for key in layer.stashable():
                routes[key] = [number]
    return [SkipRoute(key, stash, tuple(pops)) for key, (stash, *pops) in routes.items()]


def _skippables(module: nn.Module, name: str = "") -> Iterator[tuple[str, Skippable]]:
    """Yield skippable modules with their names, in order; one that is there twice comes twice."""
    if isinstance(module, Skippable):
        yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _skippables(child, f"{name}.{child_name}" if name else child_name)
