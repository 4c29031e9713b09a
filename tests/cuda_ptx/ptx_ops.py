"""A pytest plugin: ``pymoe._ops`` is the library whose CPU operators run the kernels' PTX (``ptx_library``)."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from ptx_library import build


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


PATH = build()
load(PATH)
runtime = ctypes.CDLL(str(PATH))
"""The functions of ``control_api.cpp`` and ``cases.cpp``."""
runtime.pymoe_ptx_launches.restype = ctypes.c_int64
runtime.pymoe_ptx_module.restype = ctypes.c_char_p
runtime.pymoe_ptx_counts.restype = ctypes.c_char_p


def pytest_sessionfinish() -> None:
    """Leave for ``run_ptx.py`` how often each kernel was launched in this process."""
    folder = os.environ.get("PYMOE_PTX_LAUNCHED")
    if folder:
        Path(folder, f"{os.getpid()}.txt").write_bytes(runtime.pymoe_ptx_counts())
