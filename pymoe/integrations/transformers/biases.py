"""Balances the experts of transformers' models without an auxiliary loss, through a bias for every expert.

The rule is that of arXiv 2408.15664 (algorithm 1) and DeepSeek-V3 (arXiv 2412.19437), as in :class:`pymoe.nn.Router`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.choosing import ROUTERS, Choosing, ModeAround, router_of
from pymoe.integrations.transformers.routing import Attached, attach, choice_of, required_experts
from pymoe.nn.expert_bias import ExpertBias
from pymoe.nn.expert_load import load_of
from pymoe.nn.options import check_number
from pymoe.nn.stacked_experts import device_of

BIASES = ("e_score_correction_bias", "expert_bias")
"""The names of the biases that transformers' routers add to scores only for the choice of experts."""

ADDED = "pymoe_bias"
"""Name of the submodule of experts that :func:`add_expert_biases` adds."""


def add_expert_biases(model: nn.Module, rate: float) -> Attached:
    """Balance a transformers model's experts with biases, which :func:`pymoe.nn.update_expert_biases` moves.

    Call it before the first step. A bias changes only which experts a router chooses, never the weights of the chosen
    experts (arXiv 2408.15664). If some routers have a bias of their own, such as ``e_score_correction_bias`` of
    DeepSeek-V3, updates move that bias, which is saved with the model, and routers without one are left alone.
    Otherwise every router gets a bias of zeros in float32. It is added to the scores of routers that choose by scores,
    such as Mixtral's, and to the logits of routers that choose by logits, such as GPT-OSS's.

    Added biases are in the state dict, as ``...experts.pymoe_bias.bias``. No other program would add them to the
    router's scores, so ``save_pretrained``, also of a ``Trainer``, raises :class:`ValueError` once one of them is not
    0: save ``model.state_dict()`` with ``torch.save`` instead, and load it after another ``add_expert_biases``. PEFT
    saves adapters without these biases.

    In training mode the backward pass counts the loads: once per step, even under activation checkpointing, and only if
    the weights of the choice need a gradient.

    Args:
        model: a model whose experts are behind transformers' interface.
        rate: the step by which an update moves a bias; DeepSeek-V3 trains with 0.001.

    Returns:
        A handle; its ``remove()`` ends the balancing, and drops added biases. Biases of the model's own keep their
        values.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the rate is not positive; the model has no experts behind the interface, or has experts outside of
            it; it already has biases from this function; a bias of its own is narrower than float32, so that small
            steps would be lost; or it has no bias of its own, and a block without a router ``gate`` or ``router``.

    A forward raises :class:`ValueError` if a router that got a bias does not choose by a single ``torch.topk`` among
    all experts but, for instance, chooses groups of experts first; it raises :class:`RuntimeError` in compiled code.

    Example:
        >>> from pymoe.integrations.transformers import add_expert_biases
        >>> from transformers import OlmoeConfig, OlmoeForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, eos_token_id=0)
        >>> model = OlmoeForCausalLM(OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
        >>> balancing = add_expert_biases(model.train(), rate=0.001)
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> model(ids, labels=ids).loss.backward()  # counts the tokens of each expert
        >>> pymoe.nn.update_expert_biases(model)  # after optimizer.step()
        >>> model.model.layers[0].mlp.experts.pymoe_bias.bias.abs().max()
        tensor(0.0010)
    """
    check_number("add_expert_biases", "rate", rate, above=0)
    found = required_experts("add_expert_biases", model)
    if any(hasattr(experts, ADDED) for experts in found.values()):
        raise ValueError("add_expert_biases: expected a model without added biases, got one that has them")
    blocks = {name: model.get_submodule(name.rpartition(".")[0]) for name in found if "." in name}
    own = {name: bias for name, block in blocks.items() if (bias := _own_bias(block, found[name])) is not None}
    balanced = own or dict.fromkeys(found, None)
    for name, bias in balanced.items():
        if bias is not None and getattr(*bias).dtype.itemsize < 4:
            raise ValueError(
                f"add_expert_biases: {bias[1]} of {type(bias[0]).__name__} must be of float32, got "
                f"{getattr(*bias).dtype}, in which small steps are lost"
            )
        if bias is None and router_of(blocks.get(name)) is None:
            raise ValueError(
                f"add_expert_biases: expected experts in a block with a router called {' or '.join(ROUTERS)}, got "
                f"{name} in {type(blocks.get(name, model)).__name__}"
            )
    attached = Attached()
    for name, bias in balanced.items():
        experts = found[name]
        added = ExpertBias(experts.num_experts, rate, bias, device_of(experts))
        chosen_by = None
        if bias is None:
            chosen_by = ModeAround(router_of(blocks[name]), partial(_mode, added))
            interface.call_before_saving(refuse_to_save)
        hook = experts.register_forward_pre_hook(_Hook(added, chosen_by))
        attach(attached, experts, ADDED, added, hook, *(() if chosen_by is None else (chosen_by,)))
    return attached


def refuse_to_save(model: nn.Module, state_dict: object) -> None:
    """Raise ValueError if a bias that :func:`add_expert_biases` added is not 0: ``from_pretrained`` would drop it."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertBias) and module.bias is not None and module.bias.any():
            raise ValueError(
                f"save_pretrained: expected a model without biases by add_expert_biases, got {name}.bias, which "
                "from_pretrained would drop; keep model.state_dict() by torch.save and load it after add_expert_biases"
            )


def _own_bias(block: nn.Module, experts: Any) -> tuple[nn.Module, str] | None:
    """Return the module, inside a sparse block, with the router's own bias, and the name of the bias in that module.

    Return None if the router has no bias of its own.
    """
    inside = set(experts.modules())
    for module in block.modules():
        if module not in inside:
            for name in BIASES:
                bias = getattr(module, name, None)
                if isinstance(bias, Tensor) and bias.numel() == experts.num_experts:
                    return module, name
    return None


def _mode(added: ExpertBias) -> Choosing:
    bias = added.expert_bias

    def choose(scores: Tensor, k: int) -> Tensor:
        return torch.topk(scores + bias, k).indices

    return Choosing(added.num_experts, choose)


class _Hook:
    """A forward pre-hook of experts. It makes the backward pass count the load of the router's choice, and checks the
    choice of a router that got a bias.
    """

    def __init__(self, added: ExpertBias, chosen_by: ModeAround[Choosing] | None) -> None:
        self.added = added
        self.chosen_by = chosen_by
        self.checked = False

    def __call__(self, experts: nn.Module, arguments: tuple[Any, ...]) -> Any:
        x_TH, experts_TK, weights_TK = choice_of(experts, arguments)
        if self.chosen_by is not None:
            self._check(experts, experts_TK, self.chosen_by.take())
        load = load_of(experts_TK, self.added.num_experts)
        return x_TH, experts_TK, self.added.count(weights_TK, load)

    def _check(self, experts: nn.Module, experts_TK: Tensor, mode: Choosing | None) -> None:
        """Raise ValueError unless the router has chosen as the bias requires; compare the indices in the first call
        only.
        """
        problem = ""
        if mode is None or mode.indices is None:
            problem = "chooses in another way"
        elif mode.groups:
            problem = "chooses groups of experts first"
        elif not self.checked and not torch.equal(mode.indices.reshape(experts_TK.shape), experts_TK):
            # The choices are compared in the first call only, since the comparison waits for the device.
            problem = "changes the choice"
        if problem:
            raise ValueError(
                f"add_expert_biases: expected a router that chooses by one torch.topk among {self.added.num_experts} "
                f"experts, got that of {type(experts).__name__}, which {problem}"
            )
        self.checked = True
