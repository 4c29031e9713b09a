"""Errors of captures, which name the line of the user's code, the reason, and the alternatives."""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
import traceback
from pathlib import Path

import torch


class CaptureError(RuntimeError):
    """Says that a model cannot be captured, and names the line of its code, the reason and the alternatives."""


class BoundaryInside(CaptureError):
    """Says that a stage boundary lies inside a module that is called as a whole."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"a stage boundary lies inside {path!r}, which is opaque, called as a whole: it is listed in `opaque=`, or "
            "it has hooks or a state of its own that require it"
        )
        self.path = path


_ALTERNATIVES = (
    "Alternatives: list the module around the line in `opaque=` (its type or qualified name), so that it is called as "
    "a whole; rewrite the line; or do without a capture: `Pipe(nn.Sequential(...))`, or `Pipe.from_stages` with stages "
    "of your own."
)

_REASONS = (
    (
        ("GuardOnDataDependent", "DataDependentOutput", "data-dependent", "Could not guard on"),
        "the line branches on the value of a tensor, and a graph has one path for all values",
    ),
    (
        ("UnsupportedOperatorException", "DynamicOutputShapeException", "no fake impl", "Dynamic shape operator"),
        "the line calls an operator whose output shapes cannot be inferred",
    ),
    (
        (".numpy() is not supported", "Cannot access data pointer"),
        "the line takes the values of a tensor out of torch, and a graph has none",
    ),
)


def capture_error(error: BaseException, place: str | None = None) -> CaptureError:
    """Return a CaptureError for ``error``. Its message names the line of code, the reason and the alternatives.

    ``place``: the line, as :func:`describe_line` formats it; None: the innermost line of the user's code in the
    traceback.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    if not place and (lines := [frame for frame in frames if frame.lineno]):
        place = describe_line(lines[-1].filename, lines[-1].lineno or 0, lines[-1].name)
    where = f": {place}" if place else ""
    return CaptureError(f"the model cannot be captured{where}\nReason: {_reason(error)}.\n{_ALTERNATIVES}")


def branches_on_values(error: BaseException) -> bool:
    """Return whether ``error`` means that the model's code branches on the value of a tensor."""
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
        return (
            f"dynamic_shapes leaves dimensions free that the model's code fixes: {' '.join(causes).rstrip('.')}{hint}"
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = (f"{name}: {first}" if first else name).rstrip(".")
    for words, reason in _REASONS:
        if any(word in name or word in text for word in words):
            return f"{reason} ({said})"
    return said


def describe_line(file: str, line: int, function: str) -> str:
    """Return ``file:line, in function``, followed by the line itself."""
    source = linecache.getline(file, line).strip()
    return f"{file}:{line}, in {function}" + (f"\n    {source}" if source else "")


_LIBRARIES = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[2]) + os.sep,
    sysconfig.get_path("stdlib") + os.sep + "contextlib.py",
    "<",
)

_INTERACTIVE = ("<stdin>", "<python-input-", "<ipython-input-")
"""File names of code that is typed interactively: its functions and global variables are the user's."""


def is_library(file: str) -> bool:
    """Return whether a file is part of torch, pymoe or ``contextlib``, or generated code (other than typed input)."""
    return file.startswith(_LIBRARIES) and not file.startswith(_INTERACTIVE)


_PACKAGES = (
    *[sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    *site.getsitepackages(),
    site.getusersitepackages(),
)


def is_users_file(file: str) -> bool:
    """Return whether a file is the user's: neither part of Python or an installed package, nor generated code."""
    return not is_library(file) and not file.startswith(_PACKAGES)


_LIBRARY_NAMES = ("pymoe", "torch", "contextlib")


def stack_level() -> int:
    """Return the ``stacklevel`` that makes a warning of the caller point to the user's code.

    The frames are counted in every call, because torch's compiler adds some.
    """
    frame, level = sys._getframe(1), 1
    # Code that torch.fx has generated has no module name; it is skipped, too.
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch").split(".")[0] in _LIBRARY_NAMES:
        frame, level = frame.f_back, level + 1
    return level
