"""Runs the router, gate and experts of a MoE in native calls, without calling the modules, if these have no hooks and
were not replaced. If gradients are needed, this is done only on the CPU; gate and experts are then one autograd node.

For a few tokens, calling modules, looking up their attributes and checking cost more than the kernels. So the
conditions of the whole call are checked once, here. If a condition fails, the layer calls its parts one by one, with
bit for bit the same result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pymoe._common.contracts import check_gate_topk, check_kind, is_like
from pymoe._common.types import FLOATING, FORMATS, KINDS, accumulate_dtype, activation_options, autocast_enabled
from pymoe.nn.apply_experts import APPLY_CHOSEN_EXPERTS, APPLY_CHOSEN_QUANTIZED_EXPERTS
from pymoe.nn.experts import Experts
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.options import as_rows, networks_fit
from pymoe.nn.plain_calls import PLAIN_TENSORS, are_called_plainly
from pymoe.nn.quantized_experts import QuantizedExperts, QuantizedLinear
from pymoe.nn.recorded import apply_chosen_experts_recorded, count_and_inject, is_one_node
from pymoe.nn.router import Router
from pymoe.nn.router_product import is_one_node as routes
from pymoe.ops import index_checks, package_products
from pymoe.ops.function_calls import is_differentiated, is_transformed


def forward_directly(layer: Any, x: Tensor) -> Tensor | None:
    """Return the output that the parts of ``layer`` would compute; return None if the parts have to be called.

    Args:
        layer: a :class:`pymoe.nn.MoE`, not of a derived class. (The annotation is Any because the module of ``MoE``
            imports this one.)
        x: the argument of ``forward``, which may be anything.
    """
    if is_compiling() or type(x) not in PLAIN_TENSORS or is_transformed():
        return None
    if layer.score_before_experts:  # the native calls multiply the outputs by the weights, not the inputs
        return None
    parts = layer._modules
    try:  # avoid Module.__getattr__, which takes half a microsecond per name
        router, experts, losses = parts["router"], parts["experts"], parts["losses"]
        weight, of_logits = router._parameters["weight"], router._parameters["bias"]
        bias = router._buffers["expert_bias"]
        quantized = type(experts) is QuantizedExperts
        own: Any = [(experts, Experts)]
        if quantized:
            weights = experts._modules["w_in"], experts._modules["w_out"]
            own = (experts, QuantizedExperts), (weights[0], QuantizedLinear), (weights[1], QuantizedLinear)
    except KeyError:  # a part that the user has replaced may lack these names
        return None
    if not (
        are_called_plainly((router, Router), (losses, AuxiliaryLosses), *own)
        and "logits" not in router.__dict__
        and layer.backend == router.backend == experts.backend == "native"
        and _fit(layer, router, x, weight, of_logits, bias)
    ):
        return None
    if package_products.chosen is not None and x.device.type == package_products.DEVICE:
        return None
    networks = _quantized_networks(layer, experts, *weights, x) if quantized else _networks(layer, experts, x)
    if networks is None:
        return None
    recorded = is_differentiated(x, weight, of_logits, *networks)
    injects = recorded and losses.injects()
    if recorded and (quantized or not is_one_node(x) or (injects and not losses.injects_by_kernels())):
        return None
    if recorded and x.dtype == torch.bfloat16 and routes(x, weight):  # Router.route runs product and gate in one node
        return None
    if type(experts.activation) is not str or experts.activation not in KINDS:
        check_kind("MoE", "experts.activation", experts.activation)

    x_TH = as_rows(x, layer.hidden_size)
    logits_TE = router.logits(x_TH)
    groups = router.num_groups, router.topk_groups
    check_gate_topk(logits_TE, router.top_k, router.score, router.renormalize, bias, *groups, router.scale)
    options = router.gate_options()
    capacity = layer._capacity(x_TH.shape[0], router.top_k)
    activation = activation_options(experts.activation)
    router.counted.follow(logits_TE.device)
    y_TH: Tensor
    if recorded:
        loads: list[Tensor] = []
        total = router.counted["load"] if bias is not None and router.training else None
        carrier = logits_TE
        if (injects or total is not None) and logits_TE.requires_grad:
            carrier = count_and_inject(logits_TE, loads, total, losses.injected(logits_TE) if injects else None)
        gate = (logits_TE, carrier, bias, options)
        y_TH, load = apply_chosen_experts_recorded(x_TH, *gate, networks, activation, capacity)
        loads.append(load)
    else:
        kind, *numbers = activation
        call = APPLY_CHOSEN_QUANTIZED_EXPERTS if quantized else APPLY_CHOSEN_EXPERTS
        y_TH, load = call(x_TH, logits_TE, bias, *options, *networks, kind, capacity, *numbers)
    if layer.shared is not None:
        y_TH = layer._with_shared(y_TH, x_TH)
    layer._keep_stats_of(load, logits_TE, capacity, None)
    return y_TH if x.dim() == 2 else y_TH.reshape(x.shape)


def _fit(layer: Any, router: Any, x: Tensor, weight: Any, of_logits: Any, bias: Tensor | None) -> bool:
    """Return whether the native calls accept the arguments; if not, the parts compute the output or raise the error."""
    dtype, device, experts = x.dtype, x.device, layer.num_experts
    return (
        type(weight) in PLAIN_TENSORS
        and x.dim() > 0
        and x.shape[-1] == layer.hidden_size == router.hidden_size
        and experts == router.num_experts
        and weight.shape == (experts, layer.hidden_size)
        and dtype in FLOATING
        and weight.dtype == dtype
        and weight.device == device
        and (of_logits is None or type(of_logits) in PLAIN_TENSORS)
        and (of_logits is None or is_like(of_logits, (experts,), dtype, device))
        and (x.is_cpu or (x.is_cuda and not index_checks.are_on()))
        and not autocast_enabled(device.type)
        and (bias is None or bias.is_contiguous())
        and (bias is None or is_like(bias, (experts,), accumulate_dtype(dtype), device))
    )


def _networks(layer: Any, experts: Any, x: Tensor) -> Any:
    """Return the parameters of the experts as the native calls take them, or None if they do not fit."""
    if not networks_fit(experts, experts._parameters, (layer.num_experts,), x):
        return None
    own = experts._parameters
    w_in, w_out = own["w_in"], own["w_out"]
    return (
        (w_in, own["b_in"], w_out, own["b_out"])
        if type(w_in) in PLAIN_TENSORS and type(w_out) in PLAIN_TENSORS
        else None
    )


def _quantized_networks(layer: Any, experts: Any, w_in: Any, w_out: Any, x: Tensor) -> Any:
    """Return packed weights, biases and layout as the native calls take them, or None if they do not fit."""
    b_in, b_out = experts._buffers.get("b_in"), experts._buffers.get("b_out")
    packed_in, packed_out = w_in._buffers.get("packed"), w_out._buffers.get("packed")
    if not (
        w_in.backend == w_out.backend == "native"
        and x.is_cpu
        and x.dtype != torch.float64
        and type(packed_in) in PLAIN_TENSORS
        and type(packed_out) in PLAIN_TENSORS
        and packed_in.is_contiguous()
        and packed_out.is_contiguous()
        and experts.fits(layer.num_experts, layer.hidden_size, x.device)
    ):
        return None
    if b_in is not None:
        b_in = b_in.to(x.dtype).contiguous()
    if b_out is not None:
        b_out = b_out.to(x.dtype).contiguous()
    try:
        numbers = FORMATS[w_in.format, w_in.bits], FORMATS[w_out.format, w_out.bits]
    except (KeyError, TypeError):  # other code has set a format or bits that do not exist
        return None
    layout = [numbers[0], w_in.output_features, numbers[1], w_out.output_features]
    if w_in.prefetch or w_out.prefetch:
        layout.append(max(w_in.prefetch, w_out.prefetch))
    return packed_in, b_in, packed_out, b_out, layout
