"""The layer on a GPU: a training step in a CUDA graph, compiled in one piece, under autocast, and compared with the
CPU.

test_cuda_graph.py captures only forward and backward and proves that they never wait; most other tests of this folder
run on the GPU too. Without a GPU nothing is collected here.
"""

import copy

import pytest
import torch
from moe_layers import OPTIONS, make_input, make_layer

from pymoe.nn import update_expert_biases

SIZES = {"hidden_size": 64, "ffn_size": 48}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def train(layer, optimizer, x, target):
    """Run one step with everything that a training loop does on the device."""
    loss = (layer(x) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    update_expert_biases(layer)
    return loss


def beside_the_stream(call):
    """Run ``call`` on another stream, as a capture requires for its warm-up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)


def close(found, expected, tolerance):
    """Check that values agree within ``tolerance`` of the largest value: sums run in other orders on other devices."""
    size = expected.abs().max().clamp(min=1e-6)
    assert bool((found.cpu().double() - expected.double()).abs().max() <= tolerance * size.double())


if torch.cuda.is_available():

    @pytest.mark.only_on("cuda")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_whole_training_step_replays_from_a_graph(dtype):
        """Parameters, expert bias and statistics change from replay to replay as they do from step to step."""
        eager = make_layer(**{**OPTIONS["everything"], **SIZES, "dtype": dtype})
        captured = copy.deepcopy(eager)
        x, target = (make_input(80, hidden_size=64, dtype=dtype, seed=seed).detach() for seed in (1, 2))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (eager, captured)]
        beside_the_stream(lambda: train(captured, optimizers[1], x, target))
        train(eager, optimizers[0], x, target)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = train(captured, optimizers[1], x, target)
        for seed in (3, 4, 5):
            x.copy_(make_input(80, hidden_size=64, dtype=dtype, seed=seed).detach())
            graph.replay()
            assert torch.equal(loss, train(eager, optimizers[0], x, target))
        for (name, found), expected in zip(captured.state_dict().items(), eager.state_dict().values(), strict=True):
            assert torch.equal(found, expected), name
        assert all(torch.equal(a, b) for a, b in zip(captured.stats, eager.stats, strict=True))

    @pytest.mark.only_on("cuda")
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("name", ["plain", "everything"])
    def test_compiles_into_one_graph_with_inductor(name, dtype):
        torch._dynamo.reset()
        layer = make_layer(**{**OPTIONS[name], **SIZES, "dtype": dtype})
        twin = copy.deepcopy(layer)
        compiled = torch.compile(twin, fullgraph=True)
        for seed in (1, 2):
            x = make_input(33, hidden_size=64, dtype=dtype, seed=seed)
            y, compiled_y = layer(x), compiled(x)
            close(compiled_y.detach().cpu(), y.detach().cpu(), TOLERANCE[dtype])
            y.sum().backward()
            compiled_y.sum().backward()
            for found, expected in zip(twin.parameters(), layer.parameters(), strict=True):
                close(found.grad.cpu(), expected.grad.cpu(), TOLERANCE[dtype])

    @pytest.mark.only_on("cuda")
    def test_autocast_computes_experts_in_its_dtype_and_can_be_captured():
        layer = make_layer(**{**OPTIONS["shared"], **SIZES, "dtype": torch.float32})
        x = make_input(40, hidden_size=64, dtype=torch.float32)

        def step():
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                y = layer(x)
            gradients = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])
            return (y.detach(), *gradients)  # a graph that is kept would tie the capture to the stream it was made on

        expected = step()
        assert expected[0].dtype == torch.bfloat16
        beside_the_stream(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = step()
        graph.replay()
        assert all(torch.equal(found, wanted) for found, wanted in zip(replayed, expected, strict=True))

    @pytest.mark.only_on("cuda")
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("sizes", [SIZES, {"hidden_size": 20, "ffn_size": 13}], ids=["aligned", "odd"])
    @pytest.mark.parametrize("name", ["bias", "groups sigmoid bias", "capacity below the mean", "two shared gelu"])
    def test_computes_what_the_cpu_computes(name, sizes, dtype):
        """Routing is made equal by a float32 router whose tokens are the same on both devices."""
        layer = make_layer(**{**OPTIONS[name], **sizes, "dtype": dtype})
        on_cpu = copy.deepcopy(layer).cpu()
        x = make_input(120, hidden_size=sizes["hidden_size"], dtype=dtype)
        x_cpu = x.detach().cpu().requires_grad_()
        y, y_cpu = layer(x), on_cpu(x_cpu)
        close(y.detach(), y_cpu.detach(), TOLERANCE[dtype])
        y.sum().backward()
        y_cpu.sum().backward()
        assert torch.equal(layer.stats.load.cpu(), on_cpu.stats.load)
        close(x.grad, x_cpu.grad, TOLERANCE[dtype])
        for found, expected in zip(layer.parameters(), on_cpu.parameters(), strict=True):
            close(found.grad, expected.grad, TOLERANCE[dtype])

    @pytest.mark.only_on("cuda")
    @pytest.mark.parametrize("sizes", [(64, 48), (2048, 1024)], ids=str)
    def test_an_expert_without_tokens_gets_the_gradient_zero_in_memory_that_held_other_numbers(sizes):
        """Torch's product must clear the gradient without being asked to; its memory holds NaN first."""
        hidden, ffn = sizes
        layer = make_layer(hidden_size=hidden, ffn_size=ffn, num_experts=8, top_k=2, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.router.weight[3] = 0
            layer.router.weight[3, 0] = -100
        x = make_input(300, hidden_size=hidden, dtype=torch.bfloat16).detach()
        x[:, 0] = 1
        for _ in range(3):
            used = [torch.full_like(weight, float("nan")) for weight in (layer.experts.w_in, layer.experts.w_out)]
            del used
            gradients = torch.autograd.grad(layer(x.requires_grad_()).sum(), list(layer.parameters()))
            assert int(layer.stats.load[3]) == 0
            assert all(bool(gradient.isfinite().all()) for gradient in gradients)
            assert not any(bool(gradient[3].any()) for gradient in gradients[1:3])
