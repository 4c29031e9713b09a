"""Tests of examples/finetune_transformers.py: tiny runs that are whole, interrupted and resumed, and on two ranks."""

import json
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torchrun import command_of, torchrun

pytest.importorskip("peft")
pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "transformers"))

import finetune_transformers
import tiny_models
from finetune_transformers import main

from pymoe.nn import QuantizedLinear

BASE_STEPS, STEPS = 10, 30
TINY = ["--hidden", "32", "--layers", "2", "--experts", "4", "--base-steps", str(BASE_STEPS), "--base-learning-rate"]
TINY += ["0.01", "--steps", str(STEPS), "--learning-rate", "0.02", "--batch", "4", "--context", "32", "--sample", "8"]
TINY += ["--save-every", "8"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return the options of a tiny run on a text of its own."""
    text = tmp_path_factory.mktemp("text") / "squares.txt"
    text.write_text("".join(f"The square of the number {n} is the number {n * n}.\n" for n in range(150)))
    return [*TINY, "--text", str(text)]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Return the folder of a run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["--out", str(folder), *tiny]) == 0
    return folder


def history(folder, steps=STEPS):
    """Return what was logged of every step, without times."""
    log = json.loads((folder / f"checkpoint-{steps}" / "trainer_state.json").read_text())["log_history"]
    times = re.compile("runtime|_per_second")
    return [{key: value for key, value in entry.items() if not times.search(key)} for entry in log]


def losses(folder, name="loss"):
    return [entry[name] for entry in history(folder) if name in entry]


def adapters(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def assert_same_run(folder, other):
    assert history(folder / "base", BASE_STEPS) == history(other / "base", BASE_STEPS)
    assert history(folder) == history(other)
    found, expected = adapters(folder), adapters(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_run_learns_and_leaves_adapters_and_pictures(whole, tiny, capsys):
    first, *_, last = losses(whole, "eval_loss")
    assert last < first - 0.1
    loads = [entry for entry in history(whole) if any("expert_load" in key for key in entry)]
    assert len(loads) == STEPS
    for picture in ("loss.png", "experts.png"):
        assert (whole / picture).read_bytes().startswith(b"\x89PNG")
    assert main(["--resume", str(whole)]) == 0  # reports it again
    said = capsys.readouterr().out
    assert losses(whole, "eval_loss")[-1] == last
    assert re.search(r"a sample before fine-tuning:\n-+\nThe .*\n-+\na sample after fine-tuning:\n-+\nThe ", said, re.S)
    in_bits = [f"{loss / torch.tensor(2.0).log().item():.3f}" for loss in (first, last)]
    assert f"held-back text: {in_bits[0]} bits per token before, {in_bits[1]} after" in said


def test_peft_reads_the_adapters_and_has_the_loss_of_the_last_step(whole, tiny):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = whole / "base" / f"checkpoint-{BASE_STEPS}"
    options, _ = finetune_transformers.parse(["--out", "unused", *tiny])
    _, held_back = finetune_transformers.texts(AutoTokenizer.from_pretrained(base), options)
    config = finetune_transformers.PymoeConfig(bits=4, linear_bits=8)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config)
    model = PeftModel.from_pretrained(model, whole / "adapter")
    assert {"q_proj", "experts"} <= {part for key in adapters(whole) for part in key.split(".")}
    with torch.no_grad():
        found = [model(**{key: value[None] for key, value in window.items()}).loss.item() for window in held_back]
    assert sum(found) / len(found) == pytest.approx(losses(whole, "eval_loss")[-1], abs=1e-3)


@pytest.mark.parametrize("steps", [BASE_STEPS, STEPS], ids=["base", "adapters"])
def test_a_run_that_was_interrupted_goes_on_to_the_same_losses(whole, tiny, steps, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    on_step_end = finetune_transformers.NumbersOnBar.on_step_end

    def interrupted(self, args, state, control, **others):
        if (state.global_step, state.max_steps) == (2, steps):
            os.kill(os.getpid(), signal.SIGINT)
        return on_step_end(self, args, state, control, **others)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_transformers.NumbersOnBar, "on_step_end", interrupted)
        assert main(["--out", str(folder), *tiny]) == 130
    said = capsys.readouterr().out
    assert f"stopped after step 2 of {steps}" in said
    assert said.endswith(f"--resume {folder}\n")
    assert not (folder / "adapter").exists()
    assert main(["--resume", str(folder)]) == 0
    assert_same_run(folder, whole)


def test_two_ranks_have_the_losses_of_one(whole, tiny, tmp_path):
    """Each rank has half of a batch. Adam makes of rounding what it makes of gradients, where these are near zero."""
    base = ["--model", str(whole / "base" / f"checkpoint-{BASE_STEPS}")]
    status, said = torchrun("finetune_transformers.py", 2, "--out", str(tmp_path), *tiny, *base)
    assert status == 0, said
    assert said.count("held-back text:") == 1
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=1e-4)
    found, expected = adapters(tmp_path), adapters(whole)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).norm() < 1e-3 * value.norm()


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_attention_and_experts_of_other_architectures_get_adapters(name, tmp_path):
    tiny_models.build(name).save_pretrained(tmp_path)
    model = finetune_transformers.packed_with_adapters(tmp_path, Namespace(seed=0, rank=2)).train()
    model(input_ids=tiny_models.tokens(), labels=tiny_models.tokens()).loss.backward()
    trained = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(gradient is not None for gradient in trained.values())
    assert {key.split(".")[5] for key in trained} >= {"mlp", "self_attn"}
    stacked = [one for one in model.modules() if type(one) is QuantizedLinear]
    assert sum(".experts." in key for key in trained) == 2 * len(stacked)  # A and B
    assert not any("shared" in key for key in trained)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "status"), [(1, 130), (2, 1)])  # torchrun has a status of its own
def test_the_command_line_saves_at_an_interrupt(tiny, tmp_path, processes, status):
    options = ["--out", str(tmp_path), *tiny, "--base-steps", "100000"]
    command, environment = command_of("finetune_transformers.py", processes, *options)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        seen = ""
        while "loss=" not in seen:
            seen += run.stdout.read(1)
        run.send_signal(signal.SIGINT)
        said = run.stdout.read()
        assert run.wait() == status, said
    assert f"--resume {tmp_path}\n" in said
    assert finetune_transformers.last_checkpoint(tmp_path / "base")[0] >= 1


def test_what_does_not_fit_is_refused(whole, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("too short " * 50)
    assert (
        main(["--out", str(tmp_path / "run"), "--model", str(whole / "base/checkpoint-10"), "--text", str(short)]) == 2
    )
    assert "short.txt has 500 bytes, too few" in capsys.readouterr().err
    for arguments, message in (
        (["--resume", str(tmp_path)], "there is no settings.json in it"),
        ([f"--resume={whole}", "--steps=9"], "leave all other flags out"),
        (["--out", str(whole)], "already holds a run"),
        (["--experts", "3"], "must be at least 4"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err
