"""``python -m pymoe.ep simulate``: text and JSON; wrong calls say what is wrong."""

import doctest
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pymoe.ep import simulate as package
from pymoe.ep.simulate import PRESETS
from pymoe.ep.simulate.cli import main

ROOT = Path(__file__).parents[3]
RECORDED = Path(__file__).parent / "language_model.npz"
SIZES = {"hidden": 64, "ffn": 64, "experts": 16, "choices": 4, "tokens": 256, "ranks": 4}
OWN = ["simulate", *(word for name, size in SIZES.items() for word in (f"--{name}", str(size)))]


def run(capsys, *words):
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_command_runs_in_a_process_of_its_own(tmp_path):
    words = [sys.executable, "-m", "pymoe.ep", *OWN, "--load", str(RECORDED), "--json", str(tmp_path / "costs.json")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "recorded in language_model.npz: 2 layers, 4 steps of 1024 tokens" in done.stdout
    assert json.loads((tmp_path / "costs.json").read_text())["format"] == 2


def test_text_and_json_tell_the_same(tmp_path, capsys):
    out = run(capsys, *OWN, "--load", "zipf:1", "--json", str(tmp_path / "costs.json"))
    found = json.loads((tmp_path / "costs.json").read_text())
    assert (found["ranks"], found["tokens"], found["block"]["experts"]) == (4, 256, 16)
    for balance in found["balances"]:
        line = next(line for line in out.splitlines() if line.startswith(balance["name"]))
        assert f"{balance['imbalance']:.2f}" in line
    for traffic in found["traffic"]:
        assert f"{traffic['rows']:.3f}" in out
    assert [(one["deduplicated"], one["chunks"]) for one in found["traffic"]] == [
        (False, 1),
        (True, 1),
        (True, 2),
        (True, 4),
    ]
    assert set(found["memory"]) == {"EP", "EP deduplicated", "DP", "FSDP"}
    assert f"{found['traffic'][0]['tokens_below']['DP']:,.0f}" in out


@pytest.mark.thinned(usual=3)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs(name, capsys):
    out = run(capsys, "simulate", "--model", name, "--tokens", "64", "--ranks", "8")
    assert out.startswith(PRESETS[name].title)


def test_own_numbers_replace_those_of_presets(capsys):
    out = run(capsys, "simulate", *["--model", "mixtral-8x7b", "--layers", "2", "--tokens", "64", "--chunks", "3"])
    assert "Mixtral 8x7B: H 4096, F 14336, E 8, K 2, 2 layers, bfloat16" in out
    assert "3 chunks" in out


def test_plans_and_memory_have_options(capsys, tmp_path):
    words = (*OWN, "--load", "zipf:1.5", "--min-rows-to-clone", "1", "--json", str(tmp_path / "costs.json"))
    found = []
    for more in (("--spread", "1-clone"), ("--recompute",), ("--optimizer-bytes", "2")):
        out = run(capsys, *words, *more)
        found.append(json.loads((tmp_path / "costs.json").read_text()))
        assert ("weights of clones" in out) == (more[0] == "--spread")
    clones, recomputed, lean = found
    assert clones["clones_bytes"] > 0
    assert recomputed["memory"]["EP"]["activations"] == 256 * 64 * 2
    assert lean["memory"]["EP"]["optimizer"] == lean["memory"]["EP"]["weights"]


def test_the_same_seed_is_the_same_load(capsys):
    first, again, other = (run(capsys, *OWN, "--load", "zipf:1", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hidden", "64"], "expected --model, or all of --hidden, --ffn, --experts, --choices, got no --ffn"),
        (["--model", "olmoe-1b-7b", "--choices", "65"], r"Block: choices must be in 1..64, got 65"),
        (["--ranks", "0"], "ranks must be at least 1, got 0"),
        (["--tokens", "-3"], "tokens must be at least 1, got -3"),
        (["--load", "absent"], "load: expected uniform, zipf:EXPONENT or a file of recorded loads, got 'absent'"),
        (["--load", str(RECORDED)], "expected loads of 128 experts and 8 choices"),
        (["--chunks", "0"], "chunks must be at least 1, got 0"),
    ],
)
def test_wrong_numbers_are_refused_in_one_line(words, message, capsys):
    assert main(["simulate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pymoe.ep: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["simulate", "--chunks", "1;2"],
        ["simulate", "--model", "gpt-5"],
        ["simulate", "--json", "absent/costs.json"],
        ["simulate", "--json", ""],
    ],
)
def test_wrong_words_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_examples_of_the_package_run():
    assert doctest.testmod(package).attempted > 0
    assert doctest.testmod(package).failed == 0
