"""A copy of a sequential model, to be run layer by layer without a trace in the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from pymoe.pipe.skip import tracking
from pymoe.pipe.skip.tracker import Key

__all__ = ["Skips", "copied", "map_tensors", "separate", "tensors_of"]


class Skips:
    """Skips between layers: as many pops as there are; what a layer gets goes through ``hand_over``."""

    def __init__(self, hand_over: Callable[[Any], Any]) -> None:
        self.kept: dict[Key, Any] = {}
        self.stashed: list[Any] = []  # by the layer that runs
        self._hand_over = hand_over

    def save(self, key: Key, value: Any) -> None:
        self.kept[key] = value
        self.stashed.append(value)

    def load(self, key: Key) -> Any:
        return self._hand_over(self.kept[key])


@contextmanager
def copied(
    module: nn.Sequential, value: Any, device: torch.device | str | int | None, skips: Skips
) -> Iterator[tuple[list[tuple[str, nn.Module]], Any, torch.device]]:
    """A copy of the model's layers, with their names, and of its input, on a device; and that.

    Within the block gradients are on, skips go through ``skips``, and random numbers are drawn that nobody misses.

    Raises:
        TypeError: the model is no ``nn.Sequential``.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"an nn.Sequential is needed, got {type(module).__name__}")
    where = _device(module, value) if device is None else torch.device(device)
    drawn = [] if where.type == "cpu" else [torch.empty(0, device=where).device.index]
    kind = "cuda" if where.type == "cpu" else where.type
    with (
        torch.random.fork_rng(drawn, device_type=kind),
        torch.inference_mode(False),  # and gradients are on
        tracking(skips),
    ):
        layers = copy.deepcopy(module).to(where)
        yield list(layers._modules.items()), map_tensors(lambda x: _copy(x, where), value), where  # type: ignore[arg-type]


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def separate(value: Any) -> Any:
    """The same values with a graph that begins here; a layer may write into them."""

    def begin(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad).clone()

    return map_tensors(begin, value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A nested structure with ``function(tensor)`` for every tensor."""
    return _pytree.tree_map_only(torch.Tensor, function, value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _device(module: nn.Module, value: Any) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers(), *tensors_of(value)):
        return tensor.device
    return torch.device("cpu")
