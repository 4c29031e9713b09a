"""``nn.Sequential`` as a pipeline: consecutive layers are a stage, skips are edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pymoe.pipe.auxiliary import with_auxiliary_losses
from pymoe.pipe.devices import place
from pymoe.pipe.execution.shared_layers import serialize_shared_layers
from pymoe.pipe.skip import SkipRoute, skip_routes, tracking, verify_skippables
from pymoe.pipe.skip.tracker import Key
from pymoe.pipe.staged import StagedModel
from pymoe.pipe.stages import INPUT, Pipeline, Source, Stage

__all__ = ["SequentialModel", "cut", "sequential_pipeline"]


class SequentialModel(StagedModel):
    """An ``nn.Sequential``, cut between its layers. Takes one value and returns one.

    Hooks of a stage's module see micro-batches, those of the model itself whole mini-batches.

    Raises:
        TypeError: the model is not an ``nn.Sequential``; skips do not match; ``balance`` is not a list of integers.
        ValueError: ``balance`` or ``devices`` do not match the model.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None,
        devices: Sequence[torch.device | str | int] | None,
    ) -> None:
        self.module = module
        parts = cut(module, balance)
        self.parts = tuple(parts)
        self.devices = tuple(place(parts, devices))
        self._pipeline = sequential_pipeline(module, parts, self.devices)

    @property
    def pipeline(self) -> Pipeline:
        """The stages and edges; the same in training and evaluation."""
        return self._pipeline

    @property
    def hooks_are_pipes(self) -> bool:
        """True: stages call the layers, and nothing calls the model."""
        return True

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the one argument."""
        if kwargs:
            unknown = ", ".join(name for name in kwargs if name != "input")
            if unknown:
                raise TypeError(f"Pipe: unexpected argument {unknown}: an nn.Sequential has one, 'input'")
            args = [*args, kwargs["input"]]
        if len(args) != 1:
            raise TypeError(f"Pipe: expected 1 input, got {len(args)}")
        return list(args)

    def unflatten_outputs(self, values: Sequence[Any]) -> Any:
        """Return the one value."""
        return values[0]

    def extra_repr(self) -> str:
        """Return the numbers of layers of the stages."""
        return f"balance={[len(part._modules) for part in self.parts]}"


def cut(module: nn.Sequential, balance: Sequence[int] | None) -> list[nn.Sequential]:
    """Cut a model into groups of layers of the sizes in ``balance``; None: of one layer each. Names are kept.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or has its own forward; ``balance`` is not a list of integers.
        ValueError: the sizes do not add up to the number of layers, or one is less than 1.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"Pipe: the model must be an nn.Sequential, got {type(module).__name__}")
    if type(module).forward is not nn.Sequential.forward:
        raise TypeError(f"Pipe: {type(module).__name__} has a forward of its own, which would not run")
    layers = list(module._modules.items())
    sizes = [1] * len(layers) if balance is None else list(balance)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"Pipe: balance must be a list of integers, the layers of each stage, got {balance!r}")
    if not layers:
        raise ValueError("Pipe: the model has no layers")
    if any(size < 1 for size in sizes):
        raise ValueError(f"Pipe: every stage must have a layer, got balance={sizes}")
    if sum(sizes) != len(layers):
        raise ValueError(f"Pipe: balance={sizes} is for {sum(sizes)} layers, the model has {len(layers)}")
    parts = []
    rest = iter(layers)
    for size in sizes:
        part = nn.Sequential()
        part._modules.update([next(rest) for _ in range(size)])
        part.training = module.training
        parts.append(part)
    return parts


def sequential_pipeline(
    module: nn.Sequential, parts: Sequence[nn.Sequential], devices: Sequence[torch.device | None]
) -> Pipeline:
    """Return the pipeline of a model that was cut into ``parts``. It takes one value and returns one.

    Raises:
        TypeError: stashes and pops of skips do not match.
    """
    verify_skippables(module)
    routes = skip_routes(parts)
    sends: list[list[SkipRoute]] = [[] for _ in parts]  # skips that leave the stage, as its outputs 1, 2, ...
    takes: list[list[tuple[Key, Source]]] = [[] for _ in parts]  # and where they come from
    for route in routes:
        elsewhere = sorted({pop for pop in route.pops if pop != route.stash})
        if elsewhere:
            sends[route.stash].append(route)
            for pop in elsewhere:
                takes[pop].append((route.key, Source(route.stash, len(sends[route.stash]))))
    functions = []
    for number, part in enumerate(parts):
        taken, sent = [key for key, _ in takes[number]], [route.key for route in sends[number]]
        functions.append(with_auxiliary_losses(_Layers(part, taken, sent, routes, number), part))
    stages = []
    for number, function in enumerate(serialize_shared_layers(functions, parts)):
        before = Source(number - 1, 0) if number else Source(INPUT, 0)
        inputs = (before, *[source for _, source in takes[number]])
        stages.append(Stage(function, inputs, 1 + len(sends[number]), (parts[number],), devices[number]))
    return Pipeline(tuple(stages), 1, (Source(len(parts) - 1, 0),))


class _Layers:
    """The function of a stage: runs its layers one after the other."""

    def __init__(
        self, part: nn.Sequential, takes: list[Key], sends: list[Key], routes: Sequence[SkipRoute], number: int
    ) -> None:
        self._part = part
        self._takes = takes
        self._sends = sends
        self._pops = Counter({route.key: route.pops.count(number) for route in routes})
        self._has_skips = bool(sum(self._pops.values()) or sends)

    def __call__(self, value: Any, *taken: Any) -> Sequence[Any]:
        if self._has_skips:
            return self._with_skips(value, taken)
        return [self._part(value)]

    def _with_skips(self, value: Any, taken: Sequence[Any]) -> Sequence[Any]:
        skips = _Skips(dict(zip(self._takes, taken, strict=True)), self._sends, self._pops)
        with tracking(skips):
            value = self._part(value)
        return [value, *[skips.sent[key] for key in self._sends]]


class _Skips:
    """The skip tracker of a stage: keeps what its layers and other stages have stashed for the layers that pop it."""

    def __init__(self, taken: dict[Key, Any], sends: list[Key], pops: Counter[Key]) -> None:
        self.sent: dict[Key, Any] = {}
        self._sends = sends
        self._kept = taken
        self._pops = pops.copy()

    def save(self, key: Key, value: Any) -> None:
        if key in self._sends:
            self.sent[key] = value
        if self._pops[key]:
            self._kept[key] = value

    def load(self, key: Key) -> Any:
        value = self._kept[key]
        self._pops[key] -= 1
        if not self._pops[key]:
            del self._kept[key]
        return value
