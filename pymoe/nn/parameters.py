"""Whether the parameters of a layer fit what is to be computed, in words that name them.

Constructors make parameters that fit, and ``load_state_dict`` keeps them so; assignments and swapped modules may not.
The operators would refuse most of that in words of their own, torch the rest, or broadcast it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe.nn.experts import Experts, SharedExperts
from pymoe.nn.router import Router
from pymoe.reference import checks
from pymoe.reference.autocast import autocast_enabled


def check_layer(layer: Any, x: Tensor) -> None:
    """Raise unless the parts of an :class:`pymoe.nn.MoE`, where they are of the classes of which it makes them, fit.

    Args:
        layer: the layer.
        x: its input, which fits the layer's sizes.

    Raises:
        ValueError: a parameter has not the layer's sizes, or is on another device than ``x``.
        TypeError: a parameter of experts has another dtype than ``x``, and autocast does not cast it.
    """
    router, experts, shared = layer.router, layer.experts, layer.shared
    if type(router) is Router:
        _check_place("router.weight", router.weight, (layer.num_experts, layer.hidden_size), x)
        if router.expert_bias is not None:
            _check_place("router.expert_bias", router.expert_bias, (layer.num_experts,), x)
    if type(experts) is Experts:
        check_networks("experts", experts, (layer.num_experts,), x)
    if type(shared) is SharedExperts:
        check_networks("shared", shared, (), x)


def check_networks(name: str, networks: Experts | SharedExperts, stack: tuple[int, ...], x: Tensor) -> None:
    """Raise, as :func:`check_layer` does, unless the parameters of feed-forward networks fit.

    Args:
        name: of the module in its layer.
        networks: the module.
        stack: the first sizes of each parameter.
        x: rows that they are to be applied to.
    """
    for parameter, size in networks.sizes().items():
        value = getattr(networks, parameter)
        if value is not None:
            check_parameter(f"{name}.{parameter}", value, (*stack, *size), x)


def check_parameter(name: str, parameter: Tensor, shape: tuple[int, ...], x: Tensor, whose: str = "") -> None:
    """Raise unless a parameter of experts has this shape and the device and dtype of ``x``, or one that autocast casts.

    Args:
        name: as the error is to call it.
        parameter: the parameter.
        shape: that it must have.
        x: rows that it is to be multiplied with.
        whose: words after the shape.
    """
    _check_place(name, parameter, shape, x, whose)
    if parameter.dtype == x.dtype:
        return
    if not autocast_enabled(x.device.type) or parameter.dtype == torch.float64:
        raise TypeError(f"MoE: {name} must have the dtype of the rows ({x.dtype}), got {parameter.dtype}")


def _check_place(name: str, parameter: Tensor, shape: tuple[int, ...], x: Tensor, whose: str = "") -> None:
    if parameter.shape != shape:
        raise ValueError(f"MoE: {name} must have shape {shape}{whose}, got {tuple(parameter.shape)}")
    checks.same_device("MoE", name, parameter, "x", x)
