"""Plants faults in the CPU kernels and the operators, which pytest must detect in a copy of the tree under
build/mutants.

Test runs do not include these: compiling a kernel with a fault takes half a minute or more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults_python import FAULTS
from planting import RESULTS, ROOT, Kind, PythonFault

TREE = RESULTS / "tree"


def refresh() -> None:
    """Bring the copy up to date; only files that differ are written, so that ninja rebuilds little."""
    for folder in ("benchmarks", "csrc", "pymoe", "tests"):
        wanted = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        wanted = {path for path in wanted if "__pycache__" not in path.parts and path.suffix != ".so"}
        for path in wanted | {Path("setup.py"), Path("pyproject.toml")}:
            copy = TREE / path
            if not copy.exists() or copy.read_bytes() != (ROOT / path).read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, copy)
        for path in (TREE / folder).rglob("*"):
            relative = path.relative_to(TREE)
            if path.is_file() and relative not in wanted and path.suffix != ".so" and "__pycache__" not in path.parts:
                path.unlink()


def build() -> None:
    environment = {**os.environ, "PYMOE_CUDA": "0", "MAX_JOBS": os.environ.get("MAX_JOBS", "2")}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stdout[-3000:] + result.stderr[-3000:])


def first_failure(tests: Sequence[str]) -> str | None:
    """Return the first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--level=exhaustive", *tests]
    result = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    if result.returncode == 5:
        raise RuntimeError("no test was chosen")
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", result.stdout, re.MULTILINE)
    return failed.group(1) if failed else f"pytest ended with {result.returncode}: {result.stdout[-300:]}"


def prepare(faults: Sequence[Any]) -> None:
    """Bring the copy up to date and build it."""
    refresh()
    build()


def judge(fault: PythonFault, _: None) -> tuple[bool, str]:
    """Build the copy with the fault and run its tests there; the fault is noticed if one fails."""
    path = TREE / fault.file
    path.write_text(fault.planted())
    try:
        build()
        found = first_failure(fault.tests)
    finally:
        path.write_text((ROOT / fault.file).read_text())
    return (True, found) if found else (False, "-")


KIND = Kind("python", FAULTS, prepare, judge, at_once=1)
