"""shard: spreads the experts of a model's layers over the ranks of a group."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pymoe.ep.agreement import number_of
from pymoe.ep.arrangement import Arrangement, Scope, Transport
from pymoe.ep.comparison import compare
from pymoe.ep.experts import ShardedExperts
from pymoe.ep.groups import next_model, note_announced
from pymoe.ep.layer import ShardedMoE
from pymoe.ep.optimizers import watch
from pymoe.ep.padded import notes_of
from pymoe.nn.experts import Experts
from pymoe.nn.moe import MoE
from pymoe.nn.quantize import lost_with
from pymoe.reference import checks


def shard(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    chunks: int = 1,
    scope: Scope = "rank",
    room: int | None = None,
    clones: int = 0,
    worth: int | None = None,
    deduplicate: bool = False,
    transport: Transport = "exact",
) -> nn.Module:
    """Spread the experts of every :class:`pymoe.nn.MoE` in ``model`` over the ranks of a group, in place.

    Each rank keeps the experts that ``torch.chunk`` gives it; E need not be divisible by the ranks, and ranks may have
    none. Expert parameters become DTensors (``Shard(0)`` on the mesh) of the shapes and names that they had, so
    ``torch.distributed.checkpoint`` saves and loads them for any number of ranks. Router and shared experts stay on
    every rank. Make optimizers afterwards: the next step of one from before raises. Every rank must hold the same
    model: the same seed, or the same checkpoint loaded. A model on the meta device can be sharded first, given memory
    by ``to_empty``, and initialised or loaded then.

    A call of a layer is collective (:class:`ShardedMoE`). Rows go to the ranks of their experts and come back, with one
    read of numbers by the host or none; the rank of a token sums its choices, in their order. Sums of rows over an
    expert run in the order of ranks. So outputs, gradients of inputs and gradients of experts are, bit for bit, those
    of one process with the tokens of all ranks, rank after rank, if its router and shared experts are
    ``row_invariant``, as ``shard`` makes them here. Exceptions, equal to rounding: gradients of router and shared
    experts, which you sum over the ranks; what the auxiliary losses of a ``scope="group"`` add to gradients of inputs;
    and what ``clones`` and ``deduplicate`` say below.

    Args:
        model: any module; layers inside that are quantised, of subclasses of ``MoE`` or ``Experts``, or with hooks on
            their ``experts`` are refused.
        mesh: the ranks: a mesh of one dimension that lists them in the order of its group, such as ``mesh["ep"]``, or a
            process group. All of them call this; a rank that gives something without a group, as None, cannot tell the
            others, which wait for the group's timeout.
        chunks: in how many exchanges the rows of a call travel, each with an equal share of every rank's experts. While
            one is under way, the experts of the one before compute, forward and backward. At most as many as a rank has
            experts; a larger number is reduced to that.
        scope: over whose tokens capacity and auxiliary losses are taken. ``"rank"``: each rank's own, as data
            parallelism does. ``"group"``: all of them, as one process does; tokens of lower ranks come first, and the
            mean over ranks of the losses is that of all tokens.
        room: the most rows that a rank may receive in a call, a row for each choice also with ``deduplicate``. If one
            would receive more, every rank raises :class:`GroupError` before anything is allocated for them. None: no
            limit. With ``transport="padded"`` see there.
        clones: how many experts of other ranks a rank may take clones of, for one call (FasterMoE's shadow experts).
            Every call's clones are planned from its own loads by :func:`pymoe.ep.clones.plan_clones`, without another
            message. The weights of a clone travel to its rank once and their gradients once back, in one more exchange
            either way; their rows travel in one more chunk, the last, so that weights come while ranks compute with
            shared experts and their own. ``moe.last_rows`` tells the rows that each rank computed. Outputs and
            gradients of inputs keep their bits. The gradient of an expert that had clones is the sum of a gradient a
            rank, the clones' added in the order of ranks and then to the owner's: that of one process to rounding, the
            same in every run. Rows are gathered after the loads have been read, not meanwhile.
        worth: the fewest rows for which an expert is cloned, at least 1. A clone moves P numbers twice, forward and
            back, and each row that it takes off the fullest rank moves H numbers four times. None: P / (2 H) rows,
            from which on the weights take no longer than the rows: 1.5 F for gated experts. That is where a clone pays
            on a wire that takes as long for a row as a rank computes on it; where a rank computes φ operations in the
            time of a byte on its wire, take b φ / 3 for numbers of b bytes.
        deduplicate: send a token once to each rank of which it chose experts (in every chunk in which it did), and
            their weighted sum back, in place of a row for each choice. Numbers of experts and weights travel beside
            the rows, 12 K bytes a row in a forward and backward pass (20 K in float64). Sums are grouped by rank:
            outputs and gradients of inputs equal one process's to rounding, an output to (K + 3) u times the sum of
            its terms' sizes, u being the unit roundoff of the dtype. Gradients of experts keep their bits. Not with
            ``clones``.
        transport: ``"exact"``: ranks tell each other how many rows they send, and the host reads these numbers, once a
            call. ``"padded"``: every rank sends every other ``room // (R * chunks)`` rows in each chunk, filled or not,
            and the host reads nothing, so shapes follow from shapes. ``room`` must be given: 2 T K for ranks of at most
            T tokens leaves each pair twice its even share. Of the rows from a rank to a rank in a chunk, those past
            that number are dropped, in the order of tokens and choices, after those past a capacity and like them;
            ``stats.dropped`` counts them in, and :attr:`ShardedMoE.overflowed` adds them up. Where nothing is dropped
            so, all bits are those of ``"exact"``. Ranks that disagree are not noticed before rows travel:
            :func:`check_calls`. Not with ``clones`` or ``deduplicate``.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument, or a layer's class, is of the wrong kind.
        ValueError: ``mesh`` has several dimensions, another order than its group, or not this rank; a number is out of
            range, or options do not fit each other; ``model`` holds no layer, one that has been sharded before, or one
            with a hook on its experts or a ``forward`` of its own.
        GroupError: the ranks do not give equal arguments and layers, their routers or shared experts differ, or one of
            them has failed; so every rank raises.
    """
    mesh = _mesh_of(mesh, model)
    problem: Exception | None = None
    layers: dict[str, MoE] = {}
    try:
        _check_order(mesh)
        checks.integer("shard", "chunks", chunks, 1, None, "at least 1")
        checks.choice("shard", "scope", scope, ("rank", "group"))
        if room is not None:
            checks.integer("shard", "room", room, 0, None, "None or at least 0")
        checks.integer("shard", "clones", clones, 0, None, "at least 0")
        if worth is not None:
            checks.integer("shard", "worth", worth, 1, None, "None or at least 1")
        checks.flag("shard", "deduplicate", deduplicate)
        checks.choice("shard", "transport", transport, ("exact", "padded"))
        if deduplicate and clones:
            raise ValueError(f"shard: clones must be 0 with deduplicate=True, got {clones}")
        layers = _layers_of(model)
        if transport == "padded":
            _check_padded(mesh, layers, chunks, room, clones, deduplicate)
    except (TypeError, ValueError) as error:
        problem = error
    options: dict[str, Any] = {"chunks": chunks, "scope": scope, "room": room, "clones": clones, "worth": worth}
    options |= {"deduplicate": deduplicate, "transport": transport}
    described = {name: _described(layer) for name, layer in layers.items()}
    compare("shard", mesh.get_group(), {"argument": options, "layer": described}, problem)
    watch()
    number = next_model(mesh.get_group())
    made: dict[int, nn.Parameter] = {}
    for name, layer in layers.items():
        arrangement = Arrangement(
            name,
            mesh,
            layer.num_experts,
            _chunks_of(layer, mesh, chunks),
            scope,
            room,
            number,
            clones,
            worth=_worth_of(layer.experts) if worth is None else worth,
            deduplicate=deduplicate,
            transport=transport,
        )
        note_announced(mesh.get_group(), arrangement.announced)
        layer.router.row_invariant = True
        if layer.shared is not None:
            layer.shared.row_invariant = True
        experts: Any = layer.experts
        if not isinstance(experts, ShardedExperts):  # layers may share them
            experts.__class__ = ShardedExperts
            experts.spread(arrangement, made)
        number_of(arrangement.title)  # so that this rank can name the layer when others call it
        sharded: Any = layer
        sharded.__class__ = ShardedMoE
        sharded.arrangement = arrangement
        if transport == "padded":
            sharded.notes = notes_of(arrangement, layer.router.weight.device)
    return model


def _chunks_of(layer: MoE, mesh: DeviceMesh, chunks: int) -> int:
    return min(chunks, -(-layer.num_experts // mesh.size()))


def _check_padded(
    mesh: DeviceMesh, layers: dict[str, MoE], chunks: int, room: int | None, clones: int, deduplicate: bool
) -> None:
    """Raise unless options fit ``transport="padded"``."""
    if clones:
        raise ValueError(f"shard: clones must be 0 with transport='padded', got {clones}")
    if deduplicate:
        raise ValueError("shard: deduplicate must be False with transport='padded', got True")
    if room is None:
        raise ValueError("shard: room must be given with transport='padded', got None")
    least = mesh.size() * max(_chunks_of(layer, mesh, chunks) for layer in layers.values())
    if room < least:
        raise ValueError(
            f"shard: room must be at least {least} with transport='padded', a row from each rank in each chunk, got "
            f"{room}"
        )


def _worth_of(experts: Experts) -> int:
    """Return from how many rows on the weights of an expert, and their gradients, take no longer than the rows do."""
    numbers = sum(one.numel() for one in experts.parameters()) // experts.num_experts
    return max(1, -(-numbers // (2 * experts.hidden_size)))


def _mesh_of(mesh: Any, model: Any) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"shard: mesh must have one dimension, as mesh['ep'] has, got {mesh}")
        if mesh.get_coordinate() is None:
            raise ValueError(f"shard: mesh must have this rank, got rank {dist.get_rank()} and {mesh}")
        return mesh
    if mesh is None and not dist.is_initialized():
        raise TypeError("shard: mesh must be a DeviceMesh or a ProcessGroup, got None; call init_process_group first")
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"shard: mesh must have this rank, got a group without rank {dist.get_rank()}")
    if not isinstance(mesh, dist.ProcessGroup):
        raise TypeError(f"shard: mesh must be a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    device = next((parameter.device.type for parameter in parameters), "cpu")
    return DeviceMesh.from_group(mesh, "cpu" if device == "meta" else device, mesh_dim_names=("ep",))


def _check_order(mesh: DeviceMesh) -> None:
    """Check that a rank's place in the mesh, by which DTensors cut, is that in the group, by which rows travel."""
    listed, group = mesh.mesh.tolist(), dist.get_process_group_ranks(mesh.get_group())
    if listed != group:
        raise ValueError(f"shard: mesh must list its ranks in the order of their group, {group}, got {listed}")


def _layers_of(model: Any) -> dict[str, MoE]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard: model must be a module, got {type(model).__name__}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        raise ValueError(f"shard: model must hold a pymoe.nn.MoE, got a {type(model).__name__} without one")
    for name, layer in layers.items():
        if isinstance(layer, ShardedMoE):
            raise ValueError(f"shard: layers must not be sharded yet, got {name!r} on {layer.arrangement.ranks} ranks")
        if type(layer) is not MoE:
            raise TypeError(f"shard: layers must be of the class MoE itself, got {name!r} of {type(layer).__name__}")
        if type(layer.experts) is not Experts:
            kind = type(layer.experts).__name__
            raise TypeError(f"shard: a layer's experts must be of the class Experts itself, got {name!r} with {kind}")
        if lost := "a forward of its own" if "forward" in layer.__dict__ else lost_with(layer.experts):
            raise ValueError(
                f"shard: layers must have a plain forward and Experts that nothing is attached to, as both are called "
                f"otherwise when they are sharded, got {name!r} with {lost}; remove it first"
            )
        if layer.experts.w_in.shape[0] != layer.num_experts:
            seen = tuple(layer.experts.w_in.shape)
            raise ValueError(f"shard: {name!r} must have {layer.num_experts} experts, got w_in of shape {seen}")
    return layers


def _described(layer: MoE) -> dict[str, Any]:
    """Return what must be the same on all ranks, by what errors call it."""
    said: dict[str, Any] = {"options": repr(layer)}
    for name, parameter in layer.experts.named_parameters():
        said |= {
            f"shape of experts.{name}": tuple(parameter.shape),
            f"dtype of experts.{name}": str(parameter.dtype).removeprefix("torch."),
            f"requires_grad of experts.{name}": parameter.requires_grad,
        }
    copies = {f"router.{name}": one for name, one in [*layer.router.named_parameters(), *layer.router.named_buffers()]}
    if layer.shared is not None:
        copies |= {f"shared.{name}": one for name, one in layer.shared.named_parameters()}
    return said | {f"checksum of {name}": _checksum(tensor) for name, tensor in copies.items()}


def _checksum(tensor: Tensor) -> int | None:
    """Return a checksum of a tensor's bits, in their order; None if it has no memory."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if whole.is_meta:
        return None
    bits = whole.detach().cpu().contiguous()
    length = bits.numel() * bits.element_size()
    return zlib.crc32((ctypes.c_char * length).from_address(bits.data_ptr())) if length else 0
