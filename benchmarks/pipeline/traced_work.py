"""Defines models that are not a sequence of layers, for pipelines that capture a model and split it.

Equal cases have equal weights, inputs and targets in every process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.pipeline.work import LAYERS_PER_WORKER, SLEEP, Case
from pymoe.pipe.schedules import Action, Kind

BYTES, CONTEXT, WIDTH, HEADS = 256, 64, 128, 4
SLEEPING_WIDTH = 8
ROWS = 4
"""Rows of a micro-batch."""


# A custom operator, since torch.export would lose the backward of an autograd.Function.
@torch.library.custom_op("pymoe_benchmarks::sleeping_product", mutates_args=())
def sleeping_product(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """Sleep ``seconds``, without the GIL, and return ``x * weight``. Its backward sleeps twice as long."""
    time.sleep(seconds)
    return x * weight


@sleeping_product.register_fake
def _(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.seconds = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    time.sleep(2 * ctx.seconds)
    return grad * weight, (grad * x).sum(0), None


sleeping_product.register_autograd(_backward, setup_context=_keep)


class Sleeping(nn.Module):
    """Multiplies by its weight, and sleeps, so that the times of its forward and backward are known."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = SLEEP
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(SLEEPING_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return sleeping_product(x, self.weight, self.seconds)


class Skipping(nn.Module):
    """A chain of sleeping layers with a skip connection from the first layer's output to the end."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sleeping() for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        kept = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x + kept


class Block(nn.Module):
    """A pre-norm transformer block: causal attention and a feed-forward network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.mix(self.norm(x)).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.feed_forward(self.norm_after(x))


class Transformer(nn.Module):
    """A language model over bytes; if ``tied``, head and embedding share one weight."""

    def __init__(self, layers: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.place = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 8)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


MODELS: dict[str, tuple[str, Callable[[int], nn.Module]]] = {
    "sleep": ("layers that sleep 1 ms forward and 2 ms backward; the first one's output skips to the end", Skipping),
    "transformer": (f"blocks of {WIDTH} numbers, {ROWS} x {CONTEXT} bytes", lambda n: Transformer(n, False)),
    "tied": ("the same, its head's weight being the embedding's", lambda n: Transformer(n, True)),
}


def loss(output: Any, target: Tensor) -> Tensor:
    """Return the loss of a micro-batch. ``output`` may be a tuple with the model's output, as some pipelines pass."""
    (output,) = output if isinstance(output, (tuple, list)) else (output,)
    if target.dtype == torch.int64:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())
    return F.mse_loss(output, target)


@dataclass(frozen=True)
class TracedCase(Case):
    """A kind of model, with the number of workers (threads or processes) and of micro-batches."""

    @property
    def layers(self) -> int:
        """Return the number of layers of the whole model."""
        return LAYERS_PER_WORKER * self.workers

    @property
    def repeats(self) -> int:
        """Return the number of consecutive steps whose mean is one measured value."""
        return 4 if self.work == "sleep" else 1

    @property
    def about(self) -> str:
        """Return the case in words, for a heading."""
        return f"{self}: {self.layers} layers, {MODELS[self.work][0]}"

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return loss(output, target)

    def model(self) -> nn.Module:  # type: ignore[override]
        """Return the unsplit model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return MODELS[self.work][1](self.layers)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of all micro-batches, which have equal numbers of rows."""
        generator = torch.Generator().manual_seed(1)
        rows = self.micro_batches * ROWS
        if self.work == "sleep":
            x, y = torch.randn(2, rows, SLEEPING_WIDTH, generator=generator)
            return x, y
        text = torch.randint(BYTES, (rows, CONTEXT + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def beginnings(self, stages: int) -> list[str]:
        """Return the name of the first layer of every stage except the first stage."""
        return [f"layers.{number * self.layers // stages}" for number in range(1, stages)]

    def times(self, stages: int) -> Callable[[Action], float]:
        """Return a function from an action of sleeping layers to its time, in units of one layer's forward."""
        return lambda action: self.layers // stages * (1 if action.kind is Kind.FORWARD else 2)
