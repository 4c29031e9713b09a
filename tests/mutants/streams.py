"""Faults on the way from a CUDA tensor to a launch; tests/cuda_ptx/check_streams.py must notice them.

A fault (faults_streams.py) is compiled into the object that has its code, which is linked with the unharmed others.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults_streams import FAULTS
from planting import ROOT, Kind, StreamFault

PTX = ROOT / "tests" / "cuda_ptx"
sys.path[:0] = [str(ROOT / "tests"), str(PTX)]
import ptx_library  # noqa: E402


def run_tests(word: str, operators: Path | None = None) -> tuple[bool, str]:
    """Return whether the tests with this word in their name pass, and their output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PTX), str(ROOT / "tests"), str(ROOT)])}
    if operators is not None:
        environment["PYMOE_OPERATORS_ON_DEVICES"] = str(operators)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "cuda_ops", "-n", "0", "-k", word]
    done = subprocess.run(
        [*command, str(PTX / "check_streams.py")], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode == 0, done.stdout + done.stderr


def prepare(faults: Sequence[Any]) -> Path:
    """Build the operators and run the unharmed tests; return the operators' folder."""
    if ptx_library.find_nvcc() is None:
        raise LookupError("no nvcc: nothing was launched (checks passed: none)")
    operators, _ = ptx_library.build_on_devices()
    passed, output = run_tests("")
    if not passed:
        raise RuntimeError(f"the unharmed tests fail:\n{output[-3000:]}")
    return operators.parent


def finish(folder: Path, target: str, changes: dict[str, str]) -> None:
    """Run the command that makes ``target`` in ``folder``, with words of it changed."""
    ninja = Path(sys.executable).parent / "ninja"
    asked = [str(ninja) if ninja.exists() else "ninja", "-C", str(folder), "-t", "commands", "-s", target]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    words = [changes.get(word, word) for word in shlex.split(said)]
    words[1:1] = shlex.split(changes.get("", ""))
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{target}: does not compile:\n{done.stderr[-2000:]}")


def judge(fault: StreamFault, folder: Path) -> tuple[bool, str]:
    """Compile the object, link the operators and run the tests that must fail."""
    with tempfile.TemporaryDirectory() as place:
        overlay = Path(place)
        changed = overlay / fault.file
        changed.parent.mkdir(parents=True)
        changed.write_text(fault.planted())
        kernel = fault.source.endswith("_cuda")
        name = f"{'kernels' if kernel else 'tests'}_{fault.source}.o"
        made_in = ptx_library.FOLDER / f"compute_{ptx_library.ARCHITECTURE}" if kernel else folder
        harmed = str(overlay / name)
        finish(made_in, name, {name: harmed, f"{name}.d": f"{harmed}.d", "": f"-I{overlay / 'csrc'}"})
        finish(folder, "_ops.so", {str(made_in / name) if kernel else name: harmed, "_ops.so": f"{overlay}/_ops.so"})
        passed, output = run_tests(fault.word, overlay / "_ops.so")
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    return not passed and bool(failed), failed[0][:100] if failed else output[-200:]


KIND = Kind("streams", FAULTS, prepare, judge)
