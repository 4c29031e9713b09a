"""Tests of the decisions that setup.py makes from its environment, without compiling anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from machine_code import FLAGS  # it also makes csrc importable
from nvcc_flags import arch_list_of, default_arch_list, without_path

import pymoe

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


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("wish", ["0", "auto"])
def test_cuda_is_left_out(wish: str, tmp_path: Path) -> None:
    done = run_setup("--name", PYMOE_CUDA=wish, CUDA_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "CUDA kernels left out" in done.stdout


@pytest.mark.slow
def test_a_toolkit_that_does_not_fit_is_left_out_and_named(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "nvcc", 'echo "Cuda compilation tools, release 11.8, V11.8.89"')
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    done = run_setup("--name", PYMOE_CUDA="auto", CUDA_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "CUDA kernels left out (CUDA 11.8 is too old for C++20: 12.0 is the oldest)" in done.stdout
    assert f"with {tmp_path}" in run_setup("--name", PYMOE_CUDA="1", CUDA_HOME=str(tmp_path)).stdout


def test_the_version_names_the_toolkit_if_its_kernels_were_asked_for(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.88"')
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    for wish, version in (("1", "0.1.0+cu130"), ("auto", "0.1.0"), ("0", "0.1.0")):
        done = run_setup("egg_info", f"--egg-base={tmp_path}", PYMOE_CUDA=wish, CUDA_HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert f"\nVersion: {version}\n" in (tmp_path / "pymoe_runtime.egg-info" / "PKG-INFO").read_text()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_names_of_kernels_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    """Two folders gave different wheels: nvcc puts a checksum of a source's absolute path into the names of what is in
    its anonymous namespaces.
    """

    def made(folder: str, name: str, *options: str) -> bytes:
        source = tmp_path / folder / "x_cuda.cu"
        source.parent.mkdir(exist_ok=True)
        source.write_text("namespace {\n__global__ void f(int* x) { *x = 1; }\n}\nvoid g(int* x) { f<<<1, 1>>>(x); }\n")
        output = source.with_name(name)
        subprocess.run(["nvcc", *options, source, "-o", output], check=True)
        return output.read_bytes()

    def ptx(folder: str, flags: list[str]) -> bytes:
        return made(folder, "x.ptx", *flags, "-ptx")

    def library(folder: str) -> bytes:
        """Return a module's bytes; linking drops the name of nvcc's temporary file, which the object has."""
        return made(folder, "x.so", *flags, "-shared", "-Xcompiler=-fPIC", "-Xlinker=-s", "-cudart=none")

    flags = without_path("nvcc")
    assert b"_x_cuda_cu_" in ptx("a", flags)
    assert ptx("a", flags) == ptx("b", flags)
    assert library("a") == library("b")
    assert ptx("a", []) != ptx("b", [])  # what the flags are for


def test_pythons_that_a_wheel_cannot_serve_are_refused(tmp_path: Path) -> None:
    answer = '{"tag": "%s", "suffix": ".so", "include": "%s"}'
    executable(tmp_path / "free", f"echo '{answer % ('cp313t', tmp_path)}'")
    executable(tmp_path / "bare", f"echo '{answer % ('cp313', tmp_path)}'")
    code = "import runpy, sys; sys.argv = ['setup.py', '--name']; runpy.run_path('setup.py')['pythons']()"
    for name, reason in (
        (tmp_path / "absent", "must name Pythons, got"),
        (tmp_path / "free", "must name Pythons with a GIL, got"),
        (tmp_path / "bare", "must name Pythons with headers, got"),
    ):
        environment = {**os.environ, "PYMOE_CUDA": "0", "PYMOE_PYTHONS": str(name)}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 1
        assert f"PYMOE_PYTHONS {reason} {name}" in done.stderr


def test_without_a_compiler_it_says_which_to_install(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path), "PYMOE_CUDA": "0"}
    for environment, problem in (
        ({"CXX": " "}, "None was found (looked for c++, g++, clang++)"),
        ({"CXX": "no-such-compiler"}, "None was found (looked for no-such-compiler)"),
    ):
        done = run_setup("build_ext", **nothing, **environment)
        assert done.returncode != 0
        assert problem in done.stderr
        assert done.stderr.rstrip().endswith("sudo apt-get install g++ python3-dev")
        assert len(done.stderr.strip().splitlines()) < 6


def test_a_compiler_that_is_too_old_is_named(tmp_path: Path) -> None:
    executable(tmp_path / "old", "echo \"error: unrecognized command-line option '-std=c++20'\" >&2; exit 1")
    done = run_setup("build_ext", CXX=str(tmp_path / "old"), PYMOE_CUDA="0")
    assert done.returncode != 0
    assert f"{tmp_path / 'old'} is not one (error: unrecognized command-line option '-std=c++20')" in done.stderr


def test_a_torch_that_is_too_old_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch-2.9.1.dist-info").mkdir()
    (tmp_path / "torch-2.9.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.9.1\n")
    done = run_setup("egg_info", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "(missing in this environment: torch>=2.11, found 2.9.1)" in done.stderr
    assert f'pip install --no-build-isolation -e "{ROOT}"' in done.stderr
    assert "--index-url https://download.pytorch.org/whl/cpu" in done.stderr


def test_a_torch_without_metadata_is_asked_itself(tmp_path: Path) -> None:
    """A torch that is on the path but not installed caused a PackageNotFoundError."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.9.1+local'")
    code = """
import importlib.metadata as metadata, runpy, sys
found = metadata.version
def version(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
sys.argv = ["setup.py", "egg_info"]
runpy.run_path("setup.py")
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "(missing in this environment: torch>=2.11, found 2.9.1+local)" in done.stderr


def test_other_systems_are_refused() -> None:
    code = "import setuptools, runpy, sys; sys.platform, sys.argv = 'darwin', ['setup.py', 'egg_info']; "
    code += "runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.startswith("pymoe is built only on Linux (this is darwin)")


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize(
    ("cuda", "gpu", "wish", "told"),
    [
        ("13.0", False, "auto", True),
        (None, False, "auto", False),
        ("13.0", True, "auto", False),
        ("13.0", False, "0", False),
    ],
)
def test_a_cuda_build_of_torch_that_nothing_needs_is_told_of(
    cuda: str | None, gpu: bool, wish: str, told: bool, tmp_path: Path
) -> None:
    code = "import runpy, sys, torch; sys.argv = ['setup.py', '--name']; "
    code += f"torch.version.cuda = {cuda!r}; torch.cuda.is_available = lambda: {gpu}; runpy.run_path('setup.py')"
    environment = {**os.environ, "PYMOE_CUDA": wish, "CUDA_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "is a CUDA build" in line]
    assert len(lines) == told
    assert all(line.endswith(" --index-url https://download.pytorch.org/whl/cpu") for line in lines)


def test_the_names() -> None:
    done = run_setup("--name", "--version", PYMOE_CUDA="0")
    assert done.stdout.split()[-2:] == ["pymoe-runtime", pymoe.__version__]


@pytest.fixture
def planned(tmp_path: Path):
    """Run build_ext with a toolkit and a ninja that do nothing; return the commands that it would have run."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "csrc", source / "csrc")
    (source / "pymoe").mkdir()
    for name in ("setup.py", "pyproject.toml", "pymoe/__init__.py"):
        shutil.copy(ROOT / name, source / name)
    (source / "README.md").touch()
    toolkit = tmp_path / "toolkit"
    nvcc = toolkit / "bin" / "nvcc"
    executable(nvcc, 'echo "Cuda compilation tools, release ${TOOLKIT:-13.0}, V13.0.88"')
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


@pytest.mark.parametrize(
    ("toolkit", "written", "listed"),
    [
        ("12.6", "8.0;9.0+PTX", "80:sm 90:sm 90:compute"),
        ("12.8", "8.0;9.0;10.0+PTX;12.0", "80:sm 90:sm 100:sm 100:compute 120:sm"),
        ("13.0", "8.0;9.0;10.0+PTX;12.0", "80:sm 90:sm 100:sm 100:compute 120:sm"),
    ],
)
def test_the_default_architectures(
    planned, monkeypatch: pytest.MonkeyPatch, toolkit: str, written: str, listed: str
) -> None:
    assert default_arch_list(toolkit) == written
    if torch.version.cuda is not None:  # torch's own extensions refuse a toolkit of another major version
        toolkit = torch.version.cuda
        written = default_arch_list(toolkit)
        listed = "80:sm 90:sm 100:sm 100:compute 120:sm" if "12.0" in written else "80:sm 90:sm 90:compute"
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    text = planned(TOOLKIT=toolkit)
    flags = set(re.findall(r"-gencode=arch=(compute_\d+,code=\w+)", text))
    assert flags == {f"compute_{number},code={kind}_{number}" for number, kind in re.findall(r"(\d+):(\w+)", listed)}
    assert f'-DPYMOE_CUDA_ARCHITECTURES="{written}"' in text.replace("\\", "").replace("'", "")


@pytest.mark.parametrize(
    ("seen", "listed"),
    [
        ([], "8.0;9.0;10.0+PTX;12.0"),
        ([(9, 0)], "9.0+PTX"),
        ([(8, 9), (8, 9), (9, 0)], "8.0;9.0+PTX"),
        ([(10, 3)], "10.0+PTX"),
        ([(12, 1)], "12.0+PTX"),
        ([(7, 5)], "8.0;9.0;10.0+PTX;12.0"),  # no kernel runs there
        ([(9, 0), (11, 0)], "8.0;9.0;10.0+PTX;12.0"),  # the PTX runs on 11.0
    ],
)
def test_kernels_are_built_for_the_gpus_that_are_seen(seen: list[tuple[int, int]], listed: str) -> None:
    assert arch_list_of(set(seen), "13.0") == listed


def test_setup_asks_torch_which_gpus_there_are(tmp_path: Path) -> None:
    code = """
import runpy, sys, torch
torch.version.cuda, torch.cuda.is_available, torch.cuda.device_count = "13.0", lambda: True, lambda: 2
torch.cuda.get_device_capability = lambda number: [(9, 0), (8, 6)][number]
sys.argv = ["setup.py", "--name"]
print(sorted(runpy.run_path("setup.py")["seen_capabilities"]()))
"""
    environment = {**os.environ, "PYMOE_CUDA": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[(8, 6), (9, 0)]", done.stderr


def test_kernels_are_compiled_with_the_flags_that_the_checks_of_machine_code_use(planned) -> None:
    """tests/machine_code.py compiles with FLAGS; a flag that only one of the two had would not be checked."""
    text = planned()
    (line,) = [line for line in text.splitlines() if line.startswith("cuda_post_cflags")]
    assert " ".join(FLAGS) in line.replace("'", "")
    assert "--fmad=false" in FLAGS


def test_the_architecture_list_is_honoured(planned) -> None:
    text = planned(TORCH_CUDA_ARCH_LIST="10.0")
    assert "compute_100,code=sm_100" in text
    assert "compute_80" not in text
    assert "compute_90" not in text


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch has ninja know the headers")
def test_a_kernel_is_compiled_again_after_a_header_has_changed(planned, tmp_path: Path) -> None:
    """With a CPU build of torch, ninja is not told which headers a .cu file includes, and old kernels stayed."""
    objects = tmp_path / "source" / "build" / "objects" / "csrc" / "kernels"
    objects.mkdir(parents=True)
    for name, age in (("old_cuda.o", 10**6), ("new_cuda.o", -60)):
        (objects / name).touch()
        os.utime(objects / name, (time.time() - age,) * 2)
    (tmp_path / "source" / "csrc" / "core" / "dtype.h").touch()
    planned()
    assert [file.name for file in objects.glob("*.o")] == ["new_cuda.o"]


def test_every_source_is_compiled_once(planned, tmp_path: Path) -> None:
    text = planned()
    merged = "".join(file.read_text() for file in (tmp_path / "source" / "build" / "merged").iterdir())
    for path in [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.cu")]:
        name = str(path.relative_to(ROOT))
        compiled = len(re.findall(rf"^build .*/{re.escape(name)}$", text, re.MULTILINE))
        assert compiled + merged.count(f'"{name.removeprefix("csrc/")}"') == 1, name
