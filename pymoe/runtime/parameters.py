"""Locks on parameters that backends share, and checks that an optimizer updates them."""

from __future__ import annotations

import inspect
import itertools
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from pymoe import _runtime


def lock_of(parameters: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return the lock that a backend holds while it reads or changes these parameters.

    Every parameter has exactly one re-entrant lock, which parameters of the same backend may share. So backends that
    share a parameter exclude each other. If the parameters of a backend have several locks, the returned lock takes all
    of them, always in the same order, so that two backends never wait for each other. While a pass waits for another
    expert, that expert may use the locks of the pass as if it ran on the same thread.
    """
    parameters = list(parameters)
    with _registry:
        found = {_locks[one][0]: _locks[one] for one in parameters if one in _locks}
        numbered = [found[number] for number in sorted(found)] or [(next(_numbers), _runtime.ParameterLock())]
        for one in parameters:
            if one not in _locks:
                _locks[one] = numbered[0]
    locks = [lock for _, lock in numbered]
    return (
        locks[0] if len(locks) == 1 else _Together(locks)
    )  # prefer a single lock: if Ctrl-C interrupts _Together between two locks, the first one is never released


class _Together:
    def __init__(self, locks: Sequence[AbstractContextManager[Any]]) -> None:
        self._locks = locks

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for lock in reversed(self._locks):
            lock.__exit__(*exception)


_registry = threading.Lock()
_numbers = itertools.count()
_locks = WeakIdKeyDictionary()  # parameter -> (number, lock)


def optimized(opt: Any) -> list[nn.Parameter]:
    """Return the parameters in the ``param_groups`` of ``opt``; an empty list if ``opt`` has no groups."""
    return [parameter for group in getattr(opt, "param_groups", ()) for parameter in group["params"]]


def check_steps(opt: Any, scheduler: Any, alone: bool) -> None:
    """Raise TypeError unless ``opt`` and ``scheduler`` are each None or an object with a ``step()``.

    With ``alone``, ``step()`` must also need no arguments.
    """
    for what, kind, one in (("opt", "an optimizer", opt), ("scheduler", "a scheduler", scheduler)):
        if one is None:
            continue
        if isinstance(one, type):
            raise TypeError(f"ExpertBackend: {what} must be {kind} or None, got the class {one.__name__} itself")
        if not callable(getattr(one, "step", None)):
            raise TypeError(f"ExpertBackend: {what} must be {kind} or None, got {type(one).__name__}")
        # Check the step() of the class: a learning-rate scheduler replaces the optimizer instance's step() with
        # a wrapper whose signature still has `self`.
        step = getattr(type(one), "step", None)
        if step is None or not alone:
            continue
        try:
            inspect.signature(step).bind(one)
        except TypeError as error:
            raise TypeError(
                f"ExpertBackend: {what}.step() of {type(one).__name__} cannot be called without arguments ({error}); "
                f"override ExpertBackend.apply_gradients to call it with what it needs"
            ) from None
        except ValueError:  # its signature cannot be determined
            continue


def check_updates(name: str, opt: Any, parameters: Sequence[nn.Parameter], before: Sequence[nn.Parameter]) -> None:
    """Check that ``opt`` updates the ``parameters`` of the expert ``name``.

    ``before`` are the parameters at the previous check, if there was one. Warn if ``opt`` does not update a parameter
    that requires a gradient and has been added since then. Only optimizers of torch are checked.

    Raises:
        ValueError: ``opt`` updates none of the parameters.
    """
    if not isinstance(opt, Optimizer):
        return
    known = set(map(id, optimized(opt)))
    if not any(id(parameter) in known for parameter in parameters):
        raise ValueError(
            f"ExpertBackend {name!r}: opt updates none of the expert's parameters. Make it from expert.parameters(), "
            f"after whatever replaces them (load_state_dict(assign=True), parametrizations)"
        )
    old = set(map(id, before))
    lost = sum(one.requires_grad and id(one) not in known and id(one) not in old for one in parameters)
    if before and lost:
        warnings.warn(
            f"ExpertBackend {name!r}: {lost} parameters of the expert were replaced after the backend was made, and "
            f"opt does not update the new ones",
            stacklevel=2,
        )
