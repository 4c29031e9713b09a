"""What setup.py decides from its environment, seen without compiling anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_setup(*arguments: str, source: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", *arguments]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, env={**os.environ, **environment})


def executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_unknown_wish_is_refused() -> None:
    done = run_setup("--name", PYMOE_CUDA="yes")
    assert done.returncode != 0
    assert done.stderr.strip() == "PYMOE_CUDA must be auto, 0 or 1, got 'yes'"


def test_cuda_on_demand_without_a_toolkit_is_refused(tmp_path: Path) -> None:
    done = run_setup("--name", PYMOE_CUDA="1", CUDA_HOME=str(tmp_path))
    assert done.returncode != 0
    assert "no CUDA toolkit was found" in done.stderr
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wish", ["0", "auto"])
def test_cuda_is_left_out(wish: str, tmp_path: Path) -> None:
    done = run_setup("--name", PYMOE_CUDA=wish, CUDA_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "CUDA kernels left out" in done.stdout


def test_a_toolkit_that_does_not_fit_is_left_out_and_named(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "nvcc", 'echo "Cuda compilation tools, release 11.8, V11.8.89"')
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    done = run_setup("--name", PYMOE_CUDA="auto", CUDA_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "CUDA kernels left out (CUDA 11.8 is too old for C++20: 12.0 is the oldest)" in done.stdout
    assert f"with {tmp_path}" in run_setup("--name", PYMOE_CUDA="1", CUDA_HOME=str(tmp_path)).stdout


@pytest.fixture
def planned(tmp_path: Path):
    """Runs build_ext with a toolkit and a ninja that do nothing; returns the commands that it would have run."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "csrc", source / "csrc")
    (source / "pymoe").mkdir()
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    (source / "README.md").touch()
    toolkit = tmp_path / "toolkit"
    executable(toolkit / "bin" / "nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.88"')
    (toolkit / "include").mkdir()
    (toolkit / "include" / "cuda_runtime.h").touch()
    executable(tmp_path / "bin" / "ninja", '[ "$1" = --version ] && echo 1.11.0 && exit 0\nexit 1')

    def plan(**environment: str) -> str:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = run_setup("build_ext", source=source, PATH=path, CUDA_HOME=str(toolkit), PYMOE_CUDA="1", **environment)
        assert f"CUDA kernels with {toolkit}" in done.stdout, done.stderr
        (build,) = source.rglob("build.ninja")
        return build.read_text()

    return plan


def test_the_default_architectures(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    text = planned()
    for flag in ("compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"):
        assert flag in text
    assert '-DPYMOE_CUDA_ARCHITECTURES="8.0;9.0+PTX"' in text.replace("\\", "").replace("'", "")


def test_the_architecture_list_is_honoured(planned) -> None:
    text = planned(TORCH_CUDA_ARCH_LIST="10.0")
    assert "compute_100,code=sm_100" in text
    assert "compute_80" not in text
    assert "compute_90" not in text


def test_every_kernel_is_compiled(planned) -> None:
    text = planned()
    for path in [*(ROOT / "csrc" / "kernels").rglob("*.cpp"), *(ROOT / "csrc" / "kernels").rglob("*.cu")]:
        assert str(path.relative_to(ROOT)) in text
