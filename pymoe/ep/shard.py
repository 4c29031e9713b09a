"""shard spreads the experts of a model over the ranks of a group; shard_on_load does so while the model is loaded."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pymoe._common import checks
from pymoe._common.names import explain_arguments
from pymoe.ep.clones import fewest_rows_that_pay
from pymoe.ep.dispatcher import device_notes
from pymoe.ep.exchange import next_model_number, register_layer
from pymoe.ep.experts import ShardedExperts
from pymoe.ep.failures import assert_same_on_all_ranks
from pymoe.ep.layer import ShardedLayer, ShardedMoE
from pymoe.ep.modules import hidden_size_of, is_quantized, modules_of, num_experts_of, sharded_class
from pymoe.ep.redistribute import watch_torch
from pymoe.ep.sharding import ExpertSharding, Scope, Transport, shard_ranges
from pymoe.nn.experts import Experts
from pymoe.nn.moe import MoE
from pymoe.nn.quantized_experts import lost_with
from pymoe.nn.stacked_experts import OnLoad, StackedExperts, device_of, on_load


@explain_arguments(
    group="mesh",
    ep_group="mesh",
    process_group="mesh",
    num_chunks="chunks",
    replicas="clones",
)
def shard(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    chunks: int = 1,
    scope: Scope = "rank",
    room: int | None = None,
    clones: int = 0,
    min_rows_to_clone: int | None = None,
    deduplicate: bool = False,
    transport: Transport = "exact",
) -> nn.Module:
    """Spread the experts of every layer in ``model`` over the ranks of a group, in place.

    Layers are all :class:`pymoe.nn.MoE` modules and, once :mod:`pymoe.integrations.transformers` is imported, all
    experts modules behind transformers' interface; these must run with ``experts_implementation="pymoe"``.

    Each rank keeps the experts that ``torch.chunk`` gives it; E need not be divisible by R, and ranks may have no
    experts. Expert parameters become DTensors (``Shard(0)`` on the mesh) with their old shapes and names, so
    ``torch.distributed.checkpoint`` saves and loads them for any number of ranks. Every rank keeps a copy of router and
    shared experts. Make optimizers after this call: an optimizer that was made earlier raises in its next step, unless
    other modules use the old parameters, too, and have given them new gradients. Every rank must have the same model:
    made with the same seed, or loaded from the same checkpoint. A model on the meta device can be sharded first, then
    given memory by ``to_empty``, and then initialised or loaded.

    A call of a layer is collective (:class:`ShardedLayer`). Rows go to the ranks of their experts and come back; the
    host reads at most one tensor of counts; the rank of a token sums the results of its choices, in their order. Sums
    over the rows of an expert run in the order of ranks. So outputs, gradients of inputs and gradients of experts are
    bit for bit those of one process that has the tokens of all ranks, in the order of ranks, if router and shared
    experts are ``row_invariant`` in that process, too, as ``shard`` makes them here. Some results are equal only up to
    rounding: gradients of router and shared experts, which you sum over the ranks; the contribution of the auxiliary
    losses of ``scope="group"`` to gradients of inputs; layers with biases in bfloat16 on GPUs of compute capability 9.0
    and 10.0, where one process adds biases after the products; and those named under ``clones`` and ``deduplicate``
    below. For experts of transformers this holds if the choices and their weights, which come from transformers'
    router, are those of one process; gradients of these weights are then also bit for bit those of one process. An
    activation that pymoe does not fuse must compute every row from that row alone. Quantised experts of transformers
    (:func:`pymoe.nn.quantize_experts`) stay packed: each rank keeps the packed weights of its own experts, and
    ``packed`` becomes a DTensor. They cannot have ``clones`` or be moved.

    Args:
        model: any module. Refused are quantised layers (``MoE`` with ``QuantizedExperts``), layers of subclasses of
            ``MoE`` or ``Experts``, and layers with hooks on their ``experts``; also experts of transformers that are
            outside of its interface, have a norm after every expert, have an adapter, or share parameters with other
            modules.
        mesh: the ranks: a mesh of one dimension that lists them in the order of its group, such as ``mesh["ep"]``, or a
            process group. All of these ranks must call this function. If a rank passes something without a group, such
            as None, only this rank raises, and the other ranks wait for the group's timeout.
        chunks: the number of exchanges in which the rows of a call travel, each for an equal share of every rank's
            experts (or nearly). While one exchange is under way, the experts of the previous one compute, forward and
            backward. If the largest number of experts of a rank is smaller than ``chunks``, that number is used.
        scope: the tokens over which capacity and auxiliary losses are computed. ``"rank"``: each rank's own tokens, as
            in data parallelism. ``"group"``: the tokens of all ranks, as in one process; tokens of lower ranks come
            first, and the mean of the ranks' losses is the loss of all tokens. ``"group"`` is not available for experts
            of transformers, whose losses are transformers' own.
        room: the maximum number of rows that a rank may receive in a call, counted as one row per choice even with
            ``deduplicate``. If a rank would receive more, every rank raises :class:`GroupError` before anything is
            allocated for the received rows. None: no limit. See ``transport`` for the meaning of ``room`` with padded
            buffers.
        clones: the maximum number of other ranks' experts that a rank may clone for one call (FasterMoE's shadow
            experts). :func:`pymoe.ep.clones.plan_clones` plans the clones of every call from its loads, without another
            message. The weights of a clone travel to its rank once and their gradients once back, in an additional
            exchange in each direction. The rows of clones travel in an additional last chunk, so that the weights
            arrive while ranks compute with shared experts and with their own experts. ``moe.last_rows`` has the number
            of rows that each rank computed. Outputs and gradients of inputs keep their bits. The gradient of an expert
            that had clones is a sum: the gradients of the clones are added in the order of ranks, and their sum to the
            gradient of the owner. So it equals that of one process only up to rounding, but is the same in every run.
            Rows are gathered after the loads have been read, not while the loads travel.
        min_rows_to_clone: the smallest number of rows that are moved to a clone, at least 1. None: P / (2 H) for P
            parameters of an expert, 1.5 F for gated ones: from this number on, sending the weights of a clone takes no
            longer than sending the rows that it replaces. The page on the costs of expert parallelism derives this.
        deduplicate: send a token, in each chunk, only once to every rank that has some of its experts, and send their
            weighted sum back, instead of a row for each choice. Indices of experts and weights travel with the rows:
            12 K bytes per row in a forward and backward pass (20 K in float64). Sums are grouped by rank, so outputs
            and gradients of inputs equal those of one process only up to rounding; the error of an output is at most
            (K + 3) u times the sum of the absolute values of its terms, u being the unit roundoff of the dtype.
            Gradients of experts keep their bits. It cannot be combined with ``clones``.
        transport: ``"exact"``: ranks tell each other how many rows they send, and the host reads these counts, once per
            call. ``"padded"``: every rank sends ``room // (R * chunks)`` rows to every rank that has experts in a
            chunk, filled or not. So the host reads no counts: all shapes follow from the shapes of inputs. ``room``
            must be given: 2 T K for ranks of at most T tokens gives each pair of ranks twice its even share. After
            choices past a capacity have been dropped, the others fill the rows in the order of tokens and choices.
            Those that do not fit are dropped, too; ``stats.dropped`` includes them, and :attr:`ShardedLayer.overflowed`
            sums them up. If all fit, all bits are those of ``"exact"``. Disagreements of ranks are not detected before
            rows are sent: see :func:`check_calls`. It cannot be combined with ``clones`` or ``deduplicate``.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument, or a layer's class, is of the wrong kind.
        ValueError: ``mesh`` has several dimensions, another order than its group, or lacks this rank; a number is out
            of range, or options cannot be combined; ``model`` contains no layer, or a layer that has been sharded
            before or has a hook on its experts, a ``forward`` of its own, ``score_before_experts`` or a wrong number of
            experts; or experts of transformers are refused.
        GroupError: ranks pass different arguments or layers, their routers or shared experts differ, or another rank
            has failed. Every rank raises then.

    Example:
        >>> from torch.distributed import HashStore, destroy_process_group, init_device_mesh, init_process_group
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # torchrun sets all but "gloo"
        >>> model, x = torch.nn.Sequential(pymoe.nn.MoE(16, 32, num_experts=4, top_k=2)), torch.randn(5, 16)
        >>> alone = model(x)
        >>> model = pymoe.ep.shard(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
        >>> list(model[0].sharding.own_experts), torch.allclose(model(x), alone, atol=1e-6)
        ([0, 1, 2, 3], True)
        >>> destroy_process_group()
    """
    mesh = _mesh_of(mesh, model)
    problem: Exception | None = None
    layers: dict[str, MoE] = {}
    modules: dict[str, tuple[nn.Module, StackedExperts]] = {}
    try:
        _check_order(mesh)
        checks.integer("shard", "chunks", chunks, 1, None, "at least 1")
        checks.choice("shard", "scope", scope, ("rank", "group"))
        if room is not None:
            checks.integer("shard", "room", room, 0, None, "None or at least 0")
        checks.integer("shard", "clones", clones, 0, None, "at least 0")
        if min_rows_to_clone is not None:
            checks.integer("shard", "min_rows_to_clone", min_rows_to_clone, 1, None, "None or at least 1")
        checks.flag("shard", "deduplicate", deduplicate)
        checks.choice("shard", "transport", transport, ("exact", "padded"))
        if deduplicate and clones:
            raise ValueError(f"shard: clones must be 0 with deduplicate=True, got {clones}")
        layers, modules = _layers_of(model), modules_of(model)
        _check_found(model, layers, modules, scope)
        packed = [name for name, (module, one) in modules.items() if is_quantized(module, one)]
        if packed and clones:
            raise ValueError(f"shard: clones must be 0 for quantised experts, got {clones} and {packed[0]!r}")
        numbers = [layer.num_experts for layer in layers.values()]
        numbers += [num_experts_of(*one) for one in modules.values()]
        if transport == "padded":
            _check_padded(mesh, numbers, chunks, room, clones, deduplicate)
    except (TypeError, ValueError) as error:
        problem = error
    options = {
        "chunks": chunks,
        "scope": scope,
        "room": room,
        "clones": clones,
        "min_rows_to_clone": min_rows_to_clone,
        "deduplicate": deduplicate,
        "transport": transport,
    }
    described = {name: _described(layer) for name, layer in layers.items()}
    described |= {name: {"options": repr(one)} | _described_parameters(one) for name, (one, _) in modules.items()}
    assert_same_on_all_ranks("shard", mesh.get_group(), {"argument": options, "layer": described}, problem)
    watch_torch()
    number = next_model_number(mesh.get_group())
    made: dict[int, nn.Parameter] = {}

    def sharding_of(name: str, num_experts: int, parameters: Iterable[Tensor], hidden_size: int) -> ExpertSharding:
        fewest = min_rows_to_clone
        if fewest is None:
            fewest = fewest_rows_that_pay(sum(one.numel() for one in parameters) // num_experts, hidden_size)
        sharding = ExpertSharding(
            name,
            mesh,
            num_experts,
            _chunks_of(num_experts, mesh, chunks),
            scope,
            max_recv_rows=room,
            model=number,
            clones=clones,
            min_rows_to_clone=fewest,
            deduplicate=deduplicate,
            transport=transport,
        )
        register_layer(sharding)
        return sharding

    for name, layer in layers.items():
        sharding = sharding_of(name, layer.num_experts, layer.experts.parameters(), layer.hidden_size)
        layer.router.row_invariant = True
        if layer.shared is not None:
            layer.shared.row_invariant = True
        experts: Any = layer.experts
        if not isinstance(experts, ShardedExperts):  # an earlier layer with the same experts has sharded them already
            experts.__class__ = ShardedExperts
            experts.shard_parameters(sharding, made)
        sharded: Any = layer
        sharded.__class__ = ShardedMoE
        sharded.sharding = sharding
        if transport == "padded":
            sharded.notes = device_notes(sharding, layer.router.weight.device)
    for name, (module, experts_of_module) in modules.items():
        device = device_of(module)
        number_of = num_experts_of(module, experts_of_module)
        sharding = sharding_of(name, number_of, module.parameters(), hidden_size_of(module, experts_of_module))
        sharded = module
        kind: Any = type(module)
        sharded.__class__ = sharded_class(kind)
        sharded.spread(experts_of_module, sharding, made)
        if transport == "padded":
            sharded.notes = device_notes(sharding, device)
    return model


def _chunks_of(num_experts: int, mesh: DeviceMesh, chunks: int) -> int:
    return min(chunks, -(-num_experts // mesh.size()))


def _check_padded(
    mesh: DeviceMesh, numbers: list[int], chunks: int, room: int | None, clones: int, deduplicate: bool
) -> None:
    """Raise ValueError unless the options are allowed with ``transport="padded"``.

    ``numbers`` are the numbers of experts of the layers.
    """
    if clones:
        raise ValueError(f"shard: clones must be 0 with transport='padded', got {clones}")
    if deduplicate:
        raise ValueError("shard: deduplicate must be False with transport='padded', got True")
    if room is None:
        raise ValueError("shard: room must be given with transport='padded', got None")
    least = mesh.size() * max(_chunks_of(experts, mesh, chunks) for experts in numbers)
    if room < least:
        raise ValueError(
            f"shard: room must be at least {least} with transport='padded', a row from each rank in each chunk, got "
            f"{room}"
        )


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
    """Raise ValueError unless ``mesh`` lists the ranks in the order of its group.

    DTensors use the order of the mesh, exchanges of rows the order of the group.
    """
    listed, group = mesh.mesh.tolist(), dist.get_process_group_ranks(mesh.get_group())
    if listed != group:
        raise ValueError(f"shard: mesh must list its ranks in the order of their group, {group}, got {listed}")


def _layers_of(model: Any) -> dict[str, MoE]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard: model must be a module, got {type(model).__name__}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    for name, module in model.named_modules():
        if isinstance(module, ShardedLayer):
            raise ValueError(
                f"shard: layers must not be sharded yet, got {name!r} on {module.sharding.ranks} ranks: call shard "
                f"once, on the whole model"
            )
    for name, layer in layers.items():
        if type(layer) is not MoE:
            raise TypeError(f"shard: layers must be of the class MoE itself, got {name!r} of {type(layer).__name__}")
        if type(layer.experts) is not Experts:
            kind = type(layer.experts).__name__
            raise TypeError(f"shard: a layer's experts must be of the class Experts itself, got {name!r} with {kind}")
        if lost := "a forward of its own" if "forward" in layer.__dict__ else lost_with(layer.experts):
            raise ValueError(
                f"shard: layers must have a plain forward and Experts that nothing is attached to, since both are "
                f"called in another way when they are sharded, got {name!r} with {lost}; remove it first"
            )
        if layer.score_before_experts:
            raise ValueError(
                f"shard: layers must multiply the outputs of experts by the weights of the choices, since tokens "
                f"travel as they are, got {name!r} with score_before_experts=True"
            )
        if layer.experts.w_in.shape[0] != layer.num_experts:
            seen = tuple(layer.experts.w_in.shape)
            raise ValueError(f"shard: {name!r} must have {layer.num_experts} experts, got w_in of shape {seen}")
    return layers


def _check_found(model: nn.Module, layers: dict[str, MoE], modules: dict[str, Any], scope: Scope) -> None:
    """Raise ValueError unless the model has layers to shard, and all of them support ``scope``."""
    if not layers and not modules:
        raise ValueError(
            f"shard: model must hold a pymoe.nn.MoE, or experts of transformers (which are found once "
            f"pymoe.integrations.transformers is imported), got a {type(model).__name__} without them"
        )
    if modules and scope != "rank":
        raise ValueError(
            f"shard: scope must be 'rank' for experts of transformers, whose losses are transformers' own, got "
            f"{scope!r} and {next(iter(modules))!r}"
        )


def _described_parameters(experts: nn.Module) -> dict[str, Any]:
    """Return the properties of experts that must be equal on all ranks, keyed by their names in error messages."""
    said: dict[str, Any] = {}
    for name, parameter in experts.named_parameters():
        said |= {
            f"shape of experts.{name}": tuple(parameter.shape),
            f"dtype of experts.{name}": str(parameter.dtype).removeprefix("torch."),
            f"requires_grad of experts.{name}": parameter.requires_grad,
        }
    return said


def _described(layer: MoE) -> dict[str, Any]:
    """Return the properties of a layer that must be equal on all ranks, keyed by their names in error messages."""
    said: dict[str, Any] = {"options": repr(layer)} | _described_parameters(layer.experts)
    copies = {f"router.{name}": one for name, one in [*layer.router.named_parameters(), *layer.router.named_buffers()]}
    if layer.shared is not None:
        copies |= {f"shared.{name}": one for name, one in layer.shared.named_parameters()}
    return said | {f"checksum of {name}": checksum(tensor) for name, tensor in copies.items()}


def checksum(tensor: Tensor) -> int | None:
    """Return the CRC-32 of a tensor's bytes in row-major order; None for a tensor on the meta device.

    A DTensor is gathered from all its ranks, which must all call this.
    """
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if whole.is_meta:
        return None
    bits = whole.detach().cpu().contiguous()
    length = bits.numel() * bits.element_size()
    return zlib.crc32((ctypes.c_char * length).from_address(bits.data_ptr())) if length else 0


# Sharding while a model is loaded.


@contextmanager
def shard_on_load(mesh: DeviceMesh | dist.ProcessGroup, **options: Any) -> Iterator[None]:
    """Return a context in which ``from_pretrained`` loads a sharded model: each rank reads only its own experts.

    ::

        with pymoe.ep.shard_on_load(mesh):
            model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="pymoe")

    :func:`shard` is called for the model on the meta device, before any weight is read. Then transformers reads only
    the experts of this rank: whole tensors if the file has a tensor for each expert, else slices of stacked tensors. So
    a rank's peak memory is its own share of the model plus one layer of that share, in addition to pages of mapped
    files. The weights equal those after ``from_pretrained`` and then :func:`shard`. Weights other than those of experts
    are on every rank. With a ``PymoeConfig``, or files that pymoe has saved, all experts of a layer are packed or read,
    as in one process, and then cut to those of this rank: the peak then includes one whole layer.

    Exactly one model must be loaded in the context. If loading fails on one rank, every rank raises, at the end of the
    context at the latest.

    Args:
        mesh: the ranks, as for :func:`shard`. All of them must load the same checkpoint.
        options: the other arguments of :func:`shard`.

    Raises:
        ValueError: no model was loaded, or several; another package quantises the model; the checkpoint lacks weights
            of experts, which transformers would initialise with random numbers; or :func:`shard` refuses the model or
            an argument.
        TypeError: :func:`shard` raises it.
        RuntimeError: transformers cannot read parts of the weights; its version may be too old.
        GroupError: the ranks differ in weights that all of them have, or another rank failed.
    """
    loading = _Loading(mesh, options)
    token = on_load.set(OnLoad(loading.begins, loading.spread, loading.own))
    problem: Exception | None = None
    try:
        yield
        if loading.model is None:
            raise ValueError("shard_on_load: from_pretrained must load a model in the context, got none")
    except Exception as error:
        if loading.told:
            raise
        problem = error
    finally:
        on_load.reset(token)
    # If this rank has failed before it called shard, the other ranks wait in shard: this call tells them of the error.
    same = {} if problem is not None or loading.model is None else _checksums(loading.model)
    assert_same_on_all_ranks("shard_on_load", loading.group, {"weight": same}, problem)


class _Loading:
    """The model that is loaded in a :func:`shard_on_load` context, and the callbacks of :class:`OnLoad`."""

    def __init__(self, mesh: DeviceMesh | dist.ProcessGroup, options: dict[str, Any]) -> None:
        self._mesh, self._options = mesh, options
        self.group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        self.model: nn.Module | None = None
        self.told = False
        """True while ``shard`` runs and after it has raised, since ``shard`` itself tells other ranks of its errors."""

    def begins(self, model: nn.Module) -> bool:
        """Store ``model``, and return True, as its own weights will be read.

        Return False if ``model`` is stored already; then only the weights of an adapter will be read. Raise ValueError
        if another model is stored already.
        """
        if model is self.model:
            return False
        if self.model is not None:
            raise ValueError(
                f"shard_on_load: one model must be loaded in the context, got {type(self.model).__name__} and "
                f"{type(model).__name__}"
            )
        self.model = model
        return True

    def spread(self, model: nn.Module) -> None:
        self.told = True
        shard(model, self._mesh, **self._options)
        self.told = False

    def own(self, num_experts: int) -> slice:
        own = shard_ranges(num_experts, dist.get_world_size(self.group))[dist.get_rank(self.group)]
        return slice(own.start, own.stop)


def _checksums(model: nn.Module) -> dict[str, int | None]:
    """Return the checksums, by name, of the parameters and buffers of which every rank has a whole copy."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: checksum(tensor) for name, tensor in tensors if not isinstance(tensor, DTensor)}
