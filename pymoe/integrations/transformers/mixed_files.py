"""Folders that pymoe has saved and whose weights have several formats: the format of each weight.

``NAME.sizes`` of each packed weight holds the number of its format. The folder's configuration says "stored" if experts
have several formats, or some are not packed, and nothing of dense layers unless ``linear_bits`` packs exactly these.
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
"""What the name of the sizes has in addition to that of the weight."""


def numbers_in(files: Iterable[str], model: Any) -> dict[str, int | None]:
    """Return the numbers of packed weights' formats, by the names of the weights in the model.

    Args:
        files: paths of the safetensors.
        model: the model, before its weights are replaced.

    Returns:
        The numbers; None for a weight without sizes.
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
    """Return the formats of those weights that are packed, by their names in the model, from :func:`numbers_in`.

    Raises:
        ValueError: such a weight has no number, or one that is not in ``FORMATS``.
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
    """Put layers without bytes in the place of the stacked weights of a model on the meta device.

    Args:
        model: the model.
        formats: the formats of its stacked weights, by their names; others stay.
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
