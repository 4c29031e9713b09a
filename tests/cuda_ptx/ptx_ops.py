"""A pytest plugin: ``pymoe._ops`` is the library whose CPU operators run the kernels' PTX (``ptx_library``).

With PYMOE_PTX_ARCHITECTURE=100 it is the PTX of that architecture (``architectures.py``), otherwise the PTX of 90.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from import_as import import_as
from ptx_library import ARCHITECTURE, build

PATH = build()
import_as("pymoe._ops", PATH)
runtime = ctypes.CDLL(str(PATH))
"""The functions of ``control_api.cpp`` and ``cases.cpp``."""
runtime.pymoe_ptx_launches.restype = runtime.pymoe_ptx_executed.restype = ctypes.c_int64
runtime.pymoe_ptx_module.restype = ctypes.c_char_p
runtime.pymoe_ptx_counts.restype = ctypes.c_char_p

architecture = os.environ.get("PYMOE_PTX_ARCHITECTURE", ARCHITECTURE)


def module_of(kernel: str) -> str:
    """Return the running PTX module that has a kernel with ``kernel`` in its name."""
    text: str = runtime.pymoe_ptx_module(kernel.encode()).decode()
    assert text, f"no kernel {kernel}"
    return text


def replacements(architecture: str) -> list[tuple[str, str]]:
    """Return every running module, with its counterpart for another architecture, in which names are those of the
    library.
    """
    from architectures import texts, with_names_of

    own = {source: module_of(f"_{source}_cu_") for source in texts(architecture)}
    return [(own[source], with_names_of(text, own[source])) for source, text in texts(architecture).items()]


if architecture != ARCHITECTURE:
    for text, other in replacements(architecture):
        runtime.pymoe_ptx_replace(text.encode(), other.encode())


def pytest_sessionfinish() -> None:
    """Leave for ``run_ptx.py`` how often each kernel was launched in this process."""
    folder = os.environ.get("PYMOE_PTX_LAUNCHED")
    if folder:
        Path(folder, f"{os.getpid()}.txt").write_bytes(runtime.pymoe_ptx_counts())
