"""Tests of pymoe's message if it was not built, or built for another Python: a few lines with one command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from pymoe import _native

ROOT = Path(__file__).parents[2]
PACKAGES = Path(torch.__file__).parents[1]
RUNTIME = Path(str(_native.load_runtime().__file__))
OPERATORS = Path(str(_native.load_operators().__file__))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a source tree as it was cloned: nothing is built."""
    shutil.copytree(ROOT / "pymoe", tmp_path / "pymoe", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "csrc").mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    return tmp_path


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run Python without ``site``, so that it cannot import from an editable installation of another tree."""
    before = f"import sys; sys.path[:0] = {[str(folder) for folder in (*path, PACKAGES)]}\n"
    command = [sys.executable, "-S", "-c", before + code]
    return subprocess.run(command, cwd=path[0], capture_output=True, text=True)


def message(code: str, *path: Path) -> str:
    done = run(code, *path)
    assert done.returncode != 0
    return done.stderr.rpartition("ImportError: ")[2]


def test_a_tree_that_is_not_built_says_how_to_build_it(tree: Path) -> None:
    assert message("import pymoe", tree) == (
        f"pymoe's operators cannot be loaded: this source tree, {tree}, has not been built.\n"
        f'Run\n    {sys.executable} -m pip install --no-build-isolation -e "{tree}"\n'
    )


def test_a_tree_that_hides_an_installation_says_so(tree: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    (installed / "pymoe_runtime-0.1.0.dist-info").mkdir(parents=True)
    (installed / "pymoe_runtime-0.1.0.dist-info" / "METADATA").write_text("Name: pymoe-runtime\nVersion: 0.1.0\n")
    (installed / "pymoe").mkdir()
    (installed / "pymoe" / "_ops.abi3.so").touch()
    assert f"It hides the pymoe installed in {installed}: use that from another folder" in message(
        "import pymoe", tree, installed
    )


def test_an_installation_without_operators_names_a_command(tree: Path) -> None:
    (tree / "setup.py").unlink()
    text = message("import pymoe", tree)
    assert "has no _ops module" in text
    assert len(text.splitlines()) == 3


ASKED_FOR = ["import pymoe.runtime", "import pymoe.pipe", "import pymoe; pymoe.Runtime", "from pymoe import pipeline"]


@pytest.mark.thinned(usual=2, deep=4)
@pytest.mark.parametrize("code", ASKED_FOR)
@pytest.mark.parametrize("foreign", [False, True], ids=["missing", "of another Python"])
def test_what_needs_the_runtime_says_what_to_do(code: str, foreign: bool, tree: Path) -> None:
    shutil.copy(OPERATORS, tree / "pymoe")
    if foreign:
        shutil.copy(RUNTIME, tree / "pymoe" / "_runtime.cpython-39-x86_64-linux-gnu.so")
    text = message(code, tree)
    assert text.startswith("pymoe's runtime (serving, parallel calls, pipelines) cannot be loaded: ")
    if foreign:
        assert "_runtime.cpython-39-x86_64-linux-gnu.so was built for another Python than this" in text
        assert EXTENSION_SUFFIXES[0] in text
    assert text.endswith(f'\n    {sys.executable} -m pip install --no-build-isolation -e "{tree}"\n')
    assert len(text.splitlines()) == 3


def test_a_runtime_that_does_not_load_is_quoted(tree: Path) -> None:
    shutil.copy(OPERATORS, tree / "pymoe")
    (tree / "pymoe" / RUNTIME.name).write_text("no library")
    assert re.search(r"it was found and not loaded: .*(invalid ELF|too short)", message("import pymoe.pipe", tree))


def test_operators_and_layers_work_without_the_runtime(tree: Path) -> None:
    shutil.copy(OPERATORS, tree / "pymoe")
    code = """
import sys, torch, pymoe
layer = pymoe.nn.MoE(hidden_size=8, ffn_size=16, num_experts=4, top_k=2)
layer(torch.randn(5, 8)).sum().backward()
print(pymoe.__version__, pymoe.build_info()["runtime_compiler"], "pymoe.runtime" in sys.modules)
"""
    done = run(code, tree)
    assert done.stdout.split() == [_native.build_info()["pymoe"], "None", "False"], done.stderr


def test_no_message_names_the_project_that_has_the_name_on_the_index() -> None:
    files = [path for folder in ("pymoe", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "setup.py", ROOT / "Makefile", ROOT / "CONTRIBUTING.md", *ROOT.glob("benchmarks/*.md")]
    named = re.compile(r"pip install[^\n`]*[ '\"]pymoe(?![-\w/.])")
    assert [str(file) for file in files if named.search(file.read_text())] == []
    assert len(named.findall((ROOT / "README.md").read_text())) == 1  # in the introduction
