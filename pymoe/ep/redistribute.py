"""redistribute: moves experts to other ranks while training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from pymoe.ep.agreement import lost_rank
from pymoe.ep.arrangement import Arrangement
from pymoe.ep.comparison import Described, compare
from pymoe.ep.experts import ShardedExperts, everywhere
from pymoe.ep.layer import ShardedMoE, rearrange
from pymoe.ep.layouts import Move, layout_of, local_of
from pymoe.ep.optimizers import check_followed, follow, stacked_state, watch
from pymoe.ep.placement import Placement


def redistribute(
    model: nn.Module,
    placement: Placement | Mapping[str, Placement],
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> nn.Module:
    """Move experts to the ranks that a placement names, with their gradients and what an optimizer keeps for them.

    In place, between two steps: parameters stay the objects that they are, so optimizers, DDP and FSDP go on with them.
    Training goes on as if nothing had happened, to the bit of outputs, gradients and weights. Only the rank that
    computes an expert changes, and with it :attr:`ShardedMoE.arrangement`.

    ``state_dict()`` of the model and of the optimizer have every expert at its own place, whatever the placement is, so
    a checkpoint that was saved under one loads under any other, on any number of ranks, and into the model in one
    process. Under a placement other than the first, ``state_dict()`` and ``load_state_dict()`` exchange experts: every
    rank must call them, and as the former returns copies, the latter is needed after
    ``torch.distributed.checkpoint.load``. Parameters themselves (``full_tensor()``) are in the order of
    ``arrangement.order``.

    The call is collective, over the group of the layers and, after :func:`data_parallel`, over the ranks with copies of
    the experts. They compare what they are about to move and to where; then experts travel, and when all have arrived,
    every rank puts them in their places. If a rank raises or dies before that, nothing has changed on any of them. It
    takes memory for weights, gradients and optimizer state of a rank's experts once more. Call it between
    ``optimizer.step()`` and the next forward: a backward pass of a graph from before raises, and gradients that FSDP
    has yet to sum over ranks (``set_requires_gradient_sync(False)``) stay where they are. Copies of the model, those
    with moving averages among them, keep their placement until they are moved, too.

    Args:
        model: what :func:`shard` has been called with; also within ``DistributedDataParallel``.
        placement: for all layers, or for layers by their names in ``model``, of which the others stay as they are:
            :func:`pymoe.ep.placement.place` makes it of loads, as ``torch.tensor(layer.last_loads).sum(0)`` and those
            of :class:`pymoe.ep.simulate.LoadRecorder`. Without replicas, and with as many experts on each rank as
            ``torch.chunk`` gives it. :func:`pymoe.ep.placement.contiguous` brings all back.
        optimizer: the optimizer of these experts, or several. One that keeps something for them and is left out raises
            at its next step. One that is made later works; if it is to load a state before its first step, give it to
            this function first, with the placement that is in force. (``set_state_dict`` makes a step before.)

    Returns:
        ``model``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: ``model`` holds no sharded layer, not one that ``placement`` names, or not all that share
            parameters; a placement does not fit a layer, or has replicas; ``optimizer`` keeps what is not stacked as
            the parameters are, or has been left out before.
        GroupError: ranks give unequal arguments, or one of them cannot go on.
    """
    layers = _layers_of(model)
    moves: list[_Tensor] = []
    orders: dict[ShardedExperts, tuple[int, ...] | None] = {}
    problem: Exception | None = None
    described: Described = {"layer": {}}
    optimizers: list[Optimizer] = []
    try:
        orders = _orders(layers, placement)
        optimizers = _several(optimizer)
        for layer in layers.values():
            for one in optimizers:
                check_followed(one, layer.experts)
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
        compare("redistribute", group, described, problem)
    try:
        arrived = [moved.move(moved.local) for moved in moves]
        for group in _groups(layers):
            dist.barrier(group)  # a rank may fail until then, and none has changed anything
    except RuntimeError as lost:
        raise lost_rank(next(iter(layers.values())).arrangement, "experts that change their ranks", lost) from lost
    with torch.no_grad():
        for moved, rows in zip(moves, arrived, strict=True):
            moved.local.copy_(rows)
    for experts, order in orders.items():
        rearrange(model, {experts}, order=order)
        experts.moves += 1
    for layer in layers.values():
        for optimizer in optimizers:
            follow(optimizer, layer.experts)
    watch()
    return model


class _Tensor(NamedTuple):
    """Something that is stacked along experts, and where its rows go."""

    name: str
    kind: str
    local: Tensor
    move: Move


def _layers_of(model: Any) -> dict[str, ShardedMoE]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"redistribute: model must be a module, got {type(model).__name__}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ShardedMoE)}
    if not layers:
        raise ValueError(f"redistribute: model must hold a layer sharded before, got a {type(model).__name__} without")
    return layers


def _orders(layers: dict[str, ShardedMoE], placement: Any) -> dict[ShardedExperts, tuple[int, ...] | None]:
    """Return the new order of all experts that change theirs."""
    wanted = placement if isinstance(placement, Mapping) else dict.fromkeys(layers, placement)
    found: dict[ShardedExperts, tuple[int, ...] | None] = {}
    owners: dict[nn.Parameter, tuple[str, tuple[int, ...] | None]] = {}
    for name in wanted:
        if name not in layers:
            raise ValueError(f"redistribute: placement must name layers of model, {list(layers)}, got {name!r}")
    for name, layer in layers.items():
        arrangement = layer.arrangement
        order = _order(name, wanted[name], arrangement) if name in wanted else arrangement.order
        for parameter in layer.experts.parameters():
            other, its_order = owners.setdefault(parameter, (name, order))
            if its_order != order:
                raise ValueError(
                    f"redistribute: layers that share parameters must have one placement, got two for {other!r} and "
                    f"{name!r}"
                )
        if order != arrangement.order:
            found[layer.experts] = order
    _check_all_owners(layers, found)
    return found


def _check_all_owners(layers: dict[str, ShardedMoE], moving: Iterable[ShardedExperts]) -> None:
    """Raise unless what moves belongs to these layers alone."""
    parameters = {parameter for experts in moving for parameter in experts.parameters()}
    own = {layer.experts for layer in layers.values()}
    for experts in everywhere:
        if experts not in own and not parameters.isdisjoint(experts.parameters()):
            raise ValueError(
                f"redistribute: model must hold all layers that share parameters, got one without "
                f"{experts.arrangement.title}"
            )


def _order(name: str, placement: Any, arrangement: Arrangement) -> tuple[int, ...] | None:
    """Return the expert at each position; None where each is at its own."""
    if not isinstance(placement, Placement):
        kind = type(placement).__name__
        raise TypeError(f"redistribute: placement must be a Placement, or some by names of layers, got {kind}")
    experts, ranks = arrangement.num_experts, arrangement.ranks
    if (len(placement.hosts), placement.ranks) != (experts, ranks):
        seen = f"{len(placement.hosts)} on {placement.ranks}"
        raise ValueError(
            f"redistribute: placement of {name!r} must hold {experts} experts on {ranks} ranks, got {seen}"
        )
    for expert, hosts in enumerate(placement.hosts):
        if len(hosts) != 1 or hosts[0] not in range(ranks):
            raise ValueError(
                f"redistribute: placement of {name!r} must have one rank in 0..{ranks - 1} for every expert, got "
                f"{list(hosts)} for expert {expert}; for hot experts shard(..., clones=n) has clones"
            )
    numbers, expected = list(map(len, placement.held)), list(map(len, arrangement.spans))
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


def _stacked(experts: ShardedExperts, order: tuple[int, ...] | None, optimizers: list[Optimizer]) -> list[_Tensor]:
    """Return all that moves with some experts, by name, in one order on all ranks."""
    arrangement = experts.arrangement
    plain = range(arrangement.num_experts)
    found = []
    for name, parameter in experts.named_parameters():
        if parameter.is_meta:
            continue  # what is loaded or initialised later will be in the new order
        move = Move(layout_of(parameter, arrangement), arrangement.order or plain, order or plain)
        tensors: dict[str, Tensor] = {name: parameter}
        if parameter.grad is not None:
            tensors[f"gradient of {name}"] = parameter.grad
        for optimizer in optimizers:
            state = stacked_state(optimizer, parameter, arrangement)
            tensors |= {f"{key} of {name}": state[key] for key in sorted(state)}
        for title, tensor in tensors.items():
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            with torch.no_grad():  # the memory itself, in which autograd counts changes
                found.append(_Tensor(title, kind, local_of(tensor), move))
    return found


def _groups(layers: dict[str, ShardedMoE]) -> list[dist.ProcessGroup]:
    """Return the ranks that must agree, each group of them once."""
    arrangements = [layer.arrangement for layer in layers.values()]
    return list({one.group if one.everyone is None else one.everyone.get_group(): None for one in arrangements})
