"""Expert parallelism: the experts of a layer spread over the ranks of a process group.

:func:`shard` turns the layers of a model into :class:`ShardedMoE`. To follow a token: :meth:`ShardedMoE.forward` ->
:mod:`pymoe.ep.agreement` (all ranks say what they will send) -> :mod:`pymoe.ep.shipment` (which rows, by
:mod:`pymoe.ep.plan`) -> :mod:`pymoe.ep.exchange` (rows travel) -> :class:`ShardedExperts` -> the way back.
"""

from pymoe.ep.errors import GroupError
from pymoe.ep.experts import ShardedExperts
from pymoe.ep.gradients import clip_grad_norm_, data_parallel
from pymoe.ep.layer import ShardedMoE
from pymoe.ep.padded import check_calls
from pymoe.ep.redistribute import redistribute
from pymoe.ep.shard import shard

__all__ = [
    "GroupError",
    "ShardedExperts",
    "ShardedMoE",
    "check_calls",
    "clip_grad_norm_",
    "data_parallel",
    "redistribute",
    "shard",
]
