"""A state that comes back as it was saved: what a backend's ``load_state_dict`` alone does not do, or cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pymoe.runtime import ExpertBackend


def check_loadable(backend: ExpertBackend) -> None:
    """Raise TypeError for a part of the backend into which its saved state could not be loaded."""
    scheduler = backend.scheduler
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise TypeError(
            f"the scheduler, a {type(scheduler).__name__}, has no state_dict(): expected one that can be saved"
        )
    for name, tensor in backend.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and _is_expanded(tensor):
            raise TypeError(f"{name} is an expanded tensor, which cannot be loaded: expected its clone()")


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def load_exactly(backend: ExpertBackend, state: Mapping[str, Any]) -> None:
    """Load a state, and give what the optimizer keeps for each parameter the types that it had.

    torch's optimizers cast all of that to the dtype of the parameter: masks and counters to float, complex numbers to
    real ones, moments of float32 whose parameters are in bfloat16 to fewer bits. That is right only where the expert
    itself has other dtypes than the state.

    Raises:
        ValueError: an optimizer of another kind has made the state: it would fail at the first update.
        RuntimeError: the state of another expert.
    """
    opt, saved = backend.opt, state["_extra_state"].get("opt")
    options = [set(group) for group in getattr(opt, "param_groups", ())]
    backend.load_state_dict(state)
    for expected, group in zip(options, getattr(opt, "param_groups", ()), strict=False):
        if lost := sorted(map(str, expected - set(group))):
            raise ValueError(
                f"{backend.name!r}: expected a checkpoint made with the optimizer {type(opt).__name__}, got one made "
                f"with another, which has no {', '.join(lost)}: go on with that one, or remove the checkpoints"
            )
    if opt is None or saved is None or _dtypes(backend.state_dict(keep_vars=True)) != _dtypes(state):
        return
    if (type(opt).load_state_dict, type(opt).state_dict) != (Optimizer.load_state_dict, Optimizer.state_dict):
        return  # one that does not cast, or that keeps what it says elsewhere
    for number, loaded in opt.state_dict()["state"].items():  # the optimizer's own dicts, not copies
        for key, value in saved["state"].get(number, {}).items():
            loaded[key] = _as_saved(value, loaded.get(key))


def _dtypes(state: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {name: one.dtype for name, one in state.items() if isinstance(one, Tensor)}


def _as_saved(saved: Any, loaded: Any) -> Any:
    """Return ``loaded`` where it is as ``saved``, else that, on the same device."""
    if isinstance(saved, Tensor):
        if not isinstance(loaded, Tensor):
            return saved
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _as_saved(one, loaded.get(key)) for key, one in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)) and len(saved) == len(loaded):
        return type(saved)(map(_as_saved, saved, loaded))
    return saved
