"""A decoded token is one graph of torch.compile, whose quantised layers are the native calls that they are without it.

A step over a static cache is compiled, as text is generated: prompts run without torch.compile. Graphs that run
torch's own operators compute the same bits. Inductor rounds what it fuses otherwise: norms, rotary embeddings and
attention in bfloat16 are then rounded less often.
"""

from collections import Counter

import pytest
import tiny_models
import torch
from specs.comparison import assert_same_bits
from transformers import CompileConfig, StaticCache

from pymoe.integrations.transformers import PymoeConfig
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear, quantize_experts, quantize_linears

pytestmark = pytest.mark.only_on("cpu")

PROMPT, STEPS = 6, 4
EXPERTS, LINEAR = torch.ops.pymoe.apply_quantized_experts.default, torch.ops.pymoe.quantized_linear.default


@pytest.fixture(autouse=True)
def no_graphs_of_others():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def quantised(name, dtype=torch.float32):
    """Return a model whose layers are quantised in memory."""
    model = tiny_models.build(name).to(dtype)
    model.set_experts_implementation("pymoe")
    quantize_experts(model, 4)
    quantize_linears(model, 4)
    return model


def loaded(name, folder):
    """Return a model whose layers are quantised as it is read, and read again from the packed files."""
    model = tiny_models.build(name)
    model.save_pretrained(folder / "whole")
    config = PymoeConfig(bits=4, linear_bits=4)
    type(model).from_pretrained(folder / "whole", quantization_config=config).save_pretrained(folder / "packed")
    return type(model).from_pretrained(folder / "packed")


@torch.no_grad()
def decoded(model, step):
    """Return the logits of some tokens after a prompt, each from a call of ``step``."""
    ids = tiny_models.tokens(PROMPT + STEPS)
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :PROMPT], past_key_values=cache)
    parts = ids[:, PROMPT:].split(1, dim=1)
    return torch.cat([step(one.contiguous(), past_key_values=cache, use_cache=True).logits.clone() for one in parts], 1)


def options_of(model, backend):
    """Return options of torch.compile. A layer with a sliding window keeps its number of tokens as an int, for each of
    which ``dynamic=False`` would compile a graph.
    """
    sliding = getattr(model.config, "sliding_window", None)
    return {"fullgraph": True, "dynamic": None if sliding else False, "backend": backend}


def compiled(model, backend):
    return torch.compile(model.forward, **options_of(model, backend))


def graphs(model):
    """Return a backend that runs a graph as it is, and the list in which it puts the functions that each calls."""
    found = []

    def keep(graph, _):
        found.append(Counter(node.target for node in graph.graph.nodes if node.op == "call_function"))
        return graph

    return keep, found


def assert_native(model, found):
    """Check that tokens share a graph, in which every layer of experts and every dense one is one native call."""
    assert len(found) == 1 + (options_of(model, None)["dynamic"] is None)
    calls = found[-1]
    kinds = Counter(type(one) for one in model.modules() if isinstance(one, QuantizedLinear))
    assert kinds[QuantizedDenseLinear] > 0
    assert calls[LINEAR] == kinds[QuantizedDenseLinear]
    assert calls[EXPERTS] == kinds[QuantizedLinear] / 2 > 0
    assert not [one for one in calls if "build_routing" in str(one)]


MODELS = ["olmoe", "gpt_oss", "mixtral", "qwen2_moe"]


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["loaded", "in memory"])
def test_a_token_is_one_graph_with_a_native_call_a_layer(name, way, tmp_path):
    """torch.compile took every layer's forward for a replaced one, and ran experts operator by operator."""
    model = quantised(name) if way == "in memory" else loaded(name, tmp_path)
    model.set_attn_implementation("eager")  # sdpa turns keys and values otherwise in a graph
    backend, found = graphs(model)
    assert_same_bits(decoded(model, compiled(model, backend)), decoded(model, model), "logits")
    assert_native(model, found)


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("name", MODELS)
def test_generate_compiles_a_step_over_a_static_cache(name, tmp_path):
    model = loaded(name, tmp_path)
    backend, found = graphs(model)
    ids = tiny_models.tokens(PROMPT)
    config = CompileConfig(**options_of(model, backend), mode=None)
    config._compile_all_devices = True  # by itself, transformers compiles on a GPU alone
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, cache_implementation="static")
    expected = model.generate(ids, **options, disable_compile=True)
    assert torch.equal(model.generate(ids, **options, compile_config=config), expected)
    assert_native(model, found)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-4), (torch.bfloat16, 0.03)], ids=str)
def test_inductor_computes_the_same_up_to_rounding(dtype, tolerance, attention):
    model = quantised("olmoe", dtype)
    model.set_attn_implementation(attention)
    expected = decoded(model, model).float()
    found = decoded(model, compiled(model, "inductor")).float()
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < tolerance, error
