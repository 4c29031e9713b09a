"""Optimizers whose experts have changed their ranks: what they keep moves along, and their files do not show it.

``state_dict()`` of an optimizer has the state of every expert at its own place, as that of the layer has its weights;
``load_state_dict`` takes it so. An optimizer that is made after a move is found at its first step, or in the next call
of ``redistribute``. One that was left out of a move, or has loaded a state before it was found, would go on with the
state of other experts, and one that was made before ``shard`` with parameters that no layer uses any more: its next
step raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pymoe.ep.arrangement import Arrangement
from pymoe.ep.experts import ShardedExperts, everywhere
from pymoe.ep.layouts import as_in_one_process, as_placed

_followed: WeakKeyDictionary[Optimizer, WeakKeyDictionary[ShardedExperts, int]] = WeakKeyDictionary()
"""The optimizers whose files are converted, and after how many moves of experts their state is right."""
_watches: list[Any] = []


def stacked_state(optimizer: Optimizer, parameter: nn.Parameter, arrangement: Arrangement) -> dict[str, DTensor]:
    """Return what an optimizer keeps for every expert of a parameter, by name.

    Raises:
        ValueError: it keeps what cannot be told apart by experts.
    """
    found: dict[str, DTensor] = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if _is_stacked(value, parameter):
            found[name] = value
        elif isinstance(value, Tensor) and value.numel() > 1:
            seen = f"{tuple(value.shape)} as {type(value).__name__}"
            raise ValueError(
                f"MoE {arrangement.title}: what an optimizer keeps for experts must be numbers, or DTensors that are "
                f"cut as the parameters are, got {name!r} of shape {seen}"
            )
    return found


def check_followed(optimizer: Optimizer, experts: ShardedExperts) -> None:
    """Raise ValueError if experts have moved before without an optimizer that keeps something for them."""
    if _is_stale(optimizer, experts):
        raise ValueError(_left_out(optimizer, experts))


def follow(optimizer: Optimizer, experts: ShardedExperts) -> None:
    """Note that what an optimizer keeps is in the order of the experts, and convert its files from now on."""
    if optimizer not in _followed:
        _followed[optimizer] = WeakKeyDictionary()
        optimizer.register_state_dict_post_hook(_in_order_of_files)
        optimizer.register_load_state_dict_pre_hook(_in_own_order)
    _followed[optimizer][experts] = experts.moves


def watch() -> None:
    """Look at every optimizer before its steps from now on, for experts that have moved or parameters that are gone."""
    if not _watches:
        _watches.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in _parameters(optimizer):
        function = getattr(parameter, "left_by_pymoe_ep", "")
        if function and parameter.requires_grad and parameter.grad is None:  # something else may use it still
            raise RuntimeError(
                f"{type(optimizer).__name__}: an optimizer must be made after pymoe.ep.{function}, which puts other "
                f"parameters in the place of the experts' own, got one from before, which would never train them"
            )
    own = set(map(id, _parameters(optimizer)))
    for experts in [one for one in everywhere if one.moves]:
        if not own.isdisjoint(map(id, experts.parameters())):
            if _is_stale(optimizer, experts):
                raise RuntimeError(_left_out(optimizer, experts))
            follow(optimizer, experts)


def _is_stale(optimizer: Optimizer, experts: ShardedExperts) -> bool:
    known = _followed[optimizer].get(experts, 0) if optimizer in _followed else 0
    return known != experts.moves and any(optimizer.state.get(one) for one in experts.parameters())


def _left_out(optimizer: Optimizer, experts: ShardedExperts) -> str:
    name = type(optimizer).__name__
    return (
        f"MoE {experts.arrangement.title}: an optimizer must be given to the call of redistribute that moves its "
        f"experts, got {name} with what it kept or loaded for them before; make a new one, and give it to redistribute "
        f"before it loads a state"
    )


def _in_order_of_files(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(optimizer, state_dict, as_in_one_process)


def _in_own_order(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(optimizer, state_dict, as_placed)


def _converted(
    optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[[DTensor, Arrangement], DTensor]
) -> dict[str, Any]:
    placed = [one for one in everywhere if one.arrangement.order is not None]
    homes = {id(parameter): one.arrangement for one in placed for parameter in one.parameters()}
    # Files that torch.distributed.checkpoint makes have names for numbers, in the same order.
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    state = dict(state_dict["state"])
    for key, parameter in zip(keys, _parameters(optimizer), strict=False):
        if key in state and id(parameter) in homes:
            arrangement = homes[id(parameter)]
            state[key] = {
                name: change(value, arrangement) if _is_stacked(value, parameter) else value
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
