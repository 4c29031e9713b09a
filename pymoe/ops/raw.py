"""The operators without argument checks, for a caller that has made the arguments itself or has checked them already.

:mod:`pymoe.ops` checks all arguments. A layer checks its own arguments once, and what it makes from them is valid: for
example, the operators need not check a routing that the layer has just built. Invalid arguments still cannot corrupt
memory: the native operators raise errors of their own, or skip bad indices.
"""

from pymoe.ops.build_routing import raw as build_routing
from pymoe.ops.combine import raw as combine
from pymoe.ops.expert_activation import raw as expert_activation
from pymoe.ops.grouped_linear import raw as grouped_linear
from pymoe.ops.row_moves import spread_rows as dispatch

__all__ = ["build_routing", "combine", "dispatch", "expert_activation", "grouped_linear"]
