"""Functions that the ranks run for test_checkpoints.py: training states saved on some ranks and loaded on others."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ep_cases import in_order, shuffled
from parallel import E, model
from rank_setup import full, groups, mesh_of, same_bits
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from pymoe import ep


def made(spread_over):
    """Return a model, its optimizer and its group.

    ``spread_over`` is 0 for a whole model, "2x2" for a mesh with FSDP, or a number of ranks. If " placed" follows,
    experts are moved to other ranks than at first.
    """
    own, group = model(bias=True), None
    where, _, placed = str(spread_over).partition(" ")
    if where == "2x2":
        ep.data_parallel(ep.shard(own, mesh_of(2, 2)["ep"]), mesh_of(2, 2), kind="fsdp")
        group = dist.group.WORLD
    elif spread_over:
        group = groups()[int(where)]
        ep.shard(own, group)
    optimizer = torch.optim.AdamW(own.parameters(), 0.01, foreach=False)
    if placed:
        ranks = 2 if where == "2x2" else int(where)
        names = ["1.0", "2"]
        ep.redistribute(own, {name: shuffled(E, ranks, seed) for seed, name in enumerate(names)}, optimizer)
        assert own[1][0].sharding.order is not None
    return own, optimizer, group


def train(own, optimizer):
    """Run some steps whose gradients follow from the parameters element by element, however these are spread."""
    for step in range(3):
        for parameter in own.parameters():
            parameter.grad = parameter.detach() * 0.5 + (step + 0.25)
        optimizer.step()
    for name, buffer in own.named_buffers():
        buffer.copy_(torch.arange(buffer.numel()) * 0.25 + len(name))


def state_of(own, optimizer):
    """Return parameters, buffers and optimizer state, whole and by name, with each expert at its original place."""
    found = {name: value.detach() for name, value in (*own.named_parameters(), *own.named_buffers())}
    for name, parameter in own.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    experts = {name: one for name, one in own.named_modules() if isinstance(one, ep.ShardedExperts)}
    for name, value in found.items():
        of = experts.get(name.rpartition(".")[0])
        found[name] = full(value) if of is None or value.dim() == 0 else in_order(of, value)
    return found


def takes_part(rank, spread_over):
    """Return whether a rank has a share of the model."""
    groups()
    where = str(spread_over).partition(" ")[0]
    return where == "2x2" or rank < max(1, int(where))


def save(rank, world, folder, spread_over):
    """Train, and save the model and its optimizer."""
    if takes_part(rank, spread_over):
        own, optimizer, group = made(spread_over)
        train(own, optimizer)
        state = dict(zip(("model", "optimizer"), get_state_dict(own, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)


def load(rank, world, folder, spread_over):
    """Load into an untrained model; return the names of what differs from a whole model trained here."""
    if not takes_part(rank, spread_over):
        return []
    own, optimizer, group = made(spread_over)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.mul_(0)
    state = dict(zip(("model", "optimizer"), get_state_dict(own, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    set_state_dict(own, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    whole, its_optimizer, _ = made(0)
    train(whole, its_optimizer)
    found, expected = state_of(own, optimizer), state_of(whole, its_optimizer)
    assert found.keys() == expected.keys()
    return [name for name in expected if not same_bits(found[name], expected[name])]


def load_whole_state_dict(rank, world, spread_over):
    """Return the names of tensors that differ after a whole model's state dict is loaded, and whether a wrong size
    is refused by name.
    """
    whole, optimizer, _ = made(0)
    train(whole, optimizer)
    own, _, _ = made(spread_over)
    own.load_state_dict(whole.state_dict())
    names = [name for name, value in own.state_dict().items() if not same_bits(full(value), whole.state_dict()[name])]
    wrong = whole.state_dict()
    wrong["2.experts.w_in"] = wrong["2.experts.w_in"][1:]
    try:
        own.load_state_dict(wrong)
    except RuntimeError as error:
        return names, "size mismatch for 2.experts.w_in" in str(error)
    return names, False


def export(rank, world, spread_over):
    """Return whether the first rank gets the whole model's tensors and the other ranks none."""
    if not takes_part(rank, spread_over):
        return True
    own, optimizer, _ = made(spread_over)
    train(own, optimizer)
    found = get_model_state_dict(own, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank > 0:
        return not found
    whole, its_optimizer, _ = made(0)
    train(whole, its_optimizer)
    expected = whole.state_dict()
    return found.keys() == expected.keys() and all(same_bits(found[name], expected[name]) for name in expected)
