"""The digits, the experts, and the model around a mixture of them."""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, MixtureOfExpertBackends

CLASSES, PIXELS = 10, 64
HELD_BACK = 360


class Digits:
    """1797 images of 8 x 8 pixels from scikit-learn, 360 of them held back; batches in an order that ``seed`` says."""

    def __init__(self, seed: int) -> None:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x = torch.tensor(images, dtype=torch.float32)[order] / 16 - 0.5
        y = torch.tensor(labels, dtype=torch.int64)[order]
        self.held_back = x[:HELD_BACK], y[:HELD_BACK]
        self.train = x[HELD_BACK:], y[HELD_BACK:]
        self.random = torch.Generator().manual_seed(seed)

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        """A batch of images (rows, 64) and labels (rows,)."""
        x, y = self.train
        index = torch.randint(len(y), (rows,), generator=self.random)
        return x[index], y[index]


class Expert(nn.Sequential):
    """A feed-forward network that can be made slow."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.delay = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.delay)
        return super().forward(x)


def served_experts(count: int, width: int, learning_rate: float) -> list[ExpertBackend]:
    """Experts with an optimizer each, which is the server's business alone."""
    backends = []
    for i in range(count):
        expert = Expert(width)
        optimizer = torch.optim.Adam(expert.parameters(), lr=learning_rate)
        backends.append(ExpertBackend(f"expert{i}", expert, optimizer, args_schema=[BatchTensorProto(width)]))
    return backends


class Classifier(nn.Module):
    """Pixels to logits of the ten digits, through the mixture. Its parameters are all but the experts'."""

    def __init__(self, mixture: MixtureOfExpertBackends, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(PIXELS, width)
        self.mixture = mixture
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x).relu()
        return self.head(x + self.mixture(x))
