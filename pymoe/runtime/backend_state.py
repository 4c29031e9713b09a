"""What an expert backend is as a module: its state between two updates, where it is, and copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pymoe.runtime.gradients import GradientRule
from pymoe.runtime.parameters import check_updates, lock_of, optimized
from pymoe.runtime.placement import Placement
from pymoe.runtime.schema import RequestSchema

if TYPE_CHECKING:
    from typing_extensions import Self

_POOLS = ("forward_pool", "backward_pool")


class BackendState(nn.Module):
    """The part of :class:`~pymoe.runtime.ExpertBackend` that serves nobody. No pass runs meanwhile."""

    name: str
    expert: nn.Module
    opt: Optimizer | None
    scheduler: Any
    _lock: AbstractContextManager[Any]
    _rule: GradientRule
    _placement: Placement
    _schema: RequestSchema
    _make_pools: Callable[[], None]
    _updates_itself: Callable[[], bool]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of expert, optimizer and scheduler, as it is between two updates.

        Unless ``keep_vars`` is set, tensors are copies: later updates do not change them. Gradients that wait for
        further batches (``accumulate_steps``) are not part of it.
        """
        keep_vars = kwargs.get("keep_vars", args[2] if len(args) > 2 else False)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        with self._lock:
            state = super().state_dict(*args, **kwargs)
            if not keep_vars:
                for key, value in state.items():
                    if key.startswith(prefix) and isinstance(value, Tensor):
                        state[key] = value.clone()
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what :meth:`state_dict` gave, between two updates. Accumulated gradients are dropped.

        The states of optimizer and scheduler are loaded where both sides have one: a backend without an optimizer
        loads the state of one that trains, and the other way round.
        """
        with self._lock:
            return super().load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        """Load the part of this module; called by its ``load_state_dict``, or by that of a module around it."""
        if self.opt is not None and local_metadata.get("assign_to_params_buffers"):
            raise ValueError(
                f"ExpertBackend {self.name!r}: load_state_dict(assign=True) would replace the parameters that opt "
                f"updates; load without assign=True"
            )
        with self._lock:
            self._rule.forget()
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        missing_keys = args[1]
        if (key := f"{prefix}_extra_state") in missing_keys:  # the state of the bare module: all that it says is taken
            missing_keys.remove(key)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the states of optimizer and scheduler, and the number of updates."""
        with self._lock:
            states = {name: one.state_dict() for name, one in self._stateful()}
            return {"updates": self._rule.updates, **copy.deepcopy(states)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what :meth:`get_extra_state` gave."""
        with self._lock:
            self._rule.forget()
            for name, one in self._stateful():
                if name in state:
                    one.load_state_dict(state[name])
            self._rule.updates = state["updates"]

    def _stateful(self) -> list[tuple[str, Any]]:
        pairs: list[tuple[str, Any]] = [("opt", self.opt), ("scheduler", self.scheduler)]
        return [(name, one) for name, one in pairs if hasattr(one, "state_dict")]

    def train(self, mode: bool = True) -> Self:
        """Set the expert's mode, between two batches."""
        with self._lock:
            return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with self._lock:
            before_dtype = self._placement.dtype  # of the parameter itself, which stays the same object
            super()._apply(fn, recurse)
            self._placement = Placement(self.expert)
            self._schema.any_dtype |= self._placement.dtype != before_dtype
            if isinstance(self.opt, Optimizer) and self.opt.state:
                self.opt.load_state_dict(self.opt.state_dict())  # which moves its tensors to where parameters are now
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but locks and pools: a copy gets its own pools, empty and served by no runtime."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", *_POOLS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = lock_of([*self._placement.parameters, *optimized(self.opt)])
        self._make_pools()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin: Self = type(self).__new__(type(self))
        memo[id(self)] = twin
        with self._lock:
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def _look_again(self) -> None:
        """Find the expert's parameters again, after some were replaced."""
        before, self._placement = self._placement.parameters, Placement(self.expert)
        if not self._updates_itself():
            check_updates(self.name, self.opt, self._placement.parameters, before)


def look_again(backend: BackendState, incompatible_keys: Any) -> None:
    """Called when a state was loaded into ``backend``, alone or as a part of another module."""
    backend._look_again()
