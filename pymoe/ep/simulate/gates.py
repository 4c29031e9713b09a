"""Loads: the experts that the tokens of a step chose, drawn from a distribution or recorded in training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.checks import at_least, not_negative
from pymoe.ep.simulate.load_files import read_loads
from pymoe.ops import gate_topk

SAMPLED_TOKENS = 65_536
"""Largest number of tokens that are drawn for a step, on all ranks together; for more tokens they are scaled up."""
SAMPLED_LAYERS = 3
"""Number of layers that are drawn; each has other popular experts."""
SAMPLED_STEPS = 2
"""Number of steps that are drawn: the first decides the placement of experts, the second uses it."""


@dataclass(frozen=True)
class Load:
    """The experts that tokens chose, in several layers and steps."""

    title: str
    choices: tuple[tuple[Tensor, ...], ...]
    """(N, K) int64 for every layer and step: the distinct experts of each token of all ranks, rank 0 first."""
    experts: int
    """E, the number of experts."""
    uniform: bool = False
    """True if every choice of K among all E experts was equally likely, as the formulas assume."""

    def __post_init__(self) -> None:
        """Raise ValueError for a load without tokens, or with choices that are not (N, K) of E experts."""
        steps = [step for layer in self.choices for step in layer]
        if not self.choices or not all(self.choices) or not all(step.numel() for step in steps):
            raise ValueError("Load: choices must have at least one layer, step and token in each")
        first = tuple(steps[0].shape)
        for step in steps:
            if step.dim() != 2 or tuple(step.shape) != first:
                raise ValueError(f"Load: choices must have one shape (N, K), got {first} and {tuple(step.shape)}")
            low, high = int(step.min()), int(step.max())
            if low < 0 or high >= self.experts:
                raise ValueError(f"Load: choices must be in 0..{self.experts - 1}, got {low} to {high}")

    @property
    def tokens(self) -> int:
        """N, the number of tokens of a step on all ranks together."""
        return self.choices[0][0].shape[0]

    @property
    def top_k(self) -> int:
        """K, the number of experts per token."""
        return self.choices[0][0].shape[1]

    def with_past(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (previous step's choices, choices) for every layer and step except the first; a single step twice."""
        for steps in self.choices:
            yield from pairwise(steps) if len(steps) > 1 else ((steps[0], steps[0]),)

    @property
    def has_past(self) -> bool:
        """True if there is a step before another one."""
        return len(self.choices[0]) > 1


def source_ranks(tokens: int, ranks: int) -> Tensor:
    """Return (N,) int64, the rank of each token: consecutive tokens, the same number on each rank within one."""
    return torch.arange(tokens) * ranks // tokens


def uniform(block: Block, tokens: int, *, seed: int = 0) -> Load:
    """Return a load in which all experts are equally likely.

    Args:
        block: the source of E, K and groups.
        tokens: N, on all ranks together; at most ``SAMPLED_TOKENS`` are drawn, and represent the others.
        seed: the seed of the random numbers.
    """
    return _drawn("uniform", block, tokens, torch.zeros(block.experts), seed)


def zipf(block: Block, tokens: int, exponent: float, *, seed: int = 0) -> Load:
    """Return a skewed load: the i-th most popular expert is drawn with odds of ``i ** -exponent``.

    A token's K experts are drawn one after another without replacement (Plackett-Luce), by adding Gumbel noise to the
    logarithms of the odds and taking the K largest. The popular experts are random in each layer, and the same in
    all of its steps.

    Args:
        block: the source of E, K and groups.
        tokens: N, on all ranks together; at most ``SAMPLED_TOKENS`` are drawn, and represent the others.
        exponent: at least 0; 0 is uniform, and with 1 the first of E = 128 experts has a share of 18 % of first
            choices.
        seed: the seed of the random numbers.
    """
    not_negative("zipf", "exponent", exponent)
    logits = -exponent * torch.arange(1, block.experts + 1).log()
    return _drawn(f"Zipf with exponent {exponent:g}", block, tokens, logits, seed)


def recorded(block: Block, file: str | Path) -> Load:
    """Return the load of a file that :class:`LoadRecorder` wrote.

    Args:
        block: its E and K must match the file.
        file: see :mod:`pymoe.ep.simulate.load_files` for its format.

    Raises:
        ValueError: the file is not a recorded load, or has another E or K.
        OSError: the file cannot be read.
    """
    found = read_loads(file)
    if (found.experts, found.choices.shape[3]) != (block.experts, block.choices):
        raise ValueError(
            f"{file}: expected loads of {block.experts} experts and {block.choices} choices ({block.title}), got "
            f"{found.experts} experts and {found.choices.shape[3]} choices"
        )
    steps = found.choices.long()
    layers = tuple(tuple(steps[step, layer] for step in range(steps.shape[0])) for layer in range(steps.shape[1]))
    title = f"recorded in {Path(file).name}: {steps.shape[1]} layers, {steps.shape[0]} steps of {steps.shape[2]} tokens"
    return Load(title, layers, found.experts)


def load_of(text: str, block: Block, tokens: int, *, seed: int = 0) -> Load:
    """Return the load that ``text`` names: ``uniform``, ``zipf:EXPONENT``, or the path of a recorded load.

    Args:
        text: the name.
        block: the source of E, K and groups.
        tokens: N, on all ranks together; a recorded load has its own number.
        seed: the seed of the random numbers.

    Raises:
        ValueError: ``text`` does not name a load, or the load does not fit the block.
        OSError: the file cannot be read.
    """
    kind, colon, number = text.partition(":")
    if text == "uniform":
        return uniform(block, tokens, seed=seed)
    if kind == "zipf" and colon:
        try:
            exponent = float(number)
        except ValueError:
            exponent = math.nan
        if not 0 <= exponent < math.inf:
            raise ValueError(f"load: expected zipf:EXPONENT with a number of at least 0, got {text!r}")
        return zipf(block, tokens, exponent, seed=seed)
    if not Path(text).exists():
        raise ValueError(f"load: expected uniform, zipf:EXPONENT or a file of recorded loads, got {text!r}")
    return recorded(block, text)


def _drawn(title: str, block: Block, tokens: int, logits: Tensor, seed: int) -> Load:
    at_least("load", "tokens", tokens, 1)
    drawn = min(tokens, SAMPLED_TOKENS)
    if drawn < tokens:
        title += f", {drawn} of {tokens} tokens drawn"
    random = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(SAMPLED_LAYERS):
        popularity = logits[torch.randperm(block.experts, generator=random)]
        layers.append(tuple(_choose(block, popularity, drawn, random) for _ in range(SAMPLED_STEPS)))
    plain = block.groups == 1 and not bool(logits.any())
    return Load(title, tuple(layers), block.experts, uniform=plain)


def _choose(block: Block, popularity: Tensor, tokens: int, random: torch.Generator) -> Tensor:
    parts = []
    for start in range(0, tokens, 16_384):  # in parts, to bound the memory
        rows = min(16_384, tokens - start)
        noise = -torch.empty(rows, block.experts).exponential_(generator=random).log()
        noisy = popularity + noise
        if block.groups == 1:
            parts.append(noisy.topk(block.choices, dim=1).indices)
        else:
            gate = gate_topk(
                noisy, block.choices, score="sigmoid", num_groups=block.groups, topk_groups=block.kept_groups
            )
            parts.append(gate.experts.long())
    return torch.cat(parts)
