"""Computes the gradients of an update from the gradients of batches: checks, accumulates, reduces and clips them."""

from __future__ import annotations

import cmath
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pymoe.autograd.graph_nodes import add_gradients

logger = logging.getLogger("pymoe.runtime")


class NonFiniteGradientError(FloatingPointError):
    """Raised if the gradient of a parameter or the norm of all gradients is not finite. The expert was not updated."""


class GradientRule:
    """Computes the gradients of an update from the gradients that batches leave in ``.grad``.

    The arguments are options of :class:`~pymoe.runtime.ExpertBackend`. After an update, the caller must increase
    ``updates``, the number of updates so far. ``batches`` is the number of batches whose gradients are accumulated now.
    """

    def __init__(self, reduction: str, accumulate_steps: int, clip_grad_norm: float | None, nonfinite: str) -> None:
        check_one_of("gradient_reduction", reduction, ("sum", "mean"))
        check_one_of("nonfinite_gradients", nonfinite, ("raise", "skip", "step"))
        if isinstance(accumulate_steps, bool) or not isinstance(accumulate_steps, int) or accumulate_steps < 1:
            raise ValueError(f"ExpertBackend: accumulate_steps must be a positive integer, got {accumulate_steps!r}")
        if clip_grad_norm is not None and not (0 < clip_grad_norm < math.inf):
            raise ValueError(f"ExpertBackend: clip_grad_norm must be a positive number or None, got {clip_grad_norm!r}")
        self.reduction = reduction
        self.accumulate_steps = accumulate_steps
        self.clip_grad_norm = clip_grad_norm
        self.nonfinite = nonfinite
        self.updates = 0
        self.skipped = 0
        self.forget()

    @property
    def last_update(self) -> int:
        """Return the number of the update with the gradients of the last batch.

        While gradients are being accumulated, this is the number of the next update, even if those of the last batch
        were dropped because they were not finite.
        """
        return self.updates + (1 if self.batches else 0)

    def forget(self) -> None:
        """Drop the accumulated gradients."""
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._rows = 0
        self.batches = 0

    def prepare(self, parameters: Sequence[nn.Parameter], rows: int) -> bool:
        """Take the gradients of a batch from ``.grad`` of the parameters; return whether to make an update now.

        The gradients are accumulated. Once those of ``accumulate_steps`` batches are complete, they are reduced and
        clipped, the results are stored in ``.grad``, and True is returned. No gradient is changed in place, because it
        may share memory with a tensor of a client.

        If a gradient of the batch is not finite, the batch is not accumulated. If all are finite, but the norm that is
        computed for ``clip_grad_norm`` is not, all accumulated gradients are dropped. In both cases, return False with
        ``nonfinite_gradients="skip"``. With ``"step"``, nothing is checked.

        Raises:
            NonFiniteGradientError: gradients are not finite, and ``nonfinite_gradients`` is ``"raise"``.
        """
        graded = [parameter for parameter in parameters if parameter.grad is not None]
        grads = [parameter.grad for parameter in graded if parameter.grad is not None]
        if self.nonfinite != "step" and not all_finite(grads):
            return self._refuse("the gradient of a parameter")
        if self.accumulate_steps > 1:
            sums = self._sums | {
                parameter: add_gradients(self._sums[parameter], grad) if parameter in self._sums else grad
                for parameter, grad in zip(graded, grads, strict=True)
            }
            self._sums, self._rows, self.batches = sums, self._rows + rows, self.batches + 1
            if self.batches < self.accumulate_steps:
                return False
            graded, grads, rows = list(sums), list(sums.values()), self._rows
            self.forget()
        elif self.reduction == "sum" and self.clip_grad_norm is None:
            return True
        scale: float | Tensor = 1 / rows if self.reduction == "mean" else 1.0
        if self.clip_grad_norm is not None and grads:
            norm = nn.utils.get_total_norm([_values(grad) for grad in grads]) * scale
            if self.nonfinite != "step" and not norm.isfinite():
                return self._refuse("the norm of all gradients", self.accumulate_steps)
            scale = scale * (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter, grad in zip(graded, grads, strict=True):
            parameter.grad = _scaled(grad, scale)
        return True

    def _refuse(self, what: str, batches: int = 1) -> bool:
        lost = "the batch" if batches == 1 else f"{batches} batches, whose gradients were accumulated,"
        if self.nonfinite == "raise":
            raise NonFiniteGradientError(
                f"{what} is not finite: {lost} made no update (nonfinite_gradients='raise'; 'skip' leaves out such "
                f"updates without an error)"
            )
        self.skipped += 1
        logger.warning("%s is not finite: %s made no update (%d so far)", what, lost, self.skipped)
        return False


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all elements of all tensors are finite.

    Check the sums of the tensors first, which takes a tenth of the time: a sum that includes NaN or infinity is never
    finite. Check every element only if a sum is not finite, because sums of finite values may overflow, too.
    """
    sums = [tensor.detach().sum() for tensor in tensors]
    if any(total.device.type != "cpu" for total in sums):  # add them on one device, to wait for it only once
        device = next(total.device for total in sums if total.device.type != "cpu")
        sums = [torch.stack([total.abs().to(device, torch.float64) for total in sums]).sum()]
    if all(cmath.isfinite(total.item()) for total in sums):
        return True
    return all(bool(_values(tensor).isfinite().all()) for tensor in tensors)


def _values(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _scaled(grad: Tensor, scale: float | Tensor) -> Tensor:
    if isinstance(scale, Tensor):
        return grad * scale.to(grad.device, grad.dtype.to_real() if grad.is_complex() else grad.dtype)
    return grad if scale == 1.0 else grad * scale


def check_one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"ExpertBackend: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
