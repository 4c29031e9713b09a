"""A whole training step of the layer can be captured in a CUDA graph: it never waits for the host."""

import pytest
import torch
from moe_layers import OPTIONS, make_input, make_layer

CAPTURED = ("plain", "groups sigmoid bias", "capacity below the mean", "both losses", "everything")


def step(layer, x, direction):
    output = layer(x)
    return (output, *torch.autograd.grad(output, [x, *layer.parameters()], direction))


@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_replays_what_eager_computes(name, dtype):
    """The replay also works for another input of the same shape whose tokens go to other experts."""
    layer = make_layer(**{**OPTIONS[name], "dtype": dtype, "hidden_size": 64, "ffn_size": 32})
    x = make_input(96, hidden_size=64, dtype=dtype).detach().requires_grad_()
    direction = torch.linspace(-1, 2, x.numel()).reshape(x.shape).to(dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, x, direction)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x, direction)
    for seed in (2, 3):
        with torch.no_grad():
            x.copy_(make_input(96, hidden_size=64, dtype=dtype, seed=seed))
        graph.replay()
        replayed = [value.clone() for value in captured]
        for i, (got, wanted) in enumerate(zip(replayed, step(layer, x, direction), strict=True)):
            assert torch.equal(got, wanted), f"result {i} after the replay of input {seed}"


@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("name", CAPTURED)
def test_a_step_never_waits_for_the_device(name):
    layer = make_layer(**{**OPTIONS[name], "dtype": torch.float32, "hidden_size": 64, "ffn_size": 32})
    x = make_input(96, hidden_size=64, dtype=torch.float32).detach().requires_grad_()
    direction = torch.ones(96, 64)
    step(layer, x, direction)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x, direction)
    finally:
        torch.cuda.set_sync_debug_mode("default")
