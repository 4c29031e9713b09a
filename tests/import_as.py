"""Replace one of pymoe's native modules by a library that the tests have built."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def import_as(name: str, path: str | Path) -> None:
    """Import the library at ``path`` as the module ``name``, such as ``"pymoe._ops"``, before pymoe does.

    Raises:
        RuntimeError: pymoe has been imported, with its own library.
    """
    if "pymoe" in sys.modules:
        raise RuntimeError(f"pymoe was imported before {path} could take the place of {name}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
