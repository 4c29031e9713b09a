"""The text, cut into a part to train on and the last tenth, held back; and the windows that each step reads.

The window that a step reads is a function of the seed and the step alone, so a resumed run needs no reader's state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_BACK = 0.1
REPEATED_PARAGRAPH_MIN = 80


class TextError(Exception):
    """The text cannot be trained on; the message says why in one line."""


@dataclass(frozen=True)
class Text:
    name: str  # a file's name without its folder
    sha256: str
    train: Tensor  # uint8, the first nine tenths
    validation: Tensor  # uint8, the last tenth


def load_text(path: str, context: int) -> Text:
    """Reads the file ``path``, or Python's own manual when ``path`` is empty."""
    if path:
        try:
            data, name = Path(path).read_bytes(), Path(path).name
        except OSError as error:
            raise TextError(f"--text {path}: {error.strerror}") from error
    else:
        data, name = python_manual(), "pydoc_data.topics"
    cut = len(data) - int(len(data) * HELD_BACK)
    if len(data) - cut <= context:
        needed = int((context + 1) / HELD_BACK) + 1
        raise TextError(
            f"{name} has {len(data):,} bytes, too few: with --context {context} the held-back last tenth must hold "
            f"one window, which takes {needed:,} bytes"
        )
    tensor = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    return Text(name, hashlib.sha256(data).hexdigest(), tensor[:cut], tensor[cut:])


def python_manual() -> bytes:
    """The topics of the Python manual that ``help()`` shows, joined.

    Topics include one another: about a fifth of the text stands in it twice. Only the first copy of a paragraph stays,
    or the held-back part would be full of sentences seen in training.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for paragraph in "\n".join(topics.values()).split("\n\n"):
        if len(paragraph) >= REPEATED_PARAGRAPH_MIN:
            if paragraph in seen:
                continue
            seen.add(paragraph)
        kept.append(paragraph)
    return "\n\n".join(kept).encode()


class Batches:
    """Shuffled windows of the training text: epoch after epoch, each from another offset and in another order."""

    def __init__(self, data: Tensor, context: int, batch_size: int, seed: int) -> None:
        self._data, self._context, self._batch_size, self._seed = data, context, batch_size, seed
        # One less than fit: then as many fit behind any offset below one window, target of the last byte included.
        self.windows_per_epoch = data.numel() // context - 1
        self._epoch, self._starts = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of step ``step`` (0-based), both (batch, context) int64."""
        first = step * self._batch_size
        starts = torch.stack([self._start(index) for index in range(first, first + self._batch_size)])
        windows = self._data[starts[:, None] + torch.arange(self._context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _start(self, index: int) -> Tensor:
        epoch, position = divmod(index, self.windows_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            offset = torch.randint(self._context, (1,), generator=generator)
            order = torch.randperm(self.windows_per_epoch, generator=generator)
            self._epoch, self._starts = epoch, offset + order * self._context
        return self._starts[position]


def validation_windows(data: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Consecutive windows over the held-back text, (windows, context): each byte is predicted once.

    What a byte can look back on ends at its window's start; the remainder that fills no window is left out.
    """
    count = (data.numel() - 1) // context
    flat = data[: count * context + 1].long()
    return flat[:-1].view(count, context), flat[1:].view(count, context)
