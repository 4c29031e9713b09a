"""Compiles every CUDA kernel for the GPUs that pymoe is built for, and holds the compiler's report to the rules.

    python tests/cuda_on_cpu/compile_gate.py        # writes build/cuda/registers.md

Machine code for sm_80 and sm_90 and PTX, warnings as errors; no kernel may spill registers to memory. The report lists
registers, shared memory, stack and spills of each kernel. Without nvcc nothing can be checked, and it says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "cuda"
# As setup.py compiles them, and stricter.
FLAGS = [
    "-O3", "-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", "-lineinfo", "-Werror=all-warnings", "-Xptxas=-v",
    "-Xcompiler=-Wall,-Wextra",
    "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]",
]  # fmt: skip
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel for one architecture; sizes in bytes."""

    file: str
    name: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spilled: int


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [
        re.sub(r"\(anonymous namespace\)::|pymoe::|cuda::|^void ", "", line).split("(")[0] for line in text.splitlines()
    ]


def parse(report: str, file: str) -> list[Kernel]:
    """The kernels in ptxas' report of one file."""
    kernels = []
    parts = ENTRY.split(report)[1:]
    for name, architecture, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        # What follows is about device functions, if there are any; the kernel's own lines come first.
        frame, used = FRAME.search(text), USED.search(text)
        if frame is None or used is None:
            raise ValueError(f"{file}: ptxas' report of {name} is not understood:\n{text}")
        shared = SHARED.search(text)
        stack, stores, loads = map(int, frame.groups())
        kernels.append(
            Kernel(
                file, name, f"sm_{architecture}", int(used[1]), int(shared[1]) if shared else 0, stack, stores + loads
            )
        )
    return kernels


def compile_file(nvcc: str, source: Path) -> tuple[str, list[Kernel], float]:
    """Compile one file; returns the compiler's complaint, its kernels and the seconds it took."""
    start = time.monotonic()
    target = FOLDER / f"{source.stem}.o"
    command = [nvcc, *FLAGS, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    if result.returncode != 0:
        return f"{source.name}: {result.stdout}{result.stderr}", [], seconds
    return "", parse(result.stderr + result.stdout, source.name), seconds


def table(kernels: list[Kernel]) -> str:
    names = demangle([kernel.name for kernel in kernels])
    rows = [
        f"| {kernel.file} | `{name}` | {kernel.architecture} | {kernel.registers} | {kernel.shared} | {kernel.stack} "
        f"| {kernel.spilled} |"
        for kernel, name in zip(kernels, names, strict=True)
    ]
    head = ["| file | kernel | GPU | registers | static shared memory, B | stack, B | spilled, B |", "|" + "---|" * 7]
    return "\n".join([*head, *rows]) + "\n"


def main() -> int:
    nvcc = find_nvcc()
    if nvcc is None:
        print("no nvcc: the CUDA kernels were not compiled (checks passed: none)")
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    sources = sorted(ROOT.glob("csrc/kernels/*.cu"))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(lambda source: compile_file(nvcc, source), sources))
    kernels = [kernel for _, found, _ in results for kernel in found]
    complaints = [complaint for complaint, _, _ in results if complaint]
    complaints += [
        f"{one.file}: {one.name} spills {one.spilled} bytes on {one.architecture}" for one in kernels if one.spilled
    ]
    complaints += [
        f"{source.name}: no kernel was found in the report"
        for source, (bad, found, _) in zip(sources, results, strict=True)
        if not found and not bad
    ]
    text = table(kernels)
    (FOLDER / "registers.md").write_text(text)
    print(text)
    for source, (_, found, seconds) in zip(sources, results, strict=True):
        print(f"{source.name}: {len(found)} kernels (two architectures) in {seconds:.1f} s")
    for complaint in complaints:
        print(f"error: {complaint}")
    if complaints:
        return 1
    print(f"checks passed: {len(kernels)} kernels compiled without a warning, none spills")
    return 0


if __name__ == "__main__":
    sys.exit(main())
