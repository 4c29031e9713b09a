"""``nn.Sequential`` as a pipeline: consecutive layers are a stage, skips are edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pymoe.pipe.deferred_batch_norm import convert_deferred_batch_norm
from pymoe.pipe.devices import place
from pymoe.pipe.skip import InPlace, Key, skip_routes, tracking, verify_skippables
from pymoe.pipe.staged import LayersAsStages
from pymoe.pipe.stages import INPUT, Pipeline, Source


class SequentialModel(LayersAsStages):
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
        deferred_batch_norm: bool = False,
    ) -> None:
        self.parts = tuple(cut(module, balance))
        self._places = devices
        self._deferred_batch_norm = deferred_batch_norm
        super().__init__(module)

    module: nn.Sequential
    hooks_are_pipes = True  # stages call the layers, and nothing calls the model

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if kwargs:
            unknown = ", ".join(name for name in kwargs if name != "input")
            if unknown:
                raise TypeError(f"Pipe: unexpected argument {unknown}: an nn.Sequential has one, 'input'")
            args = [*args, kwargs["input"]]
        if len(args) != 1:
            raise TypeError(f"Pipe: expected 1 input, got {len(args)}")
        return list(args)

    def unflatten_outputs(self, values: Sequence[Any]) -> Any:
        return values[0]

    def extra_repr(self) -> str:
        return f"balance={[len(part._modules) for part in self.parts]}"

    @property
    def pipeline(self) -> Pipeline:
        """The stages and edges, of the layers that the model has by now."""
        refuse_own_call(self.module)
        return super().pipeline

    def _fill(self) -> Sequence[tuple[nn.Module, nn.Module]]:
        verify_skippables(self.module)
        rest = iter(self.module._modules.items())
        for part in self.parts:
            part._modules.update([next(rest) for _ in part._modules])
        return [(part, self.module) for part in self.parts]

    def _make_pipeline(self) -> Pipeline:
        if self._deferred_batch_norm:
            convert_deferred_batch_norm(self.module)
        self.devices = place(self.parts, self._places)
        parts = self.parts
        routes = skip_routes(parts)
        sends: list[list[Key]] = [[] for _ in parts]  # skips that leave the stage, as its outputs 1, 2, ...
        takes: list[dict[Key, Source]] = [{} for _ in parts]  # and where they come from
        for route in routes:
            elsewhere = sorted({pop for pop in route.pops if pop != route.stash})
            if elsewhere:
                sends[route.stash].append(route.key)
                for pop in elsewhere:
                    takes[pop][route.key] = Source(route.stash, len(sends[route.stash]))
        functions = []
        for number, part in enumerate(parts):
            pops = Counter({route.key: route.pops.count(number) for route in routes})
            has_skips = sends[number] or any(pops.values())
            skips = (list(takes[number]), sends[number], pops)
            functions.append(partial(_run_with_skips, part, *skips) if has_skips else partial(_run, part))
        before = [Source(INPUT, 0), *[Source(number, 0) for number in range(len(parts))]]
        inputs = [(source, *taken.values()) for source, taken in zip(before, takes, strict=False)]
        return Pipeline(self.stages_of(functions, inputs, [1 + len(keys) for keys in sends]), 1, (before[-1],))


ANY_MODEL = ": pymoe.pipeline(model, example_args) makes a pipe of any model that can be captured"
COMPILED = (
    ": give Pipe the model itself, and compile what stages call, pipe[0].compile() for each stage "
    "(model.compile() compiles a call of the whole model, which no stage makes)"
)


def cut(module: nn.Sequential, balance: Sequence[int] | None) -> list[nn.Sequential]:
    """Cut a model into groups of layers of the sizes in ``balance``; None: of one layer each. Names are kept.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or has its own forward; ``balance`` is not a list of integers.
        ValueError: the sizes do not add up to the number of layers, or one is less than 1.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"Pipe: the model must be an nn.Sequential, got {type(module).__name__}"
            + (COMPILED if hasattr(module, "_orig_mod") else ANY_MODEL)
        )
    refuse_own_call(module)
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


def refuse_own_call(module: nn.Sequential) -> None:
    """Raise TypeError if a call of the model does more than to call its layers: stages call these alone."""
    kind = type(module)
    is_own = kind.forward is not nn.Sequential.forward or kind.__call__ is not nn.Module.__call__
    if is_own or "forward" in module.__dict__:
        where = "" if is_own else ", put into the object,"
        raise TypeError(f"Pipe: {kind.__name__} has a forward of its own{where} which would not run")


def _run(part: nn.Module, value: Any) -> Sequence[Any]:
    """The function of a stage: runs its layers one after the other."""
    return [part(value)]


def _run_with_skips(
    part: nn.Module, takes: list[Key], sends: list[Key], pops: Counter[Key], value: Any, *taken: Any
) -> Sequence[Any]:
    """The same where layers stash and pop: it is given the skips that others have stashed, and returns its own."""
    skips = _Skips(zip(takes, taken, strict=True), sends, pops)
    with tracking(skips):
        value = part(value)
    return [value, *[skips.sent[key] for key in sends]]


class _Skips(InPlace):
    """The skip tracker of a stage: keeps what its layers and other stages have stashed for the layers that pop it."""

    def __init__(self, taken: Iterable[tuple[Key, Any]], sends: list[Key], pops: Counter[Key]) -> None:
        super().__init__(pops.__getitem__)
        self.sent: dict[Key, Any] = {}
        self._sends = sends
        for key, value in taken:
            super().save(key, value)

    def save(self, key: Key, value: Any) -> None:
        if key in self._sends:
            self.sent[key] = value
        super().save(key, value)
