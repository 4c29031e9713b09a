"""Functions that the ranks run for test_equality.py: the same layer on several ranks and in one process."""

import torch
import torch.distributed as dist
from ep_cases import Case, alone, drawn, in_order
from rank_setup import full, group_of_one, groups, same_bits

from pymoe import ep
from pymoe.ep.clones import plan_clones
from pymoe.nn import set_aux_loss_scale, update_expert_biases

ROUNDING = {"float64": 1e-11, "float32": 2e-4, "bfloat16": 6e-2}


def sharded(case, group, **way):
    """Return the case's layer on a group after one backward pass, its output and the input's gradient."""
    if way.get("transport") == "padded":  # room for all rows that any rank sends to another
        way["room"] = max(1, max(case.tokens) * case.top_k) * case.world * case.chunks
    moe = case.spread(group, **way)
    if case.scope == "group":
        set_aux_loss_scale(moe, 1 / case.world)  # gradients are summed below, not averaged
    x, directions = (parts[dist.get_rank(group)] for parts in case.rows())
    x = x.clone().requires_grad_()
    y = moe(x)
    (y * directions).sum().backward()
    return moe, y.detach(), x.grad


def one(rank, world, case, **way):
    """Return what differs from one process on this rank; None if the rank is not in the group.

    With ``deduplicate``, outputs and gradients of inputs are compared up to rounding, all other results bit for bit.
    Cases in which rows travel in another way have no clones.
    """
    case = Case(**case) if isinstance(case, dict) else drawn(case)
    group = groups()[case.world]
    if rank >= case.world:
        return None
    y, dx, whole = alone(case)
    case.clones = 0 if way else case.clones
    moe, own_y, own_dx = sharded(case, group, **way)
    found = {}
    if case.scope == "group" or case.options.get("capacity_factor") is None:
        dropped = moe.stats.dropped.long()
        dist.all_reduce(dropped, group=group)
        if dropped != whole.stats.dropped:
            found["dropped"] = dropped.item()
    if moe.overflowed is not None and moe.overflowed != 0:
        found["overflowed"] = moe.overflowed.item()
    bits = {"y": (own_y, y.split(case.tokens)[rank]), "dx": (own_dx, dx.split(case.tokens)[rank])}
    rounded, cloned = {}, experts_with_clones(case, moe)
    if case.has_losses and case.scope == "group":
        rounded["dx"] = bits.pop("dx")
    if way.get("deduplicate"):
        rounded |= bits
        bits.clear()
    expected = dict(whole.named_parameters())
    for name, parameter in moe.named_parameters():
        if name.startswith("experts."):
            own, other = in_order(moe.experts, parameter.grad), expected[name].grad
            as_one = torch.tensor([expert not in cloned for expert in range(case.experts)])
            bits[name] = own[as_one], other[as_one]
            rounded[name] = own[~as_one].double(), other[~as_one].double()
        else:
            total = parameter.grad.double()
            dist.all_reduce(total, group=group)
            rounded[name] = total, expected[name].grad.double()
    for name, (own, other) in bits.items():
        if not same_bits(own, other):
            found[name] = (own.double() - other.double()).abs().max().item() if own.shape == other.shape else "shape"
    for name, (own, other) in rounded.items():
        scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        error = (own.double() - other.double()).abs().max().item() / scale if other.numel() else 0.0
        if not error <= ROUNDING[case.dtype]:
            found[name] = error
    if whole.router.expert_bias is not None:
        update_expert_biases(moe, group)
        update_by_one_process(whole)
        if not same_bits(moe.router.expert_bias, whole.router.expert_bias):
            found["expert bias"] = "differs"
    return found


def experts_with_clones(case, moe):
    """Return the experts that ranks cloned in the last call: all of them if a capacity may have changed the clones."""
    if case.clones == 0:
        return ()
    if moe.capacity_factor is not None:
        return range(case.experts)
    owner = moe.sharding.owner
    plan = plan_clones(torch.tensor(moe.last_loads), case.clones, min_rows_to_clone=case.min_rows_to_clone, owner=owner)
    assert plan.destinations().sum(0).tolist() == moe.last_rows
    return [expert for expert, hosts in enumerate(plan.hosts) if len(hosts) > 1]


def update_by_one_process(whole):
    """Update the bias by this process's load only."""
    update_expert_biases(whole, group_of_one())


def twenty_steps(rank, world, ep_ranks, chunks):
    """Return the losses of a small model in one process and on several ranks, and the largest parameter difference."""
    group = groups()[ep_ranks]
    if rank >= ep_ranks:
        return None
    tokens = [9, 0, 17, 5][:ep_ranks]
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(20, sum(tokens), 12, generator=generator, dtype=torch.float64)

    def model():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(12, 12), Case(1, [], "float64", 6, 2, options=BALANCED).layer(), torch.nn.Tanh()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(12, 12)).double()

    plain, spread = model(), ep.shard(model(), group, chunks=chunks, scope="group")
    optimizers = [torch.optim.AdamW(one.parameters(), 0.01, foreach=False) for one in (plain, spread)]
    set_aux_loss_scale(spread, 1 / ep_ranks)
    losses = []
    for x in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (plain(x) - x.sort(dim=1).values).square().sum() / x.numel()
        loss.backward()
        own = x.split(tokens)[rank]
        mine = (spread(own) - own.sort(dim=1).values).square().sum() / x.numel()
        mine.backward()
        for name, parameter in spread.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(parameter.grad, group=group)
        for optimizer in optimizers:
            optimizer.step()
        update_by_one_process(plain)
        update_expert_biases(spread, group)
        total = mine.detach()
        dist.all_reduce(total, group=group)
        losses.append((loss.item(), total.item()))
    apart = max((full(a) - b).abs().max().item() for a, b in zip(spread.parameters(), plain.parameters(), strict=True))
    return {"losses": losses, "parameters": apart}


BALANCED = {"bias_update_rate": 0.01, "aux_loss_coef": 0.01, "num_shared_experts": 1, "capacity_factor": 1.1}
