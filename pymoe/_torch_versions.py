"""Warns if torch is newer than every version that was tested."""

from __future__ import annotations

import re
import warnings

NEWEST_TESTED = "2.15"


def warn_of_newer_torch(version: str) -> None:
    """Warn if ``version``, such as ``"2.15.0+cpu"``, is of a later (major or minor) release than every tested one."""
    if _release(version) > _release(NEWEST_TESTED):
        warnings.warn(
            f"pymoe was tested with torch up to {NEWEST_TESTED}, and this is torch {version}: it uses private names of "
            "torch, which may do something else by now. Run its tests with this torch before you rely on results",
            stacklevel=3,
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
