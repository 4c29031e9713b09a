"""Runs the stages of ``benchmarks/gpu_report.sh``; benchmarks/README.md describes the files that it writes."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu.facts import cuda_home, facts, nvidia_smi, slug
from benchmarks.gpu.markdown import about, markdown
from benchmarks.gpu.sanitize import sanitizer_program
from benchmarks.gpu.stages import PASSED, ROOT, SECONDS, Stage, run_stages, write_json

LIMIT = {"cuda": 520.0, "cpu": 600.0}
"""Limit in seconds on the whole report. On a GPU it is below nine minutes, with 20 s to start Python and to write."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and write the report; return 0 if all passed, 1 if not, 2 for a wrong call, 3 without a GPU."""
    options = parse(arguments)
    if options.output and any(options.output.glob("*.json")) and not (options.output / "machine.json").exists():
        print(f"gpu_report: {options.output} holds JSON that no report wrote, and a report clears its folder")
        return 2
    start = time.monotonic()
    machine = facts() | {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "device": options.device}
    folder = options.output or default_folder(options.device, machine)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.json"), *folder.glob("*.unfinished"), *folder.glob("sonicmoe/*.json")):
        old.unlink()  # left by an earlier report
    write_json(folder / "machine.json", machine)
    if options.device == "cuda" and not machine["gpu"]:
        reason = f"torch {machine['torch']} sees no GPU" if machine["torch"] else "no working torch was found"
        (folder / "REPORT.md").write_text(
            markdown(folder, machine, [], f"No GPU was found: {reason}. Nothing was run.")
        )
        print(f"gpu_report: no GPU was found: {reason}. `--device cpu` runs the same stages on the CPU.")
        return 3
    stages = [one for one in all_stages(options.device, machine, folder) if chosen(one.name, options.stages)]
    limit = options.limit or LIMIT[options.device]
    if options.device == "cpu":  # the machine may be busy, so one stage may take all of the time
        stages = [replace(one, most=limit) for one in stages]
    outcomes = run_stages(stages, folder, limit - (time.monotonic() - start), reserve=5.0)
    machine["seconds"] = round(time.monotonic() - start, 1)
    machine["nvidia_smi_after"] = nvidia_smi(seconds=5.0) if options.device == "cuda" else None
    write_json(folder / "machine.json", machine)
    bad = [one for one in outcomes if one.status != PASSED]
    print("", *about(machine), sep="\n")
    print(f"\n{len(outcomes) - len(bad)} of {len(outcomes)} stages passed in {machine['seconds']:.0f} s")
    for one in bad:
        print(f"    {one.stage} {one.status}: {one.reason}", flush=True)
    (folder / "REPORT.md").write_text(markdown(folder, machine, [asdict(one) for one in outcomes], ""))
    print(f"report: {os.path.relpath(folder, ROOT)}/REPORT.md")
    return 1 if bad else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="gpu_report.sh", description="Build, prove and measure pymoe on a GPU.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a quick run of the same stages")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=f"for everything (default: {LIMIT})")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: build/gpu_NAME")
    parser.add_argument("--stages", default="", metavar="REGEX", help="only stages whose name matches")
    return parser.parse_args(arguments)


def default_folder(device: str, machine: dict[str, Any]) -> Path:
    """Return the default folder: one for each GPU, and one that all runs on the CPU overwrite."""
    if device == "cuda" and machine["gpu"]:
        return ROOT / "build" / f"gpu_{slug(machine['gpu'])}"
    return ROOT / "build" / "gpu_report"


def chosen(name: str, pattern: str) -> bool:
    """Return whether ``--stages`` selects this stage."""
    return bool(re.search(pattern, name))


def all_stages(device: str, machine: dict[str, Any], folder: Path) -> list[Stage]:
    """Return every stage with its reserved seconds and its time limit."""
    gpu = device == "cuda"
    no_compiler = "" if shutil.which("g++") or shutil.which("c++") else "no C++ compiler was found"
    no_nvcc = "nvcc was not found" if gpu and not cuda_home() else ""
    no_sanitizer = "" if sanitizer_program() else "compute-sanitizer was not found"
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    for_gpu = {"PYMOE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": machine["capability"]} if gpu else {}
    if gpu:
        for_gpu["NVCC_APPEND_FLAGS"] = "-lineinfo"  # lets compute-sanitizer name source lines
    emulator = [sys.executable, "tests/cuda_on_cpu/library.py"]
    equality = module("benchmarks.gpu.equality", "--device", device, "--output", folder / "equality.json")
    sanitizer = module("benchmarks.gpu.sanitize", "--device", device, "--output", folder / "sanitizer.json")
    peers = module("benchmarks.moe_layer", "--device", device, "--quick")
    jobs = {"MAX_JOBS": os.environ.get("MAX_JOBS", str(machine["cores"]))}
    return [
        Stage("build", "both native modules, in place", build, 90, 240,
              missing=no_compiler or no_nvcc, environment=for_gpu | jobs),
        Stage("emulator", "the library whose CPU operators run the CUDA kernels", emulator, 40, 100,
              missing=no_compiler, environment=jobs),
        Stage("equality", f"the same calls on the {'GPU' if gpu else 'CPU'} and on the emulator",
              [*equality, "--seconds", SECONDS if gpu else "10"], 40, 60, after=("build", "emulator")),
        tests("tests_operators", "operators against their references", device, machine, folder, 75, 170),
        tests("tests_layers", "gradients, compiled operators, layers, graphs", device, machine, folder, 50, 120),
        Stage("sanitizer", "compute-sanitizer over a small grid of calls",
              [*sanitizer, "--seconds", SECONDS if gpu else "120"], 60, 110, after=("build",),
              missing=no_nvcc or no_sanitizer),
        measurement("design_rows", "rates of the machine, and lines that have targets", device, folder, 20, 50),
        measurement("layer", "the layer: eager, in a graph, with torch alone", device, folder, 30, 60),
        measurement("layer_own_product", "the same with pymoe's own grouped product", device, folder, 20, 50,
                    PYMOE_TORCH_GROUPED_MM="0"),
        Stage("parts", "the router's product in its ways, and the kernels of a layer",
              module("benchmarks.gpu.parts", "--device", device, "--output", folder / "parts.json",
                     "--budget", 2 if gpu else 0.1), 10, 25, after=("build",), environment=PASSIVE),
        Stage("peers", "the layer beside torch and transformers",
              [*peers, "--output", str(folder), "--only", AT_ONCE], 20, 60, after=("build",), environment=PASSIVE),
        measurement("operators", "the other lines of the operators", device, folder, 30, 95),
        Stage("sonicmoe", "the layer beside SonicMoE, which compiles its kernels at the first call",
              [*peers, "--output", str(folder / "sonicmoe"), "--only", "sonicmoe"], 20, 60, after=("build",),
              environment=PASSIVE),
    ]  # fmt: skip


def module(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a Python module."""
    return [sys.executable, "-m", name, *map(str, arguments)]


AT_ONCE = "^(?!.*sonicmoe)"
"""The peers that start at once, which a peer that hangs or compiles for long must not keep from being measured."""
WITH_TARGETS = "gate_topk T(4096|16384) E128|build_routing T4096|(dispatch|combine) T4096 H7168"
LINES = {
    "design_rows": (WITH_TARGETS, "gate_topk T16384 E64"),
    "layer": ("^MoE", "^MoE T2048"),
    "layer_own_product": ("^MoE", "^MoE T2048"),
    "operators": (f"^(?!MoE|{WITH_TARGETS})", "^build_routing"),
}
"""The benchmark lines that each run measures: on a GPU, and on the CPU."""
BUDGETS = {"design_rows": 1.0, "layer": 1.5, "layer_own_product": 0.7, "operators": 0.3}


def measurement(
    name: str, about: str, device: str, folder: Path, reserved: float, most: float, **environment: str
) -> Stage:
    """Return a stage that runs pymoe.bench, which saves its results as it goes."""
    gpu = device == "cuda"
    lines = LINES[name][0 if gpu else 1]
    command = module("pymoe.bench", "run", "--device", device, "--filter", lines, "--json", folder / f"{name}.json")
    command += ["--limit", SECONDS, "--budget", str(BUDGETS[name] if gpu else 0.05)]
    return Stage(name, about, command, reserved, most, after=("build",), environment=PASSIVE | environment)


TESTS = {
    "tests_operators": (
        "errors gate_topk_semantics grouped_linear_semantics routing_semantics native_equals_reference determinism "
        "properties memory_safety cuda_indices",
        "gate_topk_semantics",
    ),
    "tests_layers": (
        "nn/ gpu/ ops/test_compile.py ops/test_gradients.py ops/test_opcheck.py test_bugs.py",
        "test_bugs.py",
    ),
}
"""The tests of each run: on a GPU, and on the CPU."""
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
COMPILED_IN_PLACE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Without this, each of many test processes would start as many compiler processes as there are cores."""


def tests(
    name: str, about: str, device: str, machine: dict[str, Any], folder: Path, reserved: float, most: float
) -> Stage:
    """Return a stage that runs pytest, in several processes if pytest-xdist is installed."""
    gpu = device == "cuda"
    files = TESTS[name][0 if gpu else 1].split()
    paths = [f"tests/{one}" if re.search(r"/|\.py$", one) else f"tests/ops/test_{one}.py" for one in files]
    if "hypothesis" not in machine["packages"]:
        paths = [one for one in paths if "properties" not in one]
    command = module("pytest", "-p", "benchmarks.gpu.tally", "-p", "no:cacheprovider", "--tb=short")
    if "xdist" in machine["packages"] and machine["cores"] > 2:
        command += ["-n", str(min(machine["cores"] - 1, 12)), "--dist=worksteal"]
    return Stage(
        name,
        about,
        [*command, "-m", "not slow and not build", "--device", device, *paths],
        reserved,
        most,
        after=("build",),
        missing="" if "pytest" in machine["packages"] else "pytest is not installed",
        environment=PASSIVE | COMPILED_IN_PLACE | {"TALLY": str(folder / f"{name}.json"), "OMP_NUM_THREADS": "2"},
    )


if __name__ == "__main__":
    sys.exit(main())
