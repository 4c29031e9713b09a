"""A pytest plugin: ``pymoe._ops`` is the library whose CPU operators run the CUDA kernels on the emulator."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from library import build


def load(path: Path) -> None:
    """Import the library at ``path`` as pymoe._ops, before pymoe does."""
    if "pymoe" in sys.modules:
        raise RuntimeError("pymoe was imported before the plugin could take the place of its operators")
    loader = importlib.machinery.ExtensionFileLoader("pymoe._ops", str(path))
    spec = importlib.util.spec_from_file_location("pymoe._ops", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["pymoe._ops"] = module


load(build())
