"""Recorded loads: the choices of a model's routers in training, and the file in which they are kept.

**The format** is an ``.npz`` archive of numpy, read without pickle, with these arrays:

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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pymoe.nn import MoE

FORMAT = 1
MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class RecordedLoads:
    """Content of a file of recorded loads."""

    experts: int
    """E, the number of experts."""
    layers: tuple[str, ...]
    """(L,) names of the layers."""
    choices: Tensor
    """(S, L, N, K) int32 choices."""


class LoadRecorder:
    """Record the choices of a model's routers in the blocks that it guards; each block is one step::

        recorder = LoadRecorder(model)
        for inputs, targets in batches:
            with recorder:
                loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
        recorder.save("loads.npz")

    Several forwards in one block (micro-batches) are tokens of one step, one after the other. The backward must be
    outside of the block: under activation checkpointing it runs forwards again. Outside of its blocks the recorder
    costs nothing; inside it copies the choices to the CPU, which waits for the device.

    Args:
        model: a model with at least one :class:`pymoe.nn.MoE`; all of them must have the same E and K.

    Raises:
        ValueError: the model has no such layer, or layers of several sizes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = {name or "moe": layer for name, layer in model.named_modules() if isinstance(layer, MoE)}
        sizes = sorted({(layer.num_experts, layer.top_k) for layer in self.layers.values()})
        if len(sizes) != 1:
            found = ", ".join(f"E {experts} K {top_k}" for experts, top_k in sizes) or "no MoE layer"
            raise ValueError(f"LoadRecorder: expected a model whose MoE layers have one E and one K, got {found}")
        self.experts, self.top_k = sizes[0]
        self.steps: list[Tensor] = []
        self._seen: dict[str, list[Tensor]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> LoadRecorder:
        """Begin a step."""
        if self._hooks:
            raise RuntimeError("LoadRecorder: expected one block at a time, got a block within another")
        self._seen = {name: [] for name in self.layers}
        for name, layer in self.layers.items():

            def keep(router: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                self._seen[name].append(output[0].experts.detach().to("cpu", torch.int32))

            self._hooks.append(layer.router.register_forward_hook(keep))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the step and keep it, unless the block raised; raise ValueError if layers saw different tokens."""
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
        self.steps.append(torch.stack([torch.cat(parts) for parts in self._seen.values()]))

    def save(self, file: str | Path) -> None:
        """Write the recorded steps; raise ValueError if there is none."""
        if not self.steps:
            raise ValueError("LoadRecorder: expected at least one recorded step, got none")
        write_loads(file, RecordedLoads(self.experts, tuple(self.layers), torch.stack(self.steps)))


def write_loads(file: str | Path, loads: RecordedLoads) -> None:
    """Write a file of recorded loads, in the format described above; raise ValueError if parts do not fit."""
    choices = loads.choices
    if choices.dim() != 4 or choices.shape[1] != len(loads.layers) or not choices.numel():
        raise ValueError(f"write_loads: expected choices (S, {len(loads.layers)}, N, K), got {tuple(choices.shape)}")
    if not 1 <= loads.experts <= MOST_EXPERTS or int(choices.min()) < 0 or int(choices.max()) >= loads.experts:
        seen = f"{int(choices.min())} to {int(choices.max())} of {loads.experts}"
        raise ValueError(f"write_loads: expected choices among at most {MOST_EXPERTS} experts, got {seen}")
    narrow = np.uint8 if loads.experts <= 256 else np.uint16
    with Path(file).open("wb") as stream:  # numpy would add a suffix to a name
        np.savez_compressed(
            stream,
            format=np.int64(FORMAT),
            experts=np.int64(loads.experts),
            layers=np.array(loads.layers),
            choices=choices.numpy().astype(narrow),
        )


def read_loads(file: str | Path) -> RecordedLoads:
    """Read a file of recorded loads.

    Raises:
        ValueError: it is not such a file, or has another format.
        OSError: it cannot be read.
    """
    try:
        with np.load(file, allow_pickle=False) as found:
            form, experts = int(found["format"]), int(found["experts"])
            layers, choices = tuple(map(str, found["layers"])), found["choices"].astype(np.int64)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{file}: expected a file of recorded loads (.npz), got {type(error).__name__}: {error}"
        ) from None
    if form != FORMAT:
        raise ValueError(f"{file}: expected format {FORMAT}, got {form}")
    if choices.ndim != 4 or choices.shape[1] != len(layers) or not choices.size:
        raise ValueError(f"{file}: expected choices (S, {len(layers)}, N, K), got {choices.shape}")
    if choices.min() < 0 or choices.max() >= experts:
        raise ValueError(f"{file}: expected choices in 0..{experts - 1}, got {choices.min()} to {choices.max()}")
    return RecordedLoads(experts, layers, torch.from_numpy(choices).int())
