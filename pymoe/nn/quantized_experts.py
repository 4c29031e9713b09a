"""Experts with weights in 8 or 4 bits, for inference."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pymoe.nn.experts import Experts
from pymoe.nn.options import Backend, check_backend, check_networks, check_size, operators
from pymoe.reference.expert_activation import is_gated
from pymoe.reference.quantized_weight import FORMATS, check_format, check_quantized, number_of, packed_shape
from pymoe.reference.types import ActivationKind, QuantizedWeight, WeightFormat

_NO_TENSOR = (
    "QuantizedLinear: its weights are packed and cannot be indexed or transposed; a model of transformers runs them "
    "with experts_implementation='pymoe' alone"
)


class QuantizedLinear(nn.Module):
    """E linear layers with weights in 8 or 4 bits over rows that are sorted by expert; see
    :func:`pymoe.ops.quantized_linear`.

    The bytes are a buffer of integers, which ``module.to(dtype)`` leaves as they are; scales and minima are among them.
    A fresh layer computes zeros: its bytes come from :meth:`from_weight`, :meth:`from_quantized` or a state dict.

    Args:
        input_features: H.
        output_features: N.
        num_experts: E.
        bits: 8 or 4.
        format: ``"int"`` or ``"mxfp"``, as for :func:`pymoe.ops.quantize_weight`.
        backend: ``"native"`` for :mod:`pymoe.ops`, ``"reference"`` for :mod:`pymoe.reference`.
        device: of the bytes.

    Attributes:
        packed: (E, ceil(N / 64), bytes) uint8.

    ``state_dict`` keys: ``packed``, and ``sizes``, (3,) int64: bits (14 for ``"mxfp"``), N and H. Loading those of
    another format or of other sizes raises :class:`RuntimeError`; a state without ``sizes`` is compared by the shape of
    ``packed`` alone.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range.
    """

    packed: Tensor

    def __init__(
        self,
        input_features: int,
        output_features: int,
        num_experts: int,
        *,
        bits: int = 8,
        format: WeightFormat = "int",
        backend: Backend = "native",
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        check_size("QuantizedLinear", "input_features", input_features)
        check_size("QuantizedLinear", "output_features", output_features)
        check_size("QuantizedLinear", "num_experts", num_experts)
        check_format("QuantizedLinear", bits, format)
        check_backend("QuantizedLinear", backend)
        self.input_features = input_features
        self.output_features = output_features
        self.num_experts = num_experts
        self.bits = bits
        self.format: WeightFormat = format
        self.backend = backend
        shape = packed_shape(FORMATS[format, bits], output_features, input_features, num_experts)
        self.register_buffer("packed", torch.zeros(shape, dtype=torch.uint8, device=device))

    @classmethod
    def from_weight(
        cls, weight: Tensor, bits: int, backend: Backend = "native", format: WeightFormat = "int"
    ) -> QuantizedLinear:
        """Return a layer with ``weight``, (E, N, H) of any floating dtype and strides, rounded to ``bits``."""
        return cls.from_quantized(operators(backend).quantize_weight(weight, bits, format), backend)

    @classmethod
    def from_quantized(cls, weight: QuantizedWeight, backend: Backend = "native") -> QuantizedLinear:
        """Return a layer with ``weight``, from :func:`pymoe.ops.quantize_weight` or :func:`pymoe.ops.pack_weight`."""
        check_quantized("QuantizedLinear.from_quantized", "weight", weight)
        packed, bits, outputs, inputs, format = QuantizedWeight(*weight)
        experts = packed.shape[0]
        layer = cls(inputs, outputs, experts, bits=bits, format=format, backend=backend, device="meta")
        layer.packed = packed
        return layer

    @property
    def weight(self) -> QuantizedWeight:
        """The weights, as :mod:`pymoe.ops` takes them."""
        return QuantizedWeight(self.packed, self.bits, self.output_features, self.input_features, self.format)

    def forward(self, rows_SH: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply to every row the linear layer of its expert.

        Args:
            rows_SH: (S, H) float32, bfloat16 or float16, from :func:`pymoe.ops.dispatch`.
            offsets: (E + 1,) int32: rows ``offsets[e]`` to ``offsets[e + 1]`` belong to expert e.
            bias: (E, N) of any floating dtype, or None.

        Returns:
            (S, N), the dtype of ``rows_SH`` (the autocast dtype inside ``torch.autocast``).
        """
        if bias is not None:
            bias = bias.to(rows_SH.dtype)
        rows: Tensor = operators(self.backend).quantized_linear(rows_SH, self.weight, offsets, bias)
        return rows

    @property
    def sizes(self) -> Tensor:
        """(3,) int64 on the CPU: bits (14 for "mxfp"), N and H, which a state dict holds next to the bytes."""
        return torch.tensor([number_of(self.weight), self.output_features, self.input_features], device="cpu")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "sizes"] = self.sizes

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Weights are filled up to whole tiles, so those of other sizes may have as many bytes.
        key = prefix + "sizes"
        saved = state_dict.get(key)  # states of before did not have it
        if saved is not None and (seen := saved.tolist()) != (own := self.sizes.tolist()):
            error_msgs.append(
                f"size mismatch for {prefix}packed: expected bits, output and input features {own}, got {seen} in the "
                f"state dict."
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in unexpected_keys:
            unexpected_keys.remove(key)

    def __getitem__(self, expert: object) -> NoReturn:
        """Refuse: there is no tensor of one expert's weights in here."""
        raise TypeError(_NO_TENSOR)

    def transpose(self, dim0: int, dim1: int) -> NoReturn:
        """Refuse, as for an index: other implementations of transformers transpose the weights of all experts."""
        raise TypeError(_NO_TENSOR)

    def extra_repr(self) -> str:
        return (
            f"input_features={self.input_features}, output_features={self.output_features}, "
            f"num_experts={self.num_experts}, {_format_repr(self)}"
        )


def _format_repr(layer: QuantizedLinear | QuantizedExperts) -> str:
    return f"bits={layer.bits}" + ("" if layer.format == "int" else f", format={layer.format!r}")


class QuantizedExperts(nn.Module):
    """E feed-forward networks with weights in 8 or 4 bits over rows that are sorted by expert, for inference.

    It takes the place of :class:`Experts`, also inside :class:`MoE`; :func:`quantize_experts` makes it of one. There
    are no parameters and no backward: rows that require a gradient are refused while gradients are recorded.

    Args:
        hidden_size: H.
        ffn_size: F.
        num_experts: E.
        bits: 8 or 4.
        format: ``"int"`` or ``"mxfp"``, as for :func:`pymoe.ops.quantize_weight`.
        activation: a kind of :func:`pymoe.ops.expert_activation`.
        bias: add ``b_in`` and ``b_out``.
        backend: ``"native"`` for :mod:`pymoe.ops`, ``"reference"`` for :mod:`pymoe.reference`.
        device: of the buffers.
        dtype: of the biases.

    ``state_dict`` keys: ``packed`` and ``sizes`` of ``w_in`` and ``w_out`` (:class:`QuantizedLinear`), and ``b_in`` and
    ``b_out`` if ``bias``.

    Attributes:
        w_in: :class:`QuantizedLinear` of (E, 2F, H) weights for gated activations, else of (E, F, H), in the layout of
            :class:`Experts`.
        w_out: :class:`QuantizedLinear` of (E, H, F) weights.
        b_in: (E, 2F) or (E, F), or ``None``.
        b_out: (E, H), or ``None``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range.
    """

    b_in: Tensor | None
    b_out: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        *,
        bits: int = 8,
        format: WeightFormat = "int",
        activation: ActivationKind = "swiglu",
        bias: bool = False,
        backend: Backend = "native",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_networks("QuantizedExperts", hidden_size, ffn_size, activation, bias, backend)
        check_size("QuantizedExperts", "num_experts", num_experts)
        check_format("QuantizedExperts", bits, format)
        self.hidden_size = hidden_size
        self.ffn_size = ffn_size
        self.num_experts = num_experts
        self.bits = bits
        self.format: WeightFormat = format
        self.activation = activation
        self.backend = backend
        inner = 2 * ffn_size if is_gated(activation) else ffn_size
        place: dict[str, Any] = {"bits": bits, "format": format, "backend": backend, "device": device}
        self.w_in = QuantizedLinear(hidden_size, inner, num_experts, **place)
        self.w_out = QuantizedLinear(ffn_size, hidden_size, num_experts, **place)
        for name, size in (("b_in", inner), ("b_out", hidden_size)):
            self.register_buffer(name, torch.zeros(num_experts, size, device=device, dtype=dtype) if bias else None)

    @classmethod
    def from_experts(cls, experts: Experts, bits: int, format: WeightFormat = "int") -> QuantizedExperts:
        """Return the networks of ``experts`` with their weights rounded to ``bits``."""
        quantized = cls(
            experts.hidden_size,
            experts.ffn_size,
            experts.num_experts,
            bits=bits,
            format=format,
            activation=experts.activation,
            bias=experts.b_in is not None,
            backend=experts.backend,
            device="meta",
        )
        quantized.w_in = QuantizedLinear.from_weight(experts.w_in, bits, experts.backend, format)
        quantized.w_out = QuantizedLinear.from_weight(experts.w_out, bits, experts.backend, format)
        if experts.b_in is not None and experts.b_out is not None:
            quantized.b_in, quantized.b_out = experts.b_in.detach(), experts.b_out.detach()
        return quantized.train(experts.training)

    def forward(self, rows_SH: Tensor, offsets: Tensor) -> Tensor:
        """Apply to every row its expert.

        Args:
            rows_SH: (S, H) float32, bfloat16 or float16, from :func:`pymoe.ops.dispatch`.
            offsets: (E + 1,) int32: rows ``offsets[e]`` to ``offsets[e + 1]`` belong to expert e.

        Returns:
            (S, H), the dtype of ``rows_SH`` (the autocast dtype inside ``torch.autocast``); zero past
            ``offsets[-1]``.

        Raises:
            ValueError: ``rows_SH`` requires a gradient while gradients are recorded.
        """
        inner = self.w_in(rows_SH, offsets, self.b_in)
        inner = operators(self.backend).expert_activation(inner, self.activation)
        rows: Tensor = self.w_out(inner, offsets, self.b_out)
        return rows

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_size={self.ffn_size}, num_experts={self.num_experts}, "
            f"{_format_repr(self)}, activation={self.activation!r}, bias={self.b_in is not None}"
        )
