"""What the examples need and may not find: checked once, before anything else is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

EXTRAS = ("rich", "matplotlib", "safetensors")


def require_pymoe() -> None:
    """Leaves with one line that holds the command to run when pymoe is not installed."""
    if importlib.util.find_spec("pymoe") is None:
        sys.exit("error: this example needs pymoe: python -m pip install --no-build-isolation -e .   (in the checkout)")


def require(names: Iterable[str] = EXTRAS, install: Iterable[str] | None = None) -> None:
    """Leaves with one line that holds the command to run when a package is missing.

    Args:
        names: what is imported.
        install: what brings it, if that is called otherwise.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(install or missing)
        sys.exit(f"error: this example needs {', '.join(missing)}: python -m pip install {packages}")
