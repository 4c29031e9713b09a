"""Refuses what torch does with models whose experts are spread over ranks, and cannot do right: each error names the
function that does.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pymoe.ep.call import ShardedLayer

_registered: list[Any] = []


def watch_torch() -> None:
    """Register the checks of this file, once in a process."""
    if not _registered:
        _registered.append(register_module_module_registration_hook(_before_wrapping))
        _registered.append(register_optimizer_step_pre_hook(_before_step))


def _before_wrapping(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Raise if ``outer`` is a DistributedDataParallel that would average experts of which ranks have different ones."""
    if inner is None or not isinstance(outer, DistributedDataParallel):
        return
    layers = [layer for layer in inner.modules() if isinstance(layer, ShardedLayer)]
    experts = {id(one) for layer in layers for one in layer.experts.parameters() if isinstance(one, DTensor)}
    for path, parameter in inner.named_parameters():
        if id(parameter) in experts and parameter.requires_grad and path not in outer.parameters_to_ignore:
            raise TypeError(
                f"DistributedDataParallel: the model must have no experts that pymoe.ep.shard has spread, got "
                f"{path!r}: call pymoe.ep.data_parallel(model, mesh) in its place"
            )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer would hand experts and whole parameters to one function of torch together."""
    for group in optimizer.param_groups:
        way = next((way for way in ("foreach", "fused") if group.get(way)), None)
        if way is None:
            continue
        kinds = {(one.device, one.dtype, isinstance(one, DTensor)) for one in group["params"] if one.grad is not None}
        if len(kinds) > len({kind[:2] for kind in kinds}):  # torch calls one function for a device and dtype
            raise ValueError(
                f"{type(optimizer).__name__}: {way} must be False for DTensors, such as experts that are spread over "
                f"ranks, together with other parameters of their dtype, got {way}={group[way]}"
            )
