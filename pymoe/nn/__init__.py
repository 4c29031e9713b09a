"""Layers: router, experts, and the mixture-of-experts layer that contains both.

The path of a token: :meth:`MoE.forward` -> :class:`Router` -> dispatch -> :class:`Experts` -> combine.
"""

from typing import TYPE_CHECKING, NoReturn

from pymoe._common.names import no_such_name
from pymoe.nn.apply_experts import apply_experts
from pymoe.nn.expert_load import expert_load
from pymoe.nn.experts import Experts, SharedExperts
from pymoe.nn.losses import inject_loss, set_aux_loss_scale
from pymoe.nn.moe import MoE, Stats
from pymoe.nn.prefetch import prefetch_experts
from pymoe.nn.quantized_dense import QuantizedDenseLinear, quantize_linears
from pymoe.nn.quantized_experts import Quantized, QuantizedExperts, QuantizedLinear, quantize_experts
from pymoe.nn.quantized_files import load_quantized, save_quantized
from pymoe.nn.replay import Routes, record_routing, replay_routing
from pymoe.nn.router import Router, update_expert_biases

__all__ = [
    "Experts",
    "MoE",
    "Quantized",
    "QuantizedDenseLinear",
    "QuantizedExperts",
    "QuantizedLinear",
    "Router",
    "Routes",
    "SharedExperts",
    "Stats",
    "apply_experts",
    "expert_load",
    "inject_loss",
    "load_quantized",
    "prefetch_experts",
    "quantize_experts",
    "quantize_linears",
    "record_routing",
    "replay_routing",
    "save_quantized",
    "set_aux_loss_scale",
    "update_expert_biases",
]

if not TYPE_CHECKING:  # with a __getattr__, type checkers would not report unknown names

    def __getattr__(name: str) -> NoReturn:
        from torch import nn

        torchs = {name: "torch.nn has it; this nn is pymoe's"} if hasattr(nn, name) else {}
        raise no_such_name(__name__, name, __all__, torchs)
