"""Loads the native modules, and reports how they were built. If one cannot be loaded, the error gives the reason and a
remedy.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# Not "pymoe", because the package index has another project of that name.
DISTRIBUTION = "pymoe-runtime"
# The ID of the process that imported pymoe. A forked child compares its own ID with this one.
PROCESS = os.getpid()


def load_operators() -> ModuleType:
    """Import ``pymoe._ops``, which registers the operators under ``torch.ops.pymoe``.

    Raises:
        ImportError: the module is missing, or does not fit this Python or the installed torch; the message says what
            to run.
    """
    return _load("_ops", "operators")


def load_runtime() -> ModuleType:
    """Import ``pymoe._runtime``, which serving, parallel calls and pipelines need; operators and layers do not.

    Raises:
        ImportError: the module is missing or was built for another Python; the message says what to run.
    """
    return _load("_runtime", "runtime (serving, parallel calls, pipelines)")


def _load(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(f"pymoe.{name}")
    except ImportError as error:
        raise ImportError(_explain(name, what, error, Path(__file__).parent)) from error


def _explain(name: str, what: str, error: ImportError, package: Path) -> str:
    """Explain why ``pymoe.<name>`` cannot be loaded from the folder ``package``, and give one command as a remedy."""
    tree = package.parent
    in_source_tree = (tree / "setup.py").exists() and (tree / "csrc").is_dir()
    pip = f"{sys.executable} -m pip install"
    if in_source_tree:
        command = f'{pip} --no-build-isolation -e "{tree}"'
    else:
        command = f"{pip} --no-build-isolation --no-deps --force-reinstall PATH_OF_PYMOE_S_SOURCE_TREE"
    built = sorted(file.name for file in package.glob(f"{name}.*so"))
    fitting = {name + suffix for suffix in EXTENSION_SUFFIXES}
    version = f"CPython {platform.python_version()}"

    if not built and in_source_tree:
        reason = f"this source tree, {tree}, has not been built"
        if hidden := _installed_elsewhere(package):
            reason += f".\nIt hides the pymoe installed in {hidden}: use that from another folder, or build here"
    elif not built:
        reason = f"{package} has no {name} module"
    elif fitting.isdisjoint(built):
        reason = f"{', '.join(built)} was built for another Python than this, {version} ({EXTENSION_SUFFIXES[0]})"
    else:
        reason = f"it was found and not loaded: {error}"
        if _release(torch.__version__) < (2, 11):
            reason += f".\ntorch >= 2.11 is needed, found {torch.__version__}"
            command = f'{pip} "torch>=2.11"'
    return f"pymoe's {what} cannot be loaded: {reason}.\nRun\n    {command}"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _installed_elsewhere(package: Path) -> Path | None:
    """Return the parent folder of an installed and built pymoe other than ``package``; None if there is none."""
    for distribution in metadata.distributions(name=DISTRIBUTION):
        folder = Path(str(distribution.locate_file("pymoe"))).resolve()
        if folder != package.resolve() and any(folder.glob("_ops*so")):
            return folder.parent
    return None


def build_info() -> dict[str, Any]:
    """Return facts about the installed build and the current process, for bug reports.

    Returns:
        A dictionary: versions of pymoe, Python and torch (running and built against), the platform, whether there are
        CUDA kernels, their toolkit and architectures, the GPU, the compilers of the operators and of the runtime (None
        if the runtime cannot be loaded), the CPU instruction set in use (``baseline``, ``v3``, ``v4``, ``v4_bf16`` or
        ``amx``, on aarch64 ``baseline``, ``dotprod`` or ``i8mm``; the environment variable ``PYMOE_CPU_ISA`` may lower
        it), and torch's number of threads. Without CUDA kernels or a GPU, the facts about them are None or False.

    Example:
        >>> info = pymoe.build_info()
        >>> info["pymoe"], info["cpu_isa"] in ("baseline", "v3", "v4", "v4_bf16", "amx", "dotprod", "i8mm")
        ('0.1.0', True)
    """
    from pymoe import __version__

    operators = load_operators()
    try:
        runtime_compiler = load_runtime().compiler
    except ImportError:
        runtime_compiler = None
    return {
        "pymoe": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "built_with_torch": operators.torch,
        "cuda_kernels": bool(operators.cuda),
        "cuda_toolkit": operators.cuda or None,
        "cuda_architectures": operators.cuda_architectures or None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "compiler": operators.compiler,
        "runtime_compiler": runtime_compiler,
        "cpu_isa": operators.cpu_isa,
        "threads": torch.get_num_threads(),
    }


load_operators()
