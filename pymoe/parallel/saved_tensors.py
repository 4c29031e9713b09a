"""Calls the caller's saved-tensor hooks in the order of the calls and on the caller's thread.

Hooks may depend on that order: ``torch.utils.checkpoint`` identifies tensors by the order in which they were saved, in
forward and when it runs its block again. Calls that run at the same time save in any order. Each call therefore records
what it saves (:class:`SavedTensors`). When all calls have ended, the caller's hooks pack everything, call by call, on
the caller's thread. Before the calls' backward passes begin, the backward pass of the map's node has the caller's hooks
unpack everything again, in the same order: a checkpoint around a map runs its block once more, not once per call.

This has two consequences. The saved tensors are in memory until all calls have ended, and again while their backward
passes run. And a tensor that is modified in place after it was saved and before it is packed is lost: a gradient that
needs it raises autograd's error, as without hooks.

A call may save tensors under its own hooks (for a checkpoint within the call): those are called as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pymoe.autograd.graph_nodes import version_of

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: it was saved in a "
    "parallel call under saved-tensor hooks, which are called when all calls have ended, and was modified before that. "
    "Hint: clone the tensor before the in-place operation"
)


class _Saved:
    """The object that an autograd graph keeps for a tensor that a call has saved."""

    __slots__ = ("__weakref__", "_packed", "_unpack", "_version", "edited", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.edited = False
        self._version = version_of(tensor)
        self._packed: Any = None
        self._unpack: Callable[[Any], torch.Tensor] | None = None  # None: not packed yet

    def pack(self, hooks: Hooks) -> None:
        tensor = self.tensor
        assert tensor is not None
        self.edited = version_of(tensor) != self._version
        self._packed, self._unpack = hooks[0](tensor), hooks[1]
        self.tensor = None

    def get(self) -> torch.Tensor:
        tensor = self.tensor
        if tensor is not None and (self._unpack is not None or version_of(tensor) == self._version):
            return tensor
        if tensor is not None or self.edited or self._unpack is None:
            raise RuntimeError(_EDITED)
        return self._unpack(self._packed)

    def fetch(self) -> None:
        if self._unpack is not None and not self.edited:
            self.tensor = self._unpack(self._packed)

    def release(self) -> None:
        if self._unpack is not None:
            self.tensor = None


class SavedTensors:
    """The tensors that a call saves, if its caller has hooks on saved tensors."""

    __slots__ = ("_handed_over", "_saved", "around", "hooks")

    def __init__(self, around: Hooks) -> None:
        self.around = around
        self.hooks: Hooks = (self._pack, _Saved.get)  # active during the call
        self._saved: list[_Saved] = []
        self._handed_over: list[weakref.ref[_Saved]] | None = None

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        if self._handed_over is None:
            self._saved.append(saved)
        else:  # saved by a thread that outlives the call: the call's other tensors are packed already
            saved.pack(self.around)
        return saved

    def hand_over(self) -> None:
        """Pack all saved tensors with the caller's hooks, even if the graph has dropped them: hooks may count them."""
        recorded, self._saved, self._handed_over = self._saved, [], []
        for saved in recorded:
            saved.pack(self.around)
        self._handed_over = [weakref.ref(saved) for saved in recorded]

    def fetch(self) -> None:
        """Unpack the tensors that the graph still needs, with the caller's hooks; keep them until :meth:`release`."""
        for saved in self._alive():
            saved.fetch()

    def release(self) -> None:
        for saved in self._alive():
            saved.release()

    def _alive(self) -> list[_Saved]:
        return [saved for reference in self._handed_over or () if (saved := reference()) is not None]


def hand_over_all(saved: Sequence[SavedTensors]) -> None:
    """Pack all tensors that the parallel calls have saved, call by call, with the hooks of the caller.

    Call it on the caller's thread when all calls have ended.
    """
    with torch.no_grad():  # autograd, too, turns gradients off while it calls hooks
        for of_call in saved:
            of_call.hand_over()


def depend_on_order(hooks: Hooks | None) -> bool:
    """Return whether ``hooks`` are those of ``torch.utils.checkpoint``, or record a call's tensors for such hooks."""
    while hooks is not None and isinstance(of_call := getattr(hooks[0], "__self__", None), SavedTensors):
        hooks = of_call.around
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
