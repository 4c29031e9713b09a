"""Tests of the benchmark of whole models: files hold the same weights, wrong logits are noticed, and contenders that
fail or are missing are named.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import large_checkpoint, whole_models
from benchmarks.common.children import ChildError
from benchmarks.layers.checkpoints import write_checkpoint
from benchmarks.models import gguf_files, llama_cpp, report
from benchmarks.models.configurations import MODELS, PUBLISHED
from benchmarks.models.contenders import CONTENDERS, Contender, waves
from benchmarks.models.files import Files
from benchmarks.models.systems import Transformers, ids_of, shares
from benchmarks.models.worker import Worker
from pymoe.nn import quantize_experts, quantize_linears

ROOT = Path(__file__).parents[2]
TINY = [f"tiny-{name}" for name in PUBLISHED]
OURS = "transformers|pymoe"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a function that returns the folder of a tiny model with two layers."""
    folder = tmp_path_factory.mktemp("models")

    def made(name):
        if not (folder / name).exists():
            write_checkpoint(folder / name, MODELS[name].build(2))
        return folder / name

    return made


@pytest.mark.parametrize("name", TINY)
def test_a_checkpoint_has_every_weight_of_the_model(name, checkpoint):
    import transformers

    model, about = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name), output_loading_info=True)
    assert not any(about.values()), about
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("name", TINY)
def test_a_gguf_file_gets_every_weight_once(name, checkpoint):
    """Tensors are split, stacked, reordered and renamed, but none is lost, and none is written twice."""
    config = json.loads((checkpoint(name) / "config.json").read_text())
    entries = list(gguf_files.tensors(checkpoint(name), config, 2))
    assert len({one[0] for one in entries}) == len(entries)
    written = [read() for _, _, read in entries]
    assert [tuple(one.shape) for one in written] == [shape for _, shape, _ in entries]
    model = Transformers(checkpoint(name)).model
    expected = torch.cat([one.detach().flatten() for one in model.state_dict().values()]).sort().values
    assert torch.equal(torch.cat([one.flatten() for one in written]).sort().values, expected)
    first = [one for one in gguf_files.tensors(checkpoint(name), config, 1) if one[0].startswith("blk.")]
    assert {one[0].split(".")[1] for one in first} == {"0"}


def test_experts_of_gpt_oss_are_taken_apart(checkpoint):
    """Columns of gate and up alternate in the checkpoint. llama.cpp has a tensor for each, with a row for every
    output.
    """
    folder = checkpoint("tiny-gptoss")
    config = json.loads((folder / "config.json").read_text())
    found = {name: read() for name, _, read in gguf_files.tensors(folder, config, 1)}
    experts = Transformers(folder).model.model.layers[0].mlp.experts
    assert torch.equal(found["blk.0.ffn_gate_exps.weight"].mT, experts.gate_up_proj[..., ::2])
    assert torch.equal(found["blk.0.ffn_up_exps.weight"].mT, experts.gate_up_proj[..., 1::2])
    assert torch.equal(found["blk.0.ffn_up_exps.bias"], experts.gate_up_proj_bias[:, 1::2])


def test_queries_of_mixtral_are_turned_for_its_rotary_embeddings():
    weight = torch.arange(12.0)[:, None]  # two heads of six rows
    assert gguf_files._turned(weight, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_fewer_layers_compute_what_a_model_of_them_computes(checkpoint):
    system = Transformers(checkpoint("tiny-gptoss"))
    ids = ids_of(256, 1, 8, 0)
    with system.cut(1):
        assert len(system.model.model.layers) == 1
        cut = system.logits(ids)
    assert not np.array_equal(system.logits(ids), cut)
    del system.model.model.layers[1]
    system.model.config.num_hidden_layers = 1
    np.testing.assert_array_equal(system.logits(ids), cut)


@pytest.mark.parametrize("name", ["tiny-olmoe", "tiny-gptoss"])
def test_packed_weights_are_compared_with_those_for_which_they_stand(name, checkpoint):
    packed, system = (Transformers(checkpoint(name)) for _ in range(2))
    system.model.set_experts_implementation("eager")
    packed.model.set_experts_implementation("pymoe")
    quantize_experts(packed.model, 4)
    quantize_linears(packed.model, 4)
    ids = ids_of(256, 1, 64, 1)

    def error():
        found, wanted = packed.logits(ids), system.logits(ids)
        return np.median(np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1))

    assert error() > 2 * report.TOLERANCE
    system.take(packed)
    assert error() < report.TOLERANCE


def test_the_share_of_touched_experts_is_counted(checkpoint):
    system = Transformers(checkpoint("tiny-olmoe"))
    found = system.touched(ids_of(256, 1, 64, 1), (1, 4, 32))
    assert found["1"] == 2 / 8
    assert found["1"] < found["4"] <= found["32"] <= 1


def test_bytes_are_counted_by_what_reads_them():
    named = [
        ("model.embed_tokens.weight", 1),
        ("layers.0.mlp.experts.gate_up_proj.packed", 10),
        ("lm_head.packed", 100),
    ]
    named += [("layers.0.mlp.shared_experts.up_proj.weight", 1000), ("token_embd.weight", 1), ("output.weight", 10_000)]
    named += [("blk.0.ffn_up_exps.weight", 100_000), ("blk.0.ffn_up_shexp.weight", 1_000_000)]
    assert shares(iter(named)) == {"experts": 100_010, "rest": 1_011_100}


def test_models_are_grouped_by_what_fits_together():
    needs = [("a", "x", 3.0), ("b", "x", 1.0), ("c", "y", 3.0), ("d", "y", 2.0), ("e", "z", 3.0)]
    assert waves(needs, 8.0) == [["a", "b"], ["c", "d", "e"]], "a class stays together"
    assert waves(needs, 4.0) == [["a", "b"], ["c"], ["d"], ["e"]], "unless it is too large"
    assert waves(needs, 1.0) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert waves([], 8.0) == []


def cells(more, fewer):
    samples = [{"wall": [value], "processor": [2 * value]} for value in (more, fewer)]
    return [
        {"mode": "decode", "tokens": 4, "layers": layers, "samples": one}
        for layers, one in zip((4, 2), samples, strict=True)
    ]


def test_layers_are_told_from_the_rest():
    """Seven seconds with four layers and five with two mean three seconds for the rest and one per layer: 19 seconds
    for 16 layers.
    """
    model = {"layers": 4, "fewer": 2, "of": 16, "touched": {"4": 0.5}}
    one = {"cells": cells(7.0, 5.0), "loaded": {"sizes": {"experts": 8_000, "rest": 1_000}}}
    assert report.split(model, one, "decode", 4) == (3.0, 1.0, 19.0)
    assert report.split(model | {"fewer": 0}, one, "decode", 4) is None
    assert report.floor({"bandwidth": 1e3}, model, one, 4) == (5_000, 5.0)


@pytest.mark.parametrize(("median", "verdict"), [(0.04, "close"), (0.06, "WRONG"), (float("nan"), "WRONG")])
def test_logits_are_judged(median, verdict):
    packed = {"exact": "int4", "errors": {"whole": [0.2, 0.3], "int4": [median, 0.9]}}
    assert report.verdict(packed) == verdict
    peer = {"exact": "", "errors": {"whole": [median * 15, 2.0]}}
    assert report.verdict(peer) == verdict
    model = {"contenders": {"a": packed, "b": peer, "failed before": {"cells": []}}}
    assert report.wrong(model) == (["a", "b"] if verdict == "WRONG" else [])


class Stub:
    """A process that answers requests until one tells it to fail."""

    def __init__(self, fails=False):
        self.fails = fails
        self.asked = []

    def ask(self, request):
        self.asked.append((request["layers"], request["calls"]))
        if self.fails and len(self.asked) > 2:
            raise ChildError("its process ended")
        return {"wall": [0.5] * request["calls"], "processor": [1.0] * request["calls"]}


def test_who_fails_is_named_and_does_not_stop_the_others():
    contenders = [Contender("a", "a"), Contender("b", "b")]
    children = {"a": Stub(), "b": Stub(fails=True)}
    record = {"title": "t", "absent": {}, "contenders": {name: {"cells": []} for name in "ab"}}
    both = [whole_models.Cell("decode", 4, layers) for layers in (4, 2)]
    options = argparse.Namespace(rounds=2, budget=0.0)
    whole_models.take_turns(contenders, children, both, options, record)
    assert record["absent"] == {"b": "failed: decode 4: its process ended"}
    assert children["a"].asked == [(4, 1), (2, 1), (4, 4), (2, 4), (4, 4), (2, 4)]
    assert [len(cell["samples"]["wall"]) for cell in record["contenders"]["a"]["cells"]] == [8, 8]
    assert record["contenders"]["b"]["cells"] == []
    whole_models.take_turns(contenders, children, both, options, record)
    assert [len(cell["samples"]["wall"]) for cell in record["contenders"]["a"]["cells"]] == [16, 16], "a second pass"


def test_without_npm_llama_cpp_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(llama_cpp.Missing, match="npm cannot be run"):
        llama_cpp.install(tmp_path / "llama_cpp")
    assert not (tmp_path / "llama_cpp" / "libraries").exists()
    monkeypatch.setattr(llama_cpp, "install", lambda: llama_cpp.__dict__["_run"]("npm"))
    options = argparse.Namespace(contenders=re.compile(""))
    assert whole_models.library(options) == (None, "npm cannot be run: No such file or directory")
    assert "llama.cpp is left out" in capsys.readouterr().err
    assert whole_models.library(argparse.Namespace(contenders=re.compile(OURS))) == (None, "not asked for")


def test_a_compiled_token_is_left_out_where_each_would_need_a_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(Files, "make_whole", lambda _: None)
    monkeypatch.setattr(Files, "make", lambda *_: None)
    for name, compiled in (("tiny-olmoe", True), ("tiny-gptoss", False)):
        files = Files(tmp_path, MODELS[name], 2, 0, 1, None)
        found = whole_models.prepared(files, re.compile(OURS), "", {"absent": {}})
        assert any(one.compiled for one in found) == compiled, name
        assert len(found) > 5


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        (whole_models, ["--rounds", "24"], "--rounds: expected at most 23, got 24"),
        (large_checkpoint, ["--tokens", "1"], "--tokens: expected at least 2, got 1"),
    ],
)
def test_numbers_that_would_fail_after_hours_are_refused_at_once(program, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit):
        program.parse()
    assert words in capsys.readouterr().err


def test_a_model_without_sdpa_keeps_its_attention(tmp_path):
    """GPT-OSS raised an error when it was asked for "sdpa", which transformers does not have for it."""
    write_checkpoint(tmp_path / "whole", MODELS["tiny-gptoss"].build(2))
    worker = Worker(1)
    worker.load(str(tmp_path / "whole"))
    assert worker.check("pymoe", {}) == {}
    assert worker.system.model.config._attn_implementation == "eager"


def test_weights_that_do_not_fit_are_left_out(tmp_path, monkeypatch):
    """A model's packed weights are measured even if its weights in bfloat16 do not fit into memory."""
    files = Files(tmp_path, MODELS["tiny-olmoe"], 1, 0, 1, None)
    write_checkpoint(files.whole, files.model.build(1))
    assert files.fits
    monkeypatch.setattr("benchmarks.models.files.MOST_LOADED", 0.0)
    files.make_whole()
    with pytest.raises(llama_cpp.Missing, match="too large"):
        files.make(CONTENDERS[0])
    assert files.touched()["1"] == 2 / 8
    assert files.touched()["2"] == 7 / 16
    assert report.verdict({"exact": "int4", "errors": {}}) == "-"


def run(folder, *arguments):
    options = ["--models", "tiny-olmoe", "--layers", "2", "--decode", "1,4", "--prefill", "8", "--rounds", "1"]
    options += ["--budget", "0", "--threads", "1", "--contenders", OURS, "--files", str(folder / "files")]
    command = [sys.executable, "-m", "benchmarks.whole_models", *options, "--output", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_model_is_measured_from_files_to_tables(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    (model,) = json.loads((tmp_path / "whole_models.json").read_text())["models"]
    assert set(model["contenders"]) == {one.name for one in CONTENDERS if re.search(OURS, one.name) and not one.mxfp}
    assert model["absent"] == {}
    for name, one in model["contenders"].items():
        calls = 2 if name.endswith("compiled") else 3  # it has no prefill
        assert len(one["cells"]) == 2 * calls, "for two numbers of layers"
        assert all(value > 0 for cell in one["cells"] for values in cell["samples"].values() for value in values)
        assert report.verdict(one) == "close"
    errors = {name: one["errors"] for name, one in model["contenders"].items()}
    assert errors["transformers eager"]["whole"] == [0, 0]
    assert errors["pymoe int8"]["whole"][0] < errors["pymoe int4"]["whole"][0]
    sizes = {name: sum(one["loaded"]["sizes"].values()) for name, one in model["contenders"].items()}
    assert sizes["pymoe int4, dense 4"] < sizes["pymoe int4"] < sizes["pymoe int8"] < sizes["pymoe bf16"]
    table = (tmp_path / "whole_models.md").read_text()
    assert table.count("| pymoe int4, dense 8 |") == 5

    expected = tmp_path / "files" / "tiny-olmoe-2" / "int8.npy"
    np.save(expected, 2 * np.load(expected))
    done = run(tmp_path, "--discard")
    assert done.returncode == 1, "logits that are not those of the weights are noticed"
    assert "WRONG" in (tmp_path / "whole_models.md").read_text()
    assert not expected.parent.exists()
