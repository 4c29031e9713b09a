"""Adapts the layers of transformers' models that choose experts to :mod:`pymoe.nn.choices`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.integrations.transformers.choosing import Choosing, ModeAround, router_of
from pymoe.integrations.transformers.routing import choice_of, sparse_experts
from pymoe.nn.choices import ChoosingLayer, Removable, finders


def register() -> None:
    """Make the functions of :mod:`pymoe.nn` that record and replay choices find the experts of transformers.

    Further calls change nothing.
    """
    if find not in finders:
        finders.append(find)


def find(function: str, model: nn.Module) -> dict[str, ChoosingLayer]:
    """Return the layers of ``model`` whose choices can be recorded or replaced, by name.

    See :data:`pymoe.nn.choices.finders`.
    """
    return {
        name: _Layer(function, experts, model.get_submodule(name.rpartition(".")[0]) if "." in name else None)
        for name, experts in sparse_experts(function, model).items()
    }


class _Layer:
    def __init__(self, function: str, experts: Any, block: nn.Module | None) -> None:
        self.function = function
        self.experts = experts
        self.block = block
        self.num_experts: int = experts.num_experts
        # Unknown here, because models store top_k under different names.
        self.top_k: int | None = None

    def observe(self, keep: Callable[[Tensor], None]) -> Removable:
        def see(experts: Any, arguments: tuple[Any, ...]) -> None:
            keep(choice_of(experts, arguments).experts_TK)

        return self.experts.register_forward_pre_hook(see)

    def replace(self, choice_TK: Tensor, used: Callable[[Tensor], None]) -> Removable:
        return _ReplacedChoice(self, choice_TK, used)


class _ReplacedChoice:
    """Replaces the choice of a router with ``choice_TK`` until :meth:`remove`."""

    def __init__(self, layer: _Layer, choice_TK: Tensor, used: Callable[[Tensor], None]) -> None:
        self.function = layer.function
        self.num_experts = layer.num_experts
        self.choice_TK = choice_TK
        self.used = used
        router = router_of(layer.block)
        self.chosen_by = None if router is None else ModeAround(router, lambda: Choosing(self.num_experts, self.choose))
        self.hook = layer.experts.register_forward_pre_hook(self.check)

    def choose(self, scores: Tensor, k: int) -> Tensor:
        """Return ``choice_TK`` in the shape of the router's choice.

        If it does not fit that shape, return the choice that the router would make; ``check`` then raises.
        """
        shape = torch.Size((*scores.shape[:-1], k))
        if k != self.choice_TK.shape[1] or shape.numel() != self.choice_TK.numel():
            return torch.topk(scores, k).indices
        return self.choice_TK.to(scores.device).view(shape)

    def check(self, experts: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Raise ValueError unless the experts got the choice ``choice_TK``, with weights that the router could compute
        for it.
        """
        _, experts_TK, weights_TK = choice_of(experts, arguments)
        mode = None if self.chosen_by is None else self.chosen_by.take()
        self.used(experts_TK)
        if not torch.equal(experts_TK, self.choice_TK.to(experts_TK.device)):
            raise ValueError(
                f"{self.function}: expected a router that chooses by torch.topk among {self.num_experts} experts, got "
                f"that of {type(experts).__name__}, which chooses others than the recorded ones"
            )
        if mode is not None and mode.groups and weights_TK.isnan().any():
            raise ValueError(
                f"{self.function}: expected a router that keeps the scores of all experts, got that of "
                f"{type(experts).__name__}, which chooses groups of experts first"
            )

    def remove(self) -> None:
        self.hook.remove()
        if self.chosen_by is not None:
            self.chosen_by.remove()
