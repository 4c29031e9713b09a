"""One short use of every part around the layer, on a GPU where torch sees one: its results are those of plain torch.

The parts have their own tests, on the CPU. These show that nothing in them is true only there: streams, the current
device, moves between devices, and NCCL in place of gloo.
"""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from limits import LONG
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pymoe
from pymoe.nn import MoE, quantize_experts
from pymoe.pipe import split_by_flops
from pymoe.runtime import ExpertClient

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ELSEWHERE = {"rtol": 2e-4, "atol": 2e-5}
"""Tolerances, and those of results from two devices, whose products sum in other orders."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def small_model(device):
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), MoE(32, 48, num_experts=8, top_k=2), nn.Linear(32, 32), nn.LayerNorm(32),
        MoE(32, 48, num_experts=4, top_k=3), nn.Linear(32, 4),
    )  # fmt: skip
    return model.to(device)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_pipe_computes_what_its_model_does(schedule, device):
    model = small_model(device)
    alone = copy.deepcopy(model)
    pipe = pymoe.Pipe(model, chunks=4, balance=[2, 2, 3], devices=[device] * 3)
    x, y = torch.randn(26, 16).to(device), torch.randn(26, 4).to(device)
    losses = pipe.step(x, target=y, loss_fn=nn.functional.mse_loss, schedule=schedule)
    assert losses.device == device
    expected = nn.functional.mse_loss(alone(x), y)
    expected.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, gradients(alone)[name], **CLOSE, msg=lambda text, name=name: name + text)
    torch.testing.assert_close(pipe(x), alone(x), **CLOSE)


@pytest.mark.only_on("cpu", "cuda")
def test_stages_of_a_pipe_may_be_on_other_devices(device):
    """Micro-batches cross from the CPU to the GPU and back."""
    model = small_model("cpu")
    alone = copy.deepcopy(model)
    pipe = pymoe.Pipe(model, chunks=3, balance=[2, 3, 2], devices=["cpu", device, "cpu"])
    x, y = torch.randn(21, 16).cpu(), torch.randn(21, 4).cpu()
    for _ in range(3):
        model.zero_grad()
        pipe.step(x, target=y, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(alone(x), y).backward()
    for name, gradient in gradients(model).items():
        expected = gradients(alone)[name]
        torch.testing.assert_close(gradient.cpu(), expected, **ELSEWHERE, msg=lambda text, name=name: name + text)


@pytest.mark.only_on("cpu", "cuda")
def test_a_captured_pipeline_computes_what_its_model_does(device):
    model = small_model(device)
    alone = copy.deepcopy(model)
    x, y = torch.randn(24, 16).to(device), torch.randn(24, 4).to(device)
    pipe = pymoe.pipeline(model, (x[:6],), split_policy=split_by_flops(3), chunks=4)
    pipe.step(x, target=y, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(alone(x), y).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, gradients(alone)[name], **CLOSE, msg=lambda text, name=name: name + text)


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("kind", ["ffn", "moe"])
@pytest.mark.parametrize("clients_on", ["the expert's device", "the CPU"])
def test_a_served_expert_answers_many_clients(kind, clients_on, device):
    expert = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) if kind == "ffn" else MoE(8, 16, 4, 2)
    alone = copy.deepcopy(expert).to(device)
    backend = pymoe.ExpertBackend("served", expert, None, args_schema=[pymoe.BatchTensorProto(8)], device=device)
    place = torch.device("cpu") if clients_on == "the CPU" else device
    inputs = [torch.randn(1 + i % 5, 8).to(place).requires_grad_() for i in range(40)]
    outputs = [None] * len(inputs)
    with pymoe.Runtime([backend]):
        client = ExpertClient(backend)

        def ask(first):
            for i in range(first, len(inputs), 8):
                outputs[i] = client(inputs[i])
                outputs[i].square().sum().backward()

        threads = [threading.Thread(target=ask, args=(first,), daemon=True) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert not any(thread.is_alive() for thread in threads)
    for x, y in zip(inputs, outputs, strict=True):
        assert y.device == place
        again = x.detach().to(device).requires_grad_()
        expected = alone(again)
        expected.square().sum().backward()
        torch.testing.assert_close(y.detach().to(device), expected.detach(), **CLOSE)
        torch.testing.assert_close(x.grad.to(device), again.grad, **CLOSE)


@pytest.mark.only_on("cpu", "cuda")
def test_a_served_expert_learns_what_its_twin_learns(device):
    expert = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
    alone = copy.deepcopy(expert)
    optimizers = [torch.optim.Adam(one.parameters(), 1e-2) for one in (expert, alone)]
    backend = pymoe.ExpertBackend("served", expert, optimizers[0], args_schema=[pymoe.BatchTensorProto(8)])
    with pymoe.Runtime([backend]):
        client = ExpertClient(backend)
        for _ in range(5):
            x = torch.randn(64, 8).to(device)
            client(x).square().mean().backward()
            optimizers[1].zero_grad()
            alone(x).square().mean().backward()
            optimizers[1].step()
    for found, expected in zip(expert.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.only_on("cpu", "cuda")
def test_parallel_calls_on_a_side_stream_equal_a_loop(device):
    layer = MoE(16, 24, num_experts=4, top_k=2).to(device)
    twin = copy.deepcopy(layer)
    inputs = [torch.randn(10, 16).to(device).requires_grad_() for _ in range(6)]
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    side = torch.cuda.Stream() if device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side) if side is not None else torch.enable_grad():
        outputs = pymoe.map_with_parallel_backward(layer, *[(x,) for x in inputs])
        sum(y.square().sum() for (y,) in outputs).backward()
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    sum(twin(x).square().sum() for x in copies).backward()
    for x, again in zip(inputs, copies, strict=True):
        torch.testing.assert_close(x.grad, again.grad, **CLOSE)
    for found, expected in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **CLOSE)


@pytest.mark.only_on("cpu", "cuda")
def test_dropout_in_parallel_calls_depends_only_on_the_seed(device):
    layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).to(device)
    inputs = [(torch.ones(4, 16).to(device),) for _ in range(5)]

    def run():
        torch.manual_seed(3)
        return [y for (y,) in pymoe.map_with_parallel_backward(layer, *inputs)]

    first = run()
    assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))
    assert not torch.equal(first[0], first[1])


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_layer_spread_over_one_rank_equals_itself(deduplicate, device, tmp_path):
    """NCCL's exchanges run, although there is nobody to send to."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = small_model(device)
        alone = copy.deepcopy(model)
        pymoe.ep.shard(model, init_device_mesh(device.type, (1,), mesh_dim_names=("ep",)), deduplicate=deduplicate)
        for _ in range(2):
            x = torch.randn(33, 16).to(device)
            y, expected = model(x), alone(x)
            torch.testing.assert_close(y, expected, **CLOSE)
            for one, output in ((model, y), (alone, expected)):
                one.zero_grad()
                output.square().sum().backward()
            for name, gradient in gradients(model).items():
                whole = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                torch.testing.assert_close(whole, gradients(alone)[name], **CLOSE)
    finally:
        dist.destroy_process_group()


@pytest.mark.only_on("cpu", "cuda")
def test_remote_experts_may_be_on_a_gpu(device):
    pytest.importorskip("grpc")
    pytest.importorskip("msgspec")
    import pymoe.remote

    expert = MoE(8, 16, num_experts=4, top_k=2).to(device)
    alone = copy.deepcopy(expert)
    backend = pymoe.ExpertBackend("far", expert, None, args_schema=[pymoe.BatchTensorProto(8)])
    with pymoe.remote.ExpertServer(backend) as server, pymoe.remote.connect(server.address, timeout=60) as there:
        client = ExpertClient(*there.backends())
        x = torch.randn(9, 8).to(device).requires_grad_()
        y = client(x)
        y.square().sum().backward()
    again = x.detach().clone().requires_grad_()
    expected = alone(again)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, **CLOSE)
    torch.testing.assert_close(x.grad, again.grad, **CLOSE)


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("bits", [8, 4])
def test_experts_in_few_bits_compute_what_the_cpu_does(bits, device):
    """There are no CUDA kernels for them: the reference computes them, if the user asks for it."""
    model = nn.Sequential(MoE(64, 128, num_experts=4, top_k=2, backend="reference")).eval()
    quantize_experts(model, bits=bits)
    moved = copy.deepcopy(model).to(device)
    x = torch.randn(20, 64)
    with torch.no_grad():
        torch.testing.assert_close(moved(x.to(device)).cpu(), model(x.cpu()).cpu(), rtol=2e-2, atol=2e-3)


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_transformers_computes_what_eager_does(dtype, device):
    transformers = pytest.importorskip("transformers")
    import pymoe.integrations.transformers  # noqa: F401

    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OlmoeConfig(
        **sizes, vocab_size=97, num_experts=8, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1
    )
    models = []
    for implementation in ("eager", "pymoe"):
        torch.manual_seed(1)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=implementation)
        models.append(made.to(device))
    tokens = torch.randint(2, 97, (2, 24)).to(device)
    losses = [model(tokens, labels=tokens).loss for model in models]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(losses[1], losses[0], **tolerance)
    for loss in losses:
        loss.backward()
    if dtype == torch.float32:
        for found, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5)
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        generated = [model.eval().generate(tokens[:, :5], **options) for model in models]
        assert torch.equal(*generated)


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=str)
def test_training_lowers_the_loss(amp, device):
    model = small_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    x = torch.randn(256, 16).to(device)
    y = x[:, :4].sort(dim=1).values
    losses = []
    for _ in range(80):
        with torch.autocast(device.type, dtype=amp, enabled=amp is not None):
            loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
