"""Functions that the ranks run for test_gradients.py: a model over a mesh, compared with one in a single process."""

import torch
import torch.distributed as dist
from rank_setup import full, mesh_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from pymoe import ep
from pymoe.nn import MoE, QuantizedDenseLinear, set_aux_loss_scale, update_expert_biases

H, E = 8, 6
ROWS = 7


def model(bias=False, tied=False, dtype=torch.float64, experts=E):
    """Return a model of two layers, which may share a weight, with dense layers around them."""
    torch.manual_seed(0)
    options = {"num_shared_experts": 1, "bias": bias, "bias_update_rate": 0.05, "dtype": dtype}
    made = nn.Sequential(
        nn.Linear(H, H, dtype=dtype),
        nn.Sequential(MoE(H, 6, experts, 2, **options), nn.Linear(H, H, dtype=dtype)),
        MoE(H, 6, experts, 3, **options),
        nn.Linear(H, 1, dtype=dtype),
    )
    if tied:
        made[2].experts.w_in = made[1][0].experts.w_in
    return made


def data(world, steps=1):
    """Return the tokens of every rank in every step."""
    return torch.randn(steps, world, ROWS, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(shape, kind, way=None, **options):
    """Return the model over a mesh, and the callable that runs it."""
    mesh = mesh_of(*shape)
    spread = ep.shard(
        model(**options), mesh if mesh.ndim == 1 else mesh["ep"], chunks=2, min_rows_to_clone=1, **(way or {})
    )
    blocks = {"blocks": [spread[1]]} if kind == "fsdp" else {}
    return spread, ep.data_parallel(spread, mesh, kind=kind, **blocks)


def worst(pairs):
    """Return the largest difference divided by the largest expected number."""
    pairs = list(pairs)
    return max((full(a) - b).abs().max().item() for a, b in pairs) / max(b.abs().max().item() for _, b in pairs)


def gradients(rank, world, shape, kind, micro_batches, **way):
    """Return how far gradients of the mean loss are from the gradients of one process."""
    whole, (spread, called) = model(), made(shape, kind, way)
    x = data(world, micro_batches)
    (whole(x.flatten(0, 2)) ** 2).mean().backward()
    for number, own in enumerate(x[:, rank]):
        is_last = number == micro_batches - 1
        if kind == "fsdp":
            called.set_requires_gradient_sync(is_last)
            (called(own) ** 2).mean().div(micro_batches).backward()
        elif is_last:
            (called(own) ** 2).mean().div(micro_batches).backward()
        else:
            with called.no_sync():
                (called(own) ** 2).mean().div(micro_batches).backward()
    expected = dict(whole.named_parameters())
    return worst((p.grad, expected[name].grad) for name, p in spread.named_parameters())


def one_step(rank, world, shape, kind, tied=False, dtype="float64", replaced=None):
    """Return how far a model's gradients are from the gradients of one process.

    ``replaced`` names a change of parameters after sharding: a "cast" to their own dtype, "loaded" tensors, "memory"
    for parameters on the meta device, or "thawed" experts that were frozen.
    """
    options = {"tied": tied, "dtype": getattr(torch, dtype)}
    whole, mesh = model(**options), mesh_of(*shape)
    with torch.device("meta" if replaced == "memory" else "cpu"):
        spread = model(**options)
    spread.requires_grad_(replaced != "thawed")
    spread[0].requires_grad_(True)
    ep.shard(spread, mesh if mesh.ndim == 1 else mesh["ep"])
    called = ep.data_parallel(spread, mesh, kind=kind)
    spread.requires_grad_(True)
    if replaced == "cast":
        spread.to(options["dtype"])
    elif replaced == "loaded":
        experts = {name: tensor for name, tensor in spread.state_dict().items() if ".experts." in name}
        spread.load_state_dict(experts, strict=False, assign=True)
    elif replaced == "memory":
        fill(spread.to_empty(device="cpu"), whole)
    x = data(world)[0].to(options["dtype"])
    for _ in range(2):
        (whole(x.flatten(0, 1)) ** 2).mean().backward()
        (called(x[rank]) ** 2).mean().backward()
    expected = dict(whole.named_parameters())
    found = {name: p.grad for name, p in spread.named_parameters() if replaced != "thawed" or ".experts." in name}
    return worst((gradient, expected[name].grad) for name, gradient in found.items())


def spread_over_a_group(rank, world):
    """Return how far gradients are off if a model is spread over a process group and then cut over a mesh."""
    whole, spread, mesh = model(), model(), mesh_of(2, 2)
    called = ep.data_parallel(ep.shard(spread, mesh["ep"].get_group()), mesh, kind="fsdp")
    x = data(world)[0]
    (whole(x.flatten(0, 1)) ** 2).mean().backward()
    (called(x[rank]) ** 2).mean().backward()
    expected = dict(whole.named_parameters())
    return worst((p.grad, expected[name].grad) for name, p in spread.named_parameters())


def mixed_precision(rank, world, shape, clones):
    """Return how far gradients are off when FSDP casts parameters to bfloat16, and the gradients' dtypes."""
    whole, spread = (model(dtype=torch.float32, experts=8) for _ in range(2))
    mesh = mesh_of(*shape)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    called = ep.data_parallel(
        ep.shard(spread, mesh["ep"], clones=clones, min_rows_to_clone=1), mesh, kind="fsdp", mp_policy=policy
    )
    x = data(world)[0].float()
    (whole(x.flatten(0, 1)) ** 2).mean().backward()
    (called(x[rank]) ** 2).mean().backward()
    expected = dict(whole.named_parameters())
    pairs = [(p.grad, expected[name].grad) for name, p in spread.named_parameters() if ".experts." in name]
    return worst(pairs), [str(gradient.dtype) for gradient, _ in pairs]


def ignored_by_ddp(rank, world):
    """Return whether an ignored parameter keeps this rank's own gradient, and whether another parameter gets DDP's
    mean.
    """
    spread, alone = model(), model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(spread, ["3.weight"])
    ep.shard(spread, mesh_of(4))
    ep.shard(alone, mesh_of(4))
    x = data(world)[0, rank]
    ep.data_parallel(spread, mesh_of(4))(x).sum().backward()
    alone(x).sum().backward()
    return [
        torch.equal(spread[3].weight.grad, alone[3].weight.grad),
        torch.equal(spread[3].bias.grad, x.new_full((1,), ROWS)),
    ]


def dense_in_few_bits(rank, world, differ):
    """Return whether a rank's packed dense weights stay as it sets them, or the error of ranks that have others."""
    whole = model(dtype=torch.float32)
    whole[0] = QuantizedDenseLinear.from_linear(whole[0], 8)
    packed = whole[0].packed
    packed[0, 0, 0] += rank if differ else 0
    try:
        parallel = ep.data_parallel(ep.shard(whole, mesh_of(world)), mesh_of(world))
    except ep.GroupError as error:
        return str(error)
    packed[0, 0, 0] = rank
    parallel(data(world)[0, rank].float()).sum().backward()
    return int(packed[0, 0, 0])


def fill(spread, whole):
    """Give a model over ranks the state of a model in one process."""
    states = spread.state_dict()
    for name, tensor in whole.state_dict().items():
        states[name] = tensor if ".experts." in name else spread_like(states[name], tensor)
    spread.load_state_dict(states)


def accumulated_with_every_sum(rank, world):
    """Return the largest error of accumulated gradients if DDP sums over ranks in every backward pass."""
    whole, (spread, called) = model(), made((2, 2), "ddp")
    x = data(world, 3)
    for own in x:
        (whole(own.flatten(0, 1)) ** 2).mean().backward()
        (called(own[rank]) ** 2).mean().backward()
    expected = dict(whole.named_parameters())
    return worst((p.grad, expected[name].grad) for name, p in spread.named_parameters())


def sums_over_twins(rank, world):
    """Return how often a backward pass sums expert gradients over ranks, without ``no_sync()`` and with it."""
    spread, called = made((2, 2), "ddp")
    x, real, count = data(world)[0, rank], dist.all_reduce, []
    dist.all_reduce = lambda *args, **options: (count.append(1), real(*args, **options))[1]
    try:
        called(x).sum().backward()
        with_sums = len(count)
        with called.no_sync():
            called(x).sum().backward()
    finally:
        dist.all_reduce = real
    return with_sums, len(count) - with_sums, sum(".experts." in name for name, _ in spread.named_parameters())


def training(rank, world, shape, kind, clip):
    """Return losses and parameters after some steps with clipped gradients, and the same from one process."""
    whole, (spread, called) = model(bias=True), made(shape, kind, bias=True)
    optimizers = [torch.optim.AdamW(one.parameters(), 0.01, foreach=False) for one in (whole, spread)]
    apart = []
    for x in data(world, 6):
        norms = []
        for one, rows, optimizer in ((whole, x.flatten(0, 1), optimizers[0]), (called, x[rank], optimizers[1])):
            optimizer.zero_grad()
            loss = (one(rows) ** 2).mean()
            loss.backward()
            norms.append(ep.clip_grad_norm_(one.parameters(), clip).item())
            optimizer.step()
        update_expert_biases(spread)
        update_by_one_process(whole)
        apart.append(abs(norms[0] - norms[1]))
    expected = dict(whole.named_parameters())
    biases = [(p, dict(whole.named_buffers())[name]) for name, p in spread.named_buffers()]
    return [
        max(apart),
        worst((p.detach(), expected[name].detach()) for name, p in spread.named_parameters()),
        all(torch.equal(a, b) for a, b in biases),
    ]


def update_by_one_process(whole):
    """Update the biases by this process's load only."""
    from rank_setup import group_of_one

    update_expert_biases(whole, group_of_one())


def scaled_losses(rank, world):
    """Return the averaged auxiliary losses of ranks with unequal numbers of tokens, and the losses of one process."""
    torch.manual_seed(0)
    options = {"aux_loss_coef": 0.5, "z_loss_coef": 0.1, "dtype": torch.float64}
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(MoE(H, 6, E, 2, **options))
    whole, spread = layers
    called = ep.data_parallel(ep.shard(spread, mesh_of(4), scope="group"), mesh_of(4))
    sizes = [3, 9, 0, 6]
    x = torch.randn(sum(sizes), H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # The task's loss is a sum over all tokens; as a mean over ranks it is the ranks' sums times their number.
    whole(x).square().sum().backward()
    called(x.split(sizes)[rank]).square().sum().mul(world).backward()
    expected = dict(whole.named_parameters())
    task_and_losses = worst((p.grad, expected[name].grad) for name, p in spread.named_parameters())
    set_aux_loss_scale(whole, 0.0)
    whole.zero_grad()
    whole(x).square().sum().backward()
    without_losses = worst((p.grad, expected[name].grad) for name, p in spread.named_parameters())
    return task_and_losses, without_losses


def clipped(rank, world, norm_type, max_norm):
    """Return how far norm and clipped gradients are from one process, and the expected norm. Parameters are whole
    or spread over one of two meshes; one has no gradient.
    """
    spread = [
        ep.shard(MoE(H, 6, E, 2, dtype=torch.float64), mesh)
        for mesh in (mesh_of(2, 2)["ep"], mesh_of(4))
        if torch.manual_seed(0)
    ]
    whole = [MoE(H, 6, E, 2, dtype=torch.float64) for _ in spread if torch.manual_seed(0)]
    for one, other in zip(spread, whole, strict=True):
        for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
            if name == "experts.w_out" and one is spread[0]:
                continue
            q.grad = torch.linspace(-1, 2, q.numel(), dtype=torch.float64).reshape(q.shape)
            p.grad = spread_like(p, q.grad)
    found = [[p for one in layers for p in one.parameters()] for layers in (spread, whole)]
    kind = float(norm_type)
    norms = [ep.clip_grad_norm_(found[0], max_norm, kind), nn.utils.clip_grad_norm_(found[1], max_norm, kind)]
    pairs = [(p.grad, q.grad) for p, q in zip(*found, strict=True) if q.grad is not None]
    return abs(norms[0].item() - norms[1].item()), worst(pairs), norms[1].item()


def spread_like(parameter, whole):
    """Return a whole tensor spread in the same way as a parameter."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return whole.clone()
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def clipped_over_stages(rank, world):
    """Return the norm over ranks that have different parameters."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.full_like(parameter, rank + 1.0)
    norm = ep.clip_grad_norm_([parameter], 1.0, group=dist.group.WORLD)
    return norm.item() ** 2, parameter.grad.tolist()


def not_finite(rank, world):
    """Return the error for a norm that is not finite."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full_like(parameter, float("nan"))
    try:
        ep.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)


def clip_refused(rank, world, what):
    """Return the error for wrong arguments of clip_grad_norm_."""
    parameters, numbers = [nn.Parameter(torch.zeros(3))], (1.0, 2.0)
    if what == "a module":
        parameters = nn.Linear(1, 1)
    elif what == "modules":
        parameters = nn.Sequential(nn.Linear(1, 1))
    else:
        numbers = what
    try:
        ep.clip_grad_norm_(parameters, *numbers)
    except (TypeError, ValueError) as error:
        return [type(error).__name__, str(error)]


def refused(rank, world, what):
    """Return the errors for arguments that do not fit."""
    mesh, kind, options = mesh_of(2, 2), "ddp", {}
    spread = ep.shard(model(), mesh["ep"])
    if what == "other ranks":
        mesh = mesh_of(4)
    elif what == "no mesh":
        mesh = dist.group.WORLD
    elif what == "not sharded":
        spread = model()
    elif what == "kind":
        kind = "zero"
    elif what == "turned":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    elif what == "group":
        options["process_group"] = dist.group.WORLD
    elif what == "no modules":
        kind, options["blocks"] = "fsdp", ["1"]
    elif what == "one module":
        kind, options["blocks"] = "fsdp", spread[0]
    elif what == "module of another":
        kind, options["blocks"] = "fsdp", [nn.Linear(1, 1)]
    elif what == "cast on one dimension":
        mesh, kind, options["mp_policy"] = mesh_of(4), "fsdp", MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        spread = ep.shard(model(), mesh)
    elif what == "no expert on a rank":
        spread, kind = ep.shard(nn.Sequential(MoE(H, 6, 1, 1)), mesh["ep"]), "fsdp"
    elif what == "twice":
        ep.data_parallel(spread, mesh)
    elif what == "wrapped":
        spread = ep.data_parallel(spread, mesh)
    elif what == "blocks":
        options["blocks"] = [spread[1]]
    try:
        ep.data_parallel(spread, mesh, kind=kind, **options)
    except (TypeError, ValueError) as error:
        return [type(error).__name__, str(error)]


def twins(rank, world, kind, init_sync=True):
    """Return the rank's place among ranks with the same experts, whether experts differed at first, and whether
    they now have the expected values.
    """
    mesh = mesh_of(2, world // 2)
    torch.manual_seed(mesh.get_local_rank("edp"))
    spread = nn.Sequential(nn.Linear(H, H), MoE(H, 6, E, 2, bias=True))
    ep.shard(spread, mesh["ep"])
    before = {name: one.to_local().clone() for name, one in spread[1].experts.named_parameters()}
    firsts = {name: one.clone() for name, one in before.items()}
    source = dist.get_process_group_ranks(mesh.get_group(0))[0]
    for one in firsts.values():
        dist.broadcast(one, source, group=mesh.get_group(0))
    differed = any(not torch.equal(before[name], one) for name, one in firsts.items())
    ep.data_parallel(spread, mesh, kind=kind, **({} if init_sync else {"init_sync": False}))
    wanted = firsts if init_sync else before
    found = []
    for name, one in spread[1].experts.named_parameters():
        found.append(torch.equal(_of_expert_group(one, mesh, kind), wanted[name]))
    return mesh.get_local_rank("edp"), differed, all(found)


def _of_expert_group(parameter, mesh, kind):
    """Return the part of a parameter for this rank's place among the experts, even if FSDP has cut it further."""
    if kind == "ddp":
        return parameter.to_local()
    whole = parameter.full_tensor()
    return whole.chunk(mesh["ep"].size())[mesh.get_local_rank("ep")]


def other_twins(rank, world):
    """Return the ranks' errors when ranks that should have the same experts have experts of another size."""
    mesh = mesh_of(2, world // 2)
    spread = ep.shard(MoE(H, 6 + mesh.get_local_rank("edp"), E, 2), mesh["ep"])
    try:
        ep.data_parallel(spread, mesh)
    except ep.GroupError as error:
        return str(error)


def early_optimizer(rank, world):
    """Return the error of an optimizer that was created before sharding; one that was created afterwards must not
    raise.
    """
    whole = model()
    early = torch.optim.SGD(whole.parameters(), lr=0.1)
    spread = ep.shard(whole, dist.group.WORLD)
    spread(data(world)[0, rank]).sum().backward()
    torch.optim.SGD(spread.parameters(), lr=0.1, foreach=False).step()
    try:
        early.step()
    except RuntimeError as error:
        return str(error)


def norm_of_16_bits(rank, world, dtype):
    """Return how far the norm of 16-bit gradients is from the norm of their exact values."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(300, 7, dtype=getattr(torch, dtype))) for _ in range(3)]
    for one in parameters:
        one.grad = torch.randn(300, 7).to(one.dtype)
    exact = torch.cat([one.grad.double().flatten() for one in parameters]).norm()
    return float((ep.clip_grad_norm_(parameters, 1e9) / exact - 1).abs())
