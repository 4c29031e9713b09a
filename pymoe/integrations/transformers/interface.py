"""transformers' interface for experts as pymoe uses it: every private name of transformers is in this file.

The interface is the decorator ``use_experts_implementation`` of ``transformers.integrations.moe``: it gives an experts
module the flags that :func:`flags` reads, and a forward that looks up an implementation by the name that the module's
configuration holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

NAME = "pymoe"
"""The name of pymoe among transformers' implementations of experts."""

GATE = "_apply_gate"
"""The method of an experts module that computes its gate."""

OLDEST = 5
INSTALL = 'pip install "transformers>=5"'


def register(function: Callable[..., Tensor]) -> None:
    """Make ``function`` the implementation of experts called ``"pymoe"``. Doing so again changes nothing.

    Args:
        function: takes an experts module, (T, H) hidden states, (T, K) indices and (T, K) weights; returns (T, H).

    Raises:
        ImportError: transformers is missing, or older than version 5, which has no interface for experts.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"pymoe.integrations.transformers needs transformers: {INSTALL}") from error
    version = transformers.__version__
    if int(version.split(".")[0]) < OLDEST:
        raise ImportError(
            f"pymoe.integrations.transformers needs transformers {OLDEST} or newer, got {version}: {INSTALL}"
        )
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, function)


class Flags(NamedTuple):
    """Describes how an experts module holds its parameters, and what it does with them."""

    gated: bool
    """True: it has ``gate_up_proj`` and a gate; False: ``up_proj`` and an activation."""
    biased: bool
    transposed: bool
    """True: weights are (E, in, out); False: (E, out, in)."""
    normed: bool
    """True: ``post_expert_norm`` is applied to every expert's output."""
    expert_parallel: bool
    """True: indices from E on mean experts of other ranks."""


def flags(experts: Any) -> Flags:
    """Return the flags of an experts module; flags that its version of transformers lacks have their defaults."""
    return Flags(
        gated=getattr(experts, "has_gate", True),
        biased=getattr(experts, "has_bias", False),
        transposed=getattr(experts, "is_transposed", False),
        normed=getattr(experts, "has_post_expert_norm", False),
        expert_parallel=getattr(experts, "_is_expert_parallel", False),
    )


def activation(experts: Any) -> Callable[[Tensor], Tensor]:
    """Return the module's own computation between its two products."""
    chosen: Callable[[Tensor], Tensor] = experts._apply_gate if flags(experts).gated else experts.act_fn
    return chosen


def has_default_gate(experts_class: Any) -> bool:
    """Return whether a class splits its input into halves, gate before up, as transformers does by default."""
    from transformers.integrations import moe

    return experts_class._apply_gate is getattr(moe, "_default_apply_gate", None)


def has_replaced_gate(experts: Any) -> bool:
    """Return whether the gate of this module was replaced on the module itself, not on its class."""
    return GATE in experts.__dict__


def is_behind(module: Any) -> bool:
    """Return whether a module's class was made by ``use_experts_implementation``."""
    return hasattr(module, GATE) and hasattr(type(module).forward, "__wrapped__") and hasattr(module, "config")


def implementation(experts: Any) -> str | None:
    """Return the name of the implementation that an experts module runs."""
    name: str | None = experts.config._experts_implementation
    return name


def set_implementation(experts: Any, name: str | None) -> None:
    """Choose the implementation of an experts module, and of all that share its configuration."""
    experts.config._experts_implementation = name


def records_outputs(hook: Any) -> bool:
    """Return whether a hook is one that transformers leaves on modules to record their outputs.

    A model that was once asked for its router's logits, for example, keeps such hooks. They change nothing.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


@functools.cache
def refuse_to_save(reason_of: Callable[[Any], str]) -> None:
    """Make ``save_pretrained`` of all models raise :class:`ValueError` if ``reason_of(model)`` gives a reason.

    transformers has no hook before saving, which ``Trainer`` and ``push_to_hub`` also use, so its method is wrapped,
    once for all models. Adapters can be saved, because the model that they adapt is not saved with them.

    Args:
        reason_of: returns a sentence, or "" for a model that can be saved.
    """
    from transformers import PreTrainedModel

    save: Callable[..., Any] = PreTrainedModel.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self: Any, *arguments: Any, **named: Any) -> Any:
        if not getattr(self, "_hf_peft_config_loaded", False) and (reason := reason_of(self)):
            raise ValueError(reason)
        return save(self, *arguments, **named)

    PreTrainedModel.save_pretrained = save_pretrained
