"""Tests that the GPU report survives any failure of a stage, reports it, and names neither machine nor paths.

No GPU is needed: the stages are simple commands, and compute-sanitizer's outputs are given.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pymoe.bench import cli

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu import markdown as gpu_markdown  # noqa: E402
from benchmarks.gpu import report, sanitize  # noqa: E402
from benchmarks.gpu.markdown import markdown  # noqa: E402
from benchmarks.gpu.parts import plain_name  # noqa: E402
from benchmarks.gpu.stages import Stage, run_stages, scrubbed  # noqa: E402

HANG = "import os, subprocess, sys, time; print('begun', flush=True)\n"
HANG += "subprocess.Popen([sys.executable, '-c', CHILD], preexec_fn=os.setpgrp); time.sleep(600)"
"""The child is in a process group of its own, as every compiler is that ninja starts."""
MACHINE = {
    "gpu": None, "torch": "2.13", "nvcc": None, "compiler": "g++", "python": "3.11.7", "cores": 2, "device": "cpu",
    "commit": None, "uncommitted": False, "date": "2026-11-21T00:00:00+00:00", "packages": ["pytest"],
}  # fmt: skip


def stage(name, code, reserved=20.0, most=60.0, **options):
    return Stage(name, f"planted: {name}", [sys.executable, "-c", code], reserved, most, **options)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Return outcomes by name, the folder, and the file to which a hanging stage's child writes while it lives."""
    folder = tmp_path_factory.mktemp("report")
    pulse = folder / "pulse"
    child = (
        f"import time, pathlib\nwhile True: pathlib.Path({str(pulse)!r}).write_text(str(time.time())); time.sleep(0.1)"
    )
    outcomes = run_stages(
        [
            stage("good", "print('all is well')"),
            stage("failing", f"import sys; print('at {folder}/deep/file.py on {os.uname().nodename}'); sys.exit(7)"),
            stage("crashing", "import os; print('before', flush=True); os.abort()"),
            stage("hanging", f"CHILD = {child!r}\n{HANG}", reserved=3.0, most=3.0),
            stage("no_program", ""),
            stage("dependent", "print('never')", after=("good", "failing")),
            stage("impossible", "print('never')", missing="there is no such tool"),
            stage("last", "print('still here')", after=("good",)),
        ],
        folder,
        limit=120.0,
    )
    return {one.stage: one for one in outcomes}, folder, pulse


def test_every_stage_ends_in_a_file_with_its_outcome(planted):
    outcomes, folder, _ = planted
    written = {name: json.loads((folder / f"stage_{name}.json").read_text()) for name in outcomes}
    assert {name: one["status"] for name, one in written.items()} == {
        "good": "passed", "failing": "failed", "crashing": "failed", "hanging": "timed out", "no_program": "passed",
        "dependent": "did not run", "impossible": "did not run", "last": "passed",
    }  # fmt: skip
    assert written["failing"]["reason"] == "exit status 7"
    assert written["crashing"]["reason"] == "ended by signal SIGABRT"
    assert written["dependent"]["reason"] == "failing failed"
    assert written["impossible"]["reason"] == "there is no such tool"
    assert written["last"]["tail"] == ["still here"]
    assert "begun" in written["hanging"]["tail"]


def test_a_hanging_stage_ends_with_all_that_it_started(planted):
    _, _, pulse = planted
    assert pulse.exists(), "the child of the hanging stage ran"
    before = pulse.read_text()
    time.sleep(0.5)
    assert pulse.read_text() == before


def test_what_is_written_names_no_machine_and_no_path(planted):
    outcomes, folder, _ = planted
    text = "".join(file.read_text() for file in folder.glob("*.json"))
    assert str(folder) not in text
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text)
    assert outcomes["failing"].tail == ["at file.py on host"]
    assert scrubbed("a/b and 1/2 s and https://x.org/a/b") == "a/b and 1/2 s and https://x.org/a/b"


@pytest.mark.slow
def test_a_slow_stage_leaves_later_ones_their_time(tmp_path):
    slow, later = stage("slow", "import time; time.sleep(600)", 2.0, 500.0), stage("later", "print('ran')", 8.0, 20.0)
    outcomes = run_stages([slow, later], tmp_path, limit=12.0)
    # The later stage starts only while five seconds are left, so its passing shows when the slow stage was ended.
    assert [one.status for one in outcomes] == ["timed out", "passed"]
    assert outcomes[0].allowed <= 12.0 - 8.0


@pytest.mark.slow
def test_without_time_a_stage_is_dropped_and_says_so(tmp_path):
    outcomes = run_stages(
        [stage("one", "import time; time.sleep(600)", 4.0, 4.0), stage("two", "", 5.0)], tmp_path, limit=5
    )
    assert outcomes[1].status == "did not run"
    assert outcomes[1].reason == "no time was left"


def test_the_report_holds_every_outcome_and_the_last_words(planted):
    outcomes, folder, _ = planted
    text = markdown(folder, MACHINE, [vars(one) for one in outcomes.values()], "")
    assert "| failing | planted: failing | **failed**: exit status 7 |" in text
    assert "| hanging | planted: hanging | **timed out**: after 3 s |" in text
    assert "failing:\n\n```\nat file.py on host" in text


@pytest.mark.slow
def test_the_router_and_the_launches_have_their_part(tmp_path):
    file = tmp_path / "parts.json"
    command = [sys.executable, "-m", "benchmarks.gpu.parts", "--device", "cpu", "--budget", "0.05", "--output", file]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    found = json.loads(file.read_text())
    assert found["launches"]["forward"]["pymoe::apply_chosen_experts_recorded"] == 1
    assert found["launches"]["backward"]["pymoe::combine_backward"] == 1
    ways = found["router"]["ways"]
    assert len(ways) == 4
    assert all(one["largest_error"] < 1e-4 for one in ways.values() if one["largest_error"] is not None)
    assert any("pymoe::" in name for times in found["kernels"].values() for name in times)
    text = "\n".join(gpu_markdown.parts(tmp_path))
    assert "| as the layer does it |" in text
    assert "us in kernels" in text
    assert "operators called (" in text


def run_script(*arguments, **environment):
    command = ["bash", "benchmarks/gpu_report.sh", *arguments]
    variables = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_without_a_gpu_the_script_says_so_and_ends(tmp_path):
    done = run_script("--output", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "no GPU was found" in done.stdout
    assert "No GPU was found" in (tmp_path / "REPORT.md").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["REPORT.md", "machine.json"]


def test_a_folder_with_files_of_others_is_left_alone(tmp_path, capsys):
    (tmp_path / "theirs.json").write_text("{}")
    assert report.main(["--output", str(tmp_path)]) == 2
    assert "holds JSON that no report wrote" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.json"]


def test_a_script_without_torch_says_what_to_name(tmp_path):
    """The script skips a Python without torch."""
    for name in ("python3", "python"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "gpu_report.sh"
    script.write_text((ROOT / "benchmarks" / "gpu_report.sh").read_text())
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no Python with torch was found" in done.stderr


def test_the_stages_of_a_gpu_fit_its_limit_and_name_files_that_exist(tmp_path):
    machine = MACHINE | {
        "gpu": "NVIDIA H200",
        "capability": "9.0",
        "cores": 16,
        "packages": ["pytest", "hypothesis", "xdist"],
    }
    stages = report.all_stages("cuda", machine, tmp_path)
    # The report keeps 5 s for itself; starting Python, ending the last stage and nvidia-smi take time beside the limit.
    assert sum(one.reserved for one in stages) + 5 <= report.LIMIT["cuda"] <= 540 - 20
    names = [one.name for one in stages]
    assert names[:3] == ["build", "emulator", "equality"]  # equality first; times when all else is known
    assert all(one.reserved <= one.most for one in stages)
    assert all(set(one.after) <= set(names) for one in stages)
    for one in stages:
        for part in one.command:
            if part.startswith("tests/"):
                assert (ROOT / part).exists(), part
    lines = {name: [line.name for line in selected("cuda", wanted[0])] for name, wanted in report.LINES.items()}
    assert len(lines["design_rows"]) >= 7
    assert all("MoE" in name for name in lines["layer"])
    assert len(lines["layer"]) >= 7
    assert len(lines["operators"]) > 30
    everything = selected("cuda", "")
    assert lines["layer_own_product"] == lines["layer"]  # measured twice
    once = [name for stage, names in lines.items() if stage != "layer_own_product" for name in names]
    assert sorted(line.name for line in everything) == sorted(once)
    assert not any("quantized" in name for name in once)  # these have no CUDA kernels

    assert {line.name for line in everything if line.targets.get("cuda")} == set(lines["design_rows"])
    for operator in ("gate_topk T4096 E128 K8", "build_routing T4096 K8 E128", "dispatch T4096 H7168 K8"):
        assert any(name.startswith(operator) for name in lines["design_rows"])
    assert all(selected("cpu", wanted[1]) for wanted in report.LINES.values())


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        (
            "void pymoe::cuda::(anonymous namespace)::combine_kernel<pymoe::BFloat16, 16>(int)",
            "pymoe::cuda::combine_kernel",
        ),
        ("_ZN7cutlass13device_kernelIN2at4cuda6detailE", "cutlass::device_kernel"),
        ("Memset (Device)", "Memset"),
        ("nvjet_sm90_tss_64x8_64x16_2x1_v_bz_TNT", "nvjet_sm90_tss_64x8_64x16_2x1_v_bz_TNT"),
    ],
)
def test_kernels_have_their_plain_names(name, plain):
    """On an H200 the report called most kernels "void pymoe::cuda::", and gave those of torch a thousand letters."""
    assert plain_name(name) == plain


def selected(device, pattern):
    options = cli.parser().parse_args(["run", "--device", device, "--filter", pattern])
    return cli.selected(options)[0]


MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at {kernel}(int *, int)+0x90 in file.cu:8
=========     by thread (0,0,0) in block (0,0,0)
=========
{calls}
========= ERROR SUMMARY: 1 error
"""
CALLERS = """\
=========     Saved host backtrace up to driver entry point
=========         Host Frame: pymoe::cuda::dispatch [0x8ad] in _ops.abi3.so
"""
CLEAN = "========= COMPUTE-SANITIZER\n120 calls\n========= ERROR SUMMARY: 0 errors\n"
PLANTED = MEMCHECK.format(kernel="pymoe_canary_memcheck", calls="")


@pytest.mark.parametrize(
    ("canary", "status", "grid", "expected"),
    [
        (PLANTED, 0, CLEAN, "passed"),
        (PLANTED, 1, MEMCHECK.format(kernel="pymoe::cuda::dispatch_kernel", calls="120 calls"), "failed"),
        (PLANTED, 0, MEMCHECK.format(kernel="at::native::fill", calls="120 calls"), "passed"),
        (PLANTED, 0, MEMCHECK.format(kernel="at::native::fill", calls=f"120 calls\n{CALLERS}"), "passed"),
        (PLANTED, 1, f"========= Program hit cudaErrorInvalidValue\n{CALLERS}120 calls\n", "failed"),
        (PLANTED, None, "========= COMPUTE-SANITIZER\n", "timed out"),
        (PLANTED, 1, "========= COMPUTE-SANITIZER\nTraceback\n", "failed"),
        ("========= Error: Device not supported\n", 0, CLEAN, "does not work here"),
        (CLEAN, 0, CLEAN, "does not work here"),
    ],
)
def test_a_tool_counts_only_after_it_reported_its_planted_fault(canary, status, grid, expected):
    record = sanitize.judge("memcheck", canary, status, grid)
    assert record["status"] == expected
    if expected == "failed":
        assert record["reason"]
    if "fill" in grid:
        assert (record["reports"], record["reports_of_others"]) == (0, 1)


def test_every_tool_runs_its_canary_first_and_is_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sanitize, "time", SimpleNamespace(monotonic=lambda: 0.0)
    )  # the clock stands still while the stages are planned
    commands, file = {tool: [] for tool in sanitize.TOOLS}, tmp_path / "sanitizer.json"
    granted = {tool: [] for tool in sanitize.TOOLS}

    def written():
        return [one["tool"] for one in json.loads(file.read_text())["tools"]] if file.exists() else []

    def run(command, share):
        tool = command[command.index("--tool") + 1]
        commands[tool].append(command)
        granted[tool].append(share)
        if "canary" in command:
            return 1, MEMCHECK.format(kernel=f"pymoe_canary_{tool}", calls="")
        if tool == sanitize.TOOLS[0]:  # the results of the others are written without waiting for it
            deadline = time.monotonic() + 30
            while len(written()) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert written() == list(sanitize.TOOLS[1:])
        return 0, CLEAN

    records = sanitize.sanitize("compute-sanitizer", "canary", 60.0, file, run)
    assert [one["tool"] for one in records] == written() == list(sanitize.TOOLS)
    assert {one["status"] for one in records} == {"passed"}
    assert {one["calls"] for one in records} == {120}
    for of_tool in commands.values():
        assert ["canary" in command for command in of_tool] == [True, False]
    for of_tool in granted.values():
        assert of_tool == pytest.approx([60.0 / 3, 0.95 * 60.0])  # shares of the 60 s that a tool may run


def test_the_canary_has_a_fault_for_every_tool():
    source = (ROOT / "benchmarks" / "gpu/canary.cu").read_text()
    for tool in sanitize.TOOLS:
        assert f"__global__ void pymoe_canary_{tool}(" in source
        assert f'std::strcmp(fault, "{tool}") == 0' in source


def test_the_summary_names_what_failed_and_the_machine(tmp_path, capsys, monkeypatch):
    """Stages that raise, hang or need another are named with their reasons, and later stages still run."""
    machine = MACHINE | {"gpu": None, "packages": []}
    planted = [
        stage("raising", "raise ValueError('planted')"),
        stage("hanging", "import time; time.sleep(600)", reserved=2.0, most=2.0),
        stage("needing", "", after=("raising",)),
        stage("last", "print('still here')"),
    ]
    monkeypatch.setattr(report, "facts", lambda: dict(machine))
    monkeypatch.setattr(report, "all_stages", lambda *_: planted)
    monkeypatch.setattr(report, "replace", lambda one, most: one)  # which gives a stage on the CPU all of the time
    assert report.main(["--device", "cpu", "--output", str(tmp_path)]) == 1
    end = capsys.readouterr().out.split("still here")[-1].split("\n\n")[-1].splitlines()
    assert end[0].startswith("1 of 4 stages passed in ")
    assert end[1:4] == [
        "    raising failed: exit status 1",
        "    hanging timed out: after 2 s",
        "    needing did not run: raising failed",
    ]
    text = (tmp_path / "REPORT.md").read_text()
    assert "ValueError: planted" in text
    assert "torch 2.13 (CUDA None), nvcc None, g++, Python 3.11.7, 2 cores" in text
    monkeypatch.setattr(report, "all_stages", lambda *_: planted[-1:])
    assert report.main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(" failed") == 0
