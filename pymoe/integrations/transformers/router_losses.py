"""Adds the auxiliary losses of :class:`pymoe.nn.MoE` to transformers' routers, by injecting their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pymoe._common.types import Gate, Score
from pymoe.integrations.transformers.choosing import ROUTERS, ModeAround, router_of
from pymoe.integrations.transformers.routing import Attached, attach, choice_of, required_experts
from pymoe.nn.expert_load import load_of
from pymoe.nn.losses import AuxiliaryLosses

ADDED = "pymoe_losses"
"""Name of the submodule of experts that :func:`add_router_losses` adds."""

_SCORES: dict[Any, Score] = {
    **dict.fromkeys((torch.softmax, Tensor.softmax, functional.softmax), "softmax"),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, functional.sigmoid), "sigmoid"),
    # A router that calls ``topk`` on its logits takes the softmax of the chosen logits afterwards.
    **dict.fromkeys((torch.topk, Tensor.topk), "softmax"),
}
_SAME = {Tensor.float, Tensor.to, Tensor.type, Tensor.view, Tensor.reshape}
"""Functions that return the logits with another dtype or shape at most."""


class _Logits(TorchFunctionMode):
    """Finds the logits of a router: the product with E columns to which the router applies a score function or
    ``topk``.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.logits: Tensor | None = None
        self.score: Score = "softmax"
        self._products: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        of_logits = bool(args) and any(args[0] is product for product in self._products)
        if func is functional.linear or (of_logits and func in _SAME):
            if result.shape[-1] == self.num_experts:
                self._products.append(result)
        elif of_logits and self.logits is None and func in _SCORES:
            self.logits, self.score = args[0], _SCORES[func]
        return result


def add_router_losses(model: nn.Module, *, aux_loss_coef: float = 0.0, z_loss_coef: float = 0.0) -> Attached:
    """Add the balancing loss and the z loss to the training of a transformers model.

    As in :class:`pymoe.nn.MoE`, the losses are not part of the model's loss: in training mode, the backward pass of any
    loss adds the gradients of ``aux_loss_coef * balancing loss + z_loss_coef * z loss`` of every layer, whatever factor
    scales that loss. Use :func:`pymoe.nn.set_aux_loss_scale` for gradient accumulation and loss scaling. The balancing
    loss uses the function by which the router computes scores from its logits, a softmax or a sigmoid; for routers that
    choose by logits and take the softmax of the chosen ones, such as GPT-OSS's, it uses the softmax of all logits.

    transformers itself adds a balancing loss to the loss of some models if they return their routers' logits. A forward
    in which both balancing losses would count raises :class:`ValueError`.

    Args:
        model: a model whose experts are behind transformers' interface.
        aux_loss_coef: factor of the balancing loss (Switch Transformer, arXiv 2101.03961), at least 0.
        z_loss_coef: factor of the z loss (ST-MoE, arXiv 2202.08906), at least 0.

    Returns:
        A handle; its ``remove()`` removes the losses.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: both coefficients are 0, or one is negative; the model has no experts behind the interface, has
            experts outside of it, or has a block without a router ``gate`` or ``router``; or it already has losses from
            this function.

    A forward in training mode raises :class:`ValueError` if a router applies neither a softmax nor a sigmoid nor
    ``topk`` to the result of a product itself, for instance because it masks or caps the logits first. A forward in
    compiled code raises :class:`RuntimeError`.

    Example:
        >>> from pymoe.integrations.transformers import add_router_losses
        >>> from transformers import OlmoeConfig, OlmoeForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, eos_token_id=0)
        >>> model = OlmoeForCausalLM(OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
        >>> handle = add_router_losses(model.train(), aux_loss_coef=0.01)
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> model(ids, labels=ids).loss.backward()  # adds the gradients of the balancing loss
        >>> model.model.layers[0].mlp.gate.weight.grad.shape
        torch.Size([4, 32])
    """
    found = required_experts("add_router_losses", model)
    if aux_loss_coef == z_loss_coef == 0:
        raise ValueError("add_router_losses: expected aux_loss_coef or z_loss_coef greater than 0, got 0 for both")
    if any(hasattr(experts, ADDED) for experts in found.values()):
        raise ValueError("add_router_losses: expected a model without added losses, got one that has them")
    routers = {name: router_of(model.get_submodule(name.rpartition(".")[0])) for name in found if "." in name}
    for name in found:
        if routers.get(name) is None:
            raise ValueError(
                f"add_router_losses: expected experts next to a router called {' or '.join(ROUTERS)}, got {name}"
            )
    attached = Attached()
    for name, experts in found.items():
        losses = AuxiliaryLosses(aux_loss_coef, z_loss_coef)
        logits = ModeAround(routers[name], partial(_Logits, experts.num_experts))
        hook = experts.register_forward_pre_hook(partial(_inject, losses, logits))
        attach(attached, experts, ADDED, losses, hook, logits)
    for module in model.modules():
        if aux_loss_coef > 0 and hasattr(module, "router_aux_loss_coef"):
            attached._hooks.append(module.register_forward_pre_hook(_refuse_double, with_kwargs=True))
    return attached


def _refuse_double(model: Any, arguments: Any, named: dict[str, Any]) -> None:
    asked = named.get("output_router_logits")
    if asked is None:
        asked = getattr(model.config, "output_router_logits", False)
    if model.training and asked and model.router_aux_loss_coef:
        raise ValueError(
            "add_router_losses: expected a forward without transformers' own balancing loss, got one that returns "
            "logits of routers (output_router_logits), for which it is added; set the model's router_aux_loss_coef to 0"
        )


def _inject(
    losses: AuxiliaryLosses, followed: ModeAround[_Logits], experts: Any, arguments: tuple[Any, ...]
) -> tuple[Tensor, ...] | None:
    x_TH, experts_TK, weights_TK = choice_of(experts, arguments)
    mode = followed.take()
    if not losses.injects():
        return None
    logits = None if mode is None or mode.logits is None else mode.logits.reshape(-1, experts.num_experts)
    if mode is None or logits is None or len(logits) != len(experts_TK):
        raise ValueError(
            f"add_router_losses: expected a router that takes a softmax, a sigmoid or the largest of its logits, got "
            f"that of {type(experts).__name__}"
        )
    losses.score = mode.score
    gate = Gate(weights_TK, experts_TK, load_of(experts_TK, experts.num_experts))
    weights_TK, _ = losses(gate, logits)
    return x_TH, experts_TK, weights_TK
