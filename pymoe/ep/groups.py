"""What all layers have in common that are spread over one group, in one model or in several.

Every call of ``shard`` over a group is made by all of its ranks in the same order, so all count alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist


@dataclass
class _Layers:
    models: int = 0
    most_experts: int = 0


_layers: WeakKeyDictionary[dist.ProcessGroup, _Layers] = WeakKeyDictionary()


def join(group: dist.ProcessGroup, experts: int) -> int:
    """Note that a model is spread over a group.

    Args:
        group: the ranks.
        experts: the most that a layer of the model has.

    Returns:
        The number of the model among those of the group, from 1 on.
    """
    layers = _layers.setdefault(group, _Layers())
    layers.models += 1
    layers.most_experts = max(layers.most_experts, experts)
    return layers.models


def most_experts(group: dist.ProcessGroup) -> int:
    """Return the most experts that a layer over this group has; 0 if none was spread in this process."""
    layers = _layers.get(group)
    return 0 if layers is None else layers.most_experts
