"""build_routing: sorts choices by expert, by a native stable counting sort.

Contract: :func:`pymoe.reference.build_routing`; kernel: csrc/kernels/build_routing.h.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pymoe._common.contracts import ROW_LIMIT, check_build_routing
from pymoe._common.types import Routing
from pymoe.ops import index_checks
from pymoe.ops.function_calls import one_by_one
from pymoe.reference.build_routing import build_routing as reference

_BUILD_ROUTING = torch.ops.pymoe.build_routing.default


def build_routing(
    experts: Tensor, num_experts: int, *, capacity: int | None = None, foreign_experts: bool = False
) -> Routing:
    check_build_routing(experts, num_experts, capacity, foreign_experts)
    index_checks.experts_in_range("build_routing", experts, num_experts, foreign_experts)
    return raw(experts, num_experts, capacity=capacity, foreign_experts=foreign_experts)


build_routing.__doc__ = reference.__doc__


def raw(experts: Tensor, num_experts: int, *, capacity: int | None = None, foreign_experts: bool = False) -> Routing:
    """Return the result of :func:`build_routing`, without checks of the arguments."""
    if capacity is not None:
        capacity = min(capacity, ROW_LIMIT)
    return Routing(*_BUILD_ROUTING(experts.contiguous(), num_experts, capacity, foreign_experts))


torch.library.register_vmap("pymoe::build_routing", partial(one_by_one, _BUILD_ROUTING))


@torch.library.register_fake("pymoe::build_routing")
def _(experts: Tensor, num_experts: int, capacity: int | None, foreign: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return (
        experts.new_empty(experts.shape, dtype=torch.int32),
        experts.new_empty((experts.numel(),), dtype=torch.int32),
        experts.new_empty((num_experts + 1,), dtype=torch.int32),
    )
