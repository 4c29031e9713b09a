"""What a capture that fails says: which line of the user's code, why, and what to do instead."""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch

__all__ = [
    "BoundaryInside",
    "CaptureError",
    "asks_for_values",
    "capture_error",
    "is_library",
    "is_users_file",
    "stack_level",
]


class CaptureError(RuntimeError):
    """A model that cannot be captured; the message names the line of its code, the reason, and the ways out."""


class BoundaryInside(CaptureError):
    """A boundary of stages stands inside of a call that is made in one piece."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"a boundary of stages stands inside of {path!r}, which is called as it is, in one piece: the model has it "
            "named in `opaque=`, or it has hooks or a state of its own that need it"
        )
        self.path = path


_WAYS_OUT = (
    "Ways out: name the module around the line in `opaque=` (its type or qualified name), and it is called as it is, "
    "in one piece; write the line otherwise; or do without a capture: `Pipe(nn.Sequential(...))`, or stages of your "
    "own by `Pipe.from_stages`."
)

_REASONS = (
    (
        ("GuardOnDataDependent", "DataDependentOutput", "data-dependent", "Could not guard on"),
        "the line decides by the value of a tensor, and a graph has one path for all values",
    ),
    (
        ("UnsupportedOperatorException", "DynamicOutputShapeException", "no fake impl", "Dynamic shape operator"),
        "the line calls an operator that does not tell the shapes of its outputs",
    ),
    (
        (".numpy() is not supported", "Cannot access data pointer"),
        "the line takes the values of a tensor out of torch, and a graph has none",
    ),
)


def capture_error(error: BaseException, place: str | None = None) -> CaptureError:
    """The error for the user, from what ``torch.export`` or the model raised, and where that is, if it is known."""
    place = place or _users_line(error.__traceback__)
    where = "" if place is None else f": {place}"
    return CaptureError(f"the model cannot be captured{where}\nWhy: {_reason(error)}.\n{_WAYS_OUT}")


def asks_for_values(error: BaseException) -> bool:
    """Whether the model's code decides by the value of a tensor."""
    return any(word in type(error).__name__ for word in ("GuardOnDataDependent", "DataDependentOutput"))


def _reason(error: BaseException) -> str:
    name, text = type(error).__name__, str(error).strip()
    if isinstance(error, CaptureError):
        return text
    if text.startswith("Constraints violated"):
        lines = [line.strip() for line in text.splitlines()]
        causes = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
        fixes = [line for line in lines if " = " in line and line.split(" = ")[0].isidentifier()]
        hint = f"; torch suggests {', '.join(fixes)}" if fixes else ""
        return f"dynamic_shapes leaves more free than the model's code does: {' '.join(causes).rstrip('.')}{hint}"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = (f"{name}: {first}" if first else name).rstrip(".")
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


_TYPED = ("<stdin>", "<python-input-", "<ipython-input-")
"""What code is called that somebody types: its functions and global variables are the user's."""


def is_library(file: str) -> bool:
    """Whether a file belongs to torch, to pymoe, or is no file; code that was typed in is the user's."""
    return file.startswith(_LIBRARIES) and not file.startswith(_TYPED)


_PACKAGES = (
    *[sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    *site.getsitepackages(),
    site.getusersitepackages(),
)


def is_users_file(file: str) -> bool:
    """Whether it is none of an installed package, or of Python itself."""
    return not is_library(file) and not file.startswith(_PACKAGES)


def stack_level() -> int:
    """That of the caller's first frame outside of this package, for warnings."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level
