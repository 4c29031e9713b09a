"""Quantised dense layers of transformers' models: which layers are packed, and their names in files.

A packed weight has the name of the weight that it replaces, ``PATH.weight``, and ``PATH.weight.sizes`` next to it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.stored_format import Format
from pymoe.nn import QuantizedDenseLinear
from pymoe.nn.quantized_dense import linears_of

ENDING = ".weight"
"""Suffix of the name of a packed weight after the path of its layer; names of stacked experts have no suffix."""


def dense_layers(model: Any) -> set[str]:
    """Return the paths of the layers that ``linear_bits`` packs, whether they are packed yet or not."""
    return set(linears_of(model, interface.tied(model), packed=True))


def layers_of(model: Any, weights: Container[str]) -> set[str]:
    """Return the paths of the layers that are packed or can be packed and whose weights are among ``weights``."""
    return set(linears_of(model, interface.tied(model), select=lambda name, _: name + ENDING in weights, packed=True))


def place_layers(model: Any, formats: Mapping[str, Format]) -> None:
    """Replace linear layers of a model with quantised layers on the meta device.

    Args:
        model: the model, on the meta device.
        formats: the formats of the layers to replace, by their paths.
    """
    for name, (format, bits) in formats.items():
        linear = model.get_submodule(name)
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        layer = QuantizedDenseLinear(*sizes, bits=bits, format=format, device="meta", dtype=linear.weight.dtype)
        model.set_submodule(name, layer.eval())


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedDenseLinear]]:
    """Yield the path and the layer of every quantised dense layer."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedDenseLinear):
            yield name, module


def packed_in_place(model: nn.Module, name: str, weight: Tensor, bits: int) -> QuantizedDenseLinear:
    """Replace the linear layer ``name`` with a quantised layer that has the same bias; return the new layer."""
    linear: Any = model.get_submodule(name)
    layer = QuantizedDenseLinear.from_weight(weight, bits, bias=linear.bias).eval()
    model.set_submodule(name, layer)
    return layer


def sources(model: Any, names: Iterable[str]) -> Iterator[tuple[str, bool]]:
    r"""Yield patterns for the names of layers' weights in files, and for each pattern whether its layers have no bias.

    Layers whose paths differ only in their first number share a pattern, because transformers tries every pattern on
    every tensor's name, and files with separate experts may have 100,000 tensors. The target of a converter refers to
    the path of the layer as ``\1``. That path lacks the prefix of the base model, as do the names in the files of a
    model without a head.
    """
    found: dict[tuple[str, str, bool], list[str]] = {}
    for name in sorted(names):
        own = name.removeprefix(f"{model.base_model_prefix}.")
        before, *rest = re.split(r"(?<=\.)(\d+)(?=\.)", own, maxsplit=1)
        number, after = rest or ("", "")
        found.setdefault((before, after, model.get_submodule(name).bias is None), []).append(number)
    for (before, after, unbiased), numbers in found.items():
        yield rf"\b({re.escape(before)}(?:{'|'.join(numbers)}){re.escape(after)})\.weight$", unbiased


def name_as_in_files(model: nn.Module, state: dict[str, Tensor]) -> list[str]:
    """Rename the tensors of quantised dense layers in ``state`` to their names in files; return the new names."""
    renamed = []
    for name, _ in quantized_layers(model):
        for own, new in (("packed", ENDING), ("sizes", f"{ENDING}.sizes")):
            state[name + new] = state.pop(f"{name}.{own}")
            renamed.append(name + new)
    return renamed


def bits_to_save(model: nn.Module) -> int | None:
    """Return the ``linear_bits`` with which ``from_pretrained`` packs the same dense layers in the same format.

    Return None if there is no such value, or if no dense layer is packed: ``from_pretrained`` then takes the format of
    each layer from the files.

    Raises:
        ValueError: ``from_pretrained`` would not pack a layer that the model has packed.
    """
    layers = dict(quantized_layers(model))
    if others := sorted(layers.keys() - layers_of(model, {name + ENDING for name in layers})):
        raise ValueError(
            f"save_pretrained: expected a model whose configuration ties no dense layer in few bits to another layer, "
            f"got {others[0]!r}; save model.state_dict()"
        )
    formats = {(layer.format, layer.bits) for layer in layers.values()}
    if len(formats) != 1 or layers.keys() != dense_layers(model):
        return None
    ((format, bits),) = formats
    return bits if format == "int" else None
