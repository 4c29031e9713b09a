"""Dense layers of transformers' models in 8 or 4 bits: which ones are packed, and their names in files.

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
"""What the name of a packed weight has in addition to the path of its layer; stacked experts have nothing."""


def dense_layers(model: Any) -> set[str]:
    """Return the paths of the layers that ``linear_bits`` packs, before or after it has done so."""
    return set(linears_of(model, interface.tied(model), packed=True))


def layers_of(model: Any, weights: Container[str]) -> set[str]:
    """Return the paths of the layers that can be packed among those with weights of these names, packed or not."""
    return set(linears_of(model, interface.tied(model), select=lambda name, _: name + ENDING in weights, packed=True))


def place_layers(model: Any, formats: Mapping[str, Format]) -> None:
    """Put layers without bytes in the place of linear ones of a model on the meta device.

    Args:
        model: the model.
        formats: the formats of the layers, by their paths.
    """
    for name, (format, bits) in formats.items():
        linear = model.get_submodule(name)
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        layer = QuantizedDenseLinear(*sizes, bits=bits, format=format, device="meta", dtype=linear.weight.dtype)
        model.set_submodule(name, layer.eval())


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedDenseLinear]]:
    """Yield the layers that are quantised, by their paths."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedDenseLinear):
            yield name, module


def packed_in_place(model: nn.Module, name: str, weight: Tensor, bits: int) -> QuantizedDenseLinear:
    """Put a quantised layer in the place of a linear one, whose bias it keeps, and return it."""
    linear: Any = model.get_submodule(name)
    layer = QuantizedDenseLinear.from_weight(weight, bits, bias=linear.bias).eval()
    model.set_submodule(name, layer)
    return layer


def sources(model: Any, names: Iterable[str]) -> Iterator[tuple[str, bool]]:
    r"""Yield patterns for the names of layers' weights in files, and whether these layers have no bias.

    Layers whose paths differ in one number share a pattern, because transformers tries each one on every tensor's name,
    of which files with single experts have 100,000. The pattern's group, ``\1`` in a target, is the path of a layer.
    Files of a model without a head have no prefix before these names, so the path has none, either.
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
    """Rename the tensors of quantised layers in a state; return their new names."""
    renamed = []
    for name, _ in quantized_layers(model):
        for own, new in (("packed", ENDING), ("sizes", f"{ENDING}.sizes")):
            state[name + new] = state.pop(f"{name}.{own}")
            renamed.append(name + new)
    return renamed


def bits_to_save(model: nn.Module) -> int | None:
    """Return the ``linear_bits`` that would pack a model's dense layers as they are, or None if there are none.

    The files of other layers say the format of each of them; those of earlier versions need ``linear_bits``.

    Raises:
        ValueError: ``from_pretrained`` would not put a packed layer where the model has one.
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
