"""Auxiliary losses of a router. Their gradients are injected in the backward pass; the model's loss omits them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pymoe._common import checks
from pymoe._common.types import SCORES, Gate, RouterLosses, Score
from pymoe.nn.options import Backend, check_backend, check_model, check_number, operators
from pymoe.ops.function_calls import call
from pymoe.ops.router_losses import router_losses_backward

_NUMBERS = (float, int)


class _InjectLoss(torch.autograd.Function):
    @staticmethod
    def forward(carrier: Tensor, loss: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def tangent(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def inject_loss(carrier: Tensor, loss: Tensor) -> Tensor:
    """Return the values of ``carrier``; the backward of the returned tensor gives ``loss`` the gradient 1.

    ``objective(inject_loss(carrier, loss)).backward()`` computes the gradients of ``objective(carrier) + loss``: the
    loss need not be carried to the end of the model, and the gradient of the returned tensor does not scale it. This
    holds under activation checkpointing, since the backward runs once, however often a forward is recomputed. The idea
    comes from Megatron-LM's ``MoEAuxLossAutoScaler``.

    Args:
        carrier: any tensor between the inputs and the objective.
        loss: a scalar.

    Returns:
        The values of ``carrier``.
    """
    passed: Tensor = call(_InjectLoss, carrier, loss)
    return passed


class Injected(NamedTuple):
    """The factors of the losses that a forward injects, for :meth:`gradient`."""

    score: Score
    balancing: Tensor
    """Scalar, the dtype of the logits: the factor of the balancing loss."""
    z: Tensor
    """Scalar, the dtype of the logits: the factor of the z loss."""

    def gradient(self, logits_TE: Tensor, load: Tensor) -> Tensor:
        """Return the gradient (T, E) of the injected losses with respect to ``logits_TE``.

        It has the same bits as the gradient that autograd computes with :func:`inject_loss`.

        Args:
            logits_TE: (T, E).
            load: (E,), the number of choices of each expert.
        """
        return router_losses_backward(self.balancing, self.z, logits_TE, load, self.score)


class AuxiliaryLosses(nn.Module):
    """The balancing loss and the z loss of a router, injected in training by the backward of the gate's weights.

    Args:
        aux_loss_coef: factor of the balancing loss (Switch Transformer, arXiv 2101.03961), at least 0.
        z_loss_coef: factor of the z loss (ST-MoE, arXiv 2202.08906), at least 0.
        score: ``"softmax"`` or ``"sigmoid"``, the same as the router's.
        backend: ``"native"`` or ``"reference"``.
    """

    def __init__(
        self,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        *,
        score: Score = "softmax",
        backend: Backend = "native",
    ) -> None:
        super().__init__()
        check_number("AuxiliaryLosses", "aux_loss_coef", aux_loss_coef, minimum=0)
        check_number("AuxiliaryLosses", "z_loss_coef", z_loss_coef, minimum=0)
        checks.choice("AuxiliaryLosses", "score", score, SCORES)
        check_backend("AuxiliaryLosses", backend)
        self.aux_loss_coef = aux_loss_coef
        self.z_loss_coef = z_loss_coef
        self.score = score
        self.backend = backend
        self.scale: float | Tensor = 1.0
        """Factor of the injected losses; see :func:`set_aux_loss_scale`."""

    def injects(self) -> bool:
        """Return whether a forward injects a loss: in training, if a coefficient is greater than 0."""
        return self.training and (self.aux_loss_coef > 0 or self.z_loss_coef > 0)

    def forward(
        self, gate: Gate, logits_TE: Tensor, *, load: Tensor | None = None, share: float | Tensor = 1.0
    ) -> tuple[Tensor, RouterLosses]:
        """Return the weights (T, K) of the gate, and the detached losses.

        If :meth:`injects` is true, the backward of the returned weights injects the losses.

        Args:
            gate: the router's choice for the logits.
            logits_TE: (T, E).
            load: (E,), used in place of ``gate.load``, for example the load summed over all ranks.
            share: an additional factor of the injected losses; :attr:`scale` applies, too.
        """
        injects = self.injects()
        losses: RouterLosses = operators(self.backend).router_losses(
            logits_TE if injects else logits_TE.detach(), gate.load if load is None else load, score=self.score
        )
        weights_TK = gate.weights
        if injects:
            weights_TK = inject_loss(weights_TK, self._weighted(losses, self.scale * share))
            losses = RouterLosses(losses.load_balancing.detach(), losses.z.detach())
        return weights_TK, losses

    def injected(self, logits_TE: Tensor) -> Injected:
        """Return the factors with which :meth:`forward` injects the losses, before a gate has chosen experts.

        Args:
            logits_TE: (T, E); the factors have its dtype and device.
        """
        scale, zero = self.scale, logits_TE.new_zeros(())
        one = scale.to(logits_TE.dtype) if isinstance(scale, Tensor) else logits_TE.new_full((), scale)
        factors = [coefficient * one if coefficient > 0 else zero for coefficient in self._coefficients()]
        return Injected(self.score, *factors)

    def injects_by_kernels(self) -> bool:
        """Return whether :meth:`Injected.gradient` computes the gradient of the losses that :meth:`forward` injects.

        It does not for the reference backend, nor if a user has set a coefficient to a tensor, or :attr:`scale` to a
        tensor that requires a gradient or is not a scalar. In these cases, use only :meth:`forward`.
        """
        scale = self.scale
        return (
            self.backend == "native"
            and self.score in SCORES
            and type(self.aux_loss_coef) in _NUMBERS
            and type(self.z_loss_coef) in _NUMBERS
            and (
                type(scale) in _NUMBERS or (isinstance(scale, Tensor) and scale.dim() == 0 and not scale.requires_grad)
            )
        )

    def _coefficients(self) -> tuple[float, float]:
        return self.aux_loss_coef, self.z_loss_coef

    def _weighted(self, losses: RouterLosses, factor: float | Tensor) -> Tensor:
        """Return ``factor`` times the sum of the losses times their coefficients.

        At least one coefficient must be greater than 0. Coefficients of 0 and a factor of 1 are skipped, because every
        operation costs one or two launches on a GPU.
        """
        pairs = zip(self._coefficients(), losses, strict=True)
        terms = [coefficient * loss for coefficient, loss in pairs if coefficient > 0]
        total = sum(terms[1:], terms[0])
        return total if isinstance(factor, float) and factor == 1 else factor * total

    def extra_repr(self) -> str:
        return f"aux_loss_coef={self.aux_loss_coef}, z_loss_coef={self.z_loss_coef}"


def set_aux_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Set the factor of the auxiliary losses that the layers of ``model`` inject from their next forward on.

    A factor of the model's own loss does not scale an injected loss. So if you scale the model's own loss before its
    backward, pass the same factor here before the forward:

    - gradient accumulation over n micro-batches, with ``(loss / n).backward()``: ``set_aux_loss_scale(model, 1 / n)``;
    - ``torch.amp.GradScaler``: ``set_aux_loss_scale(model, scaler.get_scale())`` in every step. A scalar tensor, for
      example ``scaler.scale(torch.ones((), device=device))``, saves the host synchronisation.

    Args:
        model: any module that contains :class:`pymoe.nn.MoE` layers; others are ignored.
        scale: a number, or a scalar tensor on the layers' device.

    Raises:
        TypeError: ``model`` is not a module, or ``scale`` is neither a number nor a tensor.
        ValueError: ``scale`` is not finite, or a tensor that is not floating or has several elements.

    Example:
        >>> moe = pymoe.nn.MoE(16, 32, num_experts=4, top_k=2, aux_loss_coef=0.01)
        >>> pymoe.nn.set_aux_loss_scale(moe, 1 / 4)  # gradients of 4 micro-batches are accumulated
        >>> for _ in range(4):
        ...     (moe(torch.randn(8, 16)).square().mean() / 4).backward()
        >>> moe.router.weight.grad.shape
        torch.Size([4, 16])
    """
    check_model("set_aux_loss_scale", model)
    if not isinstance(scale, Tensor):
        check_number("set_aux_loss_scale", "scale", scale)
    elif scale.numel() != 1 or not scale.is_floating_point():
        raise ValueError(f"set_aux_loss_scale: scale must be a floating scalar, got {tuple(scale.shape)} {scale.dtype}")
    value = scale.detach().reshape(()) if isinstance(scale, Tensor) else float(scale)
    for module in model.modules():
        if isinstance(module, AuxiliaryLosses):
            module.scale = value
