"""DistributedDataParallel over two processes equals one process on both batches."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from pymoe.nn import MoE, update_expert_biases

STEPS, MICRO_BATCHES, TOKENS, WORLD = 3, 2, 16, 2


def make_model():
    torch.manual_seed(0)
    # There is no balancing loss: it is not a mean over tokens, so each rank has its own.
    return MoE(8, 6, 4, 2, bias_update_rate=0.05, z_loss_coef=0.1, num_shared_experts=1, dtype=torch.float64)


def batches():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, MICRO_BATCHES, WORLD, TOKENS, 8, generator=generator, dtype=torch.float64)


def train(model, data):
    """Train on ``data`` (steps, micro-batches, tokens, H); return the parameters and buffers after every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    for step in data:
        for x in step:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_expert_biases(model)
        states.append(copy.deepcopy(model.state_dict()))
    return states


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        model = make_model()
        train_states = train(DistributedDataParallel(model), batches()[:, :, rank])
        torch.save(train_states, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.only_on("cpu")
def test_two_processes_equal_one_on_the_concatenated_batch(tmp_path):
    mp.spawn(worker, args=(str(tmp_path),), nprocs=WORLD)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    expected = train(make_model(), batches().flatten(2, 3))
    assert expected[-1]["router.expert_bias"].abs().max() > 0.04
    for step, wanted in enumerate(expected):
        for name, value in wanted.items():
            first, second = (rank[step][f"module.{name}"] for rank in ranks)
            assert torch.equal(first, second), name
            torch.testing.assert_close(first, value, rtol=1e-10, atol=1e-12)
