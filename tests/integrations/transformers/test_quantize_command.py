"""python -m pymoe.quantize: a folder as on the hub becomes a packed folder, or is left alone with a message."""

import json
import re
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from specs.quantized_weight import FORMATS
from test_quantizer import assert_same_model, checkpoint, quantised

from pymoe.quantize import main

pytestmark = pytest.mark.only_on("cpu")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_folder_becomes_a_packed_one(form, tmp_path, capfd):
    whole, out = tmp_path / "whole", tmp_path / "below" / "packed"
    cls = checkpoint("qwen3_moe", whole, torch.bfloat16)
    (whole / "tokenizer.json").write_text("{}")
    (whole / "pytorch_model.bin").write_text("not copied")
    assert main([str(whole), str(out), "--bits", str(form[0]), "--format", form[1], "--max-shard-size", "50KB"]) == 0
    printed = capfd.readouterr()
    assert str(out) in printed.out
    assert "Loading weights" in printed.err
    assert "Writing model shards" in printed.err
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert "pytorch_model.bin" not in names
    assert [file.name for file in out.parent.iterdir()] == [out.name], "nothing else is left"
    model = cls.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert_same_model(model, quantised(cls, whole, *form))
    read = {}
    for file in out.glob("*.safetensors"):
        read.update(load_file(file))
    assert sum(tensor.dtype == torch.uint8 for tensor in read.values()) == 4


def no_folder(folder):
    return [folder / "nowhere"], "expected a folder with config.json, got .*nowhere"


def full_folder(folder):
    return [folder / "whole", folder / "whole"], "expected .*whole not to exist, or to be empty, got files"


def quantised_folder(folder):
    assert main([str(folder / "whole"), str(folder / "packed")]) == 0
    return [folder / "packed"], "expected weights that are not quantised, or .*compressed-tensors, got 'pymoe'"


def foreign_class(folder):
    file = folder / "whole" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["MineForCausalLM"]}))
    return [folder / "whole"], "expected a model of transformers, got the architecture 'MineForCausalLM'"


def too_many_bits(folder):
    return [folder / "whole", "--bits=8", "--format=mxfp"], "PymoeConfig: bits must be 4 for format 'mxfp', got 8"


def no_experts(folder):
    tiny_models.build("llama4").save_pretrained(folder / "dense")
    return [folder / "dense"], "experts that pymoe quantises, got Llama4ForCausalLM"


def cut_short(folder):
    file = max((folder / "whole").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    return [folder / "whole"], f"expected a whole safetensors file, got {file}"


def lost_file(folder):
    max((folder / "whole").glob("*.safetensors")).unlink()
    return [folder / "whole"], "safetensors"


@pytest.mark.parametrize(
    "prepare",
    [no_folder, full_folder, quantised_folder, foreign_class, too_many_bits, no_experts, cut_short, lost_file],
)
def test_what_cannot_be_done_is_said_and_leaves_nothing(prepare, tmp_path, capsys):
    checkpoint("qwen3_moe", tmp_path / "whole")
    arguments, words = prepare(tmp_path)
    before = {file.name for file in tmp_path.iterdir()}
    capsys.readouterr()
    folders = [one for one in arguments if isinstance(one, Path)]
    options = [one for one in arguments if isinstance(one, str)]
    assert main([*map(str, [*folders, tmp_path / "out"][:2]), *options]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("pymoe.quantize: ")
    assert re.search(words, last), last
    assert {file.name for file in tmp_path.iterdir()} == before


def test_bits_are_checked_before_anything_is_read(capsys):
    with pytest.raises(SystemExit):
        main(["folder", "out", "--bits", "5"])
    assert "invalid choice: 5" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["folder", "out", "--format", "fp8"])
    assert "invalid choice: 'fp8'" in capsys.readouterr().err
