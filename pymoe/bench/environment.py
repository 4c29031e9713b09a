"""Facts about the machine and the build that are stored with measurements: no host names, no paths."""

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
    """Return the facts that a reader needs to judge a measurement.

    Returns:
        A flat dictionary: the versions of :func:`pymoe.build_info`; and for the machine the CPU's model and
        capabilities as torch reports them, the number of cores that this process may use, the number of torch's
        threads, the memory in GiB, the date, and the load averages of the last 1, 5 and 15 minutes (a load near or
        above the number of cores means that the machine is not quiet).
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
    """Return advice to install torch's CPU build, if its CUDA build is installed without a GPU or a toolkit to use it.

    Args:
        facts: the result of :func:`environment`.

    Returns:
        One line; None if torch is a CPU build, or if there is a GPU, CUDA kernels or nvcc.
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
    """Return the processor's name as the operating system gives it."""
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """Return the processor's features by their Linux names (``avx2``, ``avx512_bf16``, ...); empty on other systems
    and on Arm.
    """
    return (_field("/proc/cpuinfo", "flags") or "").split()


def memory_gib(field: str = "MemTotal") -> float | None:
    """Return the physical memory in GiB, or another field of /proc/meminfo; None if the system does not provide it."""
    kibibytes = _field("/proc/meminfo", field)
    return round(int(kibibytes.split()[0]) / 2**20, 1) if kibibytes else None


def _field(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)
