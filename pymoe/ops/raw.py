"""The operators without their checks, for a caller that has made the arguments itself or has checked them already.

:mod:`pymoe.ops` checks what others hand it. A layer checks what it is given once, and what it makes of that fits: the
routing that it has built a moment ago need not be looked at by each operator in turn. Arguments that do not fit are
still no danger to memory, since the native operators guard it; the words of an error are then theirs.
"""

from pymoe.ops.build_routing import raw as build_routing
from pymoe.ops.combine import raw as combine
from pymoe.ops.expert_activation import raw as expert_activation
from pymoe.ops.gate_topk import raw as gate_topk
from pymoe.ops.grouped_linear import raw as grouped_linear
from pymoe.ops.row_moves import spread_rows as dispatch

__all__ = ["build_routing", "combine", "dispatch", "expert_activation", "gate_topk", "grouped_linear"]
