"""Functions that the ranks run for test_cloned_calls.py: layers with hot experts, which ranks with few rows clone."""

import torch
import torch.distributed as dist
from calls import case, different, gradients, prepared
from ep_cases import Case, alone, in_order
from rank_setup import exchanges, mesh_of, same_bits

from pymoe import ep
from pymoe.ep.clones import plan_clones
from pymoe.ep.exchange import AllToAll
from pymoe.nn import MoE, apply_experts
from pymoe.ops import build_routing

TOKENS = [24, 10, 0, 17]


class Hot(Case):
    """A layer in which every token chooses expert 1."""

    def layer(self):
        whole = super().layer()
        with torch.no_grad():
            whole.router.weight[1, 0] = 9.0  # feature 0 is positive in all tokens
        return whole


def hot(dtype="float32", **more):
    """Return a case of eight experts on four ranks."""
    return Hot(**vars(case(dtype, tokens=TOKENS, experts=8, **{"clones": 1, **more})))


def plan_of(layer):
    """Return which rank computes what, according to the function that plans from the counts."""
    sharding = layer.sharding
    counts = torch.tensor(layer.last_loads)
    return plan_clones(counts, sharding.clones, min_rows_to_clone=sharding.min_rows_to_clone, owner=sharding.owner)


def travelled(rank, world, chunks):
    """Return the width and the amount per destination of each exchange in both passes, and the expected values."""
    layer, x, directions = prepared(rank, hot(chunks=chunks))
    with exchanges() as seen:
        y = layer(x)
        forward = len(seen)
        (y * directions).sum().backward()
    plan = plan_of(layer)
    lent = [[0] * world for _ in range(world)]
    for owner, *others in plan.hosts:
        for other in others:
            lent[owner][other] += 1
    numbers = sum(p.to_local()[:1].numel() for p in layer.experts.parameters())
    weights = [(one["width"], one["sent"]) for one in seen if one["width"] == numbers]
    sent = [sum(rows) for rows in zip(*(one["sent"] for one in seen[: chunks + 1]), strict=True)]
    return {
        "exchanges": [forward, len(seen) - forward],
        "weights": weights == [(numbers, lent[rank]), (numbers, [row[rank] for row in lent])],
        "rows": sent == plan.destinations()[rank].tolist(),
        "clones": sum(map(sum, lent)),
        "computed": layer.last_rows == plan.destinations().sum(0).tolist(),
    }


def sums_of_gradients(rank, world, dtype):
    """Return what differs when each rank's gradients are added as documented: first those of clones, then the
    owner's.
    """
    one = hot(dtype, clones=2, options={"bias": True})
    layer, x, directions = prepared(rank, one)
    (layer(x) * directions).sum().backward()
    plan = plan_of(layer)
    whole = one.layer()
    whole.router.row_invariant = True
    tokens, directions = (torch.cat(parts) for parts in one.rows())
    gate, _ = whole.router(tokens)
    host = hosts_of_choices(gate.experts, plan)
    names = [name for name, _ in whole.experts.named_parameters()]
    each = []
    for number in range(world):
        own = torch.where(host == number, gate.experts, whole.num_experts)
        parts = whole.experts
        y = apply_experts(
            *(tokens, own, gate.weights.detach(), parts.w_in, parts.w_out),
            b_in=parts.b_in,
            b_out=parts.b_out,
            activation=parts.activation,
            foreign_experts=True,
        )
        each.append(torch.autograd.grad((y * directions).sum(), list(parts.parameters())))
    wrong = []
    for name, *by_rank in zip(names, *each, strict=True):
        found = in_order(layer.experts, getattr(layer.experts, name).grad)
        for expert, (owner, *others) in enumerate(plan.hosts):
            expected = by_rank[owner][expert]
            if others:
                clones = torch.zeros_like(expected)
                for other in others:
                    clones = clones + by_rank[other][expert]
                expected = expected + clones
            if not same_bits(found[expert], expected):
                wrong.append(f"{name} of {expert}")
    return wrong, max(map(len, plan.hosts))


def hosts_of_choices(experts, plan):
    """Return the rank that computes each choice of each token of all ranks."""
    host = torch.empty_like(experts)
    start = 0
    for source, count in enumerate(TOKENS):
        own = experts[start : start + count]
        routing = build_routing(own.contiguous(), len(plan.hosts))
        place = routing.slot - routing.offsets[own.long()]
        for expert, hosts in enumerate(plan.hosts):
            bounds = plan.rows[source, expert, : len(hosts)].cumsum(0)
            number = torch.bucketize(place.long(), bounds, right=True).clamp(max=len(hosts) - 1)
            host[start : start + count] = torch.where(
                own == expert, torch.tensor(hosts)[number].int(), host[start : start + count]
            )
        start += count
    return host


def repeated(rank, world):
    """Return what differs between two passes over the same rows."""
    found = []
    for _ in range(2):
        layer, x, directions = prepared(rank, hot("bfloat16", clones=3))
        (layer(x) * directions).sum().backward()
        found.append(gradients(layer, x))
    return [name for name in found[0] if not same_bits(found[0][name], found[1][name])]


def without_need(rank, world, min_rows_to_clone):
    """Return the number of exchanges in a call where no clone pays off, and the differences from one process."""
    one = hot(min_rows_to_clone=min_rows_to_clone)
    layer, x, directions = prepared(rank, one)
    with exchanges() as seen:
        (layer(x) * directions).sum().backward()
    _, dx, whole = alone(one)
    expected = {name: p.grad for name, p in whole.experts.named_parameters()}
    experts = {name: (in_order(layer.experts, p.grad), expected[name]) for name, p in layer.experts.named_parameters()}
    return len(seen), different({"dx": (x.grad, dx.split(TOKENS)[rank])}, experts, {})


def order_of_events(rank, world):
    """Return the order in which rows and weights are sent and arrive and products are computed."""
    events, real = [], {name: getattr(AllToAll, name) for name in ("_start", "wait")}
    compute = ep.ShardedExperts._apply_to_chunk

    def told(word, name):
        def called(self, chunk, *args):
            events.append(f"{word} {'weights' if self.width > 12 else chunk}")
            return real[name](self, chunk, *args)

        return called

    def computed(self, rows, chunk, *args):
        events.append(f"compute {chunk}")
        return compute(self, rows, chunk, *args)

    AllToAll._start, AllToAll.wait = told("start", "_start"), told("finish", "wait")
    ep.ShardedExperts._apply_to_chunk = computed
    try:
        layer, x, directions = prepared(rank, hot(chunks=2))
        layer.shared.register_forward_hook(lambda *_: events.append("shared"))
        layer.shared.w_in.register_hook(lambda grad: events.append("shared") or grad)
        y = layer(x)
        forward, events[:] = list(events), []
        (y * directions).sum().backward()
    finally:
        AllToAll._start, AllToAll.wait = real["_start"], real["wait"]
        ep.ShardedExperts._apply_to_chunk = compute
    return forward, events


def room(rank, world, clones, less):
    """Return the error, if any, when a rank has room for the fullest rank's rows with a clone, minus ``less`` rows."""
    layer, x, _ = prepared(rank, hot(clones=1))
    layer(x)
    layer, x, _ = prepared(rank, hot(clones=clones), room=max(layer.last_rows) - less)
    try:
        layer(x)
    except ep.GroupError as error:
        return str(error)


def wrong_arguments(rank, world, own, others):
    """Return the errors for wrong options."""
    layer = MoE(8, 6, 4, 2)
    try:
        ep.shard(layer, mesh_of(4), **(own if rank == 2 else others))
    except (TypeError, ValueError, ep.GroupError) as error:
        return [type(error).__name__, str(error)]


def default_min_rows_to_clone(rank, world, activation, bias):
    """Return the number of rows from which an expert is cloned."""
    return ep.shard(MoE(8, 6, 4, 2, activation=activation, bias=bias), mesh_of(4), clones=1).sharding.min_rows_to_clone


def balance(rank, world, placed, clones):
    """Return the choices of all ranks in a run with a skewed load, and the number of rows that each rank computed."""
    generator = torch.Generator().manual_seed(5)
    layer = MoE(8, 8, 128, 8, dtype=torch.float32)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, 0] = -1.5 * torch.arange(1.0, 129).log()
        layer.router.weight[:, 1:] = torch.randn(128, 7, generator=generator) * 0.5
    layer = ep.shard(layer, dist.group.WORLD, clones=clones, min_rows_to_clone=1)
    x = torch.randn(3, world, 64, 8, generator=generator, dtype=torch.float32)
    x[..., 0] = 1.0
    steps = []
    for step in range(3):
        if step == 2 and placed:
            load = torch.tensor(layer.last_loads).sum(0)
            ep.redistribute(layer, ep.placement.place(load, world))
        y = layer(x[step, rank])
        y.sum().backward()
        steps.append({"loads": layer.last_loads, "rows": layer.last_rows})
    return steps
