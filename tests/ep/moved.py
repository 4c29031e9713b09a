"""Functions that the ranks run for test_redistribute.py: a model whose experts move, compared with one where they
stay.
"""

import copy

import torch
import torch.distributed as dist
from ep_cases import in_order, shuffled
from parallel import E, H, data, made, model
from rank_setup import full, mesh_of, same_bits
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pymoe import ep
from pymoe.ep.placement import Placement, contiguous, place
from pymoe.nn import MoE

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, 0.01, foreach=False, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, foreach=False),
}


def ep_ranks(shape):
    """Return the number of ranks that experts are spread over."""
    return shape[-1]


def differing(still, moved):
    """Return the names of parameters that differ, with each expert at its original place."""
    experts = {name: one for name, one in moved.named_modules() if isinstance(one, ep.ShardedExperts)}
    expected, found = dict(still.named_parameters()), []
    for name, parameter in moved.named_parameters():
        of = experts.get(name.rpartition(".")[0])
        whole = full(parameter) if of is None else in_order(of, parameter)
        if not same_bits(whole.detach(), full(expected[name]).detach()):
            found.append(name)
    return found


def training(rank, world, shape, kind, optimizer):
    """Train with experts that stay and with experts that move twice and return; return the losses and final
    differences.
    """
    x = data(world, 8)
    runs = [(*(made(shape, kind, bias=True) if kind else plainly(shape)), moves) for moves in (False, True)]
    losses, spreads = [], []
    for spread, called, moves in runs:
        optimize = OPTIMIZERS[optimizer](spread.parameters())
        seen = []
        for step in range(8):
            if moves and step in (2, 4):
                ep.redistribute(called, shuffled(E, ep_ranks(shape), seed=step), optimize)
            if moves and step == 6:
                ep.redistribute(called, contiguous(E, ep_ranks(shape)), optimize)
            loss = (called(x[step, rank]) ** 2).mean()
            loss.backward()
            ep.clip_grad_norm_(spread.parameters(), 1e6)
            optimize.step()
            optimize.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
        spreads.append(spread)
    return losses, differing(*spreads), spreads[1][2].experts.moves


def plainly(shape):
    """Return the model over a group, without data parallelism."""
    spread = ep.shard(model(bias=True), mesh_of(*shape))
    return spread, spread


def several_optimizers(rank, world):
    """Return what differs when experts have two optimizers."""
    spreads = []
    for moves in (False, True):
        spread = ep.shard(model(bias=True), mesh_of(4))
        first = [one for name, one in spread.named_parameters() if "w_in" in name]
        rest = [one for name, one in spread.named_parameters() if "w_in" not in name]
        optimizers = [OPTIMIZERS["momentum"](first), OPTIMIZERS["adamw"](rest)]
        for step, x in enumerate(data(world, 4)):
            if moves and step == 2:
                ep.redistribute(spread, shuffled(E, 4), optimizers)
            (spread(x[rank]) ** 2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        spreads.append(spread)
    return differing(*spreads)


def loaded_before_a_step(rank, world):
    """Return what differs when an optimizer made after a move loads another's state before its first step."""
    spreads = []
    for moves in (False, True):
        spread = ep.shard(model(), mesh_of(4))
        optimizer = OPTIMIZERS["adamw"](spread.parameters())
        for step, x in enumerate(data(world, 4)):
            if moves and step == 2:
                ep.redistribute(spread, shuffled(E, 4), optimizer)
                saved, optimizer = optimizer.state_dict(), OPTIMIZERS["adamw"](spread.parameters())
                ep.redistribute(spread, shuffled(E, 4), optimizer)
                optimizer.load_state_dict(saved)
            (spread(x[rank]) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        spreads.append(spread)
    return differing(*spreads), spreads[1][2].experts.moves


def mixed_precision(rank, world):
    """Return what differs after steps in which FSDP casts parameters, on one mesh of ranks and copies."""
    mesh = mesh_of(2, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    spreads = []
    for moves in (False, True):
        spread = ep.shard(model(dtype=torch.float32, experts=8), mesh["ep"])
        called = ep.data_parallel(spread, mesh, kind="fsdp", mp_policy=policy, reshard_after_forward=False)
        optimizer = OPTIMIZERS["adamw"](spread.parameters())
        for step, x in enumerate(data(world, 4).float()):
            if moves and step == 2:
                with torch.no_grad():
                    called(x[rank])  # FSDP may still hold its whole parameters
                ep.redistribute(called, shuffled(8, 2), optimizer)
            (called(x[rank]) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        spreads.append(spread)
    return differing(*spreads)


def accumulated(rank, world):
    """Return what differs when experts move with gradients to which more gradients are added."""
    spreads = []
    for moves in (False, True):
        spread = ep.shard(model(), mesh_of(4))
        for step, x in enumerate(data(world, 2)):
            if moves and step == 1:
                ep.redistribute(spread, shuffled(E, 4))
            (spread(x[rank]) ** 2).mean().backward()
        with torch.no_grad():
            for parameter in spread.parameters():
                parameter.sub_(parameter.grad)
        spreads.append(spread)
    return differing(*spreads)


def one_layer(rank, world, placement):
    """Return which layers have another order afterwards, and what differs in an output."""
    spread, still = (ep.shard(model(), mesh_of(4)) for _ in range(2))
    ep.redistribute(spread, {"2": shuffled(E, 4)} if placement == "by name" else shuffled(E, 4))
    x = data(world)[0, rank]
    orders = [one.sharding.order is not None for one in (spread[1][0], spread[2])]
    return orders, same_bits(spread(x), still(x)), repr(spread[2]), list(spread[2].sharding.own_experts)


def shared(rank, world, tied):
    """Return whether layers that share experts keep one order and the same bits, and the error for two placements."""
    spread = model(tied=tied)
    if not tied:
        spread[2].experts = spread[1][0].experts
    ep.shard(spread, mesh_of(4))
    x = data(world)[0, rank]
    y = spread(x)
    try:
        ep.redistribute(spread, {"2": shuffled(E, 4)})
        said = None
    except ValueError as error:
        said = str(error)
    ep.redistribute(spread, shuffled(E, 4))
    orders = [one.sharding.order for one in (spread[1][0], spread[2], spread[1][0].experts, spread[2].experts)]
    return len(set(orders)) == 1 and orders[0] is not None, same_bits(spread(x), y), said


def copied(rank, world):
    """Return whether a copy keeps the placement and saves each expert at its original place."""
    spread = ep.shard(model(), mesh_of(4))
    before = {name: full(value) for name, value in spread.state_dict().items()}
    ep.redistribute(spread, shuffled(E, 4))
    other = copy.deepcopy(spread)
    x = data(world)[0, rank]
    same = same_bits(other(x), spread(x))
    ep.redistribute(spread, contiguous(E, 4))
    after = {name: full(value) for name, value in other.state_dict().items() if not name.endswith("bias")}
    return same and all(same_bits(value, before[name]) for name, value in after.items())


def all_or_nothing(rank, world):
    """Return what a call changed that failed after all experts had arrived, and whether the next call works."""
    spread = ep.shard(model(), mesh_of(4))
    optimizer = OPTIMIZERS["adamw"](spread.parameters())
    (spread(data(world)[0, rank]) ** 2).mean().backward()
    optimizer.step()

    def state():
        kept = [value for one in optimizer.state.values() for value in one.values()]
        return [full(one).clone() for one in (*spread.parameters(), *kept)]

    def fail(*_):
        raise RuntimeError("out of resources")

    before, barrier = state(), dist.barrier
    dist.barrier = fail
    try:
        ep.redistribute(spread, shuffled(E, 4), optimizer)
        said = None
    except ep.GroupError as error:
        said = str(error)
    finally:
        dist.barrier = barrier
    unchanged = all(same_bits(a, b) for a, b in zip(before, state(), strict=True))
    orders = [one.sharding.order for one in (spread[1][0], spread[2])]
    ep.redistribute(spread, shuffled(E, 4), optimizer)
    return said, unchanged and orders == [None, None], spread[2].sharding.order is not None


def disagreement(rank, world, wrong):
    """Return the ranks' errors when one of them differs, and whether anything has moved."""
    spread = ep.shard(model(), mesh_of(4))
    optimizer = OPTIMIZERS["adamw"](spread.parameters())
    placement = shuffled(E, 4)
    (spread(data(world)[0, rank]) ** 2).mean().backward()
    optimizer.step()
    if rank == 2 and wrong == "placement":
        placement = shuffled(E, 4, seed=5)
    elif rank == 2 and wrong == "replicas":
        placement = place(torch.tensor([90, 1, 1, 1, 1, 1]), 4, replicas=1)
    elif rank == 2 and wrong == "optimizer":
        optimizer = None
    elif rank == 2 and wrong == "gradients":
        spread[2].experts.zero_grad()
    try:
        ep.redistribute(spread, placement, optimizer)
    except (ValueError, ep.GroupError) as error:
        return type(error).__name__, str(error), spread[2].sharding.order is None


def left_out(rank, world):
    """Return errors around a move that leaves out an optimizer: of its steps, of the next move, and of a newer
    optimizer's step.
    """
    spread = ep.shard(model(), mesh_of(4))
    optimizer = OPTIMIZERS["adamw"](spread.parameters())

    def step(one):
        (spread(data(world)[0, rank]) ** 2).mean().backward()
        try:
            one.step()
        except RuntimeError as error:
            return str(error)

    first = step(optimizer)
    ep.redistribute(spread, shuffled(E, 4))
    said = [first, step(optimizer)]
    try:
        ep.redistribute(spread, contiguous(E, 4), optimizer)
    except (ValueError, ep.GroupError) as error:
        said.append(str(error))
    later = OPTIMIZERS["adamw"](spread.parameters())
    return said, step(later)


def made_later(rank, world):
    """Return the states of an optimizer made after a move that differ from the states of a single process."""
    whole, spread = model(), ep.shard(model(), mesh_of(4))
    ep.redistribute(spread, shuffled(E, 4))
    found = []
    for one in (whole, spread):
        optimizer = OPTIMIZERS["adamw"](one.parameters())
        for parameter in one.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()
        found.append(optimizer.state_dict()["state"])
    return [
        f"{number} {name}"
        for number, state in found[0].items()
        for name, value in state.items()
        if not same_bits(full(found[1][number][name]), value)
    ]


def graph_from_before(rank, world):
    """Return the error of a backward pass whose forward ran before the move."""
    spread = ep.shard(MoE(H, 6, 8, 2, dtype=torch.float64), mesh_of(4))
    y = spread(data(world)[0, rank])
    ep.redistribute(spread, shuffled(8, 4))
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)


def before_memory(rank, world):
    """Return the differences from one process when experts moved before they had memory."""
    whole = model()
    with torch.device("meta"):
        spread = model()
    ep.shard(spread, mesh_of(4))
    ep.redistribute(spread, shuffled(E, 4))
    spread.to_empty(device="cpu")
    for one in (whole, spread):
        torch.manual_seed(4)
        one[2].reset_parameters()
    expected = dict(whole[2].experts.named_parameters())
    found = spread[2].experts.named_parameters()
    return [name for name, one in found if not same_bits(in_order(spread[2].experts, one), expected[name])]


def cut_by_hand(rank, world):
    """Return which parameters differ after initialising experts that the user cut with FSDP, and the error when
    they are moved.
    """
    mesh = mesh_of(2, 2)
    whole, spread = model(), ep.shard(model(), mesh["ep"])
    fully_shard(spread[2].experts, mesh=mesh["edp"])
    for one in (whole[2].experts, spread[2].experts):
        torch.manual_seed(4)
        one.reset_parameters()
    expected = dict(whole[2].experts.named_parameters())
    own = slice((rank % 2) * 3 + (rank // 2) * 2, (rank % 2) * 3 + (2, 3)[rank // 2])
    wrong = [
        name for name, p in spread[2].experts.named_parameters() if not same_bits(p.to_local(), expected[name][own])
    ]
    try:
        ep.redistribute(spread, {"2": shuffled(E, 2)})
    except ValueError as error:
        return wrong, str(error)


def refused(rank, world, what):
    """Return the errors for arguments that do not fit."""
    spread, placement, optimizer = ep.shard(model(), mesh_of(4)), contiguous(E, 4), None
    if what == "experts":
        placement = contiguous(8, 4)
    elif what == "ranks":
        placement = contiguous(E, 3)
    elif what == "replicas":
        placement = Placement(((0, 1), (0,), (1,), (1,), (2,), (2,)), 4)
    elif what == "rank":
        placement = Placement(((7,), (0,), (1,), (1,), (2,), (2,)), 4)
    elif what == "sizes":
        placement = Placement(((0,), (0,), (1,), (1,), (2,), (3,)), 4)
    elif what == "name":
        placement = {"1": placement}
    elif what == "kind":
        placement = [0, 0, 1, 1, 2, 2]
    elif what == "optimizer":
        optimizer = "adamw"
    elif what == "no layer":
        spread = nn.Linear(1, 1)
    elif what == "no module":
        spread = None
    elif what == "state":
        placement, optimizer = shuffled(E, 4), OPTIMIZERS["adamw"](spread.parameters())
        optimizer.state[spread[2].experts.w_in]["scales"] = torch.ones(3)
    try:
        ep.redistribute(spread, placement, optimizer)
    except (TypeError, ValueError) as error:
        return [type(error).__name__, str(error)]


def recut(rank, world):
    """Return the differences from one process after experts cut by FSDP are initialized, at first and after a move."""
    mesh, found = mesh_of(2, 2), []
    whole = model(bias=True)
    for placed in (False, True):
        spread = ep.shard(model(bias=True), mesh["ep"])
        ep.data_parallel(spread, mesh, kind="fsdp")
        if placed:
            ep.redistribute(spread, shuffled(E, 2))
        for experts in (whole[2].experts, spread[2].experts):
            torch.manual_seed(4)
            experts.reset_parameters()
        expected = dict(whole[2].experts.named_parameters())
        for name, parameter in spread[2].experts.named_parameters():
            if not same_bits(in_order(spread[2].experts, parameter), expected[name]):
                found.append(name)
    return found
