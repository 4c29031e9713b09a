"""Tests that ``benchmarks/in_turns.py`` pairs the figures of two trees by name, and reports a failed run."""

import json
import sys

import pytest

from benchmarks import in_turns

FAKE = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--output") + 1])
def spread(seconds):
    return {{"low": seconds * 0.9, "median": seconds, "high": seconds * 1.1}}
def cell(workers, seconds):
    systems = {{"pymoe": {{"verdict": "exact", "wall": spread(seconds)}}}}
    return {{"case": {{"work": "sleep", "workers": workers}}, "systems": systems}}
cells = [cell(2, {first}), cell(4, 0.5)]
records = [{{"kind": "tiny", "calls": 16, "rounds": {rounds}, "forward": spread(3.0), "{extra}": spread(1.0)}}]
ratios = [{{"cell": "small forward", "{extra}": spread(1.0)}}, {{"cell": "big forward", "rate": spread(4.0)}}]
result = {{"cells": cells, "records": records, "ratios": ratios, "asked": sys.argv[1:-2]}}
(folder / "fake.json").write_text(json.dumps(result))
sys.exit({status})
"""


def tree(folder, first=1.0, rounds=3, extra="backward", status=0):
    """Create a checkout whose only benchmark reports given seconds."""
    (folder / "benchmarks").mkdir(parents=True)
    text = FAKE.format(first=first, rounds=rounds, extra=extra, status=status)
    (folder / "benchmarks" / "fake.py").write_text(text)
    return folder


def call(monkeypatch, here, *arguments):
    monkeypatch.setattr(in_turns, "HERE", here)
    monkeypatch.setattr(sys, "argv", ["in_turns", *map(str, arguments)])
    return in_turns.main()


def test_ratios_are_this_tree_over_the_other(tmp_path, monkeypatch, capsys):
    other, here = tree(tmp_path / "other", first=2.0), tree(tmp_path / "this", first=3.0, rounds=5, extra="idle")
    assert call(monkeypatch, here, other, "--turns", 3, "--output", tmp_path / "out", "fake", "--quick") == 0
    result = json.loads((tmp_path / "out" / "in_turns_fake.json").read_text())
    found = {record["figure"]: record["ratio"]["median"] for record in result["records"]}
    assert found == {
        "cells sleep 2 workers systems pymoe wall": pytest.approx(1.5),
        "cells sleep 4 workers systems pymoe wall": pytest.approx(1.0),
        "ratios big forward rate": pytest.approx(1.0),
        "records tiny 16 calls forward": pytest.approx(1.0),  # the number of rounds is no part of a figure's name
    }
    assert "1.500" in capsys.readouterr().out
    assert "sleep 2 workers" in (tmp_path / "out" / "in_turns_fake.md").read_text()


def test_figures_can_be_chosen(tmp_path, monkeypatch):
    other, here = tree(tmp_path / "other"), tree(tmp_path / "this")
    arguments = ["--turns", 1, "--output", tmp_path, "--figures", "4 workers"]
    assert call(monkeypatch, here, other, *arguments, "fake") == 0
    assert len(json.loads((tmp_path / "in_turns_fake.json").read_text())["records"]) == 1
    assert call(monkeypatch, here, other, *arguments[:-1], "nothing like it", "fake") == 1


def test_a_run_that_fails_is_named(tmp_path, monkeypatch, capsys):
    other, here = tree(tmp_path / "other", status=3), tree(tmp_path / "this")
    assert call(monkeypatch, here, other, "--turns", 1, "--output", tmp_path, "fake") == 1
    assert f"{other}: fake ended with exit status 3" in capsys.readouterr().err


def test_a_benchmark_that_a_tree_lacks_is_refused(tmp_path, monkeypatch, capsys):
    other, here = tree(tmp_path / "other"), tree(tmp_path / "this")
    with pytest.raises(SystemExit):
        call(monkeypatch, here, other, "missing")
    assert "expected a benchmark that both trees have" in capsys.readouterr().err
