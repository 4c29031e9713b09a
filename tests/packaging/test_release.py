"""Tests of what ``make release`` refuses before it makes anything, and of the versions of torch that it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest

import pymoe
from pymoe._torch_versions import NEWEST_TESTED

ROOT = Path(__file__).parents[2]
RELEASED = f"## {pymoe.__version__}, 2026-01-31"


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    subprocess.run(["git", *identity, "-c", "commit.gpgsign=false", *arguments], cwd=folder, check=True)


def tree_of_changes(folder: Path, changes: str) -> Path:
    """Return a committed tree of the files that the checks read, with these lines as its list of changes."""
    for name in ("Makefile", "pymoe/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "CHANGELOG.md").write_text(changes)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=A tree")
    return folder


def release(folder: Path) -> str:
    """Run ``make release``, and return what it says, which is why it stopped; it must not have made a file."""
    before = {path for path in folder.rglob("*") if ".git" not in path.parts}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment["LC_ALL"] = "C"
    done = subprocess.run(["make", "release"], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert {path for path in folder.rglob("*") if ".git" not in path.parts} == before
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "heading",
    [
        f"## {pymoe.__version__}, not released yet",
        f"## {pymoe.__version__}, 2026-01-3",
        f"## {pymoe.__version__}.1, 2026-01-31",
        f"## Next\n\n{RELEASED}",
    ],
)
def test_a_release_needs_a_dated_version_on_top_of_the_changes(tmp_path: Path, heading: str) -> None:
    said = release(tree_of_changes(tmp_path, f"# Changes\n\n{heading}\n"))
    expected = f"must be '## {pymoe.__version__}, YYYY-MM-DD', got '{heading.splitlines()[0]}'"
    assert f"release: the first heading of CHANGELOG.md {expected}\n" in said


def test_a_release_needs_a_clean_tree(tmp_path: Path) -> None:
    tree = tree_of_changes(tmp_path, f"# Changes\n\n{RELEASED}\n")
    assert "release:" not in (said := release(tree))
    assert "No rule to make target 'requirements" in said  # what it needs next, which this tree lacks
    (tree / "new").touch()
    assert "release: the tree must be clean, got\n?? new\n" in release(tree)
    (tree / "new").unlink()
    shutil.rmtree(tree / ".git")
    assert "release: the tree must be clean, got\nfatal: not a git repository" in release(tree)


def test_wheels_are_tried_with_the_oldest_and_the_newest_torch() -> None:
    """The Makefile reads both where the package says them: a pattern that no longer fits would leave one out."""
    command = ["make", "--no-print-directory", "--eval=torches:; @echo $(RELEASE_TORCHES)", "torches"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    (oldest,) = [need for need in requires("pymoe-runtime") or () if need.startswith("torch>=")]
    assert said == [oldest.removeprefix("torch>="), NEWEST_TESTED]
