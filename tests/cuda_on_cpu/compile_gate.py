"""Compiles every CUDA kernel for the GPUs that pymoe is built for, and checks the compiler's report.

    python tests/cuda_on_cpu/compile_gate.py        # writes build/cuda/registers.md

Kernels are compiled to machine code for every architecture that ships and to PTX, with the build's flags and with
warnings as errors; no kernel may spill registers to memory. The report lists registers, shared memory, stack and spills
of each kernel. Unchanged sources are not compiled again (tests/machine_code.py). Without nvcc nothing is checked, and
the output says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine_code import FOLDER, ROOT, Kernel, architectures, compile_all, complain, demangle, find_nvcc, parse


def table(kernels: list[Kernel]) -> str:
    """Return the kernels as a table in Markdown."""
    names = demangle([kernel.name for kernel in kernels])
    rows = [
        f"| {kernel.file} | `{name}` | {kernel.architecture} | {kernel.registers} | {kernel.shared} | {kernel.stack} "
        f"| {kernel.spilled} |"
        for kernel, name in zip(kernels, names, strict=True)
    ]
    head = ["| file | kernel | GPU | registers | static shared memory, B | stack, B | spilled, B |", "|" + "---|" * 7]
    return "\n".join([*head, *rows]) + "\n"


def main() -> int:
    """Compile and check the kernels; return 1 if a rule is broken."""
    nvcc = find_nvcc()
    if nvcc is None:
        print("no nvcc: the CUDA kernels were not compiled (checks passed: none)")
        return 0
    compiled = compile_all(nvcc, root=ROOT, folder=FOLDER)
    complaints = [one.complaint for one in compiled if one.complaint]
    wanted = architectures(nvcc)
    kernels = []
    for one in compiled:
        found = [] if one.complaint else parse(one.report, one.source.name)
        kernels += found
        missing = [name for name in wanted if name not in {kernel.architecture for kernel in found}]
        if missing and not one.complaint:
            complaints.append(f"{one.source.name}: no kernel was found in the report for {', '.join(missing)}")
        took = f"compiled in {one.seconds:.1f} s" if one.seconds else "compiled before"
        print(f"{one.source.name}: {len(found)} kernels ({len(wanted)} architectures), {took}")
    complaints += [
        f"{one.file}: {demangle([one.name])[0]} spills {one.spilled} bytes on {one.architecture}"
        for one in kernels
        if one.spilled
    ]
    (FOLDER / "registers.md").write_text(table(kernels))
    if complaints:
        return complain(complaints)
    print(f"checks passed: {len(kernels)} kernels for {', '.join(wanted)}, none with a warning, none spills")
    return 0


if __name__ == "__main__":
    sys.exit(main())
