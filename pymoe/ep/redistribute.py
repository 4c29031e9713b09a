"""redistribute: moves experts to other ranks during training, together with the state that optimizers keep for them.

``state_dict()`` of an optimizer has the state of expert e at position e, just as ``state_dict()`` of the layer has the
weights of expert e there; ``load_state_dict`` expects the same. An optimizer that is made after a move is registered at
its first step, or if it is given to ``redistribute``. The next step of an optimizer raises if the optimizer was left
out of a move or loaded a state before it was registered (it would use the state of other experts), or if it was made
before ``shard`` or ``data_parallel`` replaced its parameters (unless the replaced ones have new gradients: then other
code uses them). An optimizer also raises if it would pass spread experts and whole parameters to one torch function.
Wrapping a model in ``DistributedDataParallel`` raises if that would average spread experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pymoe.ep.experts import (
    ExpertMove,
    ExpertShards,
    all_sharded_experts,
    in_expert_order,
    in_placed_order,
    local_tensor,
    outdated_gradients,
    position_layout,
)
from pymoe.ep.failures import Description, assert_same_on_all_ranks, lost_rank
from pymoe.ep.layer import ShardedLayer, update_sharding
from pymoe.ep.placement import Placement
from pymoe.ep.sharding import ExpertSharding


def redistribute(
    model: nn.Module,
    placement: Placement | Mapping[str, Placement],
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> nn.Module:
    """Move experts to the ranks that a placement names, with their gradients and optimizer state.

    This works in place, between two training steps: parameters stay the same objects, so optimizers, DDP and FSDP keep
    working. Outputs, gradients and weights stay the same, bit for bit. Only the rank that computes an expert changes,
    and with it :attr:`ShardedLayer.sharding`.

    ``state_dict()`` of the model and of the optimizer have expert e at position e under every placement. So a
    checkpoint that was saved under one placement can be loaded under any other, on any number of ranks, and into the
    model in one process. Under a placement other than the first, ``state_dict()`` and ``load_state_dict()`` exchange
    experts, so every rank must call them. ``state_dict()`` then returns copies, so call ``load_state_dict()`` after
    ``torch.distributed.checkpoint.load``. The parameters themselves (``full_tensor()``) are in the order of
    ``sharding.order``.

    The call is collective, over the group of the layers and, after :func:`data_parallel`, over the ranks with copies of
    the experts. Ranks compare their arguments; then experts are sent, and when all have arrived, every rank copies
    them into its parameters. If a rank raises or dies before that, nothing has changed on any rank. The call needs
    additional memory for the weights, gradients and optimizer state of a rank's experts. Call it between
    ``optimizer.step()`` and the next forward pass: a backward pass raises if its forward pass ran before the call, and
    gradients that FSDP has yet to sum over ranks (``set_requires_gradient_sync(False)``) are not moved. Copies of the
    model, such as moving averages, keep their placement until this function is called for them, too.

    Args:
        model: the model that was given to :func:`shard`, or a ``DistributedDataParallel`` around it.
        placement: one placement for all layers, or a mapping from names of layers in ``model`` to placements; other
            layers keep their placement. A placement must have no replicas, and as many experts on each rank as
            ``torch.chunk`` gives it. :func:`pymoe.ep.placement.place` computes one from loads, such as
            ``torch.tensor(layer.last_loads).sum(0)`` or those of :class:`pymoe.ep.simulate.LoadRecorder`.
            :func:`pymoe.ep.placement.contiguous` restores the first placement.
        optimizer: the optimizer of these experts, or several. If an optimizer that has state for the experts is left
            out, its next step raises. An optimizer may also be made after the call. Before a state is loaded into it,
            it must have made a step (``set_state_dict`` makes one), or have been given to this function with the
            current placement.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: ``model`` contains no sharded layer, lacks a layer that ``placement`` names, or lacks a layer that
            shares parameters with experts that would move; a placement does not fit a layer, or has replicas; experts
            that would move are quantised; an optimizer has state that is not stacked as the parameters are, or was left
            out of an earlier call.
        GroupError: ranks give different arguments, or one of them cannot continue.

    Example:
        >>> from torch.distributed import HashStore, destroy_process_group, init_device_mesh, init_process_group
        >>> from pymoe.ep.placement import place
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # torchrun sets all but "gloo"
        >>> model = torch.nn.Sequential(pymoe.nn.MoE(16, 32, num_experts=4, top_k=2))
        >>> model = pymoe.ep.shard(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
        >>> output = model(torch.randn(5, 16))
        >>> load = torch.tensor(model[0].last_loads).sum(dim=0)  # tokens of each expert, over all ranks
        >>> model = pymoe.ep.redistribute(model, place(load, 1))  # for one rank; give it the optimizer, too
        >>> sorted(model[0].sharding.own_experts)
        [0, 1, 2, 3]
        >>> destroy_process_group()
    """
    layers = _layers_of(model)
    moves: list[_StackedTensor] = []
    orders: dict[ExpertShards, tuple[int, ...] | None] = {}
    problem: Exception | None = None
    described: Description = {"layer": {}}
    optimizers: list[Optimizer] = []
    try:
        orders = _orders(layers, placement)
        optimizers = _several(optimizer)
        for layer in layers.values():
            for one in optimizers:
                _check_followed(one, layer.experts)
        for experts, order in orders.items():
            if isinstance(experts, FSDPModule):
                experts.reshard()
            own = _stacked(experts, order, optimizers)
            name = next(name for name, layer in layers.items() if layer.experts is experts)
            described["layer"][name] = {"order of experts": order} | {moved.name: moved.kind for moved in own}
            moves += own
    except (TypeError, ValueError) as error:
        problem = error
    for group in _groups(layers):
        assert_same_on_all_ranks("redistribute", group, described, problem)
    try:
        arrived = [moved.move(moved.local) for moved in moves]
        for group in _groups(layers):
            dist.barrier(group)  # if a rank fails before this barrier, no rank has changed anything
    except RuntimeError as lost:
        sharding = next(iter(layers.values())).sharding
        what = "experts that change their ranks"
        raise lost_rank(sharding.group, f"MoE {sharding.title}", sharding.layer, what, lost) from lost
    with torch.no_grad():
        for moved, rows in zip(moves, arrived, strict=True):
            moved.local.copy_(rows)
    for experts, order in orders.items():
        update_sharding(model, {experts}, order=order)
        experts.moves += 1
    for layer in layers.values():
        for optimizer in optimizers:
            _follow(optimizer, layer.experts)
    watch_torch()
    return model


class _StackedTensor(NamedTuple):
    """A tensor that is stacked along the experts, and the exchange that moves its experts."""

    name: str
    kind: str
    local: Tensor
    move: ExpertMove


def _layers_of(model: Any) -> dict[str, ShardedLayer]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"redistribute: model must be a module, got {type(model).__name__}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ShardedLayer)}
    if not layers:
        raise ValueError(f"redistribute: model must hold a layer sharded before, got a {type(model).__name__} without")
    return layers


def _orders(layers: dict[str, ShardedLayer], placement: Any) -> dict[ExpertShards, tuple[int, ...] | None]:
    """Return the new order of experts of each experts module that ``placement`` changes.

    Raise TypeError or ValueError if ``placement`` does not fit ``layers``.
    """
    wanted = placement if isinstance(placement, Mapping) else dict.fromkeys(layers, placement)
    found: dict[ExpertShards, tuple[int, ...] | None] = {}
    owners: dict[nn.Parameter, tuple[str, tuple[int, ...] | None]] = {}
    for name in wanted:
        if name not in layers:
            raise ValueError(f"redistribute: placement must name layers of model, {list(layers)}, got {name!r}")
    for name, layer in layers.items():
        sharding = layer.sharding
        order = _order(name, wanted[name], sharding) if name in wanted else sharding.order
        for parameter in layer.experts.parameters():
            other, its_order = owners.setdefault(parameter, (name, order))
            if its_order != order:
                raise ValueError(
                    f"redistribute: layers that share parameters must have one placement, got two for {other!r} and "
                    f"{name!r}"
                )
        if order != sharding.order:
            found[layer.experts] = order
    _check_all_owners(layers, found)
    return found


def _check_all_owners(layers: dict[str, ShardedLayer], moving: Iterable[ExpertShards]) -> None:
    """Raise ValueError if a layer outside of ``layers`` shares parameters with the experts in ``moving``."""
    parameters = {parameter for experts in moving for parameter in experts.parameters()}
    own = {layer.experts for layer in layers.values()}
    for experts in all_sharded_experts:
        if experts not in own and not parameters.isdisjoint(experts.parameters()):
            raise ValueError(
                f"redistribute: model must hold all layers that share parameters, got one without "
                f"{experts.sharding.title}"
            )


def _order(name: str, placement: Any, sharding: ExpertSharding) -> tuple[int, ...] | None:
    """Return the expert at each position under ``placement``; None if expert e is at position e for all e.

    Raise TypeError or ValueError if ``placement`` does not fit the layer ``name``.
    """
    if not isinstance(placement, Placement):
        kind = type(placement).__name__
        raise TypeError(f"redistribute: placement must be a Placement, or some by names of layers, got {kind}")
    experts, ranks = sharding.num_experts, sharding.ranks
    if (len(placement.hosts), placement.ranks) != (experts, ranks):
        seen = f"{len(placement.hosts)} on {placement.ranks}"
        raise ValueError(
            f"redistribute: placement of {name!r} must hold {experts} experts on {ranks} ranks, got {seen}"
        )
    for expert, hosts in enumerate(placement.hosts):
        if len(hosts) != 1 or hosts[0] not in range(ranks):
            raise ValueError(
                f"redistribute: placement of {name!r} must have one rank in 0..{ranks - 1} for every expert, got "
                f"{list(hosts)} for expert {expert}; for hot experts use shard(..., clones=n)"
            )
    numbers, expected = list(map(len, placement.held)), list(map(len, sharding.ranges))
    if numbers != expected:
        raise ValueError(
            f"redistribute: placement of {name!r} must have {expected} experts on the ranks, as torch.chunk cuts them, "
            f"got {numbers}"
        )
    order = tuple(expert for held in placement.held for expert in held)
    return None if order == tuple(range(experts)) else order


def _several(optimizer: Any) -> list[Optimizer]:
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for one in found:
        if not isinstance(one, Optimizer):
            raise TypeError(f"redistribute: optimizer must be an Optimizer, several or None, got {type(one).__name__}")
    return found


def _stacked(experts: ExpertShards, order: tuple[int, ...] | None, optimizers: list[Optimizer]) -> list[_StackedTensor]:
    """Return the parameters of ``experts``, their gradients and optimizer state, in the same order on all ranks.

    ``order`` is the order of experts after the move. Raise ValueError if they cannot be moved.
    """
    sharding = experts.sharding
    if experts.is_quantized:
        raise ValueError(f"redistribute: experts must not be quantised, got those of {sharding.title}")
    plain = range(sharding.num_experts)
    found = []
    for name, parameter in experts.named_parameters():
        if parameter.is_meta:
            continue  # no values to move: they will be loaded or initialised in the new order
        move = ExpertMove(position_layout(parameter, sharding), sharding.order or plain, order or plain)
        tensors: dict[str, Tensor] = {name: parameter}
        if parameter.grad is not None:
            tensors[f"gradient of {name}"] = parameter.grad
        for optimizer in optimizers:
            state = _stacked_state(optimizer, parameter, sharding)
            tensors |= {f"{key} of {name}": state[key] for key in sorted(state)}
        for title, tensor in tensors.items():
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            with torch.no_grad():  # not .data: to_local() shares the version counter, so autograd detects the move
                found.append(_StackedTensor(title, kind, local_tensor(tensor), move))
    return found


def _groups(layers: dict[str, ShardedLayer]) -> list[dist.ProcessGroup]:
    """Return the process groups whose ranks must agree on the placements, without duplicates."""
    shardings = [layer.sharding for layer in layers.values()]
    meshes = [one.mesh if one.data_parallel_mesh is None else one.data_parallel_mesh for one in shardings]
    return list({mesh.get_group(): None for mesh in meshes})


# State of optimizers after moves, and hooks that raise where torch would train a sharded model wrongly.

_moves_followed: WeakKeyDictionary[Optimizer, WeakKeyDictionary[ExpertShards, int]] = WeakKeyDictionary()
"""The registered optimizers, whose state dicts are converted. For each, the experts modules whose moves its state has
followed, with the value of ``moves`` then."""
_hooks: list[Any] = []


def watch_torch() -> None:
    """Register global hooks in torch, once per process, that raise where torch would train a sharded model wrongly.

    They raise before the step of an optimizer that has outdated state or parameters, or that would pass DTensors and
    other tensors to one function; and when a DDP is made that would average spread experts.
    """
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_before_wrapping))
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_wrapping(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Raise TypeError if ``outer`` is a DistributedDataParallel that would average the different experts of ranks."""
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


def _stacked_state(optimizer: Optimizer, parameter: nn.Parameter, sharding: ExpertSharding) -> dict[str, DTensor]:
    """Return the stacked tensors (along the experts) of an optimizer's state for ``parameter``, by name.

    Raises:
        ValueError: another tensor of the state has more than one element.
    """
    found: dict[str, DTensor] = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if _is_stacked(value, parameter):
            found[name] = value
        elif isinstance(value, Tensor) and value.numel() > 1:
            seen = f"{tuple(value.shape)} as {type(value).__name__}"
            raise ValueError(
                f"MoE {sharding.title}: the state of an optimizer for experts must be numbers, or DTensors that "
                f"are cut as the parameters are, got {name!r} of shape {seen}"
            )
    return found


def _check_followed(optimizer: Optimizer, experts: ExpertShards) -> None:
    """Raise ValueError if ``optimizer`` has state for ``experts`` and was left out of an earlier move of them."""
    if _is_stale(optimizer, experts):
        raise ValueError(_left_out(optimizer, experts))


def _follow(optimizer: Optimizer, experts: ExpertShards) -> None:
    """Record that the state of ``optimizer`` is in the current order of ``experts``.

    The first call for an optimizer registers hooks that convert its state dicts.
    """
    if optimizer not in _moves_followed:
        _moves_followed[optimizer] = WeakKeyDictionary()
        optimizer.register_state_dict_post_hook(_to_file_order)
        optimizer.register_load_state_dict_pre_hook(_to_own_order)
    _moves_followed[optimizer][experts] = experts.moves


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in _parameters(optimizer):
        function = getattr(parameter, "replaced_by_pymoe_ep", "")
        # A replaced parameter with a new gradient is used by other code, so let the optimizer update the parameter.
        if function and parameter.requires_grad and (parameter.grad is None or parameter.grad in outdated_gradients):
            raise RuntimeError(
                f"{type(optimizer).__name__}: an optimizer must be made after pymoe.ep.{function}, which replaces the "
                f"experts' parameters, got one made before, which would never train the new ones"
            )
    own = set(map(id, _parameters(optimizer)))
    for experts in [one for one in all_sharded_experts if one.moves]:
        if not own.isdisjoint(map(id, experts.parameters())):
            if _is_stale(optimizer, experts):
                raise RuntimeError(_left_out(optimizer, experts))
            _follow(optimizer, experts)
    _check_groups(optimizer)


def _check_groups(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer would pass spread experts and whole parameters to one torch function."""
    for group in optimizer.param_groups:
        way = next((way for way in ("foreach", "fused") if group.get(way)), None)
        if way is None:
            continue
        kinds = {(one.device, one.dtype, isinstance(one, DTensor)) for one in group["params"] if one.grad is not None}
        if len(kinds) > len({kind[:2] for kind in kinds}):  # torch makes one call per device and dtype
            raise ValueError(
                f"{type(optimizer).__name__}: {way} must be False for DTensors, such as experts that are spread over "
                f"ranks, together with other parameters of their dtype, got {way}={group[way]}"
            )


def _is_stale(optimizer: Optimizer, experts: ExpertShards) -> bool:
    known = _moves_followed[optimizer].get(experts, 0) if optimizer in _moves_followed else 0
    return known != experts.moves and any(optimizer.state.get(one) for one in experts.parameters())


def _left_out(optimizer: Optimizer, experts: ExpertShards) -> str:
    name = type(optimizer).__name__
    return (
        f"MoE {experts.sharding.title}: an optimizer must be given to the call of redistribute that moves its "
        f"experts, got {name} with state for them from before; make a new one, and give it to redistribute "
        f"before it loads a state"
    )


def _to_file_order(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(optimizer, state_dict, in_expert_order)


def _to_own_order(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(optimizer, state_dict, in_placed_order)


def _converted(
    optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[[DTensor, ExpertSharding], DTensor]
) -> dict[str, Any]:
    placed = [one for one in all_sharded_experts if one.sharding.order is not None]
    shardings = {id(parameter): one.sharding for one in placed for parameter in one.parameters()}
    # Match keys with parameters by their order, since torch.distributed.checkpoint replaces integer keys with names.
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    state = dict(state_dict["state"])
    for key, parameter in zip(keys, _parameters(optimizer), strict=False):
        if key in state and id(parameter) in shardings:
            sharding = shardings[id(parameter)]
            state[key] = {
                name: change(value, sharding) if _is_stacked(value, parameter) else value
                for name, value in sorted(state[key].items())
            }
    return {**state_dict, "state": state}


def _is_stacked(value: Any, parameter: Tensor) -> bool:
    return (
        isinstance(value, DTensor)
        and isinstance(parameter, DTensor)
        and value.dim() > 0
        and value.shape[0] == parameter.shape[0]
        and (value.device_mesh, value.placements) == (parameter.device_mesh, parameter.placements)
    )


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)
