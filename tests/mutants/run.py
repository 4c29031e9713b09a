"""Breaks the operators on purpose, one fault at a time, and names the test that notices.

    python tests/mutants/run.py [WORD ...]     # all faults, or those whose name contains a word

Works on a copy of the tree in build/mutants. A fault that no test notices ends the run with status 1, and so does one
that no longer fits the sources: faults.py then needs a new one. Not a part of the test suite: every fault compiles a
kernel and takes half a minute or more.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from faults import FAULTS

ROOT = Path(__file__).parents[2]
TREE = ROOT / "build" / "mutants" / "tree"


def refresh():
    """Bring the copy up to date; only files that differ are written, so that ninja rebuilds little."""
    for folder in ("csrc", "pymoe", "tests"):
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


def build():
    environment = {**os.environ, "PYMOE_CUDA": "0", "MAX_JOBS": os.environ.get("MAX_JOBS", "2")}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stdout[-3000:] + result.stderr[-3000:])


def first_failure(tests):
    """The first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    if result.returncode == 5:
        raise RuntimeError("no test was chosen")
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", result.stdout, re.MULTILINE)
    return failed.group(1) if failed else f"pytest ended with {result.returncode}: {result.stdout[-300:]}"


def main(words):
    refresh()
    build()
    survivors = 0
    for fault in FAULTS:
        if words and not any(word in fault.name for word in words):
            continue
        start = time.monotonic()
        path = TREE / fault.file
        text = path.read_text() if path.exists() else ""
        try:
            changed = fault.planted(text)
        except ValueError as error:
            verdict = f"DOES NOT FIT the sources: {error}"
        else:
            path.write_text(changed)
            try:
                build()
                found = first_failure(fault.tests)
            except RuntimeError as error:
                found, verdict = None, f"NOT TRIED: {error}"
            else:
                verdict = f"found by {found}" if found else "SURVIVES"
            finally:
                path.write_text(text)
        survivors += not verdict.startswith("found")
        print(f"{fault.name}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    build()
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
