"""Plants faults in the CUDA kernels, each of which the emulated tests must detect.

A fault (faults_cuda.py) is compiled into the tests of its kernel, in the build that must detect it: plain (wrong
values, and the emulator's own checks), address or thread (sanitizers).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from faults_cuda import FAULTS
from planting import ROOT, CudaFault, Kind

VARIANTS = {"values": ("plain", ""), "address": ("address", "address"), "thread": ("thread", "thread")}
SECONDS = 180
ENDLESS = 124
ENVIRONMENT = {
    **os.environ,
    "TSAN_OPTIONS": "exitcode=66 halt_on_error=1",
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# Texts that a run prints when it detects a fault, and their meanings; the first one found counts.
SIGNS = {
    "ThreadSanitizer: data race": "data race",
    "AddressSanitizer: ": "address error",
    "runtime error: ": "undefined behaviour",
    "emulator: ": "broken synchronisation",
    "Status: FAILURE": "wrong values",
    "no end within": "no end",
}
TARGETS = ("pymoe_emulated_tests", "pymoe_emulated_kernels", "pymoe_emulator", "pymoe_fibers")


def build(how: str) -> Path:
    """Build the emulated tests of a variant; return its folder."""
    name, sanitizer = VARIANTS[how]
    folder = ROOT / "build" / "cpp" / name
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), *generator, f"-DPYMOE_SANITIZE={sanitizer}"]
    for command in (configure, ["cmake", "--build", str(folder), "--target", "pymoe_emulated_tests", "-j", "2"]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{result.stdout[-4000:]}{result.stderr[-2000:]}")
    return folder


def compile_command(folder: Path, source: Path) -> list[str]:
    """Return the command by which the variant compiles ``source``, without the names of source and object."""
    for entry in json.loads((folder / "compile_commands.json").read_text()):
        if Path(entry["file"]) == source:
            words = shlex.split(entry["command"])
            return words[: words.index("-o")]
    raise RuntimeError(f"{source} is not in {folder}/compile_commands.json")


def run_tests(program: Path, fault: CudaFault, scales: Sequence[float] = (1.0,)) -> tuple[int, str]:
    """Run the fault's tests at each scale until they fail; return the last exit status and output.

    A scale is the share of every test's random cases. A run that does not end has the status ENDLESS.
    """
    command = [str(program), f"--source-file=*test_{fault.tests}.cpp", "--abort-after=1"]
    status, output = 0, ""
    for scale in scales:
        environment = {**ENVIRONMENT, "PYMOE_EMULATED_SCALE": str(scale)}
        try:
            result = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return ENDLESS, f"no end within {SECONDS} s"
        status, output = result.returncode, result.stdout + result.stderr
        if status != 0:
            break
    return status, output


def plant(fault: CudaFault, folder: Path, place: Path) -> Path:
    """Build the test program with the fault in ``place``."""
    text = fault.planted()
    changed = place / fault.file
    changed.parent.mkdir(parents=True)
    changed.write_text(text)
    source = ROOT / (fault.file if fault.file.endswith(".cu") else f"csrc/kernels/{fault.tests}_cuda.cu")
    if not source.exists():  # tests of a header without a kernel
        source = ROOT / f"tests/cuda_on_cpu/test_{fault.tests}.cpp"
    planted = changed if fault.file.endswith(".cu") else source
    command = compile_command(folder, source)
    # The changed file is found first, even if it is a header.
    compile_line = [
        *command[:1],
        f"-I{place / 'csrc'}",
        *command[1:],
        "-O0",  # compiling takes most of a run's time, and only a third as long without optimisation
        "-o",
        str(place / "kernel.o"),
        "-c",
        str(planted),
    ]
    finish(compile_line, fault)
    others = [str(path) for path in objects_of(fault, folder) if path.name != f"{source.name}.o"]
    sanitize = [word for word in command if word.startswith("-fsanitize=")]
    program = place / "tests"
    # The planted object comes first: of a header's function that several objects have, the linker keeps the first.
    finish([command[0], *sanitize, str(place / "kernel.o"), *others, str(folder / "libpymoe_kernels.a"), "-pthread",
            "-o", str(program)], fault)  # fmt: skip
    return program


def objects_of(fault: CudaFault, folder: Path) -> list[Path]:
    """Return only the object files that the emulated tests of one operator need, because linking takes time, too."""
    kernels = [f"{fault.tests}{part}_cuda.cu.o" for part in ("", "_backward", "_counted")]
    needed = ["main.cpp.o", f"test_{fault.tests}.cpp.o", *kernels, "emulator.cpp.o", "fiber.cpp.o"]
    # Search only these targets: if all were built, the plain tests have a main.cpp of their own.
    built = [path for target in TARGETS for path in (folder / "CMakeFiles" / f"{target}.dir").rglob("*.o")]
    return [path for path in built if path.name in needed]


def finish(command: list[str], fault: CudaFault) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{fault.name}: does not compile:\n{result.stderr[-3000:]}")


def prepare(faults: Sequence[Any]) -> dict[str, Path]:
    """Build the variants, and run the unharmed tests of each kernel in each."""
    folders = {how: build(how) for how in sorted({fault.how for fault in faults})}
    unharmed = list({(fault.how, fault.tests): fault for fault in faults}.values())
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = pool.map(lambda one: run_tests(folders[one.how] / "pymoe_emulated_tests", one), unharmed)
        for fault, (status, output) in zip(unharmed, results, strict=True):
            if status != 0:
                raise RuntimeError(f"the unharmed tests of {fault.tests} fail ({fault.how}):\n{output[-3000:]}")
    return folders


def judge(fault: CudaFault, folders: dict[str, Path]) -> tuple[bool, str]:
    """Build and run the kernel's tests with the fault; the fault is noticed if they fail."""
    with tempfile.TemporaryDirectory() as place:
        # A share of the cases runs first. Otherwise all cases of earlier tests would run before a later test fails.
        status, output = run_tests(plant(fault, folders[fault.how], Path(place)), fault, (0.2, 1.0))
    if status == 0:
        return False, "-"
    return True, f"{fault.how}: {next((meaning for sign, meaning in SIGNS.items() if sign in output), 'crash')}"


KIND = Kind("cuda", FAULTS, prepare, judge)
