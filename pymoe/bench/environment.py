"""Facts of the machine and the build, as they are stored beside measurements: no host names, no paths."""

from __future__ import annotations

import os
import platform
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from pymoe import build_info


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge a measurement.

    Returns:
        A flat dictionary: the versions of :func:`pymoe.build_info`, and of the machine the CPU's model and
        capabilities as torch sees them, cores that this process may use, threads that torch uses, memory in GiB, and
        the load averages of the last 1, 5 and 15 minutes (a load near or above the cores means: not quiet).
    """
    facts = build_info()
    facts["platform"] = f"{platform.system()} {platform.machine()}"
    facts["cpu"] = cpu_model()
    facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    facts["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts["memory_gib"] = memory_gib()
    facts["load"] = [round(one, 2) for one in os.getloadavg()] if hasattr(os, "getloadavg") else None
    facts["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return facts


def hint(facts: dict[str, Any]) -> str | None:
    """Return how to get torch's CPU build, if its CUDA build is installed without a GPU or a toolkit to use it.

    Args:
        facts: what :func:`environment` returned.

    Returns:
        One line; None where torch is a CPU build, or a GPU, CUDA kernels or nvcc is there.
    """
    if torch.version.cuda is None or facts["gpu"] or facts["cuda_kernels"]:
        return None
    if shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists():
        return None
    return (
        f"torch {torch.__version__} is a CUDA build, but neither a GPU nor nvcc was found; the CPU build does the same "
        f'here: pip install --force-reinstall --no-deps "torch=={torch.__version__.split("+")[0]}" --index-url '
        "https://download.pytorch.org/whl/cpu"
    )


def cpu_model() -> str:
    """The processor's name as the operating system gives it."""
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """The processor's features as Linux names them (``avx2``, ``avx512_bf16``, ...); empty where it does not say."""
    return (_field("/proc/cpuinfo", "flags") or "").split()


def memory_gib(field: str = "MemTotal") -> float | None:
    """Physical memory, in GiB, or another field of /proc/meminfo; None where the system does not say."""
    kibibytes = _field("/proc/meminfo", field)
    return round(int(kibibytes.split()[0]) / 2**20, 1) if kibibytes else None


def _field(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)
