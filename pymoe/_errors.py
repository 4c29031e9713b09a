"""Describes exceptions for logs and for notes on other exceptions, and adds such notes."""

from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. Before Python 3.11, where exceptions have no notes, do nothing."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def describe_error(error: BaseException) -> str:
    """Return an exception as ``"Type: message"``, or only its type if converting the message to text fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
