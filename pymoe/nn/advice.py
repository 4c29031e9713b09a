"""What a user should hear once: settings that run without an error and do not do what they seem to."""

from __future__ import annotations

import warnings

MANY_STEPS = 100
"""In-place changes of a router's weight, at least one an optimizer step, after which a lack of balancing is told."""

_told: set[str] = set()


def tell_once(subject: str, message: str, stacklevel: int = 2) -> None:
    """Give a ``UserWarning`` the first time that ``subject`` comes up in this process.

    Args:
        subject: what the message is about; later ones about the same are not given.
        message: what happens, and what to do.
        stacklevel: as of ``warnings.warn``, seen from the caller.
    """
    if subject not in _told:
        _told.add(subject)
        warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
