"""Checks that this rank's parameters can compute the rows of a call, before the call is announced.

After it other ranks send their rows and wait for answers: an operator that refused parameters then would leave them
waiting, and a rank without experts would not even notice a mistake that all ranks have made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pymoe.ep.arrangement import Arrangement
from pymoe.ep.experts import ShardedExperts
from pymoe.nn.experts import SharedExperts
from pymoe.nn.parameters import check_parameter


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
    for name, size in module.sizes().items():
        parameter = getattr(module, name)
        if parameter is not None:
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            expected = size if arrangement is None else (len(arrangement.own), *size)
            check_parameter(f"{kind}.{name}", own, expected, rows_TH, " on this rank")
