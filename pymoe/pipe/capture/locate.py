"""The line of the user's code in which something happens that can be asked for afterwards alone."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Container
from types import FrameType
from typing import Any

from pymoe.pipe.capture.errors import is_users_file

__all__ = ["LineFinder"]


class LineFinder:
    """Within ``with finder:`` every line of the user's code is followed by the question whether it has happened.

    Args:
        has_happened: the question.
        files: of packages that count as the user's, those of the model.
    """

    def __init__(self, has_happened: Callable[[], bool], files: Container[str] = ()) -> None:
        self.place: str | None = None
        """``file:line, in function`` and the source line, once it has happened."""
        self._has_happened = has_happened
        self._files = files
        self._last: tuple[str, int, str] | None = None
        self._before: Any = None

    def __enter__(self) -> LineFinder:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        self._look()

    def _call(self, frame: FrameType, event: str, value: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in self._files and not is_users_file(file):
            return None
        self._look()
        return self._line

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        self._look()
        if event == "line":
            self._last = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        return self._line

    def _look(self) -> None:
        if self.place is None and self._last is not None and self._has_happened():
            file, line, function = self._last
            source = linecache.getline(file, line).strip()
            self.place = f"{file}:{line}, in {function}" + (f"\n    {source}" if source else "")
