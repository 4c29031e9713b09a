"""Notices that a model's layers are others than those that its pipeline was made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

from torch import nn


class Structure:
    """The submodules, at all depths, of a model and of its stages, as they are when this is made.

    Args:
        model: whose layers they are.
        parts: the modules of the stages.
        made: those modules within ``parts`` that a pipe has made, each with the module whose layers it has put there.
    """

    def __init__(
        self, model: nn.Module, parts: Sequence[nn.Module], made: Iterable[tuple[nn.Module, nn.Module]] = ()
    ) -> None:
        found = {id(module): module for root in (model, *parts) for module in root.modules()}.values()
        self._model = model
        self._shown = model._modules  # a pipe has the same dictionary; deleting a layer makes another
        self._layers = dict(model._modules)
        self._parts = parts
        self._made = [(module, dict(module._modules), original) for module, original in made]
        self._leaves = [module for module in found if not module._modules]
        self._others = [(module, dict(module._modules)) for module in found if module._modules]

    def has_changed(self) -> bool:
        """Return whether a submodule was added, deleted or replaced since."""
        return any([module._modules for module in self._leaves]) or any(
            [not have_same_items(module._modules, then) for module, then in self._others]
        )

    def refuse_other_names(self) -> None:
        """Raise RuntimeError if the model has layers of other names, for which it was not cut."""
        now = self._model._modules
        if now is not self._shown or [*now] != [*self._layers]:
            raise RuntimeError(
                "Pipe: expected the layers that the pipe was made of, or others in their places (model[1] = layer), "
                f"got {_difference(self._layers, now)}: the stages are not cut for them; make a new pipe of the model"
            )

    def refuse_edited_stages(self) -> None:
        """Raise RuntimeError if a layer was replaced in a stage, where the model does not show it."""
        for module, then, original in self._made:
            layers = module._modules.items()
            is_models = all([layer is then.get(name) or layer is original._modules.get(name) for name, layer in layers])
            if not is_models or [*module._modules] != [*then]:
                stage = next(n for n, part in enumerate(self._parts) if any(module is m for m in part.modules()))
                found = _difference(then, module._modules)
                raise RuntimeError(
                    f"Pipe: expected the model's own layers in stage {stage}, got {found}: "
                    "neither the model nor its state_dict has them; replace layers in the model (model[1] = layer), "
                    "which the pipe then runs"
                )


def have_same_items(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> bool:
    """Return whether two dictionaries have the same objects under the same names, in the same order."""
    # By keys(), since the dictionaries of TorchScript are no iterables.
    return [*now.keys()] == [*then.keys()] and all(map(is_, now.values(), then.values()))


def _difference(then: Mapping[str, nn.Module | None], now: Mapping[str, nn.Module | None]) -> str:
    """Say in words which modules are new and which are gone."""

    def without(some: Mapping[str, nn.Module | None], others: Mapping[str, nn.Module | None]) -> str:
        return ", ".join(
            f"{name!r} ({type(module).__name__})"
            for name, module in some.items()
            if not any(module is other for other in others.values())
        )

    found = [
        f"{what} {layers}" for what, layers in (("new", without(now, then)), ("gone", without(then, now))) if layers
    ]
    return "; ".join(found) or f"layers named {', '.join(now) or 'nothing'} in place of {', '.join(then)}"
