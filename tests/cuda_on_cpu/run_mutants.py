"""Plants faults in the CUDA kernels, one at a time, and looks whether the emulated tests notice.

    python tests/cuda_on_cpu/run_mutants.py [WORD ...]     # those whose name contains one of the words

A fault (mutants.py) is compiled into the tests of its kernel, in the build that is to notice it: plain (values, and the
emulator's own checks), address or thread (sanitizers). The unharmed tests must pass first. Of every 20 faults, 19 must
be noticed. The result is printed and written to build/cuda/mutants.md. Nothing in the source tree is changed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutants import FAULTS, Fault

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "build" / "cuda" / "mutants.md"
VARIANTS = {"values": ("plain", ""), "address": ("address", "address"), "thread": ("thread", "thread")}
LEAST_FAULTS, LEAST_SHARE = 20, 0.95
SECONDS = 180
ENVIRONMENT = {
    **os.environ,
    "TSAN_OPTIONS": "exitcode=66 halt_on_error=1",
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# How a run ends that has noticed something; the first text that its output contains says what.
SIGNS = {
    "ThreadSanitizer: data race": "data race",
    "AddressSanitizer: ": "address error",
    "runtime error: ": "undefined behaviour",
    "emulator: ": "broken synchronisation",
    "Status: FAILURE": "wrong values",
}


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    noticed: bool
    by: str
    seconds: float


def build(how: str) -> Path:
    """Build the emulated tests of a variant; returns its folder."""
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
    """How the variant compiles ``source``, without the names of source and object."""
    for entry in json.loads((folder / "compile_commands.json").read_text()):
        if Path(entry["file"]) == source:
            words = shlex.split(entry["command"])
            return words[: words.index("-o")]
    raise RuntimeError(f"{source} is not in {folder}/compile_commands.json")


def run_tests(program: Path, fault: Fault) -> tuple[int, str]:
    """Exit status and output of the fault's tests; a hang counts as status 124."""
    command = [str(program), f"--source-file=*test_{fault.tests}.cpp", "--abort-after=1"]
    try:
        result = subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    return result.returncode, result.stdout + result.stderr


def plant(fault: Fault, folder: Path, place: Path) -> Path:
    """The test program with the fault in it, made in ``place``."""
    text = fault.planted((ROOT / fault.file).read_text())
    changed = place / fault.file
    changed.parent.mkdir(parents=True)
    changed.write_text(text)
    source = ROOT / (fault.file if fault.file.endswith(".cu") else f"csrc/kernels/{fault.tests}_cuda.cu")
    planted = changed if fault.file.endswith(".cu") else source
    command = compile_command(folder, source)
    # The changed file is found first, also where it is a header.
    compile_line = [
        *command[:1],
        f"-I{place / 'csrc'}",
        *command[1:],
        "-O0",  # a third of the compiler's time, which is most of it
        "-o",
        str(place / "kernel.o"),
        "-c",
        str(planted),
    ]
    finish(compile_line, fault)
    objects = [
        path
        for part in ("tests", "kernels")
        for path in (folder / f"CMakeFiles/pymoe_emulated_{part}.dir").rglob("*.o")
    ]
    objects += [
        path for part in ("emulator", "fibers") for path in (folder / f"CMakeFiles/pymoe_{part}.dir").rglob("*.o")
    ]
    others = [str(path) for path in objects if path.name != f"{source.name}.o"]
    sanitize = [word for word in command if word.startswith("-fsanitize=")]
    program = place / "tests"
    finish([command[0], *sanitize, *others, str(place / "kernel.o"), str(folder / "libpymoe_core.a"), "-pthread",
            "-o", str(program)], fault)  # fmt: skip
    return program


def finish(command: list[str], fault: Fault) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{fault.name}: does not compile:\n{result.stderr[-3000:]}")


def judge(fault: Fault, folder: Path) -> Outcome:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        status, output = run_tests(plant(fault, folder, Path(place)), fault)
    by = next((meaning for sign, meaning in SIGNS.items() if sign in output), "crash or hang")
    return Outcome(fault, status != 0, by if status != 0 else "-", time.monotonic() - start)


def main() -> int:
    words = sys.argv[1:]
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    folders = {how: build(how) for how in sorted({fault.how for fault in faults})}
    unharmed = {(fault.how, fault.tests): fault for fault in faults}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        healthy = list(
            pool.map(lambda one: run_tests(folders[one.how] / "pymoe_emulated_tests", one), unharmed.values())
        )
        for fault, (status, output) in zip(unharmed.values(), healthy, strict=True):
            if status != 0:
                print(f"error: the unharmed tests of {fault.tests} fail ({fault.how}):\n{output[-3000:]}")
                return 1
        outcomes = list(pool.map(lambda fault: judge(fault, folders[fault.how]), faults))
    rows = ["| fault | file | build | noticed | as |", "|---|---|---|---|---|"]
    for one in outcomes:
        fault = one.fault
        print(
            f"{'noticed ' if one.noticed else 'SURVIVED'} {fault.name} ({fault.how}: {one.by}, {one.seconds:.0f} s)",
            flush=True,
        )
        rows.append(
            f"| {fault.name} | {Path(fault.file).name} | {fault.how} | {'yes' if one.noticed else 'NO'} | {one.by} |"
        )
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text("\n".join(rows) + "\n")
    noticed = sum(one.noticed for one in outcomes)
    enough = noticed >= LEAST_SHARE * len(outcomes) and (bool(words) or len(outcomes) >= LEAST_FAULTS)
    print(f"{'checks passed' if enough else 'error'}: {noticed} of {len(outcomes)} planted faults noticed")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
