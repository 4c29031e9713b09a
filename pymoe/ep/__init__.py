"""Expert parallelism: spreads the experts of a layer over the ranks of a process group.

:func:`shard` turns the layers of a model into :class:`ShardedMoE`, and experts of transformers into
:class:`ShardedModule`. The path of a token: :meth:`ShardedMoE.forward` in :mod:`pymoe.ep.layer` ->
:mod:`pymoe.ep.dispatcher` (which rows travel) -> :mod:`pymoe.ep.exchange` (counts, then the dispatch) ->
:class:`ShardedExperts` -> the combine, through the same modules in the other direction.
"""

from pymoe.ep.dispatcher import check_calls
from pymoe.ep.experts import ShardedExperts
from pymoe.ep.failures import GroupError
from pymoe.ep.gradients import clip_grad_norm_, data_parallel
from pymoe.ep.layer import ShardedLayer, ShardedMoE
from pymoe.ep.modules import ShardedModule
from pymoe.ep.redistribute import redistribute
from pymoe.ep.shard import shard, shard_on_load

__all__ = [
    "GroupError",
    "ShardedExperts",
    "ShardedLayer",
    "ShardedMoE",
    "ShardedModule",
    "check_calls",
    "clip_grad_norm_",
    "data_parallel",
    "redistribute",
    "shard",
    "shard_on_load",
]
