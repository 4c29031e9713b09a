"""LoRA by rows under data parallelism: the gradients of one process that has the tokens of all ranks.

Adapters of experts that no token of a rank has chosen get zeros there, so no rank waits for another.
"""

import copy

import pytest
import rank_groups
import tiny_models
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pymoe.integrations.transformers import count_expert_load
from pymoe.nn import expert_load

pytestmark = pytest.mark.only_on("cpu")

WORLD = 2


@pytest.fixture(scope="module")
def ranks():
    pytest.importorskip("peft")
    started = rank_groups.Ranks(WORLD)
    yield started
    started.close()


def in_parallel(model, way):
    if way == "ddp":
        return DistributedDataParallel(model)
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compared(rank, world, name, way, bits):
    """Return the experts without tokens on this rank, and the greatest error of a gradient and of a step's result.

    The tokens of the last rank are all equal, so that few experts get any.
    """
    from test_peft_lora import adapt, build
    from test_peft_quantized import BOTH, quantized

    torch.set_default_dtype(torch.float32)
    alone = adapt(quantized(name) if bits else build(name), **BOTH).train()
    model = copy.deepcopy(alone)
    ids = tiny_models.tokens().repeat(2, 1)
    ids[2:] = 7
    counting = count_expert_load(model.get_base_model())
    parallel = in_parallel(model, way)
    found = {}
    for key, one, own in (("alone", alone, ids), ("parallel", parallel, ids.chunk(world)[rank])):
        trained = {name.removeprefix("module."): p for name, p in one.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=0.1)
        one(input_ids=own, labels=own, use_cache=False).loss.backward()
        gradients = {name: whole(parameter.grad) for name, parameter in trained.items()}
        optimizer.step()
        found[key] = gradients, {name: whole(parameter.detach()) for name, parameter in trained.items()}
    idle = min(int((load == 0).sum()) for load in expert_load(model.get_base_model()).values())
    counting.remove()
    errors = []
    for expected, other in zip(found["alone"], found["parallel"], strict=True):
        assert expected.keys() == other.keys()
        of_each = [(other[key] - value).norm() / value.norm() for key, value in expected.items()]
        errors.append(torch.stack(of_each).max().item())  # unlike max() of Python, this takes NaN for the largest
    return idle, *errors


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "gpt_oss"])
def test_gradients_are_those_of_one_process(ranks, name, way, bits):
    found = ranks.run(compared, name=name, way=way, bits=bits)
    assert found[-1][0] >= 5  # of 8 experts, each token chooses 3
    for _, gradient, parameter in found:
        assert gradient < 1e-5
        assert parameter < 1e-6
