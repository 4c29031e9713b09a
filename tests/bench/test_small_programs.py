"""Tests that a run of each small benchmark writes a positive figure for every line of its table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import finetune, model_memory, perplexity

ROOT = Path(__file__).parents[2]
OPERATORS = ("gate_topk", "dispatch", "grouped_linear", "expert_activation", "combine", "router_losses")
CALLS = {(name, way) for name in OPERATORS for way in ("raw", "Python", "recorded")}
CALLS |= {(name, way) for name in ("build_routing", "gather_batch of 64") for way in ("raw", "Python")}
WAYS = ("native calls", "no gradients", "recorded", "forward + backward")
CALLS |= {(f"MoE, T {tokens}", way) for tokens in (1, 4, 16) for way in WAYS}
PARTS = {("inference", t, part) for t in (1, 16) for part in ("MoE", "native calls", "experts", "router", "losses")}
PARTS |= {("training", tokens, "MoE") for tokens in (1, 16)}


def run(module, folder, *arguments):
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--output", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert (folder / f"{module}.md").read_text().count("|") > 20
    return json.loads((folder / f"{module}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "keys", "lines"),
    [("host_cost", ("call", "way"), CALLS), ("layer_overhead", ("mode", "tokens", "name"), PARTS)],
)
def test_every_call_is_measured(module, keys, lines, tmp_path):
    found = run(module, tmp_path, "--budget", "0.01")["microseconds"]
    assert lines <= {tuple(one[key] for key in keys) for one in found}
    assert all(one["median"] > 0 for one in found)


@pytest.mark.slow
def test_a_layer_has_the_same_candidates_in_training_without_its_parts(tmp_path):
    found = run("layer_overhead", tmp_path, "--budget", "0.01")["microseconds"]
    for tokens in (1, 16):
        of_inference, of_training = (
            {one["name"] for one in found if (one["mode"], one["tokens"]) == (mode, tokens)}
            for mode in ("inference", "training")
        )
        assert of_inference == of_training | {"native calls", "experts", "router", "losses"}


@pytest.mark.slow
def test_every_product_is_measured(tmp_path):
    arguments = ["--rows", "2", "40", "--isas", "baseline", "--rounds", "1", "--weights", "int8|in, out"]
    records = run("products", tmp_path, *arguments)["records"]
    levels = {("bf16 (in, out)", rows): {"baseline", "torch.mm"} for rows in (2, 40)}
    levels |= {(kind, rows): {"baseline"} for kind in ("int8", "int8 gradient") for rows in (2, 40)}
    assert {(one["kind"], one["rows"]): set(one["seconds"]) for one in records} == levels
    assert all(spread["median"] > 0 for one in records for spread in one["seconds"].values())
    assert (tmp_path / "products.md").read_text().count(" GB/s |") == 4  # the lines of 2 rows


@pytest.mark.slow
def test_every_way_to_load_is_measured(tmp_path):
    sizes = ["--gigabytes", "0.02", "--hidden", "64", "--ffn", "64", "--experts", "8", "--vocabulary", "256"]
    found = run("model_memory", tmp_path, *sizes, "--folder", str(tmp_path / "models"))
    assert [one["way"] for one in found["ways"]] == list(model_memory.ORDER)
    assert all(one["load"] > 0 and one["packed"] > 0 for one in found["ways"])
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
def test_every_way_to_train_experts_adapters_is_measured(tmp_path):
    sizes = ["--models", "qwen3", "--trainings", "experts", "--shrink", "16", "--tokens", "16", "--rank", "2"]
    found = run("finetune", tmp_path, *sizes, "--steps", "2", "--rounds", "1", "--threads", "1")
    ways = {tuple(one["way"]) for one in found["steps"]}
    assert ways == {way for way in finetune.WAYS if way.training == "experts"}
    assert all(min(one["processor"]) > 0 and len(one["seconds"]) == 2 and one["peak"] > 0 for one in found["steps"])
    last = [one["losses"][-1] for one in found["steps"] if one["way"][1] == "bf16"]
    assert max(last) - min(last) < 0.05


@pytest.mark.slow
def test_every_way_to_round_a_trained_model_is_measured(tmp_path):
    found = run("perplexity", tmp_path, "--steps", "5", "--contenders", "^(?!llama)")  # not from an index
    errors = {one["way"]: one.get("error", 0.0) for one in found["accuracy"]}
    assert len(errors) == 2 + len(perplexity.EXPERTS) * len(perplexity.DENSE)
    assert errors["float32"] == 0 < errors["int8, dense 8"] < errors["int8, dense 4"]
    assert errors["int8"] < errors["fp8"] < errors["mxfp4"]


@pytest.mark.slow
def test_both_ways_to_read_mapped_experts_are_measured(tmp_path):
    arguments = ["--layers", "2", "--tokens", "2", "--shares", "50,100", "--sizes", "64,96", "--files", str(tmp_path)]
    found = run("mapped_experts", tmp_path / "output", *arguments)
    assert [one["share"] for one in found["shares"]] == [50, 100]
    assert all(one["same"] and one["ratio"]["median"] > 0 for one in found["shares"])
    assert not list(tmp_path.glob("*/*.safetensors"))


@pytest.mark.slow
def test_a_model_that_was_made_layer_by_layer_is_fine_tuned(tmp_path):
    sizes = ["--model", "tiny-qwen3", "--layers", "2", "--tokens", "32", "--rate", "1e-2"]
    found = run("finetune_large", tmp_path, *sizes, "--folder", str(tmp_path / "model"))
    losses = found["trained"]["losses"]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert found["made"]["written"] < 0.6 * found["made"]["whole"]
    assert found["trained"]["peak"] > 0
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_every_walk_is_counted():
    command = [sys.executable, "-m", "benchmarks.walks", "--budget", "0.01"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    walks, times = printed.split("\n\n")
    counts = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in walks.splitlines()[2:]}
    layers = ("MoE", "MoE on two ranks", "remote expert")
    assert {f"{layer}, no gradients" for layer in layers} <= {*counts}
    assert all(len(one) == 4 and all(int(count) > 0 for count in one) for one in counts.values())
    assert times.count("\n") > 4
