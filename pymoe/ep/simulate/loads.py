"""Loads: the experts that the tokens of a step chose, drawn from a distribution or recorded in training.

**Recorded loads** are kept in an ``.npz`` archive of numpy, read without pickle, with these arrays:

========== ================= ===================================================================================
format     () int64          1
experts    () int64          E
layers     (L,) unicode      names of the layers in the model
choices    (S, L, N, K) uint the distinct experts of each of N tokens, in S steps and L layers, before any capacity;
                             uint8 for E up to 256, else uint16
========== ================= ===================================================================================

A simulation gives rank r of R the r-th part of the consecutive tokens of a step. So a file of one rank represents the
tokens of all ranks; records of several ranks are concatenated along N, rank 0 first.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor, nn

from pymoe.ep.simulate.block import Block, at_least
from pymoe.nn.choices import Removable, choosing_layers
from pymoe.nn.options import check_number
from pymoe.ops import gate_topk

FORMAT = 1
SAMPLED_TOKENS = 65_536
"""Largest number of tokens that are drawn for a step, on all ranks together; results for more tokens are scaled up."""
SAMPLED_LAYERS = 3
"""Number of layers that are drawn; the popular experts differ between layers."""
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
        """Return N, the number of tokens of a step on all ranks together."""
        return self.choices[0][0].shape[0]

    @property
    def top_k(self) -> int:
        """Return K, the number of experts per token."""
        return self.choices[0][0].shape[1]

    def with_past(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (previous step's choices, choices) for every layer and step but the first; a single step is its own
        past.
        """
        for steps in self.choices:
            yield from pairwise(steps) if len(steps) > 1 else ((steps[0], steps[0]),)


def source_ranks(tokens: int, ranks: int) -> Tensor:
    """Return (N,) int64, the rank of each token. Each rank has consecutive tokens, as many as others or one more."""
    return torch.arange(tokens) * ranks // tokens


def uniform(block: Block, tokens: int, *, seed: int = 0) -> Load:
    """Return a load in which all experts are equally likely. See :func:`zipf` for the arguments."""
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
    check_number("zipf", "exponent", exponent, minimum=0)
    logits = -exponent * torch.arange(1, block.experts + 1).log()
    return _drawn(f"Zipf with exponent {exponent:g}", block, tokens, logits, seed)


def recorded(block: Block, file: str | Path) -> Load:
    """Return the load of a file that :class:`LoadRecorder` wrote.

    Args:
        block: its E and K must match the file.
        file: see :mod:`pymoe.ep.simulate.loads` for its format.

    Raises:
        ValueError: the file is not a recorded load, or has another format, E or K.
        OSError: the file cannot be read.
    """
    try:
        with np.load(file, allow_pickle=False) as found:
            form, experts = int(found["format"]), int(found["experts"])
            names, choices = found["layers"], torch.from_numpy(found["choices"].astype(np.int64))
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as error:
        got = f"{type(error).__name__}: {error}" if zipfile.is_zipfile(file) else "another kind of file"
        raise ValueError(
            f"{file}: expected a file of recorded loads (.npz), as LoadRecorder.save writes it, got {got}"
        ) from None
    if form != FORMAT:
        raise ValueError(f"{file}: expected format {FORMAT}, got {form}")
    if choices.dim() != 4 or choices.shape[1] != len(names) or not choices.numel():
        raise ValueError(f"{file}: expected choices (S, {len(names)}, N, K), got {tuple(choices.shape)}")
    if (experts, choices.shape[3]) != (block.experts, block.choices):
        raise ValueError(
            f"{file}: expected loads of {block.experts} experts and {block.choices} choices ({block.title}), got "
            f"{experts} experts and {choices.shape[3]} choices"
        )
    steps, layers, tokens, _ = choices.shape
    title = f"recorded in {Path(file).name}: {layers} layers, {steps} steps of {tokens} tokens"
    try:
        return Load(title, tuple(tuple(choices[:, layer]) for layer in range(layers)), experts)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def load_of(text: str, block: Block, tokens: int, *, seed: int = 0) -> Load:
    """Return the load that ``text`` names: ``uniform``, ``zipf:EXPONENT``, or the path of a recorded load.

    A recorded load has its own number of tokens. Raise ValueError if ``text`` does not name a load or the load does not
    fit the block, and OSError if the file cannot be read.
    """
    kind, colon, number = text.partition(":")
    if text == "uniform":
        return uniform(block, tokens, seed=seed)
    if kind == "zipf" and colon:
        try:
            return zipf(block, tokens, float(number), seed=seed)
        except ValueError:
            raise ValueError(f"load: expected zipf:EXPONENT with a number of at least 0, got {text!r}") from None
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


class LoadRecorder:
    """Records the choices of a model's routers within its ``with`` blocks; each block is one step::

        recorder = LoadRecorder(model)
        for inputs, targets in batches:
            with recorder:
                loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
        recorder.save("loads.npz")

    The tokens of several forwards in one block (micro-batches) are concatenated into one step. The backward must be
    outside of the block: under activation checkpointing it runs forwards again. Outside of its blocks the recorder
    costs nothing; inside it copies the choices to the CPU, which waits for the device.

    Args:
        model: a model with at least one :class:`pymoe.nn.MoE`, or one of transformers whose experts are behind its
            interface, after the import of :mod:`pymoe.integrations.transformers`. All layers must have the same E and
            K; for models of transformers, K is known after the first step.

    Raises:
        ValueError: the model has no such layer, or layers of several sizes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = choosing_layers("LoadRecorder", model)
        sizes = {(layer.num_experts, layer.top_k) for layer in self.layers.values()}
        if len(sizes) != 1:
            found = ", ".join(f"E {experts} K {top_k}" for experts, top_k in sorted(sizes, key=str))
            raise ValueError(f"LoadRecorder: expected a model whose MoE layers have one E and one K, got {found}")
        ((self.experts, self.top_k),) = sizes
        self.steps: list[Tensor] = []
        self._seen: dict[str, list[Tensor]] = {}
        self._hooks: list[Removable] = []

    def __enter__(self) -> LoadRecorder:
        """Begin a step: record the choices of all routers until the end of the block."""
        if self._hooks:
            raise RuntimeError("LoadRecorder: expected one block at a time, got a block within another")
        self._seen = {name: [] for name in self.layers}
        for name, layer in self.layers.items():

            def keep(experts_TK: Tensor, name: str = name) -> None:
                self._seen[name].append(experts_TK.detach().to("cpu", torch.int32))

            self._hooks.append(layer.observe(keep))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the step and keep it, unless the block raised.

        Raise ValueError if a layer had no tokens, or another number of tokens than other layers or earlier steps, or if
        the layers differ in K.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if kind is not None:
            return
        tokens = {name: sum(len(part) for part in parts) for name, parts in self._seen.items()}
        expected = self.steps[0].shape[1] if self.steps else next(iter(tokens.values()))
        for name, number in tokens.items():
            if number != expected or not number:
                raise ValueError(f"LoadRecorder: expected {expected or 'some'} tokens in layer {name}, got {number}")
        choices = {part.shape[1] for parts in self._seen.values() for part in parts}
        if self.top_k is None and len(choices) == 1:
            (self.top_k,) = choices
        if choices != {self.top_k}:
            raise ValueError(f"LoadRecorder: expected layers with one K, got {sorted(choices)} choices a token")
        self.steps.append(torch.stack([torch.cat(parts) for parts in self._seen.values()]))

    def save(self, file: str | Path) -> None:
        """Write the recorded steps; raise ValueError if there is none."""
        if not self.steps:
            raise ValueError("LoadRecorder: expected at least one recorded step, got none")
        narrow = np.uint8 if self.experts <= 256 else np.uint16
        with Path(file).open("wb") as stream:  # numpy would add a suffix to a name
            np.savez_compressed(
                stream,
                format=np.int64(FORMAT),
                experts=np.int64(self.experts),
                layers=np.array(list(self.layers)),
                choices=torch.stack(self.steps).numpy().astype(narrow),
            )
