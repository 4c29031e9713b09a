"""Experts with weights in 8 or 4 bits, and quantize_experts, which rounds the experts of a model in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pymoe._common.contracts import check_format, check_quantized, check_rounded
from pymoe._common.names import explain_arguments
from pymoe._common.types import (
    FORMATS,
    ActivationKind,
    Prefetch,
    QuantizedWeight,
    WeightFormat,
    cast_operands,
    is_gated,
    number_of,
    packed_shape,
)
from pymoe.nn.experts import Experts
from pymoe.nn.options import Backend, check_backend, check_model, check_network_options, check_size, operators
from pymoe.nn.plain_calls import attached_to, is_of_its_source

_NO_TENSOR = (
    "QuantizedLinear: its weights are packed and cannot be indexed or transposed; a model of transformers runs them "
    "with experts_implementation='pymoe' alone"
)


class QuantizedLinear(nn.Module):
    """E linear layers with weights in 8 or 4 bits over rows that are sorted by expert; see
    :func:`pymoe.ops.quantized_linear`.

    The packed weights, with their scales and minima, are a buffer of bytes, which ``module.to(dtype)`` does not change.
    A new layer computes zeros until it gets its bytes: from :meth:`from_weight`, :meth:`from_quantized`, or a state
    dict.

    Args:
        input_features: H, the number of inputs.
        output_features: N, the number of outputs.
        num_experts: E, the number of experts.
        bits: 8 or 4; for ``"affine"`` also 2.
        format: ``"int"``, ``"mxfp"``, ``"fp"``, ``"affine"`` or ``"symmetric"``, as for
            :func:`pymoe.ops.quantize_weight` and :func:`pymoe.ops.pack_weight`.
        backend: ``"native"`` for :mod:`pymoe.ops`, ``"reference"`` for :mod:`pymoe.reference`.
        device: device of the packed weights.

    Attributes:
        packed: (E, ceil(N / 64), bytes) uint8.

    ``state_dict`` keys: ``packed``, and ``sizes``, (3,) int64: bits (and 10 more for ``"mxfp"`` and ``"fp"``, 20 more
    for ``"affine"``, 30 more for ``"symmetric"``), N and H.
    Loading a state of another format or with other sizes raises :class:`RuntimeError`; a state without ``sizes`` counts
    as one of the format ``"int"``, and is compared by the shape of ``packed`` alone.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range.
    """

    packed: Tensor
    format: WeightFormat = "int"  # the default for modules pickled by versions without this attribute
    prefetch: Prefetch = 0  # set by prefetch_experts

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
        self.format = format
        self.backend = backend
        shape = packed_shape(FORMATS[format, bits], output_features, input_features, num_experts)
        self.register_buffer("packed", torch.zeros(shape, dtype=torch.uint8, device=device))

    @classmethod
    def from_weight(
        cls, weight: Tensor, bits: int, backend: Backend = "native", format: WeightFormat = "int"
    ) -> QuantizedLinear:
        """Return a layer with ``weight``, (E, N, H), any floating dtype and strides, rounded to ``bits``."""
        return cls.from_quantized(operators(backend).quantize_weight(weight, bits, format), backend)

    @classmethod
    def from_quantized(cls, weight: QuantizedWeight, backend: Backend = "native") -> QuantizedLinear:
        """Return a layer with ``weight``, from :func:`pymoe.ops.quantize_weight` or :func:`pymoe.ops.pack_weight`."""
        check_quantized("QuantizedLinear.from_quantized", "weight", weight)
        packed, bits, outputs, inputs, format, prefetch = QuantizedWeight(*weight)
        experts = packed.shape[0]
        layer = cls(inputs, outputs, experts, bits=bits, format=format, backend=backend, device="meta")
        layer.packed = packed
        layer.prefetch = prefetch
        return layer

    @property
    def weight(self) -> QuantizedWeight:
        """Return the weights in the form that :mod:`pymoe.ops` takes."""
        packed: Any = self._buffers["packed"]  # twice as fast as self.packed
        sizes = self.output_features, self.input_features
        return QuantizedWeight(packed, self.bits, *sizes, self.format, self.prefetch)

    quantized_weight = weight
    """Another name for ``weight``, which also works in subclasses that redefine ``weight``."""

    def forward(self, rows_SH: Tensor, offsets: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Apply the linear layer of each expert to the rows of that expert.

        Args:
            rows_SH: (S, H) float32, bfloat16 or float16, from :func:`pymoe.ops.dispatch`; (..., H) without offsets.
            offsets: (E + 1,) int32: rows ``offsets[e]`` to ``offsets[e + 1]`` belong to expert e; or None if E is 1.
            bias: (E, N) of any floating dtype, or None.

        Returns:
            (S, N), or (..., N) without offsets; the dtype of ``rows_SH`` (the autocast dtype inside
            ``torch.autocast``). Differentiable in ``rows_SH`` and ``bias``, once.
        """
        if bias is not None:
            (rows_SH,) = cast_operands(rows_SH)  # type: ignore[assignment]
            bias = bias.to(rows_SH.dtype)  # inside autocast, the dtype that it has chosen
        rows: Tensor = operators(self.backend).quantized_linear(rows_SH, self.quantized_weight, offsets, bias)
        return rows

    @property
    def sizes(self) -> Tensor:
        """Return ``sizes`` of the state dict, (3,) int64 on the CPU: a number for bits and format, then N and H."""
        return torch.tensor([number_of(self.quantized_weight), self.output_features, self.input_features], device="cpu")

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
        # Weights are padded to whole tiles, so weights of other sizes may have the same number of bytes.
        key = prefix + "sizes"
        saved, own = state_dict.get(key), self.sizes.tolist()
        seen = None if saved is None else saved.tolist()
        # States saved by earlier versions lack the sizes; their format is "int".
        if seen != own and (seen is not None or self.format != "int"):
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
        """Raise TypeError: packed weights cannot be indexed by expert."""
        raise TypeError(_NO_TENSOR)

    def transpose(self, dim0: int, dim1: int) -> NoReturn:
        """Raise TypeError: packed weights cannot be transposed."""
        raise TypeError(_NO_TENSOR)

    def extra_repr(self) -> str:
        return (
            f"input_features={self.input_features}, output_features={self.output_features}, "
            f"num_experts={self.num_experts}, {format_repr(self)}"
        )


def format_repr(layer: QuantizedLinear | QuantizedExperts) -> str:
    """Return the bits of a layer's weights, and their format unless it is "int", for ``extra_repr``."""
    return f"bits={layer.bits}" + ("" if layer.format == "int" else f", format={layer.format!r}")


class QuantizedExperts(nn.Module):
    """E feed-forward networks with weights in 8 or 4 bits over rows that are sorted by expert.

    It takes the place of :class:`Experts`, also inside :class:`MoE`; :func:`quantize_experts` makes one from each
    :class:`Experts`. It has no parameters: gradients reach its rows, and so earlier layers, but not its weights.

    Args:
        hidden_size: H, the size of a row.
        ffn_size: F, the size of a row between the two products.
        num_experts: E, the number of experts.
        bits: 8 or 4; for ``"affine"`` also 2.
        format: ``"int"``, ``"mxfp"``, ``"fp"``, ``"affine"`` or ``"symmetric"``.
        activation: a kind of :func:`pymoe.ops.expert_activation`.
        bias: add ``b_in`` and ``b_out``.
        backend: ``"native"`` for :mod:`pymoe.ops`, ``"reference"`` for :mod:`pymoe.reference`.
        device: device of the buffers.
        dtype: dtype of the biases.

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
    format: WeightFormat = "int"  # the default for modules pickled by versions without this attribute

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
        check_network_options("QuantizedExperts", hidden_size, ffn_size, activation, bias, backend)
        check_size("QuantizedExperts", "num_experts", num_experts)
        check_format("QuantizedExperts", bits, format)
        self.hidden_size = hidden_size
        self.ffn_size = ffn_size
        self.num_experts = num_experts
        self.bits = bits
        self.format = format
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
        """Apply the network of each expert to the rows of that expert.

        Args:
            rows_SH: (S, H) float32, bfloat16 or float16, from :func:`pymoe.ops.dispatch`.
            offsets: (E + 1,) int32: rows ``offsets[e]`` to ``offsets[e + 1]`` belong to expert e.

        Returns:
            (S, H), the dtype of ``rows_SH`` (the autocast dtype inside ``torch.autocast``); zero past
            ``offsets[-1]``. Differentiable in ``rows_SH``, once.
        """
        inner = self.w_in(rows_SH, offsets, self.b_in)
        inner = operators(self.backend).expert_activation(inner, self.activation)
        rows: Tensor = self.w_out(inner, offsets, self.b_out)
        return rows

    def fits(self, num_experts: int, hidden_size: int, device: torch.device) -> bool:
        """Return whether weights and biases are on ``device``, and have E = ``num_experts`` and H = ``hidden_size``.

        Packed weights are padded, so the checks of a native call would accept some weights of wrong sizes.
        """
        modules: Any = self._modules  # avoid Module.__getattr__, which takes half a microsecond per name
        biases = self._buffers
        try:
            w_in, w_out, b_in, b_out = modules["w_in"], modules["w_out"], biases["b_in"], biases["b_out"]
            packed_in, packed_out = w_in._buffers["packed"], w_out._buffers["packed"]
        except KeyError:  # a part that the user has replaced may lack these names
            return False
        inner = (2 if is_gated(self.activation) else 1) * w_out.input_features
        return (
            packed_in.shape[0] == packed_out.shape[0] == num_experts
            and w_in.input_features == w_out.output_features == hidden_size
            and w_in.output_features == inner
            and packed_in.device == packed_out.device == device
            and (b_in is None or b_in.device == device)
            and (b_out is None or b_out.device == device)
        )

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_size={self.ffn_size}, num_experts={self.num_experts}, "
            f"{format_repr(self)}, activation={self.activation!r}, bias={self.b_in is not None}"
        )


# Quantisation of the experts of a model.


class Quantized(NamedTuple):
    """The result of :func:`quantize_experts` or of :func:`quantize_linears`."""

    layers: int
    """Number of modules that were quantised: experts modules or dense layers."""
    bytes_before: int
    """Size of their weights before, in bytes."""
    bytes_after: int
    """Size of their weights now, in bytes."""
    kept: tuple[str, ...] = ()
    """Names of every :class:`torch.nn.Linear` that :func:`quantize_linears` left as it was."""

    @property
    def ratio(self) -> float:
        """Return ``bytes_before / bytes_after``."""
        return self.bytes_before / self.bytes_after


Handler = Callable[[nn.Module], dict[str, Tensor] | None]
"""Takes a module. If the module also runs with a :class:`QuantizedLinear` in the place of each stacked weight, returns
views (E, out, in) of these weights by the names of their parameters; otherwise returns None."""

handlers: list[Handler] = []
"""Handlers of modules of other packages; the integrations add theirs."""


@explain_arguments(load_in_4bit="bits=4 gives 4 bits", load_in_8bit="bits=8 gives 8 bits")
def quantize_experts(model: nn.Module, bits: int = 8, format: WeightFormat = "int") -> Quantized:
    """Round the weights of all experts in a model to 8 or 4 bits, in place.

    Every :class:`Experts` becomes a :class:`QuantizedExperts`. With :mod:`pymoe.integrations.transformers` imported,
    the experts of a model of transformers that runs with ``experts_implementation="pymoe"`` keep their module, in which
    a :class:`QuantizedLinear` takes the place of each stacked weight. Routers, shared experts, biases and all other
    layers stay as they are; :func:`quantize_linears` rounds dense ones. The errors are those of
    :func:`pymoe.ops.quantize_weight`: 0.7 to 0.9 % of the weights' norm with 8 bits and 7 % with 4 (2.6 % with the
    format "fp" and 11.5 % with "mxfp"), for normally distributed weights.

    If weights have a parametrization (:mod:`torch.nn.utils.parametrize`), the values that it computes are rounded, and
    the parametrization is removed. :func:`pymoe.nn.save_quantized` saves a quantised layer, and ``save_pretrained`` a
    quantised model of transformers. ``from_pretrained`` can also quantise a model while reading it: see
    :class:`pymoe.integrations.transformers.PymoeConfig`.

    Layers are quantised one after another, and the original weights of each are freed before the next one begins. A
    weight that is not finite is only found when its layer is reached: that layer and the later ones stay as they were,
    and the earlier ones stay quantised. A model on the meta device can be quantised too, and can then load the state
    dict of another quantised model: ``load_state_dict(state, assign=True)``.

    Args:
        model: any module except an :class:`Experts` itself. It must be in evaluation mode, or its experts must not
            require gradients.
        bits: 8 or 4; 4 for "mxfp", 8 for "fp".
        format: "int", "mxfp" or "fp", as for :func:`pymoe.ops.quantize_weight`. A model on the meta device may also
            get "affine" with 8, 4 or 2 bits, or "symmetric" with 8; this function cannot round weights to these two.

    Returns:
        The number of layers that were quantised, and the bytes of their weights before and after.

    Raises:
        TypeError: ``model`` is not a module, ``bits`` is not an int, ``format`` is not a str, or weights are float64 or
            of a tensor subclass that wraps other tensors, such as torchao's.
        ValueError: ``bits`` and ``format`` are not as above; there are no experts to quantise; some experts are in
            training mode and require gradients; an :class:`Experts` has hooks or a ``forward`` of its own, which the
            :class:`QuantizedExperts` would lack; an adapter of PEFT or ``torch.compile`` wraps experts; weights are
            offloaded or spread over ranks; a weight is not finite; or the experts of a model of transformers are
            outside of its interface, such as those of Llama 4.

    Example:
        >>> model = torch.nn.Sequential(pymoe.nn.MoE(64, 128, num_experts=4, top_k=2)).eval()
        >>> pymoe.nn.quantize_experts(model, bits=4)
        Quantized(layers=1, bytes_before=393216, bytes_after=70912, kept=())
    """
    check_model("quantize_experts", model)
    check_format("quantize_experts", bits, format)
    if isinstance(model, Experts):
        raise ValueError(
            "quantize_experts: model must hold its Experts in a module, got the Experts themselves; use "
            "QuantizedExperts.from_experts"
        )
    found = [(name, module) for name, module in model.named_modules() if _weights_of(module)]
    if not found:
        packed = sum(type(module) is QuantizedLinear for module in model.modules())
        seen = f"{packed} weights of experts that are quantised already, and no others"
        if not packed:
            seen = "none (those of a model of transformers are found once pymoe.integrations.transformers is imported)"
        raise ValueError(f"quantize_experts: model must hold experts that are not quantised yet, got {seen}")
    for name, experts in found:
        _check_weights(name, experts)
        if not all(weight.is_meta for weight in _weights_of(experts).values()):
            check_rounded("quantize_experts", format)
    places = places_of(model, (experts for _, experts in found))
    layers, before, after = len(found), 0, 0
    while found:
        _, experts = found.pop(0)
        weights = _weights_of(experts)
        before += sum(weight.nbytes for weight in weights.values())
        if isinstance(experts, Experts):
            replacement: nn.Module = QuantizedExperts.from_experts(experts, bits, format)
            for parent, name in places[id(experts)]:
                setattr(parent, name, replacement)
        else:
            replacement = experts
            _quantize_in_place(experts, bits, format)
        after += sum(getattr(replacement, name).packed.nbytes for name in weights)
        del weights, experts
    return Quantized(layers, before, after)


def _weights_of(module: nn.Module) -> dict[str, Tensor]:
    if isinstance(module, Experts):
        return {"w_in": module.w_in, "w_out": module.w_out}
    for handler in handlers:
        if weights := handler(module):
            return weights
    return {}


def _check_weights(name: str, experts: nn.Module) -> None:
    weights = _weights_of(experts).values()
    path, _, own = name.rpartition(".")
    if own == "base_layer":  # PEFT gives this name to a module that it wraps
        raise ValueError(
            f"quantize_experts: model must have experts that nothing adapts, got {path!r} with an adapter, which reads "
            f"the weights that it adapts; merge it first (merge_and_unload() in PEFT)"
        )
    # torch.compile gives this name to a module that it wraps.
    if own == "_orig_mod" and isinstance(experts, Experts):
        raise ValueError(
            f"quantize_experts: model must have experts that torch.compile has not wrapped, got {path!r}, which would "
            f"run the weights that it was made with; quantise first, and compile then"
        )
    if any(hasattr(weight, "full_tensor") for weight in weights):  # a DTensor; importing the class is slow
        raise ValueError(
            f"quantize_experts: model must have whole weights, got {name!r} with weights that are spread over ranks, "
            f"as fully_shard leaves them; quantise first"
        )
    if any(weight.is_meta for weight in weights) and (bringing := attached_to(experts)):
        raise ValueError(
            f"quantize_experts: model must have its weights in memory, or all of them on the meta device, got {name!r} "
            f"with {bringing} that may bring them when it is called; load the model without offloading"
        )
    if any(weight.dtype == torch.float64 for weight in weights):
        raise TypeError(
            f"quantize_experts: model must have weights in float32, bfloat16 or float16, as rows are multiplied with "
            f"quantised ones, got float64 in {name!r}"
        )
    # Tensor subclasses that wrap other tensors have this method.
    if others := [weight for weight in weights if hasattr(weight, "__tensor_flatten__")]:
        raise TypeError(
            f"quantize_experts: model must have weights that are plain tensors, got a {type(others[0]).__name__} in "
            f"{name!r}, as another method of quantisation leaves them; quantise with one method alone"
        )
    if experts.training and any(weight.requires_grad for weight in weights):
        raise ValueError(
            f"quantize_experts: model must be in evaluation mode, got {name!r} in training mode with weights that "
            f"require gradients, which quantised ones have not; call model.eval() first"
        )
    if isinstance(experts, Experts) and (lost := lost_with(experts)):
        raise ValueError(
            f"quantize_experts: model must have Experts that nothing is attached to, as other modules take their "
            f"place, got {name!r} with {lost}; remove it first, and attach it to the QuantizedExperts"
        )


def lost_with(experts: Experts) -> str:
    """Name what calls would lose if another module replaced ``experts``, such as hooks; return "" if nothing."""
    plain = is_of_its_source(Experts, "forward") and all(
        getattr(type(experts), name) is getattr(Experts, name) for name in ("forward", "__call__", "_call_impl")
    )
    return attached_to(experts) or ("" if plain else "a forward of its own")


def places_of(model: nn.Module, modules: Iterable[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return all pairs (parent, name in the parent) of each module, keyed by the ``id`` of the module."""
    places: dict[int, list[tuple[nn.Module, str]]] = {id(module): [] for module in modules}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if id(child) in places:
                places[id(child)].append((parent, name))
    return places


def _quantize_in_place(experts: nn.Module, bits: int, format: WeightFormat) -> None:
    """Quantise all weights of a module in place. If one cannot be quantised, raise without changing any."""
    layers = {
        name: QuantizedLinear.from_weight(weight.detach(), bits, format=format).train(experts.training)
        for name, weight in _weights_of(experts).items()
    }
    for name, layer in layers.items():
        if parametrize.is_parametrized(experts, name):
            parametrize.remove_parametrizations(experts, name)
        delattr(experts, name)
        setattr(experts, name, layer)
