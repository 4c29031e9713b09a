"""The experts of a layer: routed and shared feed-forward networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pymoe._common.names import explain_arguments
from pymoe._common.types import ActivationKind, is_gated
from pymoe.nn import options
from pymoe.nn.options import (
    OTHER_NAMES,
    Backend,
    check_dtype,
    check_flag,
    check_networks,
    check_parameter,
    check_size,
    linear,
    operators,
)


class _FeedForward(nn.Module):
    """The parameters of feed-forward networks: two linear layers with an activation between them.

    Every parameter has the leading sizes ``stack``: ``(E,)`` for E networks, ``()`` for one.
    """

    w_in: nn.Parameter
    w_out: nn.Parameter
    w_gate: nn.Parameter
    b_in: nn.Parameter | None
    b_out: nn.Parameter | None

    def __init__(
        self,
        layer: str,
        hidden_size: int,
        ffn_size: int,
        stack: tuple[int, ...],
        activation: ActivationKind,
        bias: bool,
        backend: Backend,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        gate: bool = False,
    ) -> None:
        super().__init__()
        options.check_network_options(layer, hidden_size, ffn_size, activation, bias, backend)
        check_dtype(layer, dtype)
        self.hidden_size = hidden_size
        self.ffn_size = ffn_size
        self.stack = stack
        self.activation = activation
        self.backend = backend
        self.gate = gate
        for name, size in self.sizes().items():
            empty = torch.empty(*stack, *size, device=device, dtype=dtype) if bias or name[0] == "w" else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        self.reset_parameters()

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name, without the leading sizes ``stack``.

        The shapes of the biases are always included, the shape of ``w_gate`` only if the networks have a gate.
        """
        inner = (2 if is_gated(self.activation) else 1) * self.ffn_size
        sizes: dict[str, tuple[int, ...]] = {
            "w_in": (inner, self.hidden_size),
            "w_out": (self.hidden_size, self.ffn_size),
            "b_in": (inner,),
            "b_out": (self.hidden_size,),
        }
        return sizes | {"w_gate": (1, self.hidden_size)} if self.gate else sizes

    def reset_parameters(self) -> None:
        """Draw weights and biases uniformly from ±1/sqrt(input features of the linear layer), as ``nn.Linear`` does."""
        pairs = [(self.w_in, self.b_in), (self.w_out, self.b_out)]
        for weight, bias in [*pairs, (self.w_gate, None)] if self.gate else pairs:
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def extra_repr(self) -> str:
        experts = "".join(f", num_experts={count}" for count in self.stack)
        return (
            f"hidden_size={self.hidden_size}, ffn_size={self.ffn_size}{experts}, activation={self.activation!r}, "
            f"bias={self.b_in is not None}{', gate=True' if self.gate else ''}"
        )


class Experts(_FeedForward):
    """E feed-forward networks over rows that are sorted by expert.

    Each row of expert e becomes ``act(row @ w_in[e].T + b_in[e]) @ w_out[e].T + b_out[e]``, where ``act`` is an
    activation of :func:`pymoe.ops.expert_activation`. Parameters are stacked along a first dimension E, ready for
    sharding by expert, and each expert is initialised as two ``nn.Linear`` would be.

    Args:
        hidden_size: H, the size of a row.
        ffn_size: F, the size of a row between the two products.
        num_experts: E, the number of experts.
        activation: a kind of :func:`pymoe.ops.expert_activation`.
        bias: add ``b_in`` and ``b_out``.
        backend: ``"native"`` for :mod:`pymoe.ops`, ``"reference"`` for :mod:`pymoe.reference`.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Attributes:
        w_in: (E, 2F, H), gate above up, for gated activations; else (E, F, H).
        w_out: (E, H, F).
        b_in: (E, 2F) or (E, F), or ``None``.
        b_out: (E, H), or ``None``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range.

    Example:
        >>> experts = pymoe.nn.Experts(hidden_size=16, ffn_size=32, num_experts=4)
        >>> experts.w_in.shape, experts.w_out.shape  # (E, 2F, H), with the gate's rows first, and (E, H, F)
        (torch.Size([4, 64, 16]), torch.Size([4, 16, 32]))
        >>> offsets = torch.tensor([0, 2, 2, 3, 5], dtype=torch.int32)  # expert 0 gets rows 0 and 1, expert 2 row 2
        >>> experts(torch.randn(5, 16), offsets).shape
        torch.Size([5, 16])
    """

    @explain_arguments(**OTHER_NAMES)
    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        *,
        activation: ActivationKind = "swiglu",
        bias: bool = False,
        backend: Backend = "native",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_size("Experts", "num_experts", num_experts)
        super().__init__("Experts", hidden_size, ffn_size, (num_experts,), activation, bias, backend, device, dtype)
        self.num_experts = num_experts

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        errors: list[str] = args[-1]
        super()._load_from_state_dict(state_dict, prefix, *args)  # a hook of FSDP re-shards parameters in this call
        given = state_dict.get(f"{prefix}w_in")
        # Only a DTensor has `full_tensor` (importing the class is slow). A plain parameter cannot be loaded from one.
        if hasattr(given, "full_tensor") and not hasattr(self.w_in, "full_tensor"):
            errors.append(
                f"Experts {prefix.removesuffix('.')!r}: the state is of a model whose experts are spread over ranks, "
                f"and has only the experts of one rank: gather it on all ranks by "
                f"torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
                f"StateDictOptions(full_state_dict=True))"
            )
        if f"{prefix}w_in.packed" in state_dict:
            errors.append(
                f"Experts {prefix.removesuffix('.')!r}: the state holds weights in few bits, this layer has others: "
                f"call quantize_experts(model, bits=...) first, with the bits of the state, or leave its keys "
                f"{prefix}* out"
            )

    def forward(self, rows_SH: Tensor, offsets: Tensor) -> Tensor:
        """Return, for every row, the output of its expert.

        Args:
            rows_SH: (S, H), from :func:`pymoe.ops.dispatch`.
            offsets: (E + 1,) int32: rows ``offsets[e]`` to ``offsets[e + 1]`` belong to expert e.

        Returns:
            (S, H), the dtype of ``rows_SH`` (the autocast dtype inside ``torch.autocast``); zero past
            ``offsets[-1]``.
        """
        check_networks("experts", self, self.stack, rows_SH)
        ops = operators(self.backend)
        inner = ops.grouped_linear(rows_SH, self.w_in, offsets, self.b_in)
        inner = ops.expert_activation(inner, self.activation)
        rows: Tensor = ops.grouped_linear(inner, self.w_out, offsets, self.b_out)
        return rows


class SharedExperts(_FeedForward):
    """The experts that every token passes through (DeepSeekMoE, arXiv 2401.06066).

    The sum of the outputs of n shared experts of size F equals the output of one feed-forward network of size n * F. So
    this module is one network for all shared experts: ``act(x @ w_in.T + b_in) @ w_out.T + b_out``. With a gate, each
    token's output is multiplied by one number, ``sigmoid(x @ w_gate.T)`` (Qwen2-MoE, arXiv 2407.10671); sigmoid and
    product are computed in float32, or float64.

    Args:
        hidden_size: H, the size of a row.
        ffn_size: F, the size of all shared experts together.
        activation: a kind of :func:`pymoe.ops.expert_activation`.
        bias: add ``b_in`` and ``b_out``.
        gate: add ``w_gate``.
        backend: ``"native"`` for :mod:`pymoe.ops`, ``"reference"`` for :mod:`pymoe.reference`.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Attributes:
        w_in: (2F, H), gate above up, for gated activations; else (F, H).
        w_out: (H, F).
        b_in: (2F,) or (F,), or ``None``.
        b_out: (H,), or ``None``.
        w_gate: (1, H), initialised like the weight of ``nn.Linear``; only with ``gate``.
        row_invariant: if true, equal tokens get equal bits in every batch, as in :class:`Router`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range.

    Example:
        >>> shared = pymoe.nn.SharedExperts(hidden_size=16, ffn_size=32)
        >>> shared(torch.randn(5, 16)).shape
        torch.Size([5, 16])
    """

    @explain_arguments(**OTHER_NAMES)
    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: ActivationKind = "swiglu",
        bias: bool = False,
        gate: bool = False,
        backend: Backend = "native",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_flag("SharedExperts", "gate", gate)
        super().__init__("SharedExperts", hidden_size, ffn_size, (), activation, bias, backend, device, dtype, gate)
        self.row_invariant = False

    def forward(self, x_TH: Tensor) -> Tensor:
        """Return the output of the network for every token.

        Args:
            x_TH: (T, H).

        Returns:
            (T, H), the dtype of ``x_TH`` (the autocast dtype inside ``torch.autocast``).
        """
        check_networks("shared", self, self.stack, x_TH)
        inner = linear(x_TH, self.w_in, self.b_in, row_invariant=self.row_invariant)
        inner = operators(self.backend).expert_activation(inner, self.activation)
        y_TH = linear(inner, self.w_out, self.b_out, row_invariant=self.row_invariant)
        return self._gated(y_TH, x_TH) if self.gate else y_TH

    def _gated(self, y_TH: Tensor, x_TH: Tensor) -> Tensor:
        check_parameter("shared.w_gate", self.w_gate, (1, self.hidden_size), x_TH)
        logits_T1 = linear(x_TH, self.w_gate, row_invariant=self.row_invariant)
        # Not torch.sigmoid: its bits may depend on the index of a token in the batch. Those of gate_topk do not.
        weights_T1: Tensor = operators(self.backend).gate_topk(logits_T1, 1, score="sigmoid", renormalize=False).weights
        return (y_TH * weights_T1).to(y_TH.dtype)
