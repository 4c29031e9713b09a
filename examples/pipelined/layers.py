"""The language model of train_lm.py as an ``nn.Sequential``: embedding, blocks, head.

The head's weight is the embedding's: a parameter that the first and the last stage of a pipeline share.
"""

from __future__ import annotations

import torch.nn.functional as F
from lm.config import Config
from lm.model import Block, LanguageModel
from torch import Tensor, nn


class PositionedBlock(nn.Module):
    """A block with the rotary tables, so that it takes one tensor and returns one."""

    def __init__(self, block: Block, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return self.block(x, self.cos[:length], self.sin[:length])


class Head(nn.Module):
    """The last norm, and logits by the embedding's transpose."""

    def __init__(self, norm: nn.Module, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = norm
        self.weight = embedding.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


def layers(config: Config) -> nn.Sequential:
    """A new model: bytes (B, C) int64 to logits (B, C, 256)."""
    model = LanguageModel(config)
    blocks = [PositionedBlock(block, model.cos.clone(), model.sin.clone()) for block in model.blocks]
    return nn.Sequential(model.embedding, *blocks, Head(model.norm, model.embedding))


def balance(layers: int, stages: int) -> list[int]:
    """How many layers each stage gets: as equal as can be, embedding and head counted as layers."""
    size, rest = divmod(layers, stages)
    return [size + (number < rest) for number in range(stages)]
