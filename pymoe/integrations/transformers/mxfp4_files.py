"""Checkpoints with experts in MXFP4, such as the published GPT-OSS: the models that they fit, and how to pack a weight.

Instead of a stacked weight NAME of E layers from H inputs to N outputs, the files have NAME_blocks, (E, N, H / 32, 16)
uint8, and NAME_scales, (E, N, H / 32) uint8, as :func:`pymoe.ops.pack_weight` takes them. Row n of these is column n of
the model's own weight, (E, H, N), so that rows of gate and up are in the order that the model expects. These are the
rules of ``transformers.integrations.mxfp4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pymoe._common.types import GROUP
from pymoe.integrations.transformers.stored_format import StoredFormat
from pymoe.nn import QuantizedLinear
from pymoe.ops import pack_weight

ENDINGS = ("_blocks", "_scales")
"""Suffixes of the names of a weight's two tensors after the name of the weight."""

STORED = StoredFormat("mxfp4", "MXFP4", 4, "mxfp", ENDINGS[0], transposed=True, layout="(E, in, out), as GPT-OSS has,")

NAN = 255
"""The scale that is not a number."""


def stored(_: Mapping[str, Any]) -> StoredFormat:
    """Return the format of files in MXFP4; it does not depend on their configuration."""
    return STORED


def sources(name: str) -> list[str]:
    """Return patterns for the names of a weight's tensors in files; ``name`` is the last part of the weight's name."""
    return [rf"\.{name}{ending}$" for ending in ENDINGS]


def packed_weight(name: str, blocks: Tensor | None, scales: Tensor | None, layer: QuantizedLinear) -> Tensor:
    """Return the packed bytes of a weight from its tensors in the files; every code and scale is kept unchanged.

    Args:
        name: name of the weight, for errors.
        blocks: the tensor NAME_blocks of the files, or None if they have none.
        scales: the tensor NAME_scales, or None.
        layer: a layer with the sizes that the model needs.

    Raises:
        ValueError: the number of inputs is not a multiple of 32; a tensor is missing, or has another shape or dtype;
            or a scale is NaN.
    """
    if layer.input_features % GROUP:
        raise ValueError(f"expected {name!r} to have a multiple of {GROUP} inputs, got {layer.input_features}")
    shape = (layer.num_experts, layer.output_features, layer.input_features // GROUP)
    for ending, tensor, expected in zip(ENDINGS, (blocks, scales), ((*shape, GROUP // 2), shape), strict=True):
        if tensor is None:
            raise ValueError(f"expected the checkpoint to have '{name}{ending}', got none")
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != expected:
            raise ValueError(
                f"expected '{name}{ending}' to be {expected} uint8, got {tuple(tensor.shape)} "
                f"{str(tensor.dtype).removeprefix('torch.')}"
            )
    assert blocks is not None
    assert scales is not None
    bad = scales == NAN
    if bool(bad.any()):
        place = ", ".join(str(int(i)) for i in bad.nonzero()[0])
        raise ValueError(f"expected '{name}{ENDINGS[1]}' to be numbers, got NaN (a scale of {NAN}) at [{place}]")
    return pack_weight(blocks, scales).packed
