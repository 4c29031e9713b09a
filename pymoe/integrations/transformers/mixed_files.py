"""Finds the format of each weight in a folder that pymoe has saved, if weights have several formats.

For each packed weight NAME, the files contain ``NAME.sizes``, which gives the number of its format. The folder's
configuration has the format "stored" if experts have several formats or some are not packed. The
configuration has ``linear_bits`` only if this option would pack the dense layers that are packed in the model, in the
same format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pymoe._common.types import FORMATS
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.quantized import stacked_weights
from pymoe.integrations.transformers.stored_format import Format, opened
from pymoe.nn import QuantizedLinear

ENDING = ".sizes"
"""Suffix of the name of a weight's sizes after the name of the weight."""


def numbers_in(files: Iterable[str], model: Any) -> dict[str, int | None]:
    """Return the number of each packed weight's format, by the name of the weight in the model.

    Args:
        files: paths of the checkpoint's files; files that are not safetensors are skipped.
        model: the model, before its weights are replaced.

    Returns:
        A dictionary with all packed weights; the number is None for a weight without ``NAME.sizes``.
    """
    numbers: dict[str, int | None] = {}
    packed: set[str] = set()
    for file in opened(files):
        for name in list(file.keys()):
            if name.endswith(ENDING):
                numbers[name.removesuffix(ENDING)] = next(iter(file.get_tensor(name).flatten().tolist()), None)
            elif file.get_slice(name).get_dtype() == "U8":
                packed.add(name)
    names = interface.names_in_model(model, sorted(packed | numbers.keys()))
    return {name: numbers.get(own) for own, name in names.items()}


def formats_of(weights: Iterable[str], numbers: Mapping[str, int | None]) -> dict[str, Format]:
    """Return the formats of the weights that are packed, by their names in the model.

    Args:
        weights: names of weights in the model; those that are not packed are skipped.
        numbers: from :func:`numbers_in`.

    Raises:
        ValueError: a packed weight has no number, or a number that is not in ``FORMATS``.
    """
    kinds: dict[int, Any] = {number: format for format, number in FORMATS.items()}
    found: dict[str, Format] = {}
    for weight in weights:
        if weight not in numbers:
            continue
        number = numbers[weight]
        if number is None:
            raise ValueError(f"from_pretrained: expected the checkpoint to have {weight + ENDING!r}, got none")
        if number not in kinds:
            raise ValueError(
                f"from_pretrained: expected {weight + ENDING!r} to hold the number of a format, one of "
                f"{sorted(kinds)}, got {number}"
            )
        found[weight] = kinds[number]
    return found


def place_layers(model: Any, formats: Mapping[str, Format]) -> None:
    """Replace stacked weights of a model with quantised layers on the meta device.

    Args:
        model: the model, on the meta device.
        formats: the formats of the weights to replace, by their names.
    """
    for path, module in list(model.named_modules()):
        for own, weight in (stacked_weights(module) or {}).items():
            if f"{path}.{own}" not in formats:
                continue
            experts, outputs, inputs = weight.shape
            format, bits = formats[f"{path}.{own}"]
            delattr(module, own)
            setattr(
                module, own, QuantizedLinear(inputs, outputs, experts, bits=bits, format=format, device="meta").eval()
            )
