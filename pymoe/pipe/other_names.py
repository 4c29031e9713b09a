"""Keyword arguments under the names that other packages use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def also_called(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a decorator: the function takes keywords under other names, too, ``also_called(other="its own")``.

    Calls raise TypeError if they give one argument under both names.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for other, name in names.items():
                if other in kwargs:
                    if name in kwargs:
                        raise TypeError(f"{function.__name__}: {other} is another name of {name}, got both")
                    kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return call

    return decorate
