"""Functions that the ranks run for test_mistakes.py: users' mistakes that must not hang or end ranks."""

import io

import torch
import torch.distributed as dist
from failures import WRONG, bug, told
from rank_setup import group_of_one
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pymoe import ep
from pymoe._common.types import Gate
from pymoe.nn import MoE


def layers(**options):
    """Return two layers, one of six experts, of which the last of four ranks has none, and one of many."""
    torch.manual_seed(0)
    return nn.ModuleDict({"few": MoE(12, 8, 6, 2, **options), "many": MoE(12, 8, 600, 2)}).float()


def wrong_parameters(rank, world, wrong):
    """Return the ranks' errors when parameters do not fit, and afterwards."""
    model = ep.shard(layers(num_shared_experts=1), dist.group.WORLD)
    few, x = model["few"], torch.randn(3, 12, dtype=torch.float32)
    if wrong == "dtype":
        few.experts.bfloat16()
        said = told(few, x)
        few.experts.float()
    elif wrong == "dtype inside autocast":
        few.experts.double()
        with torch.autocast("cpu", torch.bfloat16):
            said = told(few, x)
        few.experts.float()
    elif wrong == "shape":
        whole = {f"experts.{name}": one for name, one in layers()["few"].experts.named_parameters()}
        said = told(torch.func.functional_call, few, whole, (x,))
    elif wrong == "shared dtype":
        if rank == WRONG:
            few.shared.bfloat16()
        said = told(few, x)
        few.shared.float()
    return said, told(few, x)


def wrong_choices(rank, world, change, **options):
    """Return the ranks' errors when the router of one makes choices that do not fit its tokens, and afterwards."""
    few = ep.shard(layers(), dist.group.WORLD, **options)["few"]
    x = torch.randn(3, 12, dtype=torch.float32)
    changes = {
        "weights": lambda gate: gate._replace(weights=gate.weights[:, :1]),
        "tokens": lambda gate: Gate(gate.weights[:2], gate.experts[:2], gate.load),
        "dtype": lambda gate: gate._replace(experts=gate.experts.float()),
        "indices": lambda gate: gate._replace(experts=gate.experts - 1 - gate.experts.max()),
    }
    hook = None
    if rank == WRONG:
        hook = few.router.register_forward_hook(lambda *call: (changes[change](call[-1][0]), call[-1][1]))
    said = told(few, x)
    if hook is not None:
        hook.remove()
    return said, told(few, x)


def wrong_index_in_padded_rows(rank, world):
    """Return the rank's error when its router chooses expert -1; each rank has a group of its own."""
    few = ep.shard(layers(), group_of_one(), transport="padded", room=64)["few"]
    few.router.register_forward_hook(
        lambda *call: (call[-1][0]._replace(experts=torch.full_like(call[-1][0].experts, -1)), call[-1][1])
    )
    return told(few, torch.randn(3, 12, dtype=torch.float32))


def gates_of_others(rank, world):
    """Return how far a layer's output is from its usual one when a router of another kind has made one rank's gate."""
    few = ep.shard(layers(), dist.group.WORLD, deduplicate=True)["few"]
    x = torch.randn(3, 12, dtype=torch.float32)
    expected = few(x)
    if rank == WRONG:
        few.router.register_forward_hook(lambda *call: (_with_other_load_and_dtype(call[-1][0]), call[-1][1]))
    return float((few(x) - expected).abs().max())


def _with_other_load_and_dtype(gate):
    return gate._replace(load=gate.load.roll(1).long(), weights=gate.weights.bfloat16())


def wrong_shared(rank, world, returned):
    """Return the rank's error when its shared experts return something else; each rank has a group of its own."""
    few = ep.shard(layers(num_shared_experts=1), group_of_one())["few"]
    few.shared.forward = {"nothing": lambda x: None, "a column": lambda x: x[:, :1]}[returned]
    return told(few, torch.randn(3, 12, dtype=torch.float32))


def wrong_weights(rank, world):
    """Return the rank's error when its losses return weights in another dtype; each rank has a group of its own."""
    few = ep.shard(layers(), group_of_one())["few"]
    few.losses.register_forward_hook(lambda *call: (call[-1][0].double(), call[-1][1]))
    return told(few, torch.randn(3, 12, dtype=torch.float32))


def unknown_activation(rank, world):
    """Return the ranks' errors when all have an activation that does not exist, and afterwards."""
    few = ep.shard(layers(), dist.group.WORLD)["few"]
    x = torch.randn(3, 12, dtype=torch.float32)
    few.experts.activation = "sine"
    said = told(few, x)
    few.experts.activation = "swiglu"
    return said, told(few, x)


def late_error(rank, world):
    """Return the notes of an error that all ranks raise after the announcement, and the ranks' errors afterwards."""
    few = ep.shard(layers(num_shared_experts=1), dist.group.WORLD)["few"]
    x = torch.randn(3, 12, dtype=torch.float32)
    hook = few.shared.register_forward_pre_hook(bug)
    try:
        few(x)
    except ArithmeticError as error:
        notes = getattr(error, "__notes__", None)
    hook.remove()
    return notes, told(few, x)


def unequal_calls(rank, world, wrong):
    """Return the ranks' errors when one has another layer or other options, and afterwards."""
    model, other = (ep.shard(layers(capacity_factor=1.25), dist.group.WORLD) for _ in range(2))
    few, x, mine = model["few"], torch.randn(3, 12, dtype=torch.float32), rank == WRONG
    options = few.top_k, few.capacity_factor
    whole = few.router.scale, few.experts.activation, few.losses.z_loss_coef
    called = few
    if mine and wrong == "many":
        called = model["many"]
    elif mine and wrong == "model":
        called = other["few"]
    elif mine and wrong == "capacity":
        few.capacity_factor = None
    elif mine and wrong == "top_k":
        few.router.top_k = few.top_k = 3
    elif mine and wrong == "scale":
        few.router.scale = 2.0
    elif mine and wrong == "activation":
        few.experts.activation = "geglu"
    elif mine and wrong == "loss":
        few.losses.z_loss_coef = 0.5
    elif mine and wrong == "frozen":
        few.experts.w_in.requires_grad_(False)
    said = told(called, x)
    few.experts.w_in.requires_grad_()
    few.router.scale, few.experts.activation, few.losses.z_loss_coef = whole
    few.top_k, few.capacity_factor = options
    few.router.top_k = few.top_k
    return said, told(few, x)


def refused(rank, world, what):
    """Return the error of ``shard`` for a mistake that all ranks make."""
    model, mesh = layers(), dist.group.WORLD
    few = model["few"]
    if what == "order":
        mesh = DeviceMesh("cpu", [2, 0, 1, 3])
    elif what == "outside the mesh":
        mesh = DeviceMesh("cpu", [0, 1])
    elif what == "outside the group":
        mesh = dist.new_group([0, 1])
    elif what == "hook":
        few.experts.register_forward_hook(bug)
    elif what == "experts' forward":
        few.experts.forward = bug
    elif what == "layer's forward":
        few.forward = bug
    elif what == "scores":
        model = layers(score_before_experts=True)
    elif what == "no module":
        model = None
    return told(lambda: ep.shard(model, mesh))


def refused_by_all(rank, world, wrong):
    """Return the errors of ``shard`` when one rank has another model."""
    model = layers(bias_update_rate=0.1, num_shared_experts=1, shared_gate=True, router_bias=True)
    few = model["few"]
    with torch.no_grad():
        few.router.weight[0, 0] = torch.nan
        if rank == WRONG and wrong == "no module":
            model = None
        elif rank == WRONG and wrong == "order of rows":
            few.router.weight.copy_(few.router.weight.flip(0))
        elif rank == WRONG and wrong == "order of shared rows":
            few.shared.w_in.copy_(few.shared.w_in.flip(0))
        elif rank == WRONG and wrong == "gate":
            few.shared.w_gate.copy_(few.shared.w_gate.flip(1))
        elif rank == WRONG and wrong == "bias":
            few.router.bias.fill_(1.0)
        elif rank == WRONG and wrong == "expert bias":
            few.router.expert_bias.fill_(1.0)
    return told(lambda: ep.shard(model, dist.group.WORLD))


def saved_whole(rank, world):
    """Return whether torch.save and torch.load restore a model that has been called."""
    model = ep.shard(layers(), dist.group.WORLD)
    x = torch.randn(3, 12, dtype=torch.float32)
    y = model["few"](x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return bool(torch.equal(loaded["few"](x), y))


def no_group():
    """Return the error of ``shard`` in a process without a group."""
    return told(lambda: ep.shard(layers(), dist.group.WORLD))
