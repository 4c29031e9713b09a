"""Functions that the ranks run for test_calls.py. Each returns what is wrong, or what it counted."""

import copy

import torch
import torch.distributed as dist
from called import functions_of
from ep_cases import Case, alone
from rank_setup import HostReads, exchanges, full, groups, same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

from pymoe import ep
from pymoe.ep.exchange import AllToAll
from pymoe.nn import MoE

TOKENS = [13, 5, 0, 9]
PADDED = {"transport": "padded", "room": 4 * 2 * 13 * 2}
"""Room for all rows, in two chunks."""
ONCE = {"deduplicate": True}


def case(dtype="float32", **more):
    """Return a case of six experts on four ranks, with a shared expert."""
    options = {"num_shared_experts": 1, "bias": True, **more.pop("options", {})}
    return Case(**{"world": 4, "tokens": TOKENS, "experts": 6, "top_k": 2, "dtype": dtype, "options": options, **more})


def prepared(rank, one, **options):
    """Return the layer spread over the ranks, this rank's tokens, and the gradients of its output."""
    layer = one.spread(dist.group.WORLD, **options)
    x, directions = (parts[rank] for parts in one.rows())
    return layer, x.clone().requires_grad_(), directions


def host_reads(rank, world, chunks, scope, **way):
    """Return how often the host reads from a tensor in a forward and in a backward pass."""
    options = {"capacity_factor": 0.8, "aux_loss_coef": 0.1, "z_loss_coef": 0.1}
    one = case(chunks=chunks, scope=scope, options=options)
    layer, x, directions = prepared(rank, one, **{"room": 1000, **way})
    with HostReads() as forward:
        y = layer(x)
    with HostReads() as backward:
        (y * directions).sum().backward()
    return forward.count, backward.count


def sent(rank, world, chunks):
    """Return the number of exchanges of a forward and of both passes, the rows sent, and the rows that the formula
    expects.
    """
    one = case(chunks=chunks)
    layer, x, directions = prepared(rank, one)
    with exchanges() as seen:
        y = layer(x)
        forward = len(seen)
        (y * directions).sum().backward()
    own = [sum(load[e] for e in layer.sharding.own_experts) for load in layer.last_loads]
    there, back = one.top_k * TOKENS[rank], sum(own)
    rows = [sum(sum(one["sent"]) for one in part) for part in (seen[:forward], seen)]
    return [forward, len(seen), rows, [there + back, 2 * (there + back)]]


def second_derivative(rank, world, **way):
    """Return the largest error of a gradient and its own gradient, and whether the latter is far enough from zero."""
    one = case("float64", options={"activation": "gelu"}, chunks=2)
    whole = one.layer()
    whole.router.row_invariant = whole.shared.row_invariant = True

    def derivatives(layer, x):
        (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first, second

    layer, x, _ = prepared(rank, one, **way)
    found = derivatives(layer, x)
    expected = derivatives(whole, torch.cat(one.rows()[0]).requires_grad_())
    pairs = zip(found, expected, strict=True)
    errors = [(a - b.split(TOKENS)[rank]).abs().max().item() if x.numel() else 0.0 for a, b in pairs]
    return max(errors), x.numel() == 0 or found[1].abs().max().item() > 0.01


def gradients(layer, x):
    """Return gradients by name, and clear them."""
    found = {name: full(p.grad) for name, p in layer.named_parameters()} | {"x": x.grad}
    layer.zero_grad()
    x.grad = None
    return found


def differing(a, b):
    """Return the names of tensors that differ."""
    return [name for name in a if not same_bits(a[name], b[name])]


def checkpointed(rank, world, chunks, **way):
    """Return what activation checkpointing changes."""
    layer, x, directions = prepared(rank, case(chunks=chunks, options={"bias_update_rate": 0.1}), **way)
    y = layer(x)
    (y * directions).sum().backward()
    plain, load = gradients(layer, x), layer.router.counted["load"].clone()
    layer.router.counted.zero_()
    again = checkpoint(layer, x, use_reentrant=False)
    (again * directions).sum().backward()
    found = differing(plain, gradients(layer, x))
    return found + [
        name for name, a, b in (("y", y, again), ("load", load, layer.router.counted["load"])) if not same_bits(a, b)
    ]


def twice_backward(rank, world, **way):
    """Return what differs after a second pass over a kept graph."""
    layer, x, directions = prepared(rank, case(chunks=2), **way)
    loss = (layer(x) * directions).sum()
    loss.backward(retain_graph=True)
    first = gradients(layer, x)
    loss.backward()
    return differing(first, gradients(layer, x))


def autocast(rank, world, **way):
    """Return differences from one process under autocast, and the dtypes in which rows and weights travel."""
    one = case(chunks=2)
    whole = one.layer()
    whole.router.row_invariant = whole.shared.row_invariant = True
    all_x = torch.cat(one.rows()[0]).requires_grad_()
    layer, x, _ = prepared(rank, one, **way)
    with exchanges() as seen:
        with torch.autocast("cpu", torch.bfloat16):
            y, expected = layer(x), whole(all_x)
        y.float().square().sum().backward()
        expected.float().square().sum().backward()
    parts = {"y": (y, expected.split(TOKENS)[rank]), "dx": (x.grad, all_x.grad.split(TOKENS)[rank])}
    expected = dict(whole.experts.named_parameters())
    experts = {name: (full(p.grad), expected[name].grad) for name, p in layer.experts.named_parameters()}
    return different(parts, experts, way), sorted({one["dtype"] for one in seen})


def different(parts, experts, way):
    """Return the names of parts that differ. Parts summed in another order than in one process may differ by
    rounding.
    """
    far = {}
    if way.get("clones"):
        far, experts = experts, {}
    elif way.get("deduplicate"):
        far, parts, experts = parts | experts, {}, {}
    found = [name for name, (a, b) in far.items() if not torch.allclose(a, b, rtol=2e-2, atol=2e-2)]
    return found + [name for name, (a, b) in (parts | experts).items() if not same_bits(a, b)]


def without_gradients(rank, world, **way):
    """Return differences from the recorded forward, and the number of exchanges in an evaluation."""
    layer, x, _ = prepared(rank, case(chunks=2), **way)
    y = layer(x)
    with exchanges() as seen, torch.no_grad():
        again = layer.eval()(x)
    return same_bits(y, again) and not again.requires_grad, len(seen)


def partly_frozen(rank, world, frozen, **way):
    """Return differences from one process when part of a layer needs no gradient."""
    one = case(chunks=2)

    def freeze(layer, x):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name.split(".")[0] not in frozen)
        return x.detach().requires_grad_("x" not in frozen)

    whole = one.layer()
    whole.router.row_invariant = whole.shared.row_invariant = True
    all_x = freeze(whole, torch.cat(one.rows()[0]))
    (whole(all_x) * torch.cat(one.rows()[1])).sum().backward()
    layer, x, directions = prepared(rank, one, **way)
    x = freeze(layer, x)
    (layer(x) * directions).sum().backward()
    parts = {} if "x" in frozen else {"dx": (x.grad, all_x.grad.split(TOKENS)[rank])}
    experts = dict(layer.experts.named_parameters())
    expected = {name: parameter.grad for name, parameter in whole.experts.named_parameters()}
    wrong = [name for name, one in experts.items() if (one.grad is None) != (expected[name] is None)]
    pairs = {name: (full(one.grad), expected[name]) for name, one in experts.items() if one.grad is not None}
    return wrong or different(parts, pairs, way)


def functions(rank, world):
    """Return the Python functions of pymoe that a forward with gradients and both passes run, as (module, name)."""
    layer, x, directions = prepared(rank, case(options={"num_shared_experts": 0, "bias": False}))
    found = functions_of(lambda: layer(x)), functions_of(lambda: (layer(x) * directions).sum().backward())
    return [[(module, name) for module, name in names if module.startswith("pymoe.")] for names in found]


def order_of_events(rank, world):
    """Return the order of events in a forward and a backward pass of three chunks."""
    events = []

    def spy(owner, name, told):
        real = getattr(owner, name)

        def called(self, *args, **kwargs):
            events.append(told(self, *args, **kwargs))
            return real(self, *args, **kwargs)

        setattr(owner, name, called)
        return owner, name, real

    def chunk_first(word):
        return lambda self, chunk, *_: f"{word} {chunk}"

    replaced = [
        spy(AllToAll, "_start", chunk_first("start")),
        spy(AllToAll, "wait", chunk_first("finish")),
        spy(ep.ShardedExperts, "_apply_to_chunk", lambda self, rows, chunk, *_: f"compute {chunk}"),
    ]
    try:
        layer, x, directions = prepared(rank, case(experts=12, chunks=3))
        layer.shared.register_forward_hook(lambda *_: events.append("shared"))
        layer.shared.w_in.register_hook(lambda grad: events.append("shared") or grad)
        layer.experts.w_in.register_hook(lambda grad: events.append("weights") or grad)
        y = layer(x)
        forward, events[:] = list(events), []
        (y * directions).sum().backward()
    finally:
        for owner, name, real in replaced:
            setattr(owner, name, real)
    return forward, events


def compiled(rank, world, **way):
    """Return whether a compiled model gives the same bits."""
    layer, x, _ = prepared(rank, case(), **way)
    model = nn.Sequential(layer, nn.Tanh())
    return same_bits(torch.compile(model, backend="eager")(x), model(x))


def copied(rank, world, **way):
    """Return whether a copy gives the same bits and has its own parameters."""
    layer, x, _ = prepared(rank, case(), **way)
    other = copy.deepcopy(layer)
    same = same_bits(layer(x), other(x))
    with torch.no_grad():
        other.experts.w_in.zero_()
    return same and bool(layer.experts.w_in.to_local().any()) == bool(layer.sharding.own_experts)


def reset(rank, world):
    """Return whether a layer is initialized as in one process."""
    one = case()
    layer, _, _ = prepared(rank, one)
    whole = one.layer()
    for other in (layer, whole):
        torch.manual_seed(3)
        other.reset_parameters()
    return all(same_bits(full(p), dict(whole.named_parameters())[name]) for name, p in layer.named_parameters())


def seen_from_outside(rank, world):
    """Return a layer's names, statistics and text."""
    one = case(scope="group", options={"capacity_factor": 0.8})
    whole, (layer, x, _) = one.layer(), prepared(rank, one)
    layer(x)
    stats, loads = layer.stats, layer.last_loads
    dropped = stats.dropped.detach().clone()
    dist.all_reduce(dropped)
    _, _, alone_layer = alone(one)
    return {
        "names": list(layer.state_dict()) == list(whole.state_dict()),
        "shapes": [list(v.shape) for v in layer.state_dict().values()]
        == [list(v.shape) for v in whole.state_dict().values()],
        "own load": stats.load.tolist() == loads[rank],
        "load": [sum(column) for column in zip(*loads, strict=True)] == alone_layer.stats.load.tolist(),
        "dropped": dropped.item() == alone_layer.stats.dropped.item(),
        "is a layer": isinstance(layer, MoE) and type(layer).__name__ in repr(layer),
        "tells its experts": f"ranks={layer.sharding.ranks}, own experts: " in repr(layer),
    }


def shared_between_layers(rank, world):
    """Return whether layers that share their experts still share them."""
    one = case()
    model = nn.Sequential(one.layer(), one.layer())
    model[1].experts = model[0].experts
    whole = copy.deepcopy(model)
    for layer in whole:
        layer.router.row_invariant = layer.shared.row_invariant = True
    ep.shard(model, dist.group.WORLD)
    x = one.rows()[0]
    y = whole(torch.cat(x)).split(TOKENS)[rank]
    return same_bits(model(x[rank]), y) and model[0].experts is model[1].experts


def groups_side_by_side(rank, world):
    """Return whether two groups of two ranks each compute their own results."""
    pair = groups_of_pairs()[rank // 2]
    one = case(world=2, tokens=[7, 4])
    layer = ep.shard(one.layer(), pair)
    y, _, _ = alone(one)
    return same_bits(layer(one.rows()[0][rank % 2]), y.split([7, 4])[rank % 2])


def groups_of_pairs():
    """Return the group of ranks 0 and 1 and the group of ranks 2 and 3."""
    groups()
    return [dist.new_group(pair) for pair in ([0, 1], [2, 3])]


def made_on_meta(rank, world):
    """Check that a layer that was spread before it had memory is initialized as in one process."""
    one = case()
    with torch.device("meta"):
        layer = MoE(12, 10, 6, 2, num_shared_experts=1, bias=True, dtype=torch.float32)
    ep.shard(layer, dist.group.WORLD)
    assert layer.experts.w_in.is_meta
    layer.to_empty(device="cpu")
    whole = one.layer()
    for other in (layer, whole):
        torch.manual_seed(3)
        other.reset_parameters()
    x = one.rows()[0]
    whole.router.row_invariant = whole.shared.row_invariant = True
    return same_bits(layer(x[rank]), whole(torch.cat(x)).split(TOKENS)[rank])
