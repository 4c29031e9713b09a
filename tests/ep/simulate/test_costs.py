"""Seconds and bytes of single parts: rooflines, links, memory, by hand and beside what a layer really keeps."""

import pytest
import torch
import torch.distributed as dist
from expert_counts import random_choices

from pymoe.ep import agreement
from pymoe.ep.simulate import MACHINES, NETWORKS, PRESETS, Block, Layer, Load, Machine, Network, simulate
from pymoe.ep.simulate.balance import plans, spreads
from pymoe.ep.simulate.memory import data_parallel, fully_sharded, optimizer_bytes_of
from pymoe.nn import MoE

ZEROS = torch.zeros(3, 2, dtype=torch.int64)
TINY = Block("tiny", 4, 8, 6, 2, layers=3, shared_ffn=16, dtype="float32")


def test_products_take_the_longer_of_operations_and_memory():
    computing, reading = Machine("computing", 1.0, 1e12), Machine("reading", 1e12, 1.0)
    assert computing.experts_seconds(TINY, 10, 2) == 10 * 6 * 4 * 8
    assert computing.experts_seconds(TINY, 10, 2, backward=True) == 2 * 10 * 6 * 4 * 8
    assert reading.experts_seconds(TINY, 10, 2) == 4 * (2 * 3 * 4 * 8 + 10 * (2 * 4 + 6 * 8))
    assert computing.shared_seconds(TINY, 10) == 10 * 6 * 4 * 16
    assert computing.gate_seconds(TINY, 10) == 10 * 2 * 4 * 6
    assert reading.move_seconds(TINY, 20, 10) == 30 * 4 * 4


def test_experts_without_rows_are_not_read():
    reading = Machine("reading", 1e12, 1.0)
    assert reading.experts_seconds(TINY, 1, 6) == 4 * (1 * 3 * 4 * 8 + 1 * (2 * 4 + 6 * 8))
    assert reading.experts_seconds(TINY, 0, 6) == 0


def test_an_exchange_takes_the_time_of_the_busiest_rank():
    """Rank 0 sends 30, rank 2 receives 50; what stays on a rank does not travel."""
    pairs = torch.tensor([[99, 10, 20], [0, 99, 30], [5, 0, 99]], dtype=torch.float64)
    assert Network("flat", 1.0, 10.0).busiest(pairs) == 5
    assert float(pairs[0, 0]) == 99


def test_rows_within_and_between_nodes_travel_at_the_same_time():
    """Nodes of two ranks: 40 within at 10, 90 between at 10; or ten times faster within."""
    pairs = torch.zeros(4, 4, dtype=torch.float64)
    pairs[0, 1], pairs[0, 2], pairs[1, 2] = 40, 30, 60
    assert Network("same", 0.0, 10.0, 2).busiest(pairs) == 9
    assert Network("slow within", 0.0, 10.0, 2, 1.0).busiest(pairs) == 40
    assert Network("slow between", 0.0, 1.0, 2, 10.0).busiest(pairs) == 90


def test_a_ring_is_as_fast_as_its_slowest_link():
    network = Network("nodes", 0.0, 1.0, 8, 10.0)
    assert (network.ring_bandwidth(8), network.ring_bandwidth(9)) == (10, 1)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("experts", [6, 600])
def test_counts_take_the_bytes_that_a_layer_sends(experts, tmp_path, monkeypatch):
    """The simulator had a header of 8 numbers, and the layer sent 11 in blocks of 512: up to seven times as many."""
    sent, gather = [], agreement.all_gather

    def recorded(received, message, group):
        sent.append(message)
        return gather(received, message, group)

    monkeypatch.setattr(agreement, "all_gather", recorded)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        MoE(4, 8, experts, 2, expert_parallel=dist.group.WORLD)(torch.ones(3, 4))
    finally:
        dist.destroy_process_group()
    (message,) = sent
    block = Block("other", 4, 8, experts, 2, layers=1, shared_ffn=0, dtype="float32")
    layer = Layer(block, 3, Machine("any", 1.0, 1.0), Network("one byte a second", 0.0, 1.0))
    assert layer.counts_seconds() == (3 - 1) * message.nbytes


def test_the_phases_of_a_layer_are_those_of_the_formulas():
    """Four ranks, 10 tokens each, a network of 1 byte a second, products alone: the backward knows the counts."""
    layer = Layer(TINY, 4, Machine("computing", 1.0, 1e12), Network("slow", 0.5, 1.0))
    load = Load("random", ((random_choices(40, 6, 2, 0),),), 6)
    (spread,) = spreads("as it is", plans(1)["as it is"], load, 4, 10)
    cut = layer.cut(spread, 10, 1, deduplicate=False)
    forward, backward = (layer.phases(cut, 10, backward=back) for back in (False, True))
    assert (forward.counts, backward.counts) == (0.5 + 4 * 3 * 512, 0)
    assert (forward.gate, backward.gate) == (10 * 2 * 4 * 6, 0)
    assert backward.sum - forward.sum == 2 * forward.gate
    assert (backward.experts[0] == 2 * forward.experts[0]).all()
    assert forward.experts[0].tolist() == [rows * 6 * 4 * 8 for rows in spread.shares.destinations().sum(0).tolist()]
    away = spread.shares.destinations().fill_diagonal_(0)
    assert forward.dispatch == backward.combine == (4 * 4 * max(int(away.sum(0).max()), int(away.sum(1).max())),)
    twice = layer.phases(cut, 20, backward=False)
    assert twice.dispatch[0] == 2 * forward.dispatch[0]
    assert (twice.experts[0] == 2 * forward.experts[0]).all()


def test_weights_gradients_and_states_are_counted():
    """E 6 of 3 * 4 * 8, a router of 4 * 6 and shared experts of 3 * 4 * 16; three layers in float32."""
    experts, rest = 6 * 3 * 4 * 8, 4 * 6 + 3 * 4 * 16
    whole = data_parallel(TINY, 10, 8, recompute=False)
    assert (whole.weights, whole.gradients, whole.optimizer) == tuple(3 * (experts + rest) * n for n in (4, 4, 8))
    part = fully_sharded(TINY, 4, 10, 8, recompute=False)
    assert part.weights == whole.weights / 4
    assert part.buffers - whole.buffers == 2 * 4 * (experts + rest)
    load = Load("random", ((random_choices(40, 6, 2, 0),),), 6)
    # On four ranks 2, 2, 2 and no experts.
    found = simulate(TINY, 4, 10, load, MACHINES["h100"], NETWORKS["nvlink"]).memory["EP"]
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
    """Weights of all experts, in billions: most of each model's total."""
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
        (lambda: Machine("x", 0, 1), ValueError, "Machine: flops must be finite and greater than 0, got 0"),
        (lambda: Network("x", -1, 1), ValueError, "Network: latency must be finite and at least 0, got -1"),
        (
            lambda: Network("x", 0, float("inf")),
            ValueError,
            "bandwidth must be finite and greater than 0, got inf",
        ),
        (lambda: Network("x", 0, 1, 0), ValueError, "Network: ranks_per_node must be at least 1, got 0"),
        (lambda: Load("x", ((ZEROS, ZEROS[:1]),), 4), ValueError, r"shape \(N, K\), got \(3, 2\) and \(1, 2\)"),
        (lambda: Load("x", ((ZEROS + 4,),), 4), ValueError, r"Load: choices must be in 0\.\.3, got 4 to 4"),
        (lambda: Load("x", (), 4), ValueError, "Load: choices must have at least one layer, step and token in each"),
    ],
)
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()
