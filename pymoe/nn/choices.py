"""Finds the layers of a model that choose experts, so that their choices can be observed or replaced.

This module finds layers of the class :class:`pymoe.nn.MoE`. Integrations add functions to :data:`finders`, which find
the layers of other libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from pymoe._common.types import Gate
from pymoe.nn.expert_load import load_of
from pymoe.nn.moe import MoE, moe_layers
from pymoe.reference.gate_topk import weights_of


class Removable(Protocol):
    """A handle that removes hooks, like torch's ``RemovableHandle``."""

    def remove(self) -> None:
        """Remove the hooks."""


class ChoosingLayer(Protocol):
    """A layer that chooses experts."""

    num_experts: int
    """E, the number of experts."""
    top_k: int | None
    """K, the number of experts per token; None if only a forward tells it."""

    def observe(self, keep: Callable[[Tensor], None]) -> Removable:
        """Call ``keep`` with the chosen experts, (T, K) integers, in every forward until the hooks are removed."""

    def replace(self, choice_TK: Tensor, used: Callable[[Tensor], None]) -> Removable:
        """Replace the choice of every forward until the hooks are removed; the router's own rule computes the weights.

        Args:
            choice_TK: (T, K) int64, the experts to use.
            used: called in every forward with the router's own choice; raises if that choice must not be replaced.
        """


finders: list[Callable[[str, nn.Module], dict[str, ChoosingLayer]]] = []
"""Functions that find the layers of some library. They take the name of the calling function, for errors, and a model;
they return the layers by name."""


def choosing_layers(function: str, model: nn.Module) -> dict[str, ChoosingLayer]:
    """Return the layers of a model that choose experts, by their names, in the model's order.

    Args:
        function: the name of the calling function, for errors.
        model: any module.

    Raises:
        ValueError: the model has no such layer, or the choice of one of them cannot be observed.
    """
    found: dict[str, ChoosingLayer] = {name: _LayerOfPymoe(layer) for name, layer in moe_layers(model).items()}
    for find in finders:
        found.update(find(function, model))
    if not found:
        raise ValueError(
            f"{function}: expected a model that chooses experts, got {type(model).__name__} with no MoE layer; for a "
            "model of transformers, import pymoe.integrations.transformers"
        )
    order = {name or "moe": place for place, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(found.items(), key=lambda pair: order[pair[0]]))


class _LayerOfPymoe:
    def __init__(self, layer: MoE) -> None:
        self.layer = layer
        self.num_experts = layer.num_experts
        self.top_k: int | None = layer.top_k

    def observe(self, keep: Callable[[Tensor], None]) -> Removable:
        # Without a hook on the router, the layer may run router and experts in one native call.
        return self.layer.router.register_forward_hook(lambda router, inputs, output: keep(output[0].experts))

    def replace(self, choice_TK: Tensor, used: Callable[[Tensor], None]) -> Removable:
        return _ReplacedGate(self.layer, choice_TK, used)


class _ReplacedGate:
    """Replaces the choice of a pymoe router until ``remove`` is called."""

    def __init__(self, layer: MoE, choice_TK: Tensor, used: Callable[[Tensor], None]) -> None:
        self.router = layer.router
        self.choice_TK = choice_TK
        self.used = used
        # Without a hook on the router, the layer may run router and experts in one native call.
        self.hook = self.router.register_forward_pre_hook(lambda router, inputs: None)
        self.before, self.router.replaced = self.router.replaced, self.choose

    def choose(self, gate: Gate, logits_TE: Tensor) -> Gate:
        """Return the gate with the replacing choice; return ``gate`` itself if it already has that choice."""
        router = self.router
        self.used(gate.experts)
        experts_TK = self.choice_TK.to(gate.experts.device)
        if torch.equal(experts_TK, gate.experts):
            return gate
        weights_TK = weights_of(logits_TE, experts_TK, router.score, router.renormalize, router.scale)
        # For tokens with an unchanged choice, keep the weights of `gate`: weights_of rounds slightly differently.
        same_T1 = (experts_TK == gate.experts).all(dim=1, keepdim=True)
        load = load_of(experts_TK, router.num_experts)
        return Gate(torch.where(same_T1, gate.weights, weights_TK), experts_TK.to(torch.int32), load)

    def remove(self) -> None:
        self.hook.remove()
        self.router.replaced = self.before
