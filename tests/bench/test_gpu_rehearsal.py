"""Tests that run every stage of the GPU report on the CPU, with its own commands and programs.

What a stage needs and a test cannot have is replaced by stand-ins: a compiler that hands out the libraries that are
built already, also in place of the emulator's, and an nvcc and a compute-sanitizer that know the planted faults. The
report runs in a copy of the tree, because it builds in place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from limits import LONG

from pymoe import _native

ROOT = Path(__file__).parents[2]
STAGES = [
    "build", "emulator", "equality", "tests_operators", "tests_layers", "sanitizer", "design_rows", "layer",
    "layer_own_product", "parts", "peers", "operators", "sonicmoe",
]  # fmt: skip

COMPILER = """#!{python}
# Makes empty objects, and links them to a library that is there already. Everything else is left to the compiler.
import os, pathlib, shutil, sys
arguments = sys.argv[1:]
output = pathlib.Path(arguments[arguments.index("-o") + 1]) if "-o" in arguments else None
if output is not None and output.suffix == ".o":
    if "-MF" in arguments:
        pathlib.Path(arguments[arguments.index("-MF") + 1]).write_text(f"{{output}}:")
    output.write_text("")
elif output is not None and "-shared" in arguments:
    libraries = {libraries!r}
    shutil.copy(libraries[output.name.split(".")[0]], output)
    with open({log!r}, "a") as log:
        print(output.name, file=log)
else:
    os.execvp("c++", ["c++", *arguments])
"""
NVCC = """#!/bin/sh
# "Compiles" the canary to a file whose name compute-sanitizer knows.
case "$*" in
  *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
  *) for last; do :; done; echo > "$last" ;;
esac
"""
SANITIZER = """#!/bin/sh
# compute-sanitizer --tool NAME [options] PROGRAM ARGUMENTS: reports the canary's fault, and runs the grid.
tool=$2
shift 2
if [ "$1" = --racecheck-report ]; then shift 2; fi
echo "========= COMPUTE-SANITIZER"
case "$1" in
  */canary)
    echo "========= Fault"
    echo "=========     at pymoe_canary_$tool(int *)+0x90"
    ;;
  *) exec "$@" ;;
esac
"""


def written(file: Path, text: str) -> Path:
    """Write a program and return its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Return a copy of the tree without native modules, and the environment that holds the stand-ins."""
    folder = tmp_path_factory.mktemp("machine")
    tree = folder / "tree"
    unwanted = shutil.ignore_patterns(".git", ".venv", "build", "*.so", "__pycache__", ".*_cache", "docs", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    libraries = {
        "_ops": str(_native.load_operators().__file__),
        "_runtime": str(_native.load_runtime().__file__),
    }
    log = folder / "linked"
    compiler = written(folder / "compiler", COMPILER.format(python=sys.executable, libraries=libraries, log=str(log)))
    toolkit = folder / "cuda"
    written(toolkit / "bin" / "nvcc", NVCC)
    written(toolkit / "bin" / "compute-sanitizer", SANITIZER)
    (toolkit / "include").mkdir()
    (toolkit / "include" / "cuda_runtime.h").write_text("")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tree),
        "CXX": str(compiler),
        "CUDA_HOME": str(toolkit),
        "PYMOE_CUDA": "0",
        "OMP_NUM_THREADS": "1",
    }
    return tree, environment, log


def rehearse(machine, output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the report on the CPU in the copied tree."""
    tree, environment, _ = machine
    command = ["bash", "benchmarks/gpu_report.sh", "--device", "cpu", "--limit", str(4 * LONG), "--output", str(output)]
    return subprocess.run(
        [*command, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def outcomes(folder: Path) -> dict[str, str]:
    """Return the status of each stage."""
    found = [json.loads(file.read_text()) for file in folder.glob("stage_*.json")]
    return {one["stage"]: one["status"] for one in found}


@pytest.fixture(scope="module")
def rehearsal(machine, tmp_path_factory):
    """Return what a rehearsal of every stage printed, and its folder."""
    folder = tmp_path_factory.mktemp("rehearsal")
    return rehearse(machine, folder), folder


@pytest.mark.slow
def test_every_stage_runs_and_passes_on_stand_ins(machine, rehearsal):
    done, folder = rehearsal
    assert outcomes(folder) == dict.fromkeys(STAGES, "passed"), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^=== (\w+):", done.stdout, re.MULTILINE) == STAGES
    assert f"{len(STAGES)} of {len(STAGES)} stages passed" in done.stdout
    built = machine[2].read_text().split()
    assert sorted(name.split(".")[0] for name in built) == ["_ops", "_ops", "_runtime"]  # once for the emulator
    assert done.stdout.splitlines()[-1].endswith("REPORT.md")


@pytest.mark.slow
def test_every_stage_leaves_what_it_found(rehearsal):
    _, folder = rehearsal
    equality = json.loads((folder / "equality.json").read_text())["operators"]
    assert {"gate_topk", "grouped_linear", "combine"} <= set(equality)
    assert all(one["tensors"] == one["same_bits"] > 0 and not one["wrong"] for one in equality.values())
    for name in ("tests_operators", "tests_layers"):
        tally = json.loads((folder / f"{name}.json").read_text())
        assert tally["finished"]
        assert tally["counts"]["passed"] >= 4
    tools = json.loads((folder / "sanitizer.json").read_text())["tools"]
    assert {one["status"] for one in tools} == {"passed"}
    assert all(one["calls"] > 10 for one in tools)
    for name in ("design_rows", "layer", "layer_own_product", "operators"):
        assert json.loads((folder / f"{name}.json").read_text())["lines"]
    launches = json.loads((folder / "parts.json").read_text())["launches"]
    assert launches["forward"]["pymoe::apply_chosen_experts_recorded"] == 1
    named = {}
    for name in ("moe_layer.json", "sonicmoe/moe_layer.json"):
        scenarios = json.loads((folder / name).read_text())["scenarios"]
        assert scenarios
        named[name] = {one["name"] for scenario in scenarios for one in (*scenario["rows"], *scenario["absent"])}
    always = {"torch.mm, dense", "pymoe native"}
    assert named["sonicmoe/moe_layer.json"] == always | {"transformers sonicmoe"}
    assert always | {"torch alone", "transformers grouped_mm"} <= named["moe_layer.json"]
    assert "transformers sonicmoe" not in named["moe_layer.json"]


@pytest.mark.slow
def test_the_report_has_a_section_for_every_stage_and_the_facts_of_the_machine(rehearsal):
    done, folder = rehearsal
    text = (folder / "REPORT.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles == [
        "Stages", "Tests", "Device and emulator", "compute-sanitizer", "Rates", "The lines with targets",
        "The router's product, and the kernels of a layer", "Layer", "Layer, with pymoe's own grouped product",
        "Operators",
        "Layer compared with its peers", "Layer compared with SonicMoE",
    ]  # fmt: skip
    machine = json.loads((folder / "machine.json").read_text())
    for said in (text, done.stdout):
        assert "a rehearsal on the CPU" in said
        assert f"torch {machine['torch']} (CUDA" in said
        assert f"nvcc 13.0, {machine['compiler']}, Python {machine['python']}, {machine['cores']} cores" in said
    assert str(folder) not in text


@pytest.mark.slow
def test_a_failing_build_stops_what_needs_it_and_nothing_else(machine, tmp_path):
    """The compiler refuses: the stages after it are named with their reasons, and the exit status is 1."""
    tree, environment, log = machine
    broken = written(tmp_path / "refusing", "#!/bin/sh\necho 'error: no compiler today' >&2\nexit 1\n")
    done = rehearse((tree, environment | {"CXX": str(broken)}, log), tmp_path / "out", "--stages", "build|emul|parts")
    assert done.returncode == 1
    assert outcomes(tmp_path / "out") == {"build": "failed", "emulator": "failed", "parts": "did not run"}
    assert "0 of 3 stages passed" in done.stdout
    assert "    build failed: exit status 1\n" in done.stdout
    assert "    parts did not run: build failed\n" in done.stdout
    assert "no compiler today" in (tmp_path / "out" / "REPORT.md").read_text()
