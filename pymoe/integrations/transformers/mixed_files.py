"""Folders that pymoe has saved and whose weights have several formats: the format of each weight.

``NAME.sizes`` of each packed weight holds the number of its format. The folder's configuration says "stored" if experts
have several, and nothing of dense layers unless they are those that ``linear_bits`` packs.
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


def numbers_in(files: Iterable[str], model: Any) -> dict[str, int]:
    """Return the numbers of packed weights' formats, by the names of the weights in the model.

    Args:
        files: paths of the safetensors.
        model: the model, before its weights are replaced.
    """
    numbers: dict[str, int] = {}
    for file in opened(files):
        names = [name for name in list(file.keys()) if name.endswith(ENDING)]
        numbers |= {name.removesuffix(ENDING): int(file.get_tensor(name).flatten()[0]) for name in names}
    return {name: numbers[own] for own, name in interface.names_in_model(model, numbers).items()}


def formats_of(weights: Iterable[str], numbers: Mapping[str, int]) -> dict[str, Format]:
    """Return the formats of weights, by their names in the model, from :func:`numbers_in`.

    Raises:
        ValueError: a weight has no number, or one that is not in ``FORMATS``.
    """
    kinds: dict[int, Any] = {number: format for format, number in FORMATS.items()}
    found: dict[str, Format] = {}
    for weight in weights:
        if weight not in numbers:
            raise ValueError(f"from_pretrained: expected the checkpoint to have {weight + ENDING!r}, got none")
        number = numbers[weight]
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
        formats: the format of each of its stacked weights.
    """
    for path, module in list(model.named_modules()):
        for own, weight in (stacked_weights(module) or {}).items():
            experts, outputs, inputs = weight.shape
            format, bits = formats[f"{path}.{own}"]
            delattr(module, own)
            setattr(
                module, own, QuantizedLinear(inputs, outputs, experts, bits=bits, format=format, device="meta").eval()
            )
