"""What all layers have in common that are spread over one group, in one model or in several.

Every call of ``shard`` over a group is made by all of its ranks in the same order, so all count alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist

from pymoe._gloo_at_exit import wait_for_gloo_at_exit


@dataclass
class _Layers:
    models: int = 0
    most_announced: int = 0


_layers: WeakKeyDictionary[dist.ProcessGroup, _Layers] = WeakKeyDictionary()


def next_model(group: dist.ProcessGroup) -> int:
    """Return the number of a model that is spread over a group: 1, then 2, ..."""
    wait_for_gloo_at_exit()
    layers = _layers.setdefault(group, _Layers())
    layers.models += 1
    return layers.models


def note_announced(group: dist.ProcessGroup, numbers: int) -> None:
    """Note how many numbers a rank announces of a layer over a group."""
    layers = _layers.setdefault(group, _Layers())
    layers.most_announced = max(layers.most_announced, numbers)


def most_announced(group: dist.ProcessGroup) -> int:
    """Return the most numbers that a rank announces of a layer over this group; 0 if none was spread here."""
    layers = _layers.get(group)
    return 0 if layers is None else layers.most_announced
