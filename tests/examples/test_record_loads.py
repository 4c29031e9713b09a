"""Tests of the example that records the loads of the language model, and of a simulation with these loads."""

import re

import pytest
import record_loads

from pymoe.ep.simulate import Block, recorded


def test_a_run_leaves_a_file_and_prints_what_it_would_cost(tmp_path, capsys, monkeypatch):
    file = tmp_path / "loads.npz"
    monkeypatch.setattr("sys.argv", ["record_loads.py", str(file), "--steps", "4", "--record", "2"])
    assert record_loads.main() == 0
    out = capsys.readouterr().out
    assert len(re.findall("recorded$", out, re.MULTILINE)) == 2
    load = recorded(Block("the example's", 64, 64, 16, 4), file)
    assert [len(layer) for layer in load.choices] == [2, 2]
    assert load.tokens == 1024
    found = {int(ranks): float(factor) for ranks, factor in re.findall(r"^(\d) ranks: .*?contiguous (\S+),", out, re.M)}
    assert set(found) == {2, 4, 8}
    assert all(1 <= factor <= ranks for ranks, factor in found.items())
    # Under an even load, a token sends K (1 - 1 / R) rows; deduplicated, at most one row per rank.
    for ranks, each, once in re.findall(r"^(\d) ranks: .* once a rank: (\S+) or (\S+)$", out, re.MULTILINE):
        assert float(each) == pytest.approx(4 * (1 - 1 / int(ranks)), rel=0.1)
        assert float(once) <= min(float(each), int(ranks) - 1)
    placed = re.findall(r"^blocks\S*: experts of 4 ranks: (.*)$", out, re.MULTILINE)
    assert len(placed) == 2
    assert all(sorted(map(int, re.findall(r"\d+", experts))) == list(range(16)) for experts in placed)
