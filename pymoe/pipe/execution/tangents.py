"""Forward-mode differentiation (``torch.autograd.forward_ad``): whether anything takes part in it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree

from pymoe.autograd.isolated_graph import has_tangent
from pymoe.pipe.micro_batches import Whole

__all__ = ["have_tangents"]


def have_tangents(values: Any, *modules: nn.Module) -> bool:
    """Whether a tensor in ``values``, or a parameter or buffer of the modules, has a tangent.

    What crosses the boundaries of stages is cut off from its history, and a tangent would get lost there.
    """
    if forward_ad._current_level < 0:
        return False
    leaves = [leaf.value if isinstance(leaf, Whole) else leaf for leaf in _pytree.tree_leaves(values)]
    state = [itertools.chain(module.parameters(), module.buffers()) for module in modules]
    tensors = itertools.chain(_pytree.tree_leaves(leaves), *state)
    return any(isinstance(x, torch.Tensor) and has_tangent(x) for x in tensors)
