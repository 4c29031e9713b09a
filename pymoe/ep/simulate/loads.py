"""Loads: the experts that the tokens of training steps chose, drawn from a distribution or recorded.

**Recorded loads** are stored in an ``.npz`` archive of numpy, read without pickle, with these arrays:

========== ================= ===================================================================================
format     () int64          1
experts    () int64          E
layers     (L,) unicode      names of the layers in the model
choices    (S, L, N, K) uint the distinct experts of each of N tokens, in S steps and L layers, before any capacity;
                             uint8 for E up to 256, else uint16
========== ================= ===================================================================================

A simulation divides the N tokens of a step into R consecutive parts, one for each rank. So the file of one rank can
represent the tokens of all ranks. To combine the files of several ranks, concatenate ``choices`` along N, in the order
of ranks.
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
"""Maximum number of tokens that are drawn for a step of all ranks; results for more tokens are scaled up."""
SAMPLED_LAYERS = 3
"""Number of layers that are drawn; each has other popular experts."""
SAMPLED_STEPS = 2
"""Number of steps that are drawn: the load of the first determines the placement of experts in the second."""


@dataclass(frozen=True)
class Load:
    """The experts that tokens chose, in several layers and steps."""

    title: str
    choices: tuple[tuple[Tensor, ...], ...]
    """(N, K) int64 for every layer and step: the K distinct experts of each token; tokens of rank 0 come first."""
    experts: int
    """E, the number of experts."""
    uniform: bool = False
    """True if every choice of K among all E experts was equally likely, as the formulas assume."""

    def __post_init__(self) -> None:
        """Raise ValueError unless all choices have the same shape (N, K), not empty, and values in 0..E-1."""
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
        """Return N, the number of tokens of all ranks in a step."""
        return self.choices[0][0].shape[0]

    @property
    def top_k(self) -> int:
        """Return K, the number of experts per token."""
        return self.choices[0][0].shape[1]

    def with_past(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (choices of the previous step, choices) for every layer and every step except the first.

        If there is a single step, it counts as its own previous step.
        """
        for steps in self.choices:
            yield from pairwise(steps) if len(steps) > 1 else ((steps[0], steps[0]),)


def source_ranks(tokens: int, ranks: int) -> Tensor:
    """Return (N,) int64, the rank of each token. Ranks get consecutive tokens, and equal numbers of them or nearly."""
    return torch.arange(tokens) * ranks // tokens


def uniform(block: Block, tokens: int, *, seed: int = 0) -> Load:
    """Return a load in which all experts are equally likely. :func:`zipf` describes the arguments."""
    return _drawn("uniform", block, tokens, torch.zeros(block.experts), seed)


def zipf(block: Block, tokens: int, exponent: float, *, seed: int = 0) -> Load:
    """Return a skewed load: the i-th most popular expert is drawn with odds of ``i ** -exponent``.

    A token's K experts are drawn one after another without replacement (Plackett-Luce), by adding Gumbel noise to the
    logarithms of the odds and taking the K largest; with groups, only those in the best groups count. Which experts are
    popular is random in each layer, and the same in all steps of a layer.

    Args:
        block: gives E, K and the groups.
        tokens: N, the number of tokens of all ranks; at most ``SAMPLED_TOKENS`` are drawn, and represent the others.
        exponent: at least 0. With 0 all experts are equally likely; with 1 the most popular of E = 128 experts gets
            18 % of the first choices.
        seed: the seed of the random numbers.

    Raises:
        TypeError: a number is of the wrong type.
        ValueError: ``tokens`` is below 1, or ``exponent`` is negative or not finite.
    """
    check_number("zipf", "exponent", exponent, minimum=0)
    logits = -exponent * torch.arange(1, block.experts + 1).log()
    return _drawn(f"Zipf with exponent {exponent:g}", block, tokens, logits, seed)


def recorded(block: Block, file: str | Path) -> Load:
    """Return the load in a file that :class:`LoadRecorder` has written.

    Args:
        block: its E and K must match those of the file.
        file: the path; :mod:`pymoe.ep.simulate.loads` describes the format.

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

    ``tokens`` and ``seed`` have no effect on a recorded load.

    Raises:
        ValueError: ``text`` does not name a load, or the load does not fit ``block``.
        OSError: the file cannot be read.
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
    """Records the choices of a model's routers. Each ``with`` block is one step::

        recorder = LoadRecorder(model)
        for inputs, targets in batches:
            with recorder:
                loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
        recorder.save("loads.npz")

    The tokens of several forwards in one block (micro-batches) are concatenated into one step. The backward pass must
    be outside of the block, because activation checkpointing would run forwards again in it. Inside its blocks the
    recorder copies the choices to the CPU, so the host waits for the device; outside of them it costs nothing.

    Args:
        model: a model with at least one :class:`pymoe.nn.MoE`, or a model of transformers whose experts are behind its
            interface, after the import of :mod:`pymoe.integrations.transformers`. All layers must have the same E and
            K. For models of transformers, K is checked at the end of each step.

    Raises:
        ValueError: the model has no such layer, or layers of several sizes, or the choice of one cannot be observed.
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
        """Begin a step: record the choices of all routers until the end of the ``with`` block.

        Raises:
            RuntimeError: the block is inside another block of the same recorder.
        """
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
        """End the step, and store it unless the block raised.

        Raises:
            ValueError: a layer had no tokens, or not as many as other layers or earlier steps; or layers differ in K.
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
        """Write the recorded steps to ``file``; raise ValueError if no step was recorded."""
        if not self.steps:
            raise ValueError("LoadRecorder: expected at least one recorded step, got none")
        narrow = np.uint8 if self.experts <= 256 else np.uint16
        with Path(file).open("wb") as stream:  # given a name, numpy would append ".npz"
            np.savez_compressed(
                stream,
                format=np.int64(FORMAT),
                experts=np.int64(self.experts),
                layers=np.array(list(self.layers)),
                choices=torch.stack(self.steps).numpy().astype(narrow),
            )
