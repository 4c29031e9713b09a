"""Loads the native modules and says what they were built with."""

from __future__ import annotations

import platform
from types import ModuleType
from typing import Any

import torch


def load_operators() -> ModuleType:
    """Import ``pymoe._ops``, which registers the operators under ``torch.ops.pymoe``.

    Raises:
        ImportError: the module is missing or does not fit the installed torch; the message says what to do.
    """
    try:
        from pymoe import _ops
    except ImportError as error:
        raise ImportError(
            f"pymoe's operators could not be loaded ({error}). They are compiled when pymoe is installed, for "
            f"torch >= 2.11 (here: {torch.__version__}). Install again with\n"
            f"    pip install --no-build-isolation --force-reinstall --no-deps pymoe\n"
            f"or, in a checkout, pip install --no-build-isolation -e ."
        ) from error
    return _ops


def build_info() -> dict[str, Any]:
    """Facts of the installed build and of the process it runs in, for bug reports.

    Returns:
        A dictionary of strings and booleans: versions of pymoe, torch (running and built against), Python, CUDA
        toolkit and architectures of the compiled kernels, compiler, and the CPU instruction set in use
        (``baseline``, ``v3`` or ``v4``; the environment variable ``PYMOE_CPU_ISA`` may lower it).
    """
    from importlib.metadata import PackageNotFoundError, version

    from pymoe import _runtime

    operators = load_operators()
    try:
        package_version = version("pymoe")
    except PackageNotFoundError:
        package_version = "not installed (imported from a source tree)"
    return {
        "pymoe": package_version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "built_with_torch": operators.torch,
        "cuda_kernels": bool(operators.cuda),
        "cuda_toolkit": operators.cuda or None,
        "cuda_architectures": operators.cuda_architectures or None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "compiler": operators.compiler,
        "runtime_compiler": _runtime.compiler,
        "cpu_isa": operators.cpu_isa,
        "threads": torch.get_num_threads(),
    }


load_operators()
