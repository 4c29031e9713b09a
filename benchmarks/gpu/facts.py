"""Collects facts about a GPU machine, without its host name or paths; each query runs in a separate process."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import ROOT

QUERY = (
    "name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "clocks.sm", "clocks.memory",
    "power.limit", "power.draw", "temperature.gpu", "utilization.gpu",
)  # fmt: skip
ASK_TORCH = """
import json, torch
facts = {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "gpu": None}
if torch.cuda.is_available():
    one = torch.cuda.get_device_properties(0)
    facts |= {"gpu": one.name, "capability": f"{one.major}.{one.minor}", "multiprocessors": one.multi_processor_count,
              "memory_gib": round(one.total_memory / 2**30, 1), "l2_mib": one.L2_cache_size / 2**20}
print(json.dumps(facts))
"""
PACKAGES = ("pytest", "xdist", "hypothesis", "pybind11", "ninja", "transformers", "triton")


def output_of(*command: str, seconds: float = 60.0) -> str:
    """Return the output of a command; an empty string if it fails or does not exist."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cuda_home() -> str | None:
    """Return the CUDA toolkit's folder, found in the same way as in setup.py."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    found = [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    for folder in [named] if named else [*found, "/usr/local/cuda"]:
        if Path(folder, "bin", "nvcc").exists() and Path(folder, "include", "cuda_runtime.h").exists():
            return folder
    return None


def facts() -> dict[str, Any]:
    """Return the hardware, the versions and the commit, which a reader needs to judge the report."""
    found: dict[str, Any] = json.loads(output_of(sys.executable, "-c", ASK_TORCH) or '{"gpu": null, "torch": null}')
    home = cuda_home()
    version = output_of(f"{home}/bin/nvcc", "--version") if home else ""
    found["nvcc"] = version.split("release ")[1].split(",")[0] if "release " in version else None
    found["compiler"] = (output_of("g++", "--version").splitlines() or [None])[0]
    found["python"] = ".".join(map(str, sys.version_info[:3]))
    found["cores"] = len(os.sched_getaffinity(0))
    found["nvidia_smi"] = nvidia_smi()
    found["commit"] = output_of("git", "rev-parse", "HEAD") or None
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", "--", "csrc", "pymoe")
    found["uncommitted"] = bool(changed)
    found["packages"] = [name for name in PACKAGES if importlib.util.find_spec(name)]
    return found


def nvidia_smi(seconds: float = 10.0) -> dict[str, str] | None:
    """Return what nvidia-smi says of the first GPU; None if it does not answer in time."""
    said = output_of("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", seconds=seconds)
    rows = list(csv.reader(said.splitlines()))
    return dict(zip(QUERY, (cell.strip() for cell in rows[0]), strict=False)) if rows else None


def slug(name: str) -> str:
    """Return the folder name for a GPU's name: ``nvidia-h200`` for ``NVIDIA H200``."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
