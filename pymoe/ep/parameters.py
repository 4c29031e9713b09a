"""Checks that this rank's parameters can compute the rows of a call, before the call is announced.

After it other ranks send their rows and wait for answers: an operator that refused parameters then would leave them
waiting, and a rank without experts would not even notice a mistake that all ranks have made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pymoe.ep.arrangement import Arrangement
from pymoe.ep.experts import ShardedExperts
from pymoe.nn.experts import SharedExperts
from pymoe.reference import checks
from pymoe.reference.autocast import autocast_enabled
from pymoe.reference.expert_activation import is_gated


def check_parameters(
    arrangement: Arrangement, experts: ShardedExperts, shared: SharedExperts | None, rows_TH: Tensor
) -> None:
    """Check shapes, devices and dtypes of parameters, without a read of their values.

    Args:
        arrangement: of the layer.
        experts: of this rank.
        shared: experts that every rank has, or None.
        rows_TH: (T, H), the tokens as they will travel.

    Raises:
        ValueError: a parameter has not the shape that the layer has of it on this rank, or is on another device; or
            experts that layers share have moved with another of them alone.
        TypeError: it has another dtype than the rows, and autocast does not cast it.
    """
    if arrangement.order is not experts.arrangement.order and arrangement.order != experts.arrangement.order:
        raise ValueError(
            f"MoE {arrangement.title}: layers that share experts must have one placement, got experts that have moved "
            f"with another layer; call redistribute for a model that holds both"
        )
    with torch.no_grad():
        _check_module("experts", experts, rows_TH, arrangement)
        if shared is not None:
            _check_module("shared", shared, rows_TH, None)


def _check_module(kind: str, module: Any, rows_TH: Tensor, arrangement: Arrangement | None) -> None:
    """Check one module; one without an arrangement is not spread."""
    if isinstance(module, FSDPModule):
        return  # until it is called, its parameters are cut once more, elsewhere, and in a wider dtype
    inner = (2 if is_gated(module.activation) else 1) * module.ffn_size
    sizes = {
        "w_in": (inner, module.hidden_size),
        "w_out": (module.hidden_size, module.ffn_size),
        "b_in": (inner,),
        "b_out": (module.hidden_size,),
    }
    for name, size in sizes.items():
        parameter = getattr(module, name)
        if parameter is not None:
            expected = size if arrangement is None else (len(arrangement.own), *size)
            _check(f"{kind}.{name}", parameter, expected, rows_TH)


def _check(name: str, parameter: nn.Parameter, shape: tuple[int, ...], rows_TH: Tensor) -> None:
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if own.shape != shape:
        raise ValueError(f"MoE: {name} must have shape {shape} on this rank, got {tuple(own.shape)}")
    checks.same_device("MoE", name, own, "x", rows_TH)
    if own.dtype == rows_TH.dtype:
        return
    if not autocast_enabled(rows_TH.device.type) or own.dtype == torch.float64:
        raise TypeError(f"MoE: {name} must have the dtype of the rows ({rows_TH.dtype}), got {own.dtype}")
