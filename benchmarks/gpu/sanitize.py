"""Runs compute-sanitizer's tools on a small grid of calls, after checking each tool on a planted fault.

    python -m benchmarks.gpu.sanitize --output FILE.json --seconds 80

A tool that does not report its planted fault (gpu/canary.cu) does not work on this machine, and its silence proves
nothing about pymoe's kernels. Reports on pymoe's kernels and on other kernels, such as torch's, are counted separately.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.gpu.facts import cuda_home
from benchmarks.gpu.stages import ROOT, scrubbed, write_json

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
REPORT = re.compile(r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY|\s)(\S.*)$")
Run = Callable[[Sequence[str], float], "tuple[int | None, str]"]


def reports(text: str) -> list[str]:
    """Return the reports in the output of a tool, each with the lines that belong to it."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if REPORT.match(line):
            found.append([line])
        elif line.startswith("=========  ") and found:
            found[-1].append(line)
    return ["\n".join(lines) for lines in found]


def is_of_pymoe(report: str) -> bool:
    """Return whether a report is about a kernel of pymoe or, if it names no kernel, about a call that pymoe made.

    The host backtrace is ignored for kernels, since pymoe also launches torch's kernels.
    """
    found = report.split("Saved host backtrace")[0]
    return "pymoe" in (found if " at " in found else report)


def judge(tool: str, canary: str, grid_status: int | None, grid: str) -> dict[str, Any]:
    """Return the result of a tool, from the outputs of its runs on the canary and on the grid."""
    planted = [one for one in reports(canary) if f"pymoe_canary_{tool}" in one]
    if not planted:
        tail = [scrubbed(line) for line in canary.splitlines()[-5:]]
        return {"tool": tool, "status": "does not work here", "reason": "it missed the planted fault", "tail": tail}
    found = reports(grid)
    of_pymoe = [one for one in found if is_of_pymoe(one)]
    calls = re.search(r"^(\d+) calls$", grid, re.MULTILINE)
    record: dict[str, Any] = {
        "tool": tool,
        "status": "passed",
        "reason": "",
        "calls": int(calls[1]) if calls else 0,
        "reports": len(of_pymoe),
        "reports_of_others": len(found) - len(of_pymoe),
        "first": [scrubbed(line) for line in of_pymoe[0].splitlines()[:12]] if of_pymoe else [],
    }
    if of_pymoe:
        record |= {"status": "failed", "reason": f"{len(of_pymoe)} reports in pymoe's kernels"}
    elif grid_status is None:
        record |= {"status": "timed out", "reason": "the grid did not end in its time"}
    elif not calls:
        record |= {"status": "failed", "reason": "the grid did not end well"}
        record["tail"] = [scrubbed(line) for line in grid.splitlines()[-8:]]
    return record


def run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Return exit status (None after ``seconds``) and output of a command."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # gives every tensor its own allocation
    try:
        done = subprocess.run(
            list(command), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=max(seconds, 1.0), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as over:
        output = over.stdout or b""
        return None, output.decode(errors="replace") if isinstance(output, bytes) else output
    return done.returncode, done.stdout


def watch(tool: str, sanitizer: str, canary: str, seconds: float, run: Run, device: str) -> dict[str, Any]:
    """Run one tool: first on its canary, then on the grid."""
    command = [sanitizer, "--tool", tool]
    if tool == "racecheck":
        command += ["--racecheck-report", "all"]
    start = time.monotonic()
    _, planted = run([*command, canary, tool], seconds / 3)
    left = 0.95 * (seconds - (time.monotonic() - start))
    # The seconds given to the grid do not include the time a tool takes to start Python with torch.
    grid = [sys.executable, "-m", "benchmarks.gpu.grid", "--device", device, "--seconds", f"{max(left / 3, 1.0):.1f}"]
    status, text = (0, "") if not reports(planted) else run([*command, *grid], left)
    return judge(tool, planted, status, text)


def sanitize(
    sanitizer: str, canary: str, seconds: float, output: Path, run: Run = run, device: str = "cuda"
) -> list[dict[str, Any]]:
    """Run all tools in parallel, as most of their time goes into starting torch. Write the results after each."""
    records: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        for done in as_completed([pool.submit(watch, tool, sanitizer, canary, seconds, run, device) for tool in TOOLS]):
            record = done.result()
            records[record["tool"]] = record
            write_json(output, {"tools": [records[tool] for tool in TOOLS if tool in records]})
            print(f"{record['tool']}: {record['status']} {record['reason']}", flush=True)
    return [records[tool] for tool in TOOLS]


def sanitizer_program() -> str | None:
    """Return the path of compute-sanitizer, found on PATH or in the CUDA toolkit; None if there is none."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{cuda_home()}/bin")


def main() -> int:
    """Run the tools; return 0 if every tool works here and none reports a fault in pymoe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="for the grid")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    start, home, sanitizer = time.monotonic(), cuda_home(), sanitizer_program()
    if not sanitizer or not home:
        print(f"{'compute-sanitizer' if home else 'nvcc'} was not found")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        canary = f"{folder}/canary"
        source = str(ROOT / "benchmarks" / "gpu/canary.cu")
        subprocess.run([f"{home}/bin/nvcc", "-O1", "-lineinfo", "-arch=native", source, "-o", canary], check=True)
        left = options.seconds - (time.monotonic() - start)
        records = sanitize(sanitizer, canary, left, options.output, device=options.device)
    return int(any(record["status"] != "passed" for record in records))


if __name__ == "__main__":
    sys.exit(main())
