"""Access to the choices of the routers of a transformers model.

Every sparse block calls its experts with the hidden states, the indices and the weights of the choice, whatever the
implementation of experts. So a hook on the experts sees every choice, and works for all classes of blocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import place
from pymoe.integrations.transformers.outside import FORWARDS, REFUSED
from pymoe.nn.choices import Removable
from pymoe.nn.expert_load import CountedLoad
from pymoe.nn.options import check_model
from pymoe.nn.stacked_experts import device_of

COUNTED = "pymoe_load"
"""Name of the submodule of experts that stores their load."""


class Choice(NamedTuple):
    """The arguments with which a sparse block calls its experts."""

    x_TH: Tensor
    experts_TK: Tensor
    weights_TK: Tensor


def choice_of(experts: Any, arguments: tuple[Any, ...]) -> Choice:
    """Return the arguments of a call of an experts module: hidden states, indices and weights.

    Raises:
        TypeError: the module was not called with exactly these three tensors, by position.
        ValueError: transformers has spread the experts over ranks, so the indices are not those of the router.
    """
    if len(arguments) != 3 or not all(isinstance(argument, Tensor) for argument in arguments):
        raise TypeError(
            f"{type(experts).__name__}: expected hidden states, indices and weights, by position, got "
            f"{len(arguments)} such arguments"
        )
    if interface.flags(experts).expert_parallel:
        raise ValueError(
            f"{type(experts).__name__}: expected all experts on one rank, got indices of expert parallelism of "
            "transformers, which are not those that the router chose"
        )
    return Choice(*arguments)


def sparse_experts(function: str, model: nn.Module) -> dict[str, Any]:
    """Return the experts modules behind transformers' interface, by their names in ``model``; there may be none.

    If ``model`` is itself such a module, its name is ``"experts"``.

    Args:
        function: the name for errors.
        model: any module.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has experts outside of the interface, so that their choices cannot be seen.
    """
    check_model(function, model)
    for module in model.modules():
        known = place(type(module))
        if known in FORWARDS or known in REFUSED:
            raise ValueError(
                f"{function}: expected experts behind transformers' interface, got {type(module).__name__}, which is "
                "outside of it, so that its choice does not pass through one place"
            )
    return {name or "experts": module for name, module in model.named_modules() if interface.is_behind(module)}


def required_experts(function: str, model: nn.Module) -> dict[str, Any]:
    """Return what :func:`sparse_experts` returns, and raise :class:`ValueError` if there are no such modules."""
    found = sparse_experts(function, model)
    if not found:
        raise ValueError(
            f"{function}: expected a model with experts behind transformers' interface, got {type(model).__name__} "
            "with none"
        )
    return found


class Attached:
    """A handle for the hooks and submodules that were attached to a model; :meth:`remove` removes them."""

    def __init__(self) -> None:
        self._parts: list[tuple[nn.Module, str]] = []
        self._hooks: list[Removable] = []

    def remove(self) -> None:
        """Remove everything that the call that returned this handle has attached. Further calls do nothing."""
        for hook in self._hooks:
            hook.remove()
        for experts, name in self._parts:
            delattr(experts, name)
        self._parts, self._hooks = [], []


def attach(attached: Attached, experts: nn.Module, name: str, part: nn.Module, *hooks: Removable) -> None:
    """Make ``part`` the submodule ``name`` of ``experts``; ``attached.remove()`` then removes it and the ``hooks``."""
    setattr(experts, name, part.train(experts.training))
    attached._parts.append((experts, name))
    attached._hooks += hooks


def count_expert_load(model: nn.Module) -> Attached:
    """Make the experts of a transformers model store the load of their last forward, for :func:`pymoe.nn.expert_load`.

    The counts are not part of the state dict, follow the model's device, and are copied and pickled with the model.
    They work with any implementation of experts, also in evaluation mode and in code that is compiled afterwards; code
    that was compiled before does not count. A token counts for every expert that gets it, even with the weight 0, as
    Zaya's first expert gets tokens that skip all experts. Experts that are counted already, and :class:`pymoe.nn.MoE`
    layers, which always count, are left alone.

    Args:
        model: a model whose experts are behind transformers' interface.

    Returns:
        A handle; its ``remove()`` ends the counting.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no experts behind the interface, or has experts outside of it.

    Example:
        >>> from pymoe.integrations.transformers import count_expert_load
        >>> from transformers import OlmoeConfig, OlmoeForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, eos_token_id=0)
        >>> model = OlmoeForCausalLM(OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
        >>> handle = count_expert_load(model)
        >>> output = model(torch.tensor([[1, 2, 3]]))
        >>> {name: load.sum().item() for name, load in pymoe.nn.expert_load(model).items()}  # 3 tokens, 2 choices each
        {'model.layers.0.mlp.experts': 6}
        >>> handle.remove()
    """
    attached = Attached()
    for experts in required_experts("count_expert_load", model).values():
        if not hasattr(experts, COUNTED):
            counted = CountedLoad(experts.num_experts, device_of(experts))
            attach(attached, experts, COUNTED, counted, experts.register_forward_pre_hook(partial(_count, counted)))
    return attached


def _count(counted: CountedLoad, experts: nn.Module, arguments: tuple[Any, ...]) -> None:
    counted.count(choice_of(experts, arguments).experts_TK)
