"""Dense layers of transformers' models in 8 or 4 bits: which ones files hold packed, and their names in files.

A packed weight has the name of the weight that it replaces, ``PATH.weight``, and ``PATH.weight.sizes`` next to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pymoe.integrations.transformers import interface
from pymoe.nn import QuantizedDenseLinear
from pymoe.nn.quantized_dense import linears_of

ENDING = ".weight"
"""What the name of a packed weight has in addition to the path of its layer; stacked experts have nothing."""


def dense_layers(model: Any) -> set[str]:
    """Return the paths of the layers that ``from_pretrained`` packs, before or after it has done so."""
    return set(linears_of(model, interface.tied(model), packed=True))


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


def sources(model: Any, names: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield for each layer its path, and patterns for the names of its weight and of its sizes in files.

    Files of a model without a head have no prefix before these names, so the path has none, either.
    """
    for name in sorted(names):
        own = name.removeprefix(f"{model.base_model_prefix}.")
        weight = rf"\b{re.escape(own)}\.weight"
        yield own, f"{weight}$", rf"{weight}\.sizes$"


def name_as_in_files(model: nn.Module, state: dict[str, Tensor]) -> list[str]:
    """Rename the tensors of quantised layers in a state; return their new names."""
    renamed = []
    for name, _ in quantized_layers(model):
        for own, new in (("packed", ENDING), ("sizes", f"{ENDING}.sizes")):
            state[name + new] = state.pop(f"{name}.{own}")
            renamed.append(name + new)
    return renamed


def bits_to_save(model: nn.Module) -> int | None:
    """Return the bits of the model's dense layers; None if none is quantised.

    Raises:
        ValueError: files cannot describe them, because ``from_pretrained`` would pack other layers.
    """
    place = "save_pretrained: expected a model"
    layers = dict(quantized_layers(model))
    if not layers:
        return None
    expected = dense_layers(model)
    if others := sorted(layers.keys() - expected):
        raise ValueError(
            f"{place} with the dense layers in few bits that quantize_linears chooses by default, got {others[0]!r}, "
            f"too; save model.state_dict()"
        )
    if whole := sorted(expected - layers.keys()):
        raise ValueError(
            f"{place} whose dense layers are all quantised or all not, got {whole[0]!r}, which is not; save "
            f"model.state_dict()"
        )
    bits = sorted({layer.bits for layer in layers.values()})
    if len(bits) > 1:
        raise ValueError(f"{place} whose dense layers all have as many bits, got {bits}; save model.state_dict()")
    return bits[0]
