"""Memory is compared with figures computed by hand and with what a layer really keeps; counts with the bytes it
really sends.
"""

import pytest
import torch
import torch.distributed as dist
from expert_counts import random_choices

from pymoe.ep import exchange
from pymoe.ep.simulate import PRESETS, Block, Load, simulate, uniform
from pymoe.ep.simulate.simulation import data_parallel, fully_sharded, optimizer_bytes_of
from pymoe.nn import MoE

ZEROS = torch.zeros(3, 2, dtype=torch.int64)
TINY = Block("tiny", 4, 8, 6, 2, layers=3, shared_ffn=16, dtype="float32")


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("experts", [6, 600])
def test_counts_take_the_bytes_that_a_layer_sends(experts, tmp_path, monkeypatch):
    """The simulator assumed a header of 8 numbers, while the layer sent 11 in blocks of 512: up to seven times as
    many.
    """
    sent, gather = [], exchange.all_gather

    def recorded(received, message, **options):
        sent.append(message)
        return gather(received, message, **options)

    monkeypatch.setattr(exchange, "all_gather", recorded)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        MoE(4, 8, experts, 2, expert_parallel=dist.group.WORLD)(torch.ones(3, 4))
    finally:
        dist.destroy_process_group()
    (message,) = sent
    block = Block("other", 4, 8, experts, 2, layers=1, shared_ffn=0, dtype="float32")
    assert simulate(block, 3, 4, uniform(block, 12)).counts_bytes == (3 - 1) * message.nbytes


def test_weights_gradients_and_states_are_counted():
    """Each of three float32 layers has 6 experts of 3 * 4 * 8, a router of 4 * 6 and shared experts of 3 * 4 * 16."""
    experts, rest = 6 * 3 * 4 * 8, 4 * 6 + 3 * 4 * 16
    whole = data_parallel(TINY, 10, 8, recompute=False)
    assert (whole.weights, whole.gradients, whole.optimizer) == tuple(3 * (experts + rest) * n for n in (4, 4, 8))
    part = fully_sharded(TINY, 4, 10, 8, recompute=False)
    assert part.weights == whole.weights / 4
    assert part.buffers - whole.buffers == 2 * 4 * (experts + rest)
    load = Load("random", ((random_choices(40, 6, 2, 0),),), 6)
    # The four ranks have 2, 2, 2 and no experts.
    found = simulate(TINY, 4, 10, load).memory["EP"]
    assert found.weights == 3 * 4 * (2 * 3 * 4 * 8 + rest)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 12), ("float16", 12), ("float32", 8), ("float64", 16)])
def test_states_of_adamw(dtype, size):
    assert optimizer_bytes_of(Block("one", 1, 1, 1, 1, dtype=dtype)) == size


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_a_layer_saves_within_a_twentieth(shared, dtype):
    tokens, hidden, ffn, experts, top_k = 256, 64, 96, 8, 2
    moe = MoE(hidden, ffn, experts, top_k, num_shared_experts=shared, dtype=dtype)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    parameters = {parameter.untyped_storage().data_ptr() for parameter in moe.parameters()}
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = moe(x)
    kept = sum(size for at, (size, _) in saved.items() if at not in parameters)
    assert y.shape == x.shape
    name = str(dtype).removeprefix("torch.")
    block = Block("layer", hidden, ffn, experts, top_k, shared_ffn=shared * ffn, dtype=name)
    assert data_parallel(block, tokens, 8, recompute=False).activations == pytest.approx(kept, rel=0.05)


def test_recomputation_keeps_one_layer_and_the_inputs_of_all():
    kept, again = (data_parallel(TINY, 10, 8, recompute=recompute) for recompute in (False, True))
    assert again.activations == 3 * 10 * 4 * 4
    assert again.buffers - kept.buffers == kept.activations / 3


def test_presets_have_the_published_sizes():
    """The sizes are the numbers of experts' parameters, in billions; they are most of each model's total."""
    sizes = {name: block.layers * block.experts * block.expert_parameters / 1e9 for name, block in PRESETS.items()}
    assert {name: round(size, 1) for name, size in sizes.items()} == {
        "mixtral-8x7b": 45.1,
        "olmoe-1b-7b": 6.4,
        "qwen3-30b-a3b": 29.0,
        "qwen3-235b-a22b": 227.1,
        "gpt-oss-20b": 19.1,
        "gpt-oss-120b": 114.7,
        "glm-4.5-air": 99.7,
        "deepseek-v3": 653.9,
    }


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Block("x", 0, 1, 1, 1), ValueError, "Block: hidden must be at least 1, got 0"),
        (lambda: Block("x", 8.0, 1, 1, 1), TypeError, "Block: hidden must be an int, got float"),
        (lambda: Block("x", 8, 8, 4, 5), ValueError, r"Block: choices must be in 1\.\.4, got 5"),
        (lambda: Block("x", 8, 8, 4, 1, dtype="int8"), ValueError, "Block: dtype must be one of .*, got 'int8'"),
        (lambda: Block("x", 8, 8, 4, 1, groups=3), ValueError, "Block: groups must divide 4 experts, got 3"),
        (
            lambda: Block("x", 8, 8, 4, 2, groups=4),
            ValueError,
            "kept_groups must leave at least 2 experts, got 1",
        ),
        (lambda: Load("x", ((ZEROS, ZEROS[:1]),), 4), ValueError, r"shape \(N, K\), got \(3, 2\) and \(1, 2\)"),
        (lambda: Load("x", ((ZEROS + 4,),), 4), ValueError, r"Load: choices must be in 0\.\.3, got 4 to 4"),
        (lambda: Load("x", (), 4), ValueError, "Load: choices must have at least one layer, step and token in each"),
    ],
)
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()
