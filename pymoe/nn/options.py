"""Code that the layers' constructors share: checks of arguments, the choice of operators, and one-time warnings.

Error messages name the layer, the argument, the rule and the value found, like those of :mod:`pymoe._common.checks`.
"""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Literal

from torch import nn

from pymoe import ops, reference
from pymoe._common import checks
from pymoe._common.contracts import check_kind
from pymoe._common.dtypes import FLOATING
from pymoe.ops import raw

Backend = Literal["native", "reference"]
"""The operators that a layer calls: :mod:`pymoe.ops` or :mod:`pymoe.reference`."""

MIN_STEPS_TO_WARN = 100
"""The number of in-place changes of a router's weight before a layer warns that nothing balances its experts. It counts
training steps, since every optimizer step changes the weight in place at least once."""

OTHER_NAMES = {
    "d_model": "hidden_size",
    "hidden_dim": "hidden_size",
    "model_dim": "hidden_size",
    "d_ff": "ffn_size",
    "ffn_dim": "ffn_size",
    "intermediate_size": "ffn_size",
    "moe_intermediate_size": "ffn_size",
    "moe_ffn_hidden_size": "ffn_size",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_moe_experts": "num_experts",
    "k": "top_k",
    "num_experts_per_tok": "top_k",
    "moe_router_topk": "top_k",
    "n_shared_experts": "num_shared_experts",
    "hidden_act": "activation",
    "scoring_func": "score",
    "norm_topk_prob": "renormalize",
    "routed_scaling_factor": "scale",
    "n_group": "num_groups",
    "topk_group": "topk_groups",
    "router_aux_loss_coef": "aux_loss_coef",
    "router_z_loss_coef": "z_loss_coef",
    "ep_size": "expert_parallel",
    "use_residual": "num_shared_experts",
    "expert": "ffn_size= and activation= describe the experts, which are feed-forward networks",
    "eval_capacity_factor": "capacity_factor= holds in training and evaluation; None drops nothing",
    "min_capacity": "capacity_factor= is the only limit of an expert; None drops nothing",
    "drop_tokens": "capacity_factor=None, the default, drops nothing",
    "use_rts": "an expert past its capacity_factor drops the last tokens; None drops nothing",
    "noisy_gate_policy": "the router adds no noise; bias_update_rate= or aux_loss_coef= balance the experts",
}
"""Names of arguments in transformers, Megatron-LM and DeepSpeed, each with the name here or what stands for it."""

_warned: set[str] = set()


def operators(backend: Backend) -> ModuleType:
    """Return :mod:`pymoe.ops` for ``"native"``, :mod:`pymoe.reference` for ``"reference"``."""
    return ops if backend == "native" else reference


def raw_operators(backend: Backend) -> ModuleType:
    """Return the operators for arguments that have been checked: :mod:`pymoe.ops.raw` in place of :mod:`pymoe.ops`."""
    return raw if backend == "native" else reference


def check_backend(layer: str, value: object) -> None:
    """Raise unless ``value`` is ``"native"`` or ``"reference"``."""
    checks.choice(layer, "backend", value, ("native", "reference"))


def check_size(layer: str, argument: str, value: object) -> None:
    """Raise unless ``value`` is an int of at least 1."""
    checks.integer(layer, argument, value, 1, None, "at least 1")


def check_number(
    layer: str, argument: str, value: object, *, minimum: float | None = None, above: float | None = None
) -> None:
    """Raise unless ``value`` is a finite number, at least ``minimum`` or greater than ``above`` if one is given."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{layer}: {argument} must be a float, got {type(value).__name__}")
    rule = "finite"
    if minimum is not None:
        rule = f"finite and at least {minimum:g}"
    elif above is not None:
        rule = f"finite and greater than {above:g}"
    low = minimum is not None and value < minimum
    finite = -sys.float_info.max <= value <= sys.float_info.max  # an int may be too large for a float
    if not finite or low or (above is not None and value <= above):
        raise ValueError(f"{layer}: {argument} must be {rule}, got {value}")


def check_model(function: str, value: object) -> None:
    """Raise unless ``value`` is a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(value).__name__}")


def check_flag(layer: str, argument: str, value: object) -> None:
    """Raise unless ``value`` is a bool."""
    checks.flag(layer, argument, value)


def check_network_options(
    layer: str, hidden_size: object, ffn_size: object, activation: object, bias: object, backend: object
) -> None:
    """Raise unless these options of feed-forward networks have the right types and are in range."""
    check_size(layer, "hidden_size", hidden_size)
    check_size(layer, "ffn_size", ffn_size)
    check_kind(layer, "activation", activation)
    check_flag(layer, "bias", bias)
    check_backend(layer, backend)


def check_dtype(layer: str, value: object) -> None:
    """Raise unless ``value`` is one of the four floating dtypes, or ``None`` for torch's default."""
    if value is not None and value not in FLOATING:
        raise TypeError(f"{layer}: dtype must be float32, float64, bfloat16 or float16, got {value}")


def warn_once(subject: str, message: str, stacklevel: int = 2) -> None:
    """Warn with ``UserWarning(message)``, unless this process has already warned about ``subject``.

    Use this for options that are accepted without an error but do not have the effect that a user expects.

    Args:
        subject: an arbitrary key; later warnings with the same key are suppressed.
        message: the problem and its remedy.
        stacklevel: as for ``warnings.warn``: 1 reports the caller's line, 2 the line that called the caller.
    """
    if subject not in _warned:
        _warned.add(subject)
        warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
