"""Compiles the C++ tests for aarch64, runs them by QEMU, and compares results with those of this machine's processor.

    python tests/aarch64/check.py        # builds in build/cpp/aarch64/, build/cpp/aarch64_address/ and build/cpp/plain/

The compiler and the emulator are packages of Debian, which tests/system_packages.sh installs if it may
(INSTALL_SYSTEM_PACKAGES=0: it does not). Without them nothing is tested, and the output says so.

The C++ tests run with every instruction set of aarch64, and some of those of kernels once more under AddressSanitizer
and UBSan. tests/aarch64/results.cpp then runs on both architectures, with every instruction set of each, and on aarch64
also under these sanitizers; all runs must print the same hashes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
EMULATED, SANITIZED, NATIVE = (ROOT / "build" / "cpp" / name for name in ("aarch64", "aarch64_address", "plain"))
TOOLCHAIN = f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/tests/aarch64/toolchain.cmake"
EMULATOR = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", "-cpu"]
JOBS = os.cpu_count() or 2

PROCESSORS = [
    ("cortex-a72", "", "baseline"),
    ("neoverse-n1", "baseline", "baseline"),
    ("neoverse-n1", "", "dotprod"),
    ("max", "dotprod", "dotprod"),
    ("max", "", "i8mm"),
]
"""Processors that QEMU emulates, PYMOE_CPU_ISA, and the instruction set that must then be in use. A Cortex-A72 has no
instruction that Armv8.0 lacks, and a Neoverse N1 has FEAT_DotProd without FEAT_I8MM."""

FEW_SEEDS = "200"
"""Number of interleavings of each simulated scenario, which the emulator runs slowly."""

SANITIZERS = {"ASAN_OPTIONS": "detect_leaks=0"}  # LeakSanitizer stops threads by ptrace, which the emulator lacks


def run(*command: str | Path, **environment: str) -> None:
    print("$ " + " ".join(map(str, command)), flush=True)
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True)


def build(folder: Path, targets: list[str], *options: str) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", "-S", ".", "-B", folder, *generator, *options)
    run("cmake", "--build", folder, "-j", str(JOBS), "--target", *targets)


def results(command: list[str], isa: str) -> tuple[str, dict[str, str]]:
    """Return the instruction set in use and the hash of every case."""
    environment = {name: value for name, value in os.environ.items() if name != "PYMOE_CPU_ISA"} | SANITIZERS
    if isa:
        environment["PYMOE_CPU_ISA"] = isa
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found, *lines = done.stdout.splitlines()
    return found, dict(line.split(": ") for line in lines)


def compare() -> list[str]:
    """Run the program of hashes everywhere; return what differs."""
    _, expected = results([str(NATIVE / "pymoe_results")], "baseline")
    complaints = []
    runs = [(f"{platform.machine()}, {isa}", isa, [str(NATIVE / "pymoe_results")], "") for isa in ("v3", "v4", "amx")]
    for processor, isa, wanted in PROCESSORS:
        for folder, how in ((EMULATED, ""), (SANITIZED, ", under sanitizers"))[: 1 if isa else 2]:
            command = [*EMULATOR, processor, str(folder / "pymoe_results")]
            runs.append((f"{processor}, {wanted}{how}", isa, command, wanted))
    with ThreadPoolExecutor(JOBS) as pool:
        printed = list(pool.map(lambda its: results(its[2], its[1]), runs))
    for (name, _, _, wanted), (found, hashes) in zip(runs, printed, strict=True):
        if wanted not in ("", found):
            complaints.append(f"{name}: {found} is in use")
        if hashes.keys() != expected.keys():
            complaints.append(f"{name}: other cases")
        complaints += [f"{name}: {case}" for case, code in hashes.items() if expected.get(case) != code]
        print(f"{name}: {len(hashes)} results, {found} in use", flush=True)
    return complaints


def has_tools() -> bool:
    """Return whether the compiler and the emulator are there, after installing them if that is allowed."""
    packages = ["bash", "tests/system_packages.sh", "aarch64"]
    return subprocess.run(packages, cwd=ROOT, env={"INSTALL_SYSTEM_PACKAGES": "1", **os.environ}).returncode == 0


def main() -> int:
    """Build, test and compare; return 1 if anything fails."""
    if not has_tools():
        print("no compiler or no emulator for aarch64: nothing was tested on it (checks passed: none)")
        return 0
    build(EMULATED, ["pymoe_tests", "pymoe_results"], TOOLCHAIN)
    build(SANITIZED, ["pymoe_tests", "pymoe_results", "pymoe_canary"], TOOLCHAIN, "-DPYMOE_SANITIZE=address")
    build(NATIVE, ["pymoe_results"])
    for folder in (EMULATED, SANITIZED):
        run(
            *("ctest", "--test-dir", folder, "--output-on-failure", "-j", str(JOBS), "-E", "cuda_on_cpu"),
            PYMOE_SEEDS=FEW_SEEDS,
        )
    complaints = compare()
    for complaint in complaints:
        print(f"differs from {platform.machine()}, baseline: {complaint}")
    print(f"checks {'failed' if complaints else 'passed'}: results of kernels on aarch64 and {platform.machine()}")
    return 1 if complaints else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error}")
