"""Functions that the ranks run for test_bugs_ep.py."""

import torch
from calls import case, prepared
from ep_cases import shuffled
from failures import told, without_models
from parallel import E, data, model
from rank_setup import mesh_of, same_bits
from torch import nn

from pymoe import ep
from pymoe.ep.exchange import AllToAll
from pymoe.ep.placement import contiguous
from pymoe.nn import MoE


def shares_of_losses(rank, world, **way):
    """Return this rank's share of losses over the group, in hexadecimal so that all bits show."""
    layer, x, _ = prepared(rank, case("float64", scope="group", options={"aux_loss_coef": 0.1}), **way)
    shares = []
    layer.losses.register_forward_pre_hook(lambda _, args, options: shares.append(options["share"]), with_kwargs=True)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        layer(x)
    finally:
        torch.set_default_dtype(usual)
    return [float(share).hex() for share in shares]


def two_layers_that_disagree(rank, world):
    """Return what two calls of check_calls report after ranks disagreed in both layers of a model."""
    spread = ep.shard(model(), mesh_of(4), transport="padded", room=200)
    layers = [one for one in spread.modules() if isinstance(one, ep.ShardedMoE)]
    for layer in layers:
        layer.capacity_factor = 1.5 if rank == 2 else None
    spread(data(world)[0, rank])
    return [told(ep.check_calls, spread) for _ in range(2)]


def other_gradients_first(rank, world, **way):
    """Start exchanges while another is under way; return the gradients that differ after passes for some of them."""
    overtaken, awaited, start, finish = [], [], AllToAll._start, AllToAll.wait

    def started(self, chunk, *args):
        before = self._under_way.get(chunk)
        start(self, chunk, *args)
        if before is not None and all(before[0] is not work for work in awaited):
            overtaken.append(chunk)

    def finished(self, chunk):
        awaited.append(self._under_way[chunk][0])
        return finish(self, chunk)

    def leaves(layer, x):
        return [x, *layer.experts.parameters()]

    found = []
    for asks_before in (False, True):
        layer, x, directions = prepared(rank, case(chunks=2), min_rows_to_clone=1, **way)
        y = layer(x)
        if asks_before:
            AllToAll._start, AllToAll.wait = started, finished
            try:
                torch.autograd.grad(y.sum(), x, retain_graph=True)
                torch.autograd.grad(y.sum(), list(layer.experts.parameters()), retain_graph=True)
                (y * directions).sum().backward()
            finally:
                AllToAll._start, AllToAll.wait = start, finish
        else:
            (y * directions).sum().backward()
        found.append([one.grad for one in leaves(layer, x)])
    return overtaken, [place for place, pair in enumerate(zip(*found, strict=True)) if not same_bits(*map(local, pair))]


def local(tensor):
    """Return the part of a tensor that is on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def moved_without_another_layer(rank, world, tied):
    """Return the messages when one of two layers that share experts or an expert weight is moved by itself, and
    afterwards.
    """
    spread = model(tied=tied)
    if not tied:
        spread[2].experts = spread[1][0].experts
    ep.shard(spread, mesh_of(4))
    x = data(world)[0, rank]
    y = spread(x)
    moving = told(ep.redistribute, spread[2], shuffled(E, 4))
    calling = told(spread, x)
    for said in (moving, calling):
        if said is not None:
            said[1] = without_models(said[1])
    ep.redistribute(spread, contiguous(E, 4))
    return moving, calling, same_bits(spread(x), y)


def early_optimizer_of_gradients(rank, world, function):
    """Return what an optimizer reports in a step after ``function`` has replaced parameters that had gradients.

    Return this also for a step after all gradients were made zero, and for one after other code has used the replaced
    parameters.
    """
    mesh = mesh_of(2, 2)
    spread = model()
    if function == "data_parallel":
        ep.shard(spread, mesh["ep"])
    early = torch.optim.SGD(spread.parameters(), lr=0.1, foreach=False)
    replaced = [layer.experts.w_in for layer in (spread[1][0], spread[2])]
    spread(data(world)[0, rank]).sum().backward()
    if function == "shard":
        ep.shard(spread, mesh["ep"])
    else:
        ep.data_parallel(spread, mesh, kind="fsdp")
    found = [told(early.step)]
    early.zero_grad(set_to_none=False)
    found.append(told(early.step))
    early.zero_grad()
    early = torch.optim.SGD(replaced, lr=0.1, foreach=False)
    found.append(told(early.step))
    sum(one.sum() for one in replaced).backward()
    found.append(told(early.step))
    return found


def fsdp_without_first_broadcast(rank, world):
    """Return whether each rank keeps a part of its own experts under fully_shard with init_sync=False."""
    mesh = mesh_of(2, world // 2)
    torch.manual_seed(mesh.get_local_rank("edp"))
    spread = nn.Sequential(nn.Linear(8, 8), MoE(8, 6, 8, 2, bias=True))
    ep.shard(spread, mesh["ep"])
    before = {name: one.to_local().clone() for name, one in spread[1].experts.named_parameters()}
    ep.data_parallel(spread, mesh, kind="fsdp", init_sync=False)
    place = mesh.get_local_rank("edp")
    return [
        torch.equal(one.to_local(), before[name].chunk(2)[place]) for name, one in spread[1].experts.named_parameters()
    ]


def own_experts_of(rank, world, experts):
    """Return the end of the text of a layer, which names the experts of the rank."""
    return repr(ep.shard(MoE(8, 6, experts, 2), mesh_of(world))).partition("own experts: ")[2].partition("\n")[0]


class Wrapped(nn.Module):
    """A router inside a module that can only be called."""

    def __init__(self, router):
        super().__init__()
        self.router = router

    @property
    def weight(self):
        return self.router.weight

    def forward(self, x):
        return self.router(x)


def router_in_a_wrapper(rank, world):
    """Return whether a layer gives the same bits after its router is put in a wrapper."""
    layer, x, _ = prepared(rank, case("float32"))
    y = layer(x)
    layer.router = Wrapped(layer.router)
    return same_bits(layer(x), y)


def strides_of_gradients(rank, world, **way):
    """Return the strides of experts' gradients, as autograd gets them, that do not match their shapes."""
    layer, x, directions = prepared(rank, case(options={"capacity_factor": 0.8}), **way)
    seen = []
    for parameter in layer.experts.parameters():
        parameter.register_hook(lambda grad: seen.append(grad.to_local()))
    (layer(x) * directions).sum().backward()
    assert len(seen) == 4
    return [grad.stride() for grad in seen if grad.stride() != torch.empty(grad.shape).stride()]
