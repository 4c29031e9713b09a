"""Tests of the counts that ``tests/house.py`` makes."""

import shutil

import pytest
from house import ROOT, count, repeated_names, texts


def test_a_name_of_two_modules_is_found():
    sources = {
        "pymoe.a": ("pymoe/a.py", "class Plan: ...\ndef f(): ...\ndef _private(): ...\nclass _Own: ...\n"),
        "pymoe.b": ("pymoe/b.py", "class Plan:\n    def f(self): ...\ndef _private(): ...\nclass _Own: ...\n"),
    }
    assert repeated_names(sources) == {"Plan": ["pymoe.a", "pymoe.b"], "_Own": ["pymoe.a", "pymoe.b"]}


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs git and its repository")
def test_a_commit_and_the_working_tree_are_read():
    assert texts("HEAD")["pyproject.toml"]
    assert "tests/house.py" in texts(".")
    found = count(".")
    assert found.files["pymoe, all"] == sum(1 for path in texts(".") if path.startswith("pymoe/"))
    assert found.lines["all"] > found.lines["tests"] > 0
