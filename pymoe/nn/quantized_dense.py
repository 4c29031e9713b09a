"""Dense linear layers with weights in 8 or 4 bits, and quantize_linears, which puts them into a model."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pymoe._common.contracts import QUANTIZED_FLOATING, check_format, check_quantized
from pymoe._common.names import explain_arguments
from pymoe._common.types import FORMATS, QuantizedWeight, WeightFormat, autocast_enabled
from pymoe.nn.options import Backend, check_flag, check_model, operators
from pymoe.nn.plain_calls import PLAIN_TENSORS, attached_to, is_of_its_source
from pymoe.nn.quantized_experts import Quantized, QuantizedLinear, format_repr, places_of
from pymoe.ops.function_calls import is_recorded
from pymoe.ops.quantized_linear import QUANTIZED_LINEAR

_NO_WEIGHT = (
    "QuantizedDenseLinear: it has no tensor called 'weight', as its weights are packed; call the layer, or "
    "dequantize its quantized_weight with pymoe.ops.dequantize_weight"
)


class QuantizedDenseLinear(QuantizedLinear):
    """A linear layer with weights in 8 or 4 bits, which is called like a :class:`torch.nn.Linear`.

    It is a :class:`QuantizedLinear` of one expert, to which all rows belong, so its products are those of
    :func:`pymoe.ops.quantized_linear`: a row of the result has the same bits on every processor, for any number of
    threads, and alone or among many. It has no parameters: gradients reach its inputs, and so earlier
    layers, but not its weights. A new layer computes zeros until it gets its weights.

    Args:
        in_features: H, the number of inputs.
        out_features: N, the number of outputs.
        bias: add ``bias``.
        bits: 8 or 4; for ``"affine"`` also 2.
        format: ``"int"``, ``"mxfp"``, ``"fp"``, ``"affine"`` or ``"symmetric"``.
        backend: ``"native"`` for :mod:`pymoe.ops`, ``"reference"`` for :mod:`pymoe.reference`.
        device: device of the buffers.
        dtype: dtype of the bias.

    ``state_dict`` keys: ``packed`` and ``sizes``, as for :class:`QuantizedLinear`, and ``bias`` if ``bias``.

    Attributes:
        packed: (1, ceil(N / 64), bytes) uint8.
        bias: (N,), or ``None``; a buffer.
        quantized_weight: the weights, (1, N, H), as :mod:`pymoe.ops` takes them. There is no ``weight``: reading it
            raises :class:`AttributeError`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range.
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bits: int = 8,
        format: WeightFormat = "int",
        backend: Backend = "native",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, 1, bits=bits, format=format, backend=backend, device=device)
        check_flag("QuantizedDenseLinear", "bias", bias)
        self.register_buffer("bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, bits: int, backend: Backend = "native", format: WeightFormat = "int"
    ) -> QuantizedDenseLinear:
        """Return a layer with the weights of ``linear`` rounded to ``bits``, and with its bias."""
        layer = cls.from_weight(linear.weight.detach(), bits, backend, format, bias=linear.bias)
        return layer.train(linear.training)

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        bits: int,
        backend: Backend = "native",
        format: WeightFormat = "int",
        *,
        bias: Tensor | None = None,
    ) -> QuantizedDenseLinear:
        """Return a layer with ``weight`` rounded to ``bits``.

        Args:
            weight: (N, H), any floating dtype and strides.
            bits: 8 or 4.
            backend: as for the class.
            format: ``"int"``, ``"mxfp"`` or ``"fp"``, as for :func:`pymoe.ops.quantize_weight`.
            bias: (N,), which the layer keeps without a copy; or None.
        """
        return cls.from_quantized(operators(backend).quantize_weight(weight[None], bits, format), backend, bias=bias)

    @classmethod
    def from_quantized(
        cls, weight: QuantizedWeight, backend: Backend = "native", *, bias: Tensor | None = None
    ) -> QuantizedDenseLinear:
        """Return a layer with ``weight``, (1, N, H), and with ``bias``, as for :meth:`from_weight`.

        Raises:
            TypeError: ``weight`` is not a quantised weight.
            ValueError: ``weight`` is of several experts or inconsistent, or ``bias`` has another shape.
        """
        check_quantized("QuantizedDenseLinear.from_quantized", "weight", weight)
        packed, bits, outputs, inputs, format, _ = QuantizedWeight(*weight)
        if packed.shape[0] != 1:
            raise ValueError(
                f"QuantizedDenseLinear.from_quantized: weight must be of one expert, got {packed.shape[0]} of them"
            )
        if bias is not None and tuple(bias.shape) != (outputs,):
            raise ValueError(f"QuantizedDenseLinear.from_quantized: bias must be ({outputs},), got {tuple(bias.shape)}")
        layer = cls(inputs, outputs, bias is not None, bits=bits, format=format, backend=backend, device="meta")
        layer.packed = packed
        if bias is not None:
            layer.bias = bias.detach()
        return layer

    @property
    def in_features(self) -> int:
        """Return H, under the name that :class:`torch.nn.Linear` uses."""
        return self.input_features

    @property
    def out_features(self) -> int:
        """Return N, under the name that :class:`torch.nn.Linear` uses."""
        return self.output_features

    @property
    def qweight(self) -> Tensor:
        """Return ``packed``. PEFT reads this attribute to find the device of quantised layers."""
        return self.packed

    @property
    def weight(self) -> NoReturn:  # type: ignore[override]
        """Raise AttributeError, so that ``hasattr`` returns False: there is no tensor of unpacked weights."""
        raise AttributeError(_NO_WEIGHT)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":  # Python calls this when the property has raised, and would show another message
            raise AttributeError(_NO_WEIGHT)
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Apply the layer to the last dimension of ``x``.

        Args:
            x: (..., H) float32, bfloat16 or float16.

        Returns:
            (..., N), the dtype of ``x`` (the autocast dtype inside ``torch.autocast``). Differentiable in ``x``, once.

        Raises:
            TypeError: ``x`` has another dtype.
            ValueError: the last dimension of ``x`` is not H, or ``x`` is on another device than the weights.
            NotImplementedError: ``x`` has a tangent, as for :func:`pymoe.ops.quantized_linear`.
        """
        packed, bias = self._buffers["packed"], self._buffers["bias"]
        bias = None if bias is None else bias[None]
        if self._is_direct(x, packed, bias):
            rows: Tensor = QUANTIZED_LINEAR(
                x.contiguous(), packed, None, bias, FORMATS[self.format, self.bits], self.output_features
            )
            return rows
        return super().forward(x, None, bias)

    def _is_direct(self, x: Tensor, packed: Any, bias: Tensor | None) -> bool:
        """Return whether the native call accepts these arguments, so that :meth:`forward` can skip the usual checks.

        Those checks take longer than the call itself.
        """
        return (
            self.backend == "native"
            and type(x) in PLAIN_TENSORS
            and x.dtype in QUANTIZED_FLOATING
            and x.is_cpu
            and packed.is_cpu
            and packed.is_contiguous()
            and x.dim() > 0
            and x.shape[-1] == self.input_features
            and (bias is None or (bias.dtype == x.dtype and bias.is_cpu and bias.is_contiguous()))
            and not autocast_enabled("cpu")
            and not is_recorded(x, bias)
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{format_repr(self)}"
        )


# Rounding of the dense layers of a model.

SMALLEST = 32
"""Smallest number of inputs and outputs of a layer that is rounded by default: smaller layers have few bytes."""

_NAMES = re.compile(
    r"(^|\.)("
    r"[qkvo]_proj|qkv_proj|kv_proj|(q|kv)_b_proj|q_a_proj|kv_a_proj_with_mqa|o_b_proj|"  # attention
    r"\w*attn\.(out_proj|in_proj_(qkvz?|z))|"  # other attention, and linear attention
    r"(gate|up|gate_up|down)_proj|(input|output)_linear|fc[12]|w[123]|"  # dense networks and shared experts
    r"lm_head)$"
)
_CHOOSE = re.compile(r"router|gate(\.|$)|indexer|compressor")
"""Matches paths of modules whose linear layers are not rounded, because they choose experts or tokens."""

Select = Callable[[str, nn.Linear], bool]


def is_dense(name: str, linear: nn.Linear | QuantizedDenseLinear) -> bool:
    """Return whether :func:`quantize_linears` rounds a layer by default.

    Args:
        name: path of the layer in its model.
        linear: the layer.
    """
    return (
        bool(_NAMES.search(name))
        and not _CHOOSE.search(name.rpartition(".")[0])
        and min(linear.in_features, linear.out_features) >= SMALLEST
    )


def linears_of(
    model: nn.Module, tied: Iterable[str] = (), select: Select = is_dense, packed: bool = False
) -> dict[str, nn.Linear]:
    """Return the linear layers of a model that :func:`quantize_linears` would round, by their paths.

    Args:
        model: any module.
        tied: names of parameters that will share memory with others, in addition to those that already do.
        select: as for :func:`quantize_linears`.
        packed: also return each :class:`QuantizedDenseLinear`, which has been rounded already.
    """
    tied = {*tied, *_shared(model)}
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        path, _, own = name.rpartition(".")
        kind: Any = type(model.get_submodule(path))
        if (
            (_is_linear(module) or (packed and isinstance(module, QuantizedDenseLinear)))
            and f"{name}.weight" not in tied
            and select(name, module)
            and not _reads_weight(kind, own)
        ):
            found[name] = module
    return found


def _is_linear(module: nn.Module) -> bool:
    """Return whether the class of a module is nn.Linear, disregarding the subclass that a parametrization creates."""
    return isinstance(module, nn.Linear) and (type(module) is nn.Linear or parametrize.is_parametrized(module))


@functools.cache
def _reads_weight(kind: type, own: str) -> bool:
    """Return whether a method or property of a class reads ``self.OWN.weight``, which a quantised layer lacks.

    Some models read the dtype of that weight, or multiply by it themselves. Reads through another name, such as a
    local variable, are not detected; after quantisation they raise AttributeError.
    """
    members = [
        member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for name, member in vars(base).items()
        if name != "_init_weights"
    ]
    codes = [inspect.unwrap(member).__code__ for member in members if inspect.isfunction(member)]
    for code in codes:  # the loop also visits nested functions, which it appends
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        names = [instruction.argval for instruction in dis.get_instructions(code)]
        if (own, "weight") in itertools.pairwise(names):
            return True
    return False


@explain_arguments(load_in_4bit="bits=4 gives 4 bits", load_in_8bit="bits=8 gives 8 bits")
def quantize_linears(model: nn.Module, bits: int = 8, *, select: Select | None = None) -> Quantized:
    """Round the weights of the dense linear layers in a model to 8 or 4 bits, in place.

    Each becomes a :class:`QuantizedDenseLinear` and keeps its bias. :func:`quantize_experts` does the same for experts.
    By default, layers with the following names, those in models of transformers, are rounded:

    - attention: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``qkv_proj``, those of multi-head latent attention
      (``q_a_proj``, ``q_b_proj``, ``kv_a_proj_with_mqa``, ``kv_b_proj``, ``kv_proj``, ``o_b_proj``), ``out_proj`` in a
      module whose name ends with ``attn``, and there ``in_proj_qkv``, ``in_proj_qkvz`` and ``in_proj_z``;
    - shared experts and dense networks: ``gate_proj``, ``up_proj``, ``gate_up_proj``, ``down_proj``,
      ``input_linear``, ``output_linear``, ``fc1``, ``fc2``, ``w1``, ``w2``, ``w3``;
    - the head, ``lm_head``.

    All others stay: routers and gates, indexers, state spaces, embeddings, norms, layers with fewer than 32 inputs or
    outputs, subclasses of :class:`torch.nn.Linear`, layers that share their weight with another module, such as a head
    that is tied to the embedding, and those whose parent reads ``self.NAME.weight`` itself. The shared experts of a
    :class:`MoE` stay because they are not linear layers of torch. The same names decide in image and audio encoders.
    ``kept`` of the result names every :class:`torch.nn.Linear` that stayed.

    Layers are rounded one after another, and the weight of each is freed before the next one begins. A weight that is
    not finite is only found when its layer is reached: the earlier layers are then rounded, the others are not.

    Args:
        model: any module except a :class:`torch.nn.Linear` itself. It must be in evaluation mode, or the layers must
            not require gradients.
        bits: 8 or 4.
        select: takes the path of a layer and the layer, and returns whether to round it. It replaces the rules above on
            names and sizes. Subclasses, layers that share their weight and layers whose weight the parent reads are
            never rounded.

    Returns:
        The number of layers that were rounded, the bytes of their weights before and after, and the names of the
        others.

    Raises:
        TypeError: ``model`` is not a module, ``bits`` is not an int, ``select`` cannot be called, or a weight is not
            float32, bfloat16 or float16, or is of a tensor subclass that wraps other tensors, such as torchao's.
        ValueError: ``bits`` is neither 8 nor 4; there are no layers to round; or one of them is in training mode and
            requires gradients, has hooks, a ``forward`` of its own or a parametrization, is wrapped by an adapter of
            PEFT or by ``torch.compile``, is offloaded or spread over ranks, or has a weight that is not finite.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).eval()
        >>> done = pymoe.nn.quantize_linears(model, bits=8, select=lambda path, layer: path != "2")
        >>> [type(layer).__name__ for layer in model]
        ['QuantizedDenseLinear', 'ReLU', 'Linear']
    """
    place = "quantize_linears"
    check_model(place, model)
    check_format(place, bits, "int")
    if select is not None and not callable(select):
        raise TypeError(f"{place}: select must be None or a function, got {type(select).__name__}")
    if isinstance(model, nn.Linear):
        raise ValueError(
            f"{place}: model must hold its layers in a module, got a {type(model).__name__} itself; use "
            f"QuantizedDenseLinear.from_linear"
        )
    for name, module in _wrapped(model):
        if (select or is_dense)(name, module):
            raise ValueError(
                f"{place}: model must have layers that nothing wraps, got {name!r} inside another module, which reads "
                f"its weight; merge an adapter first (merge_and_unload() in PEFT), and compile after this"
            )
    found = linears_of(model, select=select or is_dense)
    if not found:
        raise ValueError(
            f"{place}: model must hold dense linear layers that are not quantised yet and have names of transformers, "
            f"got none; select=lambda name, layer: True takes all others, or those that you choose"
        )
    for name, linear in found.items():
        _check_linear(name, linear)
    places = places_of(model, found.values())
    layers, before, after = len(found), 0, 0
    while found:
        linear = found.pop(next(iter(found)))
        replacement = QuantizedDenseLinear.from_linear(linear, bits)
        for parent, own in places[id(linear)]:
            setattr(parent, own, replacement)
        before += linear.weight.nbytes
        after += replacement.packed.nbytes
        del linear
    kept = tuple(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return Quantized(layers, before, after, kept)


def _wrapped(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield (name of the wrapper, layer) for each linear layer that PEFT or torch.compile has wrapped."""
    for name, module in model.named_modules():
        path, _, own = name.rpartition(".")
        if own in ("base_layer", "_orig_mod") and isinstance(module, nn.Linear):
            yield path, module


def _shared(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters and buffers whose memory begins at the same address as that of another."""
    first: dict[Any, str] = {}
    for path, module in model.named_modules():
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            name = f"{path}.{own}"
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta" and tensor.numel() > 0
            place = (tensor.device, tensor.data_ptr()) if plain else id(tensor)
            if place in first:
                yield from (first[place], name)
            first.setdefault(place, name)


def _check_linear(name: str, linear: nn.Linear) -> None:
    place = "quantize_linears: model must"
    if parametrize.is_parametrized(linear):
        raise ValueError(f"{place} have layers without parametrizations, got {name!r} with one; remove it first")
    plain = all(is_of_its_source(nn.Linear, own) for own in ("forward", "__call__", "_call_impl"))
    lost = attached_to(linear) or ("" if plain else "a forward of its own")
    if not lost and linear._compiled_call_impl is not None:
        lost = "a compiled call"
    if lost:
        raise ValueError(
            f"{place} have layers that nothing is attached to, as others take their place, got {name!r} with {lost}; "
            f"remove it first, load the model without offloading, and compile after this"
        )
    whole = tuple(linear.weight.shape) == (linear.out_features, linear.in_features)  # false if FSDP has cut the weight
    if not whole or hasattr(linear.weight, "full_tensor"):  # a DTensor; importing the class is slow
        raise ValueError(
            f"{place} have whole weights, got {name!r} with weights that are spread over ranks, as fully_shard leaves "
            f"them; quantise first"
        )
    if hasattr(linear.weight, "__tensor_flatten__"):  # a tensor subclass that wraps other tensors
        raise TypeError(
            f"{place} have weights that are plain tensors, got a {type(linear.weight).__name__} in {name!r}, as "
            f"another method of quantisation leaves them; select the layers that it has left alone"
        )
    if linear.weight.dtype not in QUANTIZED_FLOATING:
        raise TypeError(f"{place} have weights in float32, bfloat16 or float16, got {linear.weight.dtype} in {name!r}")
    if linear.training and any(parameter.requires_grad for parameter in linear.parameters()):
        raise ValueError(
            f"{place} be in evaluation mode, got {name!r} in training mode with a parameter that requires a gradient, "
            f"which a quantised layer cannot give; call model.eval() first"
        )
