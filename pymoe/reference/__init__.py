"""The specification: every operator in pure PyTorch, with the names and signatures of :mod:`pymoe.ops`.

A function here returns what the native operator must return: bit for bit if the docstring says exact, within the stated
tolerance otherwise. It is written to be read, not to be fast, and depends only on torch.

A reference returns the same bits on every processor, values and gradients (:mod:`pymoe.reference.fixed_steps`), with
three exceptions that use torch's products and sums: :func:`grouped_linear`, the gradient of ``x`` in
:func:`quantized_linear`, and gradients of biases. Their results on two processors agree within the rounding of their
sums; NaN and infinities are the same unless a sum of finite terms overflows.
"""

from pymoe._common.types import ClampedSwiglu, Gate, QuantizedWeight, RouterLosses, Routing
from pymoe.reference.build_routing import build_routing
from pymoe.reference.combine import combine
from pymoe.reference.dispatch import dispatch
from pymoe.reference.expert_activation import expert_activation
from pymoe.reference.gate_topk import gate_topk
from pymoe.reference.gather_batch import gather_batch, split_batch
from pymoe.reference.grouped_linear import grouped_linear
from pymoe.reference.quantized_linear import quantized_linear
from pymoe.reference.quantized_weight import dequantize_weight, pack_weight, quantize_weight, unpack_weight
from pymoe.reference.router_losses import load_balancing_loss, router_losses, router_z_loss

__all__ = [
    "ClampedSwiglu",
    "Gate",
    "QuantizedWeight",
    "RouterLosses",
    "Routing",
    "build_routing",
    "combine",
    "dequantize_weight",
    "dispatch",
    "expert_activation",
    "gate_topk",
    "gather_batch",
    "grouped_linear",
    "load_balancing_loss",
    "pack_weight",
    "quantize_weight",
    "quantized_linear",
    "router_losses",
    "router_z_loss",
    "split_batch",
    "unpack_weight",
]
