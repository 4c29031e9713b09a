"""Tests of the command line of examples/train_lm.py: the output and the files of small runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import common
import plot_runs
import pytest
import torch
from byte_lm import Config, LanguageModel, make_ffn, parameter_counts
from common import load_text
from safetensors.torch import load_file
from train_lm import FILE_NAME, main

import pymoe

EXAMPLES = Path(__file__).parents[2] / "examples"
# Uses one thread, since steps are small and the machine may be busy with other tests.
SMALL = (
    *("--width", "32", "--layers", "2", "--heads", "2", "--context", "32", "--batch-size", "8", "--threads", "1"),
    *("--ffn-size", "32", "--num-experts", "4", "--learning-rate", "1e-2", "--warmup", "3"),
    *("--sample-bytes", "8", "--compare-steps", "1", "--eval-every", "15"),
)
STEPS = 30
# The unit is nats per byte. Both backends choose the same experts and move the same rows, but their matrix products
# differ by rounding, and the difference grows during training: by how much depends on the processor and its BLAS.
CURVE_TOLERANCE = 1e-4


def train(*flags: object) -> int:
    return main([*SMALL, *map(str, flags)])


def record_of(folder: Path) -> dict:
    return json.loads((folder / "record.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for backend in ("native", "reference"):
        assert train("--steps", STEPS, "--backend", backend, "--out", folder / backend) == 0
    assert train("--steps", STEPS, "--ffn", "dense", "--out", folder / "dense") == 0
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("name", ["native", "reference", "dense"])
def test_loss_falls(runs: dict[str, Path], name: str) -> None:
    losses = record_of(runs[name])["loss"]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 256, the loss of an untrained model
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_reference_trains_to_the_same_curve(runs: dict[str, Path]) -> None:
    native, reference = record_of(runs["native"]), record_of(runs["reference"])
    for step, (one, other) in enumerate(zip(native["loss"], reference["loss"], strict=True), 1):
        assert one == pytest.approx(other, abs=CURVE_TOLERANCE * step), f"step {step}"
    assert native["native_against_reference"]["loss_difference"] < CURVE_TOLERANCE


def test_record_is_whole_and_names_no_place(runs: dict[str, Path]) -> None:
    record = record_of(runs["native"])
    assert record["config"]["num_experts"] == 4
    assert record["validation"]["step"] == [15, 30]
    assert record["final"]["validation_bits_per_byte"] == record["validation"]["bits_per_byte"][-1]
    assert record["native_against_reference"]["native_bytes_per_second"] > 0
    assert record["sample"]["text"].startswith("The ")
    load = record["expert_load"]["relative_load"]
    assert len(load) == STEPS
    for step in load:
        for layer in step:
            assert sum(layer) == pytest.approx(4, abs=0.01)
    text = json.dumps(record)
    assert str(runs["native"].parent) not in text
    assert "/home/" not in text


def test_pictures_are_written(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = [runs["native"] / "loss.png", runs["native"] / "experts.png", runs["dense"] / "loss.png"]
    assert not (runs["dense"] / "experts.png").exists()
    for over in ("steps", "seconds"):
        pictures.append(tmp_path / f"{over}.png")
        assert plot_runs.main([*map(str, runs.values()), "--over", over, "--output", str(pictures[-1])]) == 0
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 5_000
    assert "largest difference of the losses" in capsys.readouterr().out


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("flags", [[], ["--bias-update-rate", "0.01", "--shared-experts", "1"], ["--ffn", "dense"]])
def test_resume_continues_bit_for_bit(tmp_path: Path, flags: list[str]) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    common = ["--steps", "6", "--eval-every", "2", *flags]
    assert train(*common, "--out", straight) == 0
    assert train(*common, "--out", parts, "--stop-after", "3") == 0
    assert not (parts / "record.json").exists()
    assert main(["--resume", str(parts), "--eval-every", "2", "--compare-steps", "0"]) == 0
    for key in ("loss", "validation", "expert_load", "config"):
        assert record_of(parts)[key] == record_of(straight)[key]
    first, second = load_file(straight / FILE_NAME), load_file(parts / FILE_NAME)
    assert first.keys() == second.keys()
    different = [name for name in first if name != "history.seconds" and not first[name].equal(second[name])]
    assert different == []


def test_resuming_a_finished_run_reports_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--steps", "2", "--ffn", "dense", "--out", tmp_path) == 0
    before = record_of(tmp_path)
    assert main(["--resume", str(tmp_path)]) == 0
    assert "all 2 steps are made" in capsys.readouterr().out
    assert record_of(tmp_path)["loss"] == before["loss"]


def test_interrupt_saves_and_says_how_to_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, str(EXAMPLES / "train_lm.py"), *SMALL, "--steps", "100000", "--out", str(folder)]
    command += ["--checkpoint-every", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES.parent, env=environment()) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("step"):
                break
        run.send_signal(signal.SIGINT)
        rest = run.stdout.read()
        assert run.wait() == 130
    assert f"--resume {folder}" in rest
    tensors = load_file(folder / FILE_NAME)
    assert tensors["history.loss"].numel() >= 1


def environment() -> dict[str, str]:
    package = str(Path(pymoe.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}


def test_resume_names_the_setting_that_differs(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--resume", str(runs["native"]), "--width", "64", "--num-experts", "4"])
    message = capsys.readouterr().err
    assert "--width: the saved run has 32, the command line says 64" in message
    assert "--num-experts" not in message.split("settings:")[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-k", "9"], "--top-k must be at most --num-experts"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--width", "33"], "--width must be a multiple"),
        (["--aux-loss-coef", "nan"], "--aux-loss-coef must not be negative"),
        (["--learning-rate", "0"], "--learning-rate must be positive"),
        (["--minutes", "1", "--steps", "3"], "--minutes"),
        (["--eval-every", "0"], "--eval-every: must be at least 1"),
        (["--ffn", "sparse"], "--ffn"),
    ],
)
def test_bad_flags_are_named(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train("--out", tmp_path / "run", *flags)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_text_must_be_there_and_long_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert train("--out", tmp_path / "run", "--text", short) == 2
    assert "short.txt has 9 bytes, too few" in capsys.readouterr().err
    assert train("--out", tmp_path / "run", "--text", tmp_path / "none.txt") == 2
    assert "No such file" in capsys.readouterr().err


def test_resume_needs_the_same_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("some words again and again " * 50)
    assert train("--out", folder, "--text", text, "--steps", "2", "--stop-after", "1") == 0
    text.write_text("other words again and again " * 50)
    assert main(["--resume", str(folder)]) == 2
    assert "text.txt has changed" in capsys.readouterr().err


def test_a_folder_with_a_run_is_not_overwritten(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train("--out", runs["native"])
    assert "already holds a run" in capsys.readouterr().err


def test_no_checkpoint_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--resume", str(tmp_path)]) == 2
    assert f"no {FILE_NAME}" in capsys.readouterr().err
    (tmp_path / FILE_NAME).write_bytes(b"something else entirely")
    assert main(["--resume", str(tmp_path)]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_command() -> None:
    with pytest.raises(SystemExit, match=r"python -m pip install nobody_wrote_this$"):
        common.require(["json", "nobody_wrote_this"])


@pytest.mark.parametrize("shared_experts", [0, 2])
def test_dense_model_has_as_many_flops_per_byte(shared_experts: int) -> None:
    moe, dense = (Config(ffn=ffn, shared_experts=shared_experts) for ffn in ("moe", "dense"))
    routers = moe.layers * moe.width * moe.num_experts
    active = parameter_counts(LanguageModel(moe), moe)["active_per_byte"]
    assert active - routers == parameter_counts(LanguageModel(dense), dense)["active_per_byte"]


def test_the_manual_holds_no_paragraph_twice() -> None:
    text = load_text("", 256)
    paragraphs = bytes(text.validation.tolist()).decode(errors="replace").split("\n\n")
    training = bytes(text.train.tolist()).decode(errors="replace")
    assert text.train.numel() > 8 * text.validation.numel()
    assert not [paragraph for paragraph in paragraphs[1:] if len(paragraph) > 80 and f"\n{paragraph}\n" in training]


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_single_expert_a_byte_still_teaches_the_router(top_k: int) -> None:
    layer = make_ffn(Config(width=16, ffn_size=8, num_experts=4, top_k=top_k, aux_loss_coef=0.0))
    layer(torch.randn(9, 16)).square().sum().backward()
    assert layer.router.weight.grad.any()
