"""The native operators: the names and signatures of :mod:`pymoe.reference`, computed by kernels."""

import pymoe._native  # registers the operators, before the files below describe them to torch.compile  # noqa: F401
from pymoe._common.types import ClampedSwiglu, Gate, QuantizedWeight, RouterLosses, Routing
from pymoe.ops import flops, missing_cuda
from pymoe.ops.build_routing import build_routing
from pymoe.ops.combine import combine
from pymoe.ops.dispatch import dispatch
from pymoe.ops.expert_activation import expert_activation
from pymoe.ops.gate_topk import gate_topk
from pymoe.ops.gather_batch import gather_batch, split_batch
from pymoe.ops.grouped_linear import grouped_linear
from pymoe.ops.index_checks import check_indices
from pymoe.ops.package_products import use_products_of
from pymoe.ops.quantized_linear import quantized_linear
from pymoe.ops.quantized_weight import dequantize_weight, pack_weight, quantize_weight, unpack_weight
from pymoe.ops.router_losses import load_balancing_loss, router_losses, router_z_loss

__all__ = [
    "ClampedSwiglu",
    "Gate",
    "QuantizedWeight",
    "RouterLosses",
    "Routing",
    "build_routing",
    "check_indices",
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
    "use_products_of",
]

missing_cuda.register()
flops.register()
