"""Code shared by the layers: checks of arguments and operands, choice of the operators, one-time warnings.

Error messages name the layer, the argument, the rule and the value found, like those of :mod:`pymoe._common.checks`.

Constructors create parameters of the right shapes and dtypes. But users may assign parameters or replace modules, and
``load_state_dict(assign=True)`` takes dtypes and devices from the state. The operators would reject most wrong
parameters without naming them; torch would reject the others or broadcast them silently. Therefore the layers check
their parameters.

Parameters are checked immediately before they are used: inside the call of the submodule that has them, or by the layer
if it computes the result in place of the submodule. Earlier, parameters may be on another device, sharded or in another
dtype, because FSDP, accelerate's offloading and others restore them only in a hook of that call.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pymoe import ops, reference
from pymoe._common import checks
from pymoe._common.contracts import check_kind
from pymoe._common.types import FLOATING, autocast_enabled, is_gated
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
"""Names of arguments in transformers, Megatron-LM and DeepSpeed, each with its name here, or a hint at what replaces
it."""

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
    finite = -sys.float_info.max <= value <= sys.float_info.max  # math.isfinite raises for ints beyond float's range
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
    """Raise unless the options of a layer of feed-forward networks have the right types and are in range."""
    check_size(layer, "hidden_size", hidden_size)
    check_size(layer, "ffn_size", ffn_size)
    check_kind(layer, "activation", activation)
    check_flag(layer, "bias", bias)
    check_backend(layer, backend)


def check_dtype(layer: str, value: object) -> None:
    """Raise unless ``value`` is float32, float64, bfloat16, float16, or ``None`` for torch's default."""
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


# Operands of products.


def as_rows(x: Tensor, hidden_size: int) -> Tensor:
    """Return the tokens of (..., H) as (T, H), one after the other in memory.

    Every forward of a :class:`pymoe.nn.MoE` calls this before any product, because the rounding of torch's matrix
    products depends on the strides of their operands, even for a single row. For a single row ``is_contiguous()``
    ignores the row stride, so this function compares the strides themselves.

    Args:
        x: (..., H).
        hidden_size: H, the size of a row.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, hidden_size)
    return rows if rows.stride() == (hidden_size, 1) else rows.clone(memory_format=torch.contiguous_format)


def linear(x_TH: Tensor, weight: Tensor, bias: Tensor | None = None, *, row_invariant: bool) -> Tensor:
    """Return ``F.linear(x_TH, weight, bias)`` (T, N); with ``row_invariant``, a row's bits depend only on that row.

    The matrix products of BLAS may sum a row in another order if there are more or fewer rows, and usually do for a
    single row. :func:`pymoe.ops.grouped_linear` always uses the same order, so equal tokens give equal bits in every
    batch, and on every rank that has a part of a batch. The same holds for the gradient of ``x_TH``.

    Args:
        x_TH: (T, H).
        weight: (N, H).
        bias: (N,), or None.
        row_invariant: if true, ``grouped_linear`` computes the result, otherwise ``F.linear``.
    """
    if not row_invariant:
        return F.linear(x_TH, weight, bias)
    offsets = weight.new_zeros(2, dtype=torch.int32)
    offsets[1:] = x_TH.shape[0]
    return raw.grouped_linear(x_TH, weight[None], offsets, None if bias is None else bias[None])


# Checks of a call's operands.


def check_choice(x: Tensor, experts: Tensor, weights: Tensor) -> None:
    """Raise unless tokens, their chosen experts and the weights of the choices fit each other."""
    if _choice_fits(x, experts, weights):
        return
    name = "apply_experts"
    checks.floating(name, "x", x)
    checks.rank(name, "x", x, "(T, H)")
    checks.dtype(name, "experts", experts, torch.int32, torch.int64)
    checks.rank(name, "experts", experts, "(T, K)")
    checks.size(name, "experts", experts, 0, x.shape[0], "T of x")
    checks.same_device(name, "experts", experts, "x", x)
    checks.floating(name, "weights", weights)
    if weights.dtype == torch.float64 != x.dtype:
        raise TypeError(f"{name}: weights must not have dtype float64 for x of {x.dtype}, whose sums are float32")
    if weights.shape != experts.shape:
        shape, seen = tuple(experts.shape), tuple(weights.shape)
        raise ValueError(f"{name}: weights must have the shape of experts ({shape}), got {seen}")
    checks.same_device(name, "weights", weights, "x", x)


def _choice_fits(x: Any, experts: Any, weights: Any) -> bool:
    """Return true only if :func:`check_choice` would raise no error; see :mod:`pymoe._common.contracts`."""
    return (
        isinstance(x, Tensor)
        and isinstance(experts, Tensor)
        and isinstance(weights, Tensor)
        and x.dtype in FLOATING
        and x.dim() == 2
        and experts.dtype in (torch.int32, torch.int64)
        and experts.dim() == 2
        and experts.shape[0] == x.shape[0]
        and weights.shape == experts.shape
        and weights.dtype in (torch.float32, x.dtype)
        and x.device == experts.device == weights.device
    )


def check_networks(name: str, networks: Any, stack: tuple[int, ...], x: Tensor) -> None:
    """Raise unless the parameters of ``networks`` have the right shapes, the device of ``x`` and a dtype that fits it.

    Args:
        name: name of the module in its layer.
        networks: the module, an ``Experts`` or ``SharedExperts``. (The annotation is Any because
            the module of these classes imports this one.)
        stack: the leading sizes of each parameter.
        x: rows to which the networks will be applied.

    Raises:
        ValueError: a parameter does not have the sizes of the networks, or is on another device than ``x``.
        TypeError: a parameter has another dtype than ``x``, and autocast does not cast it.
    """
    if networks_fit(networks, networks._parameters, stack, x):
        return
    for parameter, size in networks.sizes().items():
        value = getattr(networks, parameter)
        if value is not None:
            check_parameter(f"{name}.{parameter}", value, (*stack, *size), x)


def networks_fit(networks: Any, own: Mapping[str, Tensor | None], stack: tuple[int, ...], x: Tensor) -> bool:
    """Return whether all parameters of ``networks`` have the right shapes, and the device and dtype of ``x``.

    ``own`` contains the parameters by name. Every call of a layer runs this, so it is one fast expression without
    messages, as in :mod:`pymoe._common.contracts`.
    """
    try:
        w_in, w_out, b_in, b_out = own["w_in"], own["w_out"], own["b_in"], own["b_out"]
    except KeyError:  # the user has replaced the module with one that has other parameters
        return False
    hidden, ffn, dtype, device = networks.hidden_size, networks.ffn_size, x.dtype, x.device
    inner = 2 * ffn if is_gated(networks.activation) else ffn
    return (
        w_in is not None
        and w_out is not None
        and w_in.shape == (*stack, inner, hidden)
        and w_out.shape == (*stack, hidden, ffn)
        and w_in.dtype == w_out.dtype == dtype
        and w_in.device == w_out.device == device
        and (b_in is None or (b_in.shape == (*stack, inner) and b_in.dtype == dtype and b_in.device == device))
        and (b_out is None or (b_out.shape == (*stack, hidden) and b_out.dtype == dtype and b_out.device == device))
    )


def check_parameter(name: str, parameter: Tensor, shape: tuple[int, ...], x: Tensor, whose: str = "") -> None:
    """Raise unless a parameter of experts has this shape, the device of ``x``, and a dtype that fits ``x``.

    The dtype must be that of ``x`` or, inside ``torch.autocast``, one that autocast casts.

    Args:
        name: the name of the parameter in the error.
        parameter: the parameter.
        shape: the shape that it must have.
        x: rows by which the parameter will be multiplied.
        whose: text that follows the shape in the error.
    """
    if parameter.dtype == x.dtype and parameter.shape == shape and parameter.device == x.device:
        return
    check_place(name, parameter, shape, x, whose)
    if parameter.dtype == x.dtype:
        return
    if not autocast_enabled(x.device.type) or parameter.dtype == torch.float64:
        raise TypeError(f"MoE: {name} must have the dtype of the rows ({x.dtype}), got {parameter.dtype}")


def check_place(name: str, parameter: Tensor, shape: tuple[int, ...], x: Tensor, whose: str = "") -> None:
    """Raise unless a parameter has this shape, and the device of ``x``; the arguments are those of
    :func:`check_parameter`.
    """
    if parameter.shape != shape:
        raise ValueError(f"MoE: {name} must have shape {shape}{whose}, got {tuple(parameter.shape)}")
    if parameter.device != x.device:
        checks.same_device("MoE", name, parameter, "x", x)
