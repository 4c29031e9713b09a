"""Tensors that a layer keeps between steps: counters, and statistics of its last call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pymoe._torch_private import FakeTensor, temporarily_clear_interpreter_stack
from pymoe._transforms import in_torch_func
from pymoe.ops.function_calls import call


class LocalTensors(nn.Module):
    """Named tensors that follow the device of the module that contains them.

    They are deliberately not buffers. ``DistributedDataParallel`` would broadcast a buffer from rank 0 before every
    forward, which would overwrite the counts that other ranks gathered over their micro-batches; ``module.bfloat16()``
    would change its dtype if it is floating; and ``to_empty()`` would leave garbage in it. These tensors keep their
    dtype, move with their module, become zero when they leave the meta device, and are not in the ``state_dict``.
    """

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def zero_(self) -> None:
        """Set every tensor to zero."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def follow(self, device: torch.device) -> None:
        """Move the tensors to ``device``, the device of the module's input, unless they are there already.

        This is needed because ``load_state_dict(assign=True)`` moves parameters without a call of ``_apply``.
        """
        for name, tensor in self.tensors.items():
            if tensor.device != device:
                self.tensors[name] = _moved(tensor, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for name, tensor in self.tensors.items():
            self.tensors[name] = _moved(tensor, fn(torch.empty(0, device=tensor.device)).device)
        return self

    def extra_repr(self) -> str:
        return ", ".join(self.tensors)


class LastCall(LocalTensors):
    """The values of a layer's last call, by name.

    In an eager call, :meth:`keep` stores references to the call's own tensors, and :meth:`keep_pending` stores a
    function that computes the values when they are first read: neither copies nor computes anything during the call.
    The referenced tensors are never written to, since a backward pass may need them.

    A CUDA graph and code of :func:`torch.compile` run without Python, so they cannot store references. There the values
    are copied into the tensors that the constructor was given. After the first capture of a CUDA graph every call
    copies, because a replay writes only to these tensors, and a stored reference would hide what the replay wrote.
    """

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__(**tensors)
        self.held: dict[str, Tensor] = {}
        self.pending: Callable[[], dict[str, Tensor]] | None = None
        self.captured = False

    def __getitem__(self, name: str) -> Tensor:
        self.settle()
        return self.held.get(name, self.tensors[name])

    def keep(self, **values: Tensor) -> None:
        """Store ``values`` as those of the last call: one for every name, all on one device."""
        if self.pending is not None:
            self.pending = None
        if self._may_hold(*values.values()):
            self.held = {name: value.detach() if value.requires_grad else value for name, value in values.items()}
            return
        if self.held:  # assign only if needed: torch 2.11 cannot compile activation checkpoints that set attributes
            self.held = {}
        self.follow(next(iter(values.values())).device)
        with torch.no_grad():
            for name, value in values.items():
                self.tensors[name].copy_(value)

    def keep_pending(self, compute: Callable[[], dict[str, Tensor]], *inputs: Tensor) -> None:
        """Store ``compute``, which returns the values of the last call, and call it when the values are first read.

        Where values are copied (in compiled code, and from the first capture of a CUDA graph on), ``compute`` is called
        immediately.

        Args:
            compute: returns the values by name. It may run much later, and keeps ``inputs`` alive until then.
            inputs: the tensors of the call that ``compute`` reads.
        """
        if self._may_hold(*inputs):
            # Bypass Module.__setattr__: it would look for parameters and modules of these names in every call.
            vars(self).update(held={}, pending=compute)
        else:
            self.keep(**compute())

    def settle(self) -> None:
        """Compute the pending values, if any, and drop their inputs; if the computation raises, they stay pending."""
        compute = self.pending
        if compute is not None:
            # Leave torch.func's transforms: they would wrap the values, which are kept after the transforms end.
            outside = temporarily_clear_interpreter_stack() if in_torch_func() else nullcontext()
            with torch.no_grad(), outside:
                held = compute()
            # Store the values only if `compute` is still pending: meanwhile another thread may have stored the same
            # values, or the layer may have been called again.
            if self.pending is compute:
                self.held, self.pending = held, None

    def copies(self) -> dict[str, Tensor]:
        """Return a fresh copy of every value, by name, in the dtype of the constructor's tensor of the same name."""
        return {name: self[name].to(tensor.dtype, copy=True) for name, tensor in self.tensors.items()}

    def zero_(self) -> None:
        self.held = {}
        self.pending = None
        super().zero_()

    def _may_hold(self, *values: Tensor) -> bool:
        if torch.compiler.is_compiling():
            return False
        for value in values:
            if isinstance(value, FakeTensor):
                return False
            if value.is_cuda and not self.captured:
                self.captured = torch.cuda.is_current_stream_capturing()
        return not self.captured

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.settle()
        if self.held:
            with torch.inference_mode(False):  # later calls write to the copies, maybe outside of inference mode
                self.tensors.update(self.copies())
            self.held = {}
        return super()._apply(fn, recurse)

    def __getstate__(self) -> Any:  # copies and pickles must not contain the logits of a call
        self.settle()
        return super().__getstate__()  # type: ignore[no-untyped-call]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # later calls write to the tensor, maybe outside of inference mode
        if tensor.is_meta and device.type != "meta":
            return torch.zeros_like(tensor, device=device)
        return tensor.to(device)


class _CountOnBackward(torch.autograd.Function):
    @staticmethod
    def forward(weights: Tensor, load: Tensor, total: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, load, total = inputs
        ctx.save_for_backward(load)
        # Not save_for_backward: it would raise if another micro-batch's backward has changed `total` meanwhile.
        ctx.total = total

    @staticmethod
    def tangent(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (load,) = ctx.saved_tensors
        ctx.total.add_(load)
        return grad, None, None


def count_on_backward(weights: Tensor, load: Tensor, total: Tensor) -> Tensor:
    """Return the values of ``weights``; the backward of the returned tensor adds ``load`` to ``total``.

    A forward may run any number of times in one training step: activation checkpointing recomputes it during the
    backward, and a pipeline or a remote expert may run it without gradients first. But the backward usually runs once.
    So a count in the backward is the load of the tokens on which the model was trained, and nothing has to detect a
    recomputation. Moreover, :func:`torch.compile` can compile an in-place addition in a backward without a graph break.

    Each backward counts: if a graph is kept (``retain_graph=True``, ``create_graph=True``) and run backward twice, its
    tokens count twice.

    Args:
        weights: (T, K), the weights of a gate.
        load: (E,) int32.
        total: (E,) int64, changed in place.

    Returns:
        (T, K), the values of ``weights``.
    """
    passed: Tensor = call(_CountOnBackward, weights, load, total)
    return passed
