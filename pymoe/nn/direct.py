"""A forward of MoE by its native calls alone, where nothing is differentiated and nothing stands between its parts.

For a few tokens the parts of a layer cost more in calls of modules, look-ups of their attributes and checks than in
kernels. What holds for the whole call is therefore asked once, here; whatever is out of the ordinary takes the usual
way, from part to part, and has the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from pymoe._common.dtypes import FLOATING, accumulate_dtype, autocast_enabled
from pymoe.nn.apply_experts import APPLY_CHOSEN_EXPERTS
from pymoe.nn.experts import Experts
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.networks import as_rows
from pymoe.nn.parameters import networks_fit
from pymoe.nn.plain_calls import is_called_plainly
from pymoe.nn.router import Router
from pymoe.ops import index_checks
from pymoe.ops.expert_activation import kernel_options
from pymoe.ops.function_calls import is_recorded

_PLAIN = (nn.Parameter, Tensor)
"""The types of tensors that are what they seem: a subclass may have operators of its own."""


def forward_directly(layer: Any, x: Tensor) -> Tensor | None:
    """Return what the parts of ``layer`` would, or None where they have to be called.

    Args:
        layer: a :class:`pymoe.nn.MoE`, not of a class derived from it. (That module imports this one.)
        x: whatever ``forward`` was given.
    """
    if is_compiling() or type(x) not in _PLAIN:
        return None
    parts = layer._modules
    try:  # past Module.__getattr__, which costs half a microsecond a name
        router, experts, losses = parts["router"], parts["experts"], parts["losses"]
        weight, bias = router._parameters["weight"], router._buffers["expert_bias"]
        own = experts._parameters
        w_in, w_out, b_in, b_out = own["w_in"], own["w_out"], own["b_in"], own["b_out"]
    except KeyError:  # something else has taken its place
        return None
    if (
        is_recorded(x, weight, bias, w_in, w_out, b_in, b_out)
        or not (
            is_called_plainly(router, Router)
            and "logits" not in router.__dict__
            and is_called_plainly(experts, Experts)
            and is_called_plainly(losses, AuxiliaryLosses)
            and layer.backend == router.backend == experts.backend == "native"
        )
        or not _fit(layer, x, weight, bias, w_in, w_out)
    ):
        return None

    x_TH = as_rows(x, layer.hidden_size)
    logits_TE = router.logits(x_TH)
    capacity = layer._capacity(x_TH.shape[0], router.top_k)
    kind, *numbers = kernel_options(experts.activation)
    networks = (w_in, b_in, w_out, b_out, kind, capacity, *numbers)
    y_TH: Tensor
    y_TH, load = APPLY_CHOSEN_EXPERTS(x_TH, logits_TE, bias, *router.gate_options(), *networks)
    if layer.shared is not None:
        y_TH = layer._with_shared(y_TH, x_TH)
    router.counted.follow(load.device)
    layer._keep_stats(load, logits_TE, capacity, None)
    return y_TH if x.dim() == 2 else y_TH.reshape(x.shape)


def _fit(layer: Any, x: Tensor, weight: Any, bias: Tensor | None, w_in: Any, w_out: Any) -> bool:
    """Return whether the native calls take these as they are; what does not fit is named on the usual way."""
    if not (type(weight) in _PLAIN and type(w_in) in _PLAIN and type(w_out) in _PLAIN):
        return False
    dtype, device, experts = x.dtype, x.device, layer.num_experts
    return (
        x.dim() > 0
        and x.shape[-1] == layer.hidden_size
        and weight.shape == (experts, layer.hidden_size)
        and networks_fit(layer.experts, (experts,), x)
        and dtype in FLOATING
        and weight.dtype == dtype
        and weight.device == device
        and (x.is_cpu or (x.is_cuda and not index_checks.are_on()))
        and not autocast_enabled(device.type)
        and (bias is None or _is_bias(bias, experts, accumulate_dtype(dtype), device))
    )


def _is_bias(bias: Tensor, experts: int, dtype: torch.dtype, device: torch.device) -> bool:
    return bias.shape == (experts,) and bias.dtype == dtype and bias.device == device and bias.is_contiguous()
