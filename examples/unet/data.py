"""Pictures of several handwritten digits, and where their strokes are."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

HELD_BACK = 360
DIGITS = 3  # in a picture
SCALES = 2.2, 3.4  # how many times as wide as a digit a picture is
NOISE = 0.25


class Pictures:
    """Composites of the 1797 images of 8 x 8 pixels, 360 of which are held back. The order is that of ``seed``."""

    def __init__(self, size: int, seed: int) -> None:
        images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
        images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
        self.held_back, self.train = images[:HELD_BACK], images[HELD_BACK:]
        self.size, self.seed = size, seed

    def draw(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Noisy pictures (rows, 1, size, size), and 1 where a stroke is, else 0, of the same shape."""
        return self._composites(self.train, torch.Generator().manual_seed(self.seed * 1_000_003 + step), rows)

    def draw_held_back(self, rows: int) -> tuple[Tensor, Tensor]:
        """The same of the digits that are held back; always the same ones."""
        return self._composites(self.held_back, torch.Generator().manual_seed(0), rows)

    def _composites(self, images: Tensor, random: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        chosen = images[torch.randint(len(images), (rows * DIGITS,), generator=random)]
        u = torch.rand(4, rows * DIGITS, generator=random)
        scale = SCALES[0] + (SCALES[1] - SCALES[0]) * u[0]
        angle = (u[1] - 0.5) * math.pi / 3
        shift = (2 * u[2:] - 1) * (1 - 1 / scale)  # the whole digit stays in the picture
        cos, sin = scale * angle.cos(), scale * angle.sin()
        x, y = shift
        turns = torch.stack([cos, -sin, sin * y - cos * x, sin, cos, -sin * x - cos * y], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(turns, [len(chosen), 1, self.size, self.size], align_corners=False)
        placed = F.grid_sample(chosen, grid, align_corners=False).view(rows, DIGITS, 1, self.size, self.size)
        clean = placed.amax(1)
        shade = torch.linspace(-0.3, 0.3, self.size) * (2 * torch.rand(rows, 1, 1, 1, generator=random) - 1)
        noise = NOISE * torch.randn(clean.shape, generator=random)
        return 0.7 * clean + shade + noise, (clean > 0.5).float()
