"""The U-Net as a sequential model: its skips are declared, and nobody between their ends knows of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pymoe.pipe.skip import Namespace, pop, skippable, stash


class Convolution(nn.Sequential):
    """(N, inputs, H, W) to (N, outputs, H, W)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )


@skippable(stash=["features"])
class Down(nn.Module):
    """Half as high and wide. What comes in is stashed for the way up."""

    def forward(self, x: Tensor) -> Any:
        yield stash("features", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["features"])
class Up(nn.Module):
    """Twice as high and wide, with the channels of the way down beside its own."""

    def forward(self, x: Tensor) -> Any:
        features = yield pop("features")
        return torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), features], dim=1)


def unet(width: int, levels: int) -> nn.Sequential:
    """Pictures (N, 1, H, W) to logits of the same shape; H and W are multiples of 2 ** levels."""
    return nn.Sequential(OrderedDict(_layers(width, levels)))


def _layers(width: int, levels: int) -> Iterator[tuple[str, nn.Module]]:
    namespaces = [Namespace() for _ in range(levels)]  # each level's "features" are its own
    channels = 1
    for level, namespace in enumerate(namespaces):
        wide = width << level
        yield f"in{level}a", Convolution(channels, wide)
        yield f"in{level}b", Convolution(wide, wide)
        yield f"down{level}", Down().isolate(namespace)
        channels = wide
    yield "middle_a", Convolution(channels, 2 * channels)
    yield "middle_b", Convolution(2 * channels, channels)
    for level, namespace in reversed(list(enumerate(namespaces))):
        wide = width << level
        yield f"up{level}", Up().isolate(namespace)
        yield f"out{level}a", Convolution(channels + wide, wide)
        channels = wide // 2 if level else wide
        yield f"out{level}b", Convolution(wide, channels)
    yield "logits", nn.Conv2d(channels, 1, 1)
