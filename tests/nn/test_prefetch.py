"""prefetch_experts: layers ask the system for the weights of chosen experts, for nothing else, and keep their bits."""

import copy
import gc
import json
import mmap
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from limits import LONG
from moe_layers import make_input, make_layer, one_by_one
from specs.comparison import assert_same_bits
from specs.quantized_weight import FORMATS
from torch import nn

from pymoe import ops
from pymoe.nn import MoE, load_quantized, prefetch_experts, quantize_experts, quantize_linears, save_quantized

pytestmark = pytest.mark.only_on("cpu")
HERE = Path(__file__).parent
PAGE = mmap.PAGESIZE


def saved(path, form=(4, "int"), **options):
    layer = make_layer(dtype=torch.float32, **options).eval()
    quantize_experts(layer, *form)
    save_quantized(layer, path)
    return path


@pytest.fixture
def layer(tmp_path):
    return load_quantized(saved(tmp_path / "layer.safetensors"))


def pages(begin, size):
    return list(range(begin // PAGE, -(-(begin + size) // PAGE)))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the requests of layers in a separate process."""
    folder = tmp_path_factory.mktemp("asked")
    library, path = folder / "recorded_advice.so", folder / "layer.safetensors"
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", "-O1"]
    subprocess.run([*compiler, str(HERE / "recorded_advice.cpp"), "-o", str(library)], check=True)
    saved(path, hidden_size=320, ffn_size=768)  # an expert's weights need more than one request
    preload = " ".join(filter(None, (os.environ.get("LD_PRELOAD"), str(library))))
    command = [sys.executable, str(HERE / "asked_experts.py"), str(library), str(path)]
    environment = {**os.environ, "LD_PRELOAD": preload, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize("how", ["missing", "missing, by the function", "missing, compiled", "all"])
def test_both_weights_of_the_chosen_experts_are_asked_for_and_no_others(how, recorded):
    assert 0 < len(recorded["chosen"]) < 8
    found = recorded["asked"][how]
    assert [page for one in found for page in pages(*one)] == [
        page for span in recorded["spans"] for page in pages(*span)
    ]
    assert all(begin % PAGE == 0 and 0 < size <= 128 << 10 for begin, size in found)
    assert len(found) > len(recorded["spans"])


def test_what_is_in_memory_is_not_asked_for(recorded):
    assert recorded["asked"]["in memory"] == []
    [[begin, size]] = recorded["asked"]["one page"]
    assert begin <= recorded["page"] < begin + size <= begin + (128 << 10)


@pytest.mark.parametrize("how", ["off", "off again", "a copy"])
def test_nothing_is_asked_for_without_the_option_nor_by_copies_in_memory(how, recorded):
    assert recorded["asked"][how] == []


def test_shared_memory_is_no_file():
    layer = MoE(64, 32, 4, 2).eval()
    quantize_experts(layer, 4)
    layer.share_memory()
    with pytest.raises(ValueError, match="all in memory"):
        prefetch_experts(layer)


def test_all_of_them_have_the_same_bits(recorded):
    assert recorded["same"]


@torch.no_grad()
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_pages_that_have_been_dropped_come_back_with_the_same_bits(form, tmp_path):
    path = saved(tmp_path / "layer.safetensors", form, hidden_size=64, ffn_size=96, bias=True)
    layer, x = load_quantized(path), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = layer(x)
    weights = (layer.experts.w_in, layer.experts.w_out)
    assert prefetch_experts(layer) == sum(weight.packed.nbytes for weight in weights)
    for prefetch in (1, 2):
        for weight in weights:
            weight.prefetch = prefetch
        for call in (layer, lambda x: parts(layer, x)):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
            assert_same_bits(call(x), expected)


def parts(layer, x):
    with one_by_one():
        return layer(x)


def test_layers_whose_weights_are_in_memory_are_left_alone(layer):
    other = make_layer(dtype=torch.float32).eval()
    quantize_experts(other, 4)
    both = nn.ModuleList([other, layer])
    assert prefetch_experts(both) == layer.experts.w_in.packed.nbytes + layer.experts.w_out.packed.nbytes
    assert [one.experts.w_in.prefetch for one in both] == [one.experts.w_out.prefetch for one in both] == [0, 1]
    assert prefetch_experts(both, enabled=False) == 0
    assert [one.experts.w_in.prefetch for one in both] == [0, 0]


def test_a_model_without_mapped_experts_is_refused(layer):
    dense = nn.Sequential(nn.Linear(64, 64)).eval()
    quantize_linears(dense, 8, select=lambda *_: True)
    in_memory = copy.deepcopy(layer)
    with torch.device("meta"):
        meta = make_layer(dtype=torch.float32).eval()
    quantize_experts(meta, 8)
    for model, weights in ((dense, 0), (in_memory, 2), (meta, 2), (nn.Linear(2, 2), 0)):
        expected = f"quantised experts that are mapped from files, got {weights} weights"
        with pytest.raises(ValueError, match=expected):
            prefetch_experts(model)
        assert prefetch_experts(model, enabled=False) == 0
    with pytest.raises(TypeError, match=re.escape("model must be a torch.nn.Module, got int")):
        prefetch_experts(1)
    with pytest.raises(TypeError, match=re.escape("enabled must be a bool, got int")):
        prefetch_experts(layer, 1)


def test_files_of_which_the_system_tells_nothing_are_asked_for_in_whole(layer, tmp_path, monkeypatch):
    def prefetched():
        prefetch_experts(layer)
        return layer.experts.w_in.prefetch, layer.experts.w_out.prefetch

    assert prefetched() == (1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert prefetched() == (1, 1)  # the process owns it
        patch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
        assert prefetched() == (2, 2)
    (tmp_path / "layer.safetensors").unlink()
    assert prefetched() == (2, 2)


@torch.no_grad()
def test_copies_pickles_and_conversions_keep_it_and_their_bits(layer):
    x = make_input(5, dtype=torch.float32)
    expected = layer(x)
    prefetch_experts(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer), layer.to("cpu")):
        assert other.experts.w_in.prefetch == other.experts.w_out.prefetch == 1
        assert_same_bits(other(x), expected)
    fresh = make_layer(dtype=torch.float32).eval()
    quantize_experts(fresh, 4)
    fresh.load_state_dict(layer.state_dict(), assign=True)
    assert fresh.experts.w_in.prefetch == 0  # an option, not a part of the state
    assert layer.bfloat16().experts.w_in.prefetch == 1
    assert_same_bits(layer(x.bfloat16()), fresh.bfloat16()(x.bfloat16()))


@torch.no_grad()
def test_layers_that_earlier_versions_have_pickled_prefetch_nothing(layer):
    x = make_input(5, dtype=torch.float32)
    expected = layer(x)
    for weight in (layer.experts.w_in, layer.experts.w_out):
        weight.__dict__.pop("prefetch", None)
        assert weight.weight.prefetch == 0
    assert_same_bits(layer(x), expected)


@torch.no_grad()
def test_weights_that_take_the_place_of_mapped_ones_may_be_freed(layer):
    x = make_input(5, dtype=torch.float32)
    expected = layer(x)
    prefetch_experts(layer)
    for weight in (layer.experts.w_in, layer.experts.w_out):
        weight.packed = weight.packed.clone()
    gc.collect()  # unmaps the file
    assert_same_bits(layer(x), expected)


@torch.no_grad()
def test_threads_may_call_a_layer_while_it_is_switched(layer):
    x = make_input(5, dtype=torch.float32).detach()
    expected = layer(x)

    def call(_):
        with torch.no_grad():
            return all(torch.equal(layer(x), expected) for _ in range(50))

    with ThreadPoolExecutor(3) as pool:
        same = pool.map(call, range(3))
        for number in range(20):
            prefetch_experts(layer, enabled=number % 2 == 0)
        assert all(same)


@torch.no_grad()
def test_a_compiled_layer_follows_the_switch(layer):
    x = make_input(5, dtype=torch.float32)
    expected = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for enabled in (False, True, False):
        prefetch_experts(layer, enabled)
        assert_same_bits(compiled(x), expected)


def test_a_weight_holds_the_option_and_other_values_are_refused(layer):
    prefetch_experts(layer)
    weight = layer.experts.w_in.weight
    assert weight.prefetch == 1
    x = torch.randn(8, weight.input_features)
    offsets = torch.arange(9, dtype=torch.int32)
    assert_same_bits(ops.quantized_linear(x, weight, offsets), ops.quantized_linear(x, weight[:5], offsets))
    with pytest.raises(ValueError, match=re.escape("weight.prefetch must be 0, 1 or 2, got 3")):
        ops.quantized_linear(x, weight._replace(prefetch=3), offsets)
