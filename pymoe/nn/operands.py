"""The operands of a layer: rows that lie one after the other in memory, and parameters that fit them.

Constructors make parameters that fit, and ``load_state_dict`` preserves this; a user who assigns a parameter or
replaces a module may break it. The operators would refuse most such parameters, but without naming the parameter, and
torch would refuse the rest or broadcast them silently. Therefore the layers check their parameters.

Parameters are checked directly before they are used: by the submodule that holds them, after it has been called, or by
the layer, where it computes the result in place of the submodule. Before the call of the submodule, its parameters may
be on another device, sharded or in another dtype, because FSDP, accelerate's offloading and others restore them in a
hook of the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe._common import checks
from pymoe._common.dtypes import autocast_enabled
from pymoe._common.types import is_gated
from pymoe.ops import raw


def as_rows(x: Tensor, hidden_size: int) -> Tensor:
    """Return the tokens of (..., H) as (T, H), one after the other in memory.

    Every path through a layer calls this first, because the rounding of torch's matrix products depends on the strides
    of their operands. This holds even for a single row, which torch calls contiguous whatever its strides are: so the
    strides are compared here, not ``is_contiguous()``.

    Args:
        x: (..., H).
        hidden_size: H, the size of a row.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, hidden_size)
    return rows if rows.stride() == (hidden_size, 1) else rows.clone(memory_format=torch.contiguous_format)


def linear(x_TH: Tensor, weight: Tensor, bias: Tensor | None = None, *, row_invariant: bool) -> Tensor:
    """Return ``F.linear(x_TH, weight, bias)`` (T, N); with ``row_invariant``, a row's bits depend only on that row.

    The matrix products of BLAS may sum a row in another order if there are more or fewer rows, and always do for a
    single row. :func:`pymoe.ops.grouped_linear` always uses the same order, so equal tokens have equal bits in every
    batch, and on every rank that has a share of a batch. The same holds for the gradient of ``x_TH``.

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


# Checks of parameters.


def check_networks(name: str, networks: Any, stack: tuple[int, ...], x: Tensor) -> None:
    """Raise unless the parameters of ``networks`` have the right shapes, the device of ``x`` and a dtype that fits it.

    Args:
        name: name of the module in its layer.
        networks: the module, an Experts or SharedExperts. (Their file imports this one.)
        stack: the leading sizes of each parameter.
        x: rows to which the networks will be applied.

    Raises:
        ValueError: a parameter does not have the sizes of the networks, or is on another device than ``x``.
        TypeError: a parameter has another dtype than ``x``, and autocast does not cast it.
    """
    if networks_fit(networks, stack, x):
        return
    for parameter, size in networks.sizes().items():
        value = getattr(networks, parameter)
        if value is not None:
            check_parameter(f"{name}.{parameter}", value, (*stack, *size), x)


def networks_fit(networks: Any, stack: tuple[int, ...], x: Tensor) -> bool:
    """Return whether every parameter has the right shape, and the device and dtype of ``x``.

    Every call of a layer runs this, so it is one expression without messages, as in :mod:`pymoe._common.checks`.
    """
    own = networks._parameters
    try:
        w_in, w_out, b_in, b_out = own["w_in"], own["w_out"], own["b_in"], own["b_out"]
    except KeyError:  # the user has replaced the module by one with other parameters
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

    The dtype must be that of ``x``, or one that ``torch.autocast``, if it is on, casts.

    Args:
        name: the name of the parameter in the error.
        parameter: the parameter.
        shape: the shape that it must have.
        x: rows by which the parameter will be multiplied.
        whose: words that follow the shape in the error.
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
    checks.same_device("MoE", name, parameter, "x", x)
