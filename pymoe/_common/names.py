"""Errors for unknown names of arguments, options and attributes, with suggestions.

A name that another package uses for the same thing is either accepted (:func:`also_called`), or the error gives pymoe's
name for it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NONE: Mapping[str, str] = MappingProxyType({})
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def suggestion(name: str, known: Iterable[str], elsewhere: Mapping[str, str] = _NONE) -> str:
    """Return a clause for the end of an error message, such as ``": did you mean 'top_k'?"``.

    Return "" if no name is similar.

    Args:
        name: the name that does not exist.
        known: the names that exist.
        elsewhere: maps names that other packages use to the name in ``known`` that replaces each, or to a clause that
            says what to use. A misspelling of such a name counts as that name, unless a name in ``known`` is similar.
    """
    names = tuple(known)
    near = _nearest(name, names)
    misspelt = [] if near else _nearest(name, elsewhere, 0.85)
    meant = elsewhere.get(misspelt[0] if misspelt else name, "")
    if " " in meant:
        return f": {meant}"
    near = [meant] if meant in names else near
    return f": did you mean {' or '.join(map(repr, near))}?" if near else ""


def _nearest(name: str, names: Iterable[str], cutoff: float = 0.65) -> list[str]:
    """Return the name that is most similar to ``name``, followed by up to two others that are nearly as similar.

    Names with a similarity below ``cutoff`` (0 to 1) are left out; the list may be empty.
    """
    lower = {one.lower(): one for one in names}
    near = difflib.get_close_matches(name.lower(), lower, 3, cutoff)
    likeness = [difflib.SequenceMatcher(None, one, name.lower()).ratio() for one in near]
    return [lower[one] for one, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - 0.1]


def no_such_argument(owner: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] = _NONE) -> TypeError:
    """Return the error for a keyword argument that ``owner`` does not take; see :func:`suggestion` for ``known`` and
    ``elsewhere``.
    """
    names = tuple(known)
    hint = suggestion(name, names, elsewhere) or f": expected {', '.join(names)}"
    return TypeError(f"{owner}: there is no argument {name!r}{hint}")


def no_such_name(module: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] = _NONE) -> AttributeError:
    """Return the error for an attribute that ``module`` does not have; see :func:`suggestion` for ``known`` and
    ``elsewhere``.
    """
    # Names that begin with an underscore are only looked up by tools, for which a suggestion would be wasted work.
    hint = "" if name.startswith("_") else suggestion(name, known, elsewhere)
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def keywords_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the arguments that a function takes by keyword."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(one.name for one in parameters if one.kind in _BY_KEYWORD and one.name not in ("self", "cls"))


def explain_arguments(**elsewhere: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that makes a function raise :func:`no_such_argument` for a keyword argument that it does not
    take.

    This adds about a microsecond to each call, so use it for constructors and for functions that are not called in
    every training step.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        owner, names = function.__qualname__.removesuffix(".__init__"), keywords_of(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in names:
                    raise no_such_argument(owner, name, names, elsewhere)
            return function(*args, **kwargs)

        return call

    return decorate


def also_called(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that adds aliases for keyword arguments.

    With ``also_called(alias="name")``, a caller may pass ``alias=`` in place of ``name=``. A call that passes both
    raises TypeError.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for other, name in names.items():
                if other in kwargs:
                    if name in kwargs:
                        owner = function.__qualname__.removesuffix(".__init__")
                        raise TypeError(f"{owner}: {other} is another name of {name}, got both")
                    kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return call

    return decorate
