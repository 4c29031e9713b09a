"""What a capture that fails says: which line of the user's code, why, and what to do instead."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch

__all__ = ["CaptureError", "capture_error"]

WAYS_OUT = (
    "Ways out: write the line so that it does not depend on values; name the module around it in `opaque=` (a type or "
    "a qualified name), and it is called as it is, uncut; or do without a capture: `Pipe(nn.Sequential(...))`, or "
    "stages of your own, `Pipe.from_stages`."
)

_REASONS = (
    (
        ("data-dependent", "DataDependent", "Could not guard on", "non-deterministic control flow", ".item()"),
        "a capture records one path through the code, and this line asks a tensor's value which to take",
    ),
    (
        ("Unsupported input type", "not a valid type", "is not supported", "Unsupported"),
        "a capture takes tensors, numbers, strings, None, and lists, tuples, dicts of them (and classes that are "
        "registered with torch.utils._pytree)",
    ),
)


class CaptureError(RuntimeError):
    """A model that cannot be captured; the message names the line of its code, the reason, and the ways out."""


def capture_error(error: BaseException) -> CaptureError:
    """The error for the user, from what ``torch.export`` raised."""
    place = _users_line(error.__traceback__)
    where = "The model cannot be captured.\n" if place is None else f"The model cannot be captured: {place}\n"
    return CaptureError(f"{where}Why: {_reason(error)}\n{WAYS_OUT}")


def _reason(error: BaseException) -> str:
    name, text = type(error).__name__, str(error).strip()
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = f"{name}: {first}" if first else name
    for words, reason in _REASONS:
        if any(word in name or word in text for word in words):
            return f"{reason} ({said})"
    return said


def _users_line(trace: TracebackType | None) -> str | None:
    """``file:line, in function`` and the source line of the innermost frame that is no library's."""
    frames = [
        frame for frame in traceback.extract_tb(trace) if not is_library(frame.filename) and frame.lineno is not None
    ]
    if not frames:
        return None
    frame = frames[-1]
    source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"{frame.filename}:{frame.lineno}, in {frame.name}" + (f"\n    {source}" if source else "")


_LIBRARIES = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[2]) + os.sep,
    sysconfig.get_path("stdlib") + os.sep + "contextlib.py",
    "<",
)


def is_library(file: str) -> bool:
    """Whether a file belongs to torch, to pymoe, or is no file."""
    return file.startswith(_LIBRARIES)
