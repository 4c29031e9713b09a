"""Describes exceptions in one line, for logs and for notes on other exceptions."""

from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. Before Python 3.11, where exceptions have no notes, do nothing."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def describe_error(error: BaseException) -> str:
    """Return the type and message of an exception in one line, or only its type if printing the message fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
