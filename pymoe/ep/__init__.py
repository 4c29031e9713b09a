"""Expert parallelism: spreads the experts of a layer over the ranks of a process group.

:func:`shard` turns the layers of a model into :class:`ShardedMoE`, and experts of transformers into
:class:`ShardedModule`. To follow a token: :meth:`ShardedMoE.forward` -> :mod:`pymoe.ep.call` ->
:mod:`pymoe.ep.agreement` (count exchange) -> :mod:`pymoe.ep.dispatcher` (which rows travel) ->
:mod:`pymoe.ep.all_to_all` (dispatch) -> :class:`ShardedExperts` -> the combine, by the same files.
"""

from pymoe.ep.call import ShardedLayer
from pymoe.ep.dispatcher import check_calls
from pymoe.ep.experts import ShardedExperts
from pymoe.ep.failures import GroupError
from pymoe.ep.gradients import clip_grad_norm_, data_parallel
from pymoe.ep.layer import ShardedMoE
from pymoe.ep.loading import shard_on_load
from pymoe.ep.modules import ShardedModule
from pymoe.ep.redistribute import redistribute
from pymoe.ep.shard import shard

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
