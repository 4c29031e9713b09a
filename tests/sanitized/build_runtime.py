"""Builds the runtime with ThreadSanitizer, and runs Python with it.

    python tests/sanitized/build_runtime.py    # writes build/sanitized_runtime/_runtime.so; compiles only changed files

In the child process that :func:`run` starts, the library replaces ``pymoe._runtime`` (see runtime_driver.py). It also
holds race.cpp, which contains a deliberate data race.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from ninja_library import Source, build_library, compiler, runtime_sources  # noqa: E402

LIBRARY = ROOT / "build" / "sanitized_runtime" / "_runtime.so"
SUPPRESSIONS = Path(__file__).parent / "tsan_suppressions.txt"
SANITIZE = "-fsanitize=thread -fno-omit-frame-pointer"
RACE_FOUND = 66  # exit status


def build():
    """Compile the changed files and link; raise RuntimeError with the compiler's output if that fails."""
    sources = [*runtime_sources(), Source(Path(__file__).parent / "race.cpp")]
    return build_library(LIBRARY.parent, f"-O1 -g1 {SANITIZE}", sources, SANITIZE, "_runtime")


def run(*arguments, suppressions=SUPPRESSIONS):
    """Run ``python tests/sanitized/runtime_driver.py *arguments`` with the library; return the finished process."""
    found = subprocess.run([compiler(), "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    variables = {
        **os.environ,
        "LD_PRELOAD": found.stdout.strip(),
        "TSAN_OPTIONS": f"exitcode={RACE_FOUND}:suppressions={suppressions}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(ROOT / "tests/sanitized/runtime_driver.py"), str(LIBRARY), *arguments]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    print(build())
