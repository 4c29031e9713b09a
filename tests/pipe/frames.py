"""The call path from ``Pipe.step`` to a layer: ``python tests/pipe/frames.py`` prints the package's frames on it.

Frames are those of functions of pymoe that are on the stack of the thread that runs the layer, the outermost first:
inline on the caller's thread, and on a worker's thread; with the default options and in a recomputation.
"""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from unseen import unseen

import pymoe
from pymoe.pipe import Pipe, is_recomputing
from pymoe.pipe.execution import plan

PACKAGE = Path(pymoe.__file__).parent


class Frame(NamedTuple):
    """A frame of the package."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class Traced(nn.Module):
    """A layer that records the frames through which it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.found = unseen({})  # not part of the model's state, so recomputations record, too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = "inline" if threading.current_thread() is threading.main_thread() else "worker"
        self.found().setdefault(f"{where}, recomputed" if is_recomputing() else where, frames_of_this_thread())
        return self.linear(x)


def frames_of_this_thread() -> list[Frame]:
    """Return the frames of pymoe from ``Pipe.step``, or from the thread's beginning, to the caller."""
    found: list[Frame] = []
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            found.append(Frame(str(path.relative_to(PACKAGE.parent)), frame.f_lineno, frame.f_code.co_name))
            if found[-1].file == "pymoe/pipe/pipe.py" and found[-1].function == "step":
                break
        frame = frame.f_back
    return found[::-1]


def ways() -> dict[str, list[Frame]]:
    """Return the frames through which a layer was reached in a step with default options, inline and on threads."""
    layer = Traced()  # a middle stage: the first is on the caller's thread, and the last adds the loss
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), layer, nn.Linear(2, 2)), chunks=3)
    before = plan.ALWAYS_THREADS, plan.INLINE_LIMIT_S
    try:
        for plan.ALWAYS_THREADS, plan.INLINE_LIMIT_S in ((False, math.inf), (True, 0.0)):
            pipe.step(torch.randn(6, 2), target=torch.randn(6, 2), loss_fn=nn.functional.mse_loss)
    finally:
        plan.ALWAYS_THREADS, plan.INLINE_LIMIT_S = before
    return layer.found()


if __name__ == "__main__":
    for place, frames in ways().items():
        print(f"{place}: {len(frames)} frames in {len({frame.file for frame in frames})} files")
        for found in frames:
            print(f"    {found}")
