"""Functions that the ranks run for test_duplicates.py and test_padded.py: rows sent once to a rank, and padded
buffers.
"""

import torch
import torch.distributed as dist
from calls import ONCE, TOKENS, case, prepared
from ep_cases import Case
from failures import WRONG, told, without_models
from mistakes import layers
from rank_setup import exchanges, full, groups, same_bits

from pymoe import ep, ops
from pymoe.nn import MoE, apply_experts

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}


def error_of_sums(rank, world, dtype, top_k, chunks):
    """Return an output's largest difference from one process, divided by its bound."""
    one = Case(4, TOKENS, dtype, 8, top_k, chunks=chunks)
    whole = one.layer()
    whole.router.row_invariant = True
    layer, x, _ = prepared(rank, one, **ONCE)
    x = x.detach()
    found, expected = layer(x).double(), whole(x).double()
    gate, _ = whole.router(x)
    routing = ops.build_routing(gate.experts, 8)
    rows = whole.experts(ops.dispatch(x, routing), routing.offsets)
    sizes = ops.combine(rows.double().abs(), routing, gate.weights.double().abs())
    bound = (top_k + 3) * UNIT[dtype] * sizes
    return ((found - expected).abs() / bound).max().item() if x.numel() else 0.0


def gradients_of_weights(rank, world):
    """Return the names of the gradients whose bits differ from the gradients with one row per choice."""
    one = Case(4, TOKENS, "bfloat16", 8, 4, chunks=2)
    found = []
    for way in ({}, ONCE):
        layer, x, directions = prepared(rank, one, **way)
        kept = []
        layer.losses.register_forward_hook(lambda _, args, result, kept=kept: keep_gradient(result[0], kept))
        (layer(x) * directions).sum().backward()
        gradients = {name: full(p.grad) for name, p in layer.named_parameters()}
        found.append(gradients | {"weights": kept[0]})
    return [name for name in found[0] if not same_bits(found[0][name], found[1][name])]


def keep_gradient(tensor, kept):
    """Append a tensor's gradient to a list once it is computed."""
    tensor.register_hook(kept.append)


def sent_once(rank, world, ep_ranks, experts, top_k, chunks, tokens, **options):
    """Return counts by name: rows that left this rank, as sent and as expected from its choices, and its other
    exchanges.
    """
    group = groups()[ep_ranks]
    if rank >= ep_ranks:
        return None
    torch.manual_seed(0)
    layer = MoE(12, 8, experts, top_k, dtype=torch.float32, **options)
    layer = ep.shard(layer, group, chunks=chunks, deduplicate=True)
    x = torch.randn(ep_ranks, tokens, 12, dtype=torch.float32)[rank].requires_grad_()
    chosen = layer.router(x)[0].experts.long()
    if layer.capacity_factor is not None:
        kept = ops.build_routing(chosen, experts, capacity=layer._capacity(tokens, layer.top_k)).slot >= 0
        chosen = torch.where(kept, chosen, experts)
    parts = [[set(cut) for cut in cuts] for cuts in layer.sharding.chunk_experts]
    rows = [[sum(bool(own & set(token)) for token in chosen.tolist()) for own in cuts] for cuts in parts]
    away = sum(count for cuts in rows for to, count in enumerate(cuts) if to != rank)
    with exchanges() as seen:
        layer(x).sum().backward()
    there = [one for one in seen if one["width"] == 12]
    beside = [one for one in seen if one["width"] != 12]
    sent_there = [one["sent"] for one in there[:chunks]]
    return {
        "as chosen": sent_there == rows,
        "rows": sum(sum(one) - one[rank] for one in sent_there),
        "away": away,
        "choices away": int(((chosen < experts) & (chosen // -(-experts // ep_ranks) != rank)).sum()),
        "exchanges": [len(there), len(beside)],
        "beside": sorted({(one["width"], one["dtype"]) for one in beside}),
    }


def weights_frozen_on_one_rank(rank, world):
    """Return the ranks' errors when the weights of one rank need no gradient, and afterwards."""
    few = ep.shard(layers(), dist.group.WORLD, **ONCE)["few"]
    x = torch.randn(3, 12, dtype=torch.float32)
    if rank == WRONG:
        few.router.requires_grad_(False)
    said = told(few, x)
    few.router.requires_grad_(True)
    return said, told(few, x)


def overflowing(rank, world, chunks, room, dtype, capacity):
    """Return the differences from one process that leaves out the rows that do not fit, and the number of these
    rows.
    """
    options = {} if capacity is None else {"capacity_factor": capacity}
    one = case(dtype, chunks=chunks, options=options)
    layer, x, directions = prepared(rank, one, transport="padded", room=room)
    y = layer(x)
    (y * directions).sum().backward()

    whole = one.layer()
    whole.router.row_invariant = whole.shared.row_invariant = True
    all_x, all_directions = (torch.cat(parts) for parts in one.rows())
    all_x.requires_grad_()
    gate, logits = whole.router(all_x)
    chosen, left_out = [], []
    for tokens in gate.experts.split(TOKENS):
        kept, overflow = first_that_fit(
            layer.sharding, tokens, whole._capacity(len(tokens), whole.top_k), room // (4 * chunks)
        )
        chosen.append(kept)
        left_out.append(overflow)
    experts = whole.experts
    expected = apply_experts(
        *(all_x, torch.cat(chosen), whole.losses(gate, logits)[0], experts.w_in, experts.w_out),
        b_in=experts.b_in,
        b_out=experts.b_out,
        foreign_experts=True,
    )
    expected = expected + whole.shared(all_x)
    (expected * all_directions).sum().backward()
    bits = {"y": (y, expected.split(TOKENS)[rank]), "dx": (x.grad, all_x.grad.split(TOKENS)[rank])}
    for name, parameter in layer.experts.named_parameters():
        bits[name] = full(parameter.grad), dict(experts.named_parameters())[name].grad
    own = gate.experts.split(TOKENS)[rank]
    numbers = {
        "overflowed": (layer.overflowed.item(), left_out[rank]),
        "dropped": (layer.stats.dropped.item(), int((chosen[rank] != own).sum())),
        "loads": (
            layer.last_loads,
            [torch.bincount(e.flatten(), minlength=6).tolist() for e in gate.experts.split(TOKENS)],
        ),
    }
    found = [name for name, pair in bits.items() if not same_bits(*pair)]
    return found + [name for name, (a, b) in numbers.items() if a != b], sum(left_out)


def first_that_fit(sharding, experts, capacity, room):
    """Return the (T, K) choices, with 6 for dropped ones, and how many were dropped for lack of room, counted one
    by one.
    """
    taken, filled, overflow = [0] * 6, {}, 0
    kept = experts.clone()
    for token, choice in torch.cartesian_prod(*map(torch.arange, experts.shape)).tolist():
        expert = int(experts[token, choice])
        taken[expert] += 1
        place = next(
            (chunk, rank)
            for chunk, cut in enumerate(sharding.chunk_experts)
            for rank, own in enumerate(cut)
            if expert in own
        )
        if capacity is not None and taken[expert] > capacity:
            kept[token, choice] = 6
        elif filled.get(place, 0) == room:
            kept[token, choice] = 6
            overflow += 1
        else:
            filled[place] = filled.get(place, 0) + 1
    return kept, overflow


def padded_rows(rank, world, chunks):
    """Return the rows of every exchange in calls with more and with fewer tokens."""
    one = case(chunks=chunks)
    layer, x, _ = prepared(rank, one, transport="padded", room=120)
    with exchanges() as seen:
        layer(x).sum().backward()
        layer(torch.cat([x, x])).sum().backward()
    return [one["sent"] for one in seen if one["width"] == 12], [one["width"] for one in seen]


def overflow_adds_up(rank, world):
    """Return the overflow counted over calls, and after the counter was reset."""
    layer, x, _ = prepared(rank, case(), transport="padded", room=4)
    counts = []
    for _ in range(2):
        layer(x)
        counts.append(layer.overflowed.item())
    layer.overflowed.zero_()
    return [*counts, layer.overflowed.item(), layer.stats.dropped.item()]


def evaluated_first(rank, world):
    """Return whether a call in inference mode has the bits of a training call after it, its overflow and its load."""
    layer, x, directions = prepared(rank, case(), transport="padded", room=300)
    with torch.inference_mode():
        y = layer(x)
    again = layer(x)
    (again * directions).sum().backward()
    return same_bits(y.clone(), again.detach()), layer.overflowed.item(), layer.last_loads[rank]


def disagreeing(rank, world, wrong):
    """Return what check_calls reports after calls in which one rank differed, and what a second check reports."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"first": MoE(12, 8, 6, 2), "second": MoE(12, 8, 6, 2)}).float()
    ep.shard(model, dist.group.WORLD, transport="padded", room=64)
    x = torch.randn(5, 12, dtype=torch.float32)
    silent = told(ep.check_calls, model)
    called, mine = model["first"], rank == WRONG
    if mine and wrong == "layer":
        called = model["second"]
    elif mine and wrong == "capacity":
        called.capacity_factor = 1.5
    elif mine and wrong == "gradients":
        model.requires_grad_(False)
    called(x)
    model.requires_grad_(True)
    for one in model.values():
        one.capacity_factor = None
        one(x)
    first, second = told(ep.check_calls, model), told(ep.check_calls, model)
    if first is not None:
        first[1] = without_models(first[1])
    return silent, first, second


def padded_is_refused(rank, world, options):
    """Return the error that ``shard`` raises."""
    return told(lambda: ep.shard(layers(), dist.group.WORLD, **options))
