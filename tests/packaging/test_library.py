"""Tests of the static libraries: built and installed alone, then used by the project in examples/cpp.

The build has one job, and leaves out the C++ tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.build,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake"),
]

ROOT = Path(__file__).parents[2]


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build, folder = tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("installed")
    run("cmake", "-S", ROOT, "-B", build, "-DBUILD_TESTING=OFF", "-DCMAKE_INSTALL_LIBDIR=lib")
    run("cmake", "--build", build, "-j", "1")
    run("cmake", "--install", build, "--prefix", folder)
    return folder


def test_another_project_uses_it(installed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(installed, tmp_path / "moved")  # an installation may be moved
    project = shutil.copytree(ROOT / "examples" / "cpp", tmp_path / "project")
    run("cmake", "-S", project, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={folder}")
    run("cmake", "--build", tmp_path / "build", "-j", "1")
    page = (ROOT / "docs" / "reference" / "cpp.md").read_text()
    assert f"```text\n{run(tmp_path / 'build' / 'mixture')}```" in page


def test_another_minor_version_is_refused(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(other LANGUAGES CXX)\nfind_package(pymoe 0.0 REQUIRED)\n"
    )
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={installed}"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode != 0
    assert 'compatible with requested version "0.0"' in re.sub(r"\s+", " ", done.stderr)


def test_every_installed_header_compiles_alone(installed: Path, tmp_path: Path) -> None:
    include = installed / "include"
    parts = {"activation_steps.h"}  # of activation.h, once for each kind of vectors
    headers = sorted(path.relative_to(include) for path in include.rglob("*.h") if path.name not in parts)
    assert {path.parts[1] for path in headers} == {"core", "kernels", "runtime"}
    for number, header in enumerate(headers):
        (tmp_path / f"{number:02}.cpp").write_text(f"#include <{header}>\n")
    sources = sorted(tmp_path.iterdir())
    run("c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-I", include, "-I", include / "pymoe", *sources)


def test_it_needs_neither_torch_nor_python(installed: Path) -> None:
    archives = sorted((installed / "lib").glob("*.a"))
    assert [path.name for path in archives] == ["libpymoe_kernels.a", "libpymoe_runtime.a"]
    undefined = run("nm", "-C", "--undefined-only", *archives)
    assert "std::" in undefined
    assert re.findall(r" U (?:c10|at|torch|aoti_torch|_?Py).*", undefined) == []
