"""Averages gradients over all ranks, and clips them by their common norm, for models with experts spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pymoe._common import checks
from pymoe.ep.experts import ExpertShards, local_data, mark_replaced
from pymoe.ep.failures import assert_same_on_all_ranks
from pymoe.ep.layer import update_sharding
from pymoe.ep.shard import checksum
from pymoe.nn.quantized_dense import QuantizedDenseLinear


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    kind: Literal["ddp", "fsdp"] = "ddp",
    blocks: Iterable[nn.Module] = (),
    **options: Any,
) -> nn.Module:
    """Make every gradient the mean, over all ranks of ``mesh``, of the gradients of the ranks' losses.

    For a loss L_r on rank r of R, every parameter p gets ``(1 / R) * sum over r of dL_r / dp``, the gradient of the
    mean of all losses. Gradients of parameters of which each rank has a copy (router, attention, ...) are averaged over
    all ranks. An expert's gradient already includes the rows of all ranks of its group; this function has it summed
    over the ranks that have the same expert, and divided by R, too. So a learning rate has the same effect for all
    parameters, on any number of ranks.

    The first of the ranks with the same experts broadcasts their weights to the others, as rank 0 of DDP does with
    other parameters, unless ``init_sync=False`` (an option of DDP, here for both kinds) is given. Other parameters that
    ``fully_shard`` cuts must be the same on all ranks, as without experts.

    Gradients accumulate over several backward passes as usual in DDP and FSDP: with ``no_sync()`` or
    ``set_requires_gradient_sync(False)``. ``torch.amp.GradScaler`` raises with ``"ddp"``: some gradients are DTensors
    and others are not.

    Args:
        model: the model that was given to :func:`shard`. Cast or copy it before this call, and make optimizers after
            it, as with DDP and FSDP alone.
        mesh: two dimensions, ranks with the same experts and ranks of an expert-parallel group, in this order:
            ``init_device_mesh("cpu", (2, 4), mesh_dim_names=("edp", "ep"))``, where ``model`` has been sharded over
            ``mesh["ep"]`` or the group of the same ranks; or only the second dimension.
        kind: ``"ddp"`` for ``DistributedDataParallel``, in which every rank holds all other parameters; ``"fsdp"`` for
            ``fully_shard``, which cuts these over all ranks, and each expert's parameters over the ranks that have it.
        blocks: modules of ``model``, layers mostly, that ``fully_shard`` treats as units, inner ones first; only with
            ``"fsdp"``.
        options: further arguments of ``DistributedDataParallel``, or of every call of ``fully_shard``. An ``mp_policy``
            with a ``param_dtype`` needs a mesh of two dimensions, the first of which may be 1: on one dimension nothing
            casts the experts. If ``fully_shard`` cuts or casts experts, every rank must have some of them. Parameters
            that the model tells DDP to ignore stay ignored.

    Returns:
        The ``DistributedDataParallel`` around ``model``, or ``model`` itself, which ``fully_shard`` has changed.

    Raises:
        TypeError: ``mesh`` is not a mesh, a block is not a module, or ``options`` name other ranks.
        ValueError: ``mesh`` does not fit ``model``; ``model`` contains no sharded layer, or was passed to this function
            before; or an argument is out of range.
        GroupError: ranks that should have the same experts have different ones, or different placements of them; or
            quantised dense layers differ between ranks (``"ddp"``).

    Example:
        >>> from torch.distributed import HashStore, destroy_process_group, init_device_mesh, init_process_group
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # torchrun sets all but "gloo"
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        >>> model = pymoe.ep.shard(torch.nn.Sequential(pymoe.nn.MoE(16, 32, num_experts=4, top_k=2)), mesh)
        >>> parallel = pymoe.ep.data_parallel(model, mesh)
        >>> parallel(torch.randn(5, 16)).sum().backward()
        >>> model[0].router.weight.grad.shape  # the mean over all ranks
        torch.Size([4, 16])
        >>> destroy_process_group()
    """
    checks.choice("data_parallel", "kind", kind, ("ddp", "fsdp"))
    experts = _experts_of(model, mesh)
    blocks = _blocks_of(model, kind, blocks)
    _check_options(mesh, kind, experts, options)
    data_parallel_mesh = _flattened(mesh)
    if options.get("init_sync", True):
        _broadcast_from_first_replica(experts, mesh)
    update_sharding(model, set(experts.values()), data_parallel_mesh=data_parallel_mesh)
    if kind == "ddp":
        parallel: nn.Module = _ddp(model, mesh, data_parallel_mesh, experts, options)
    else:
        parallel = _fsdp(model, mesh, data_parallel_mesh, experts, blocks, options)
    for one in experts.values():
        # The division by R has two steps: calls divide by the number of ranks of a group; after the backward pass, the
        # mean is taken over the ranks with the same experts.
        one.gradient_divisor = mesh.size(mesh.ndim - 1)
    return parallel


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm of all of them together is at most ``max_norm``.

    This is ``torch.nn.utils.clip_grad_norm_`` for models in which some parameters are whole on every rank and others
    are DTensors, on one mesh or on several: each expert counts once, on whatever rank it is. All ranks must call this
    for the same parameters. Before that, gradients of parameters with a copy on every rank must be summed or averaged
    over the ranks, as :func:`data_parallel` does; otherwise ranks get different norms. The host does not wait for the
    device, except with ``error_if_nonfinite``.

    Args:
        parameters: the model's parameters; those without a gradient count as zero.
        max_norm: the maximum norm.
        norm_type: the p of the p-norm, greater than 0; ``math.inf`` for the largest element.
        error_if_nonfinite: raise if the norm is infinite or not a number.
        group: the ranks among which the model's parameters are divided, such as the stages of a pipeline; the norm
            includes the gradients of all of them.

    Returns:
        The norm before clipping, a scalar in float64 for gradients of any dtype.

    Raises:
        TypeError: ``parameters`` are not tensors, or ``max_norm`` or ``norm_type`` is not a number.
        ValueError: ``max_norm`` is negative, or ``norm_type`` is not above 0.
        RuntimeError: with ``error_if_nonfinite``, the norm is not finite.

    Example:
        >>> moe = pymoe.nn.MoE(16, 32, num_experts=4, top_k=2)
        >>> moe(torch.randn(8, 16)).sum().backward()
        >>> norm = pymoe.ep.clip_grad_norm_(moe.parameters(), 1.0)  # the same call after shard
        >>> torch.nn.utils.get_total_norm([p.grad for p in moe.parameters()]) <= 1.001
        tensor(True)
    """
    parameters = _tensors(parameters)
    _number("max_norm", max_norm, "at least 0", lambda value: value >= 0)
    _number("norm_type", norm_type, "above 0", lambda value: value > 0)
    total = _power_of_norm(parameters, norm_type, group)
    if norm_type != float("inf"):
        total = total ** (1 / norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} must be finite, got {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_data(parameter.grad)
            local.mul_(factor.to(local.device))
    return total


def _tensors(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    several = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    for one in several:
        if not isinstance(one, Tensor):
            raise TypeError(f"clip_grad_norm_: parameters must be tensors, got {type(one).__name__}")
    return several


def _number(name: str, value: object, meaning: str, is_right: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"clip_grad_norm_: {name} must be a number, got {type(value).__name__}")
    if not is_right(float(value)):
        raise ValueError(f"clip_grad_norm_: {name} must be {meaning}, got {value}")


def _power_of_norm(parameters: list[Tensor], p: float, group: dist.ProcessGroup | None) -> Tensor:
    """Return the p-th power of the p-norm of all gradients of ``parameters``; for infinite p, the norm itself."""
    largest = p == float("inf")
    # Group gradients by the mesh and placements of their parameters. All ranks have the groups in the same order, even
    # if some ranks have no gradient, so that their all-reduces match.
    gradients: dict[Any, list[Tensor]] = {None: []}
    for parameter in parameters:
        gradient = parameter.grad
        sharded = isinstance(parameter, DTensor)
        if isinstance(gradient, DTensor) and any(isinstance(one, Partial) for one in gradient.placements):
            gradient, sharded = gradient.full_tensor(), False
        key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) and sharded else None
        own = gradients.setdefault(key, [])
        if gradient is not None and local_data(gradient).numel():
            own.append(local_data(gradient))
    device = parameters[0].device if parameters else torch.device("cpu")
    reduce = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    total = torch.zeros((), dtype=torch.float64, device=device)
    for key, own in gradients.items():
        # Compute the norms of 16-bit gradients here in float32, since get_total_norm would round them to 16 bits.
        own = [torch.linalg.vector_norm(one, p, dtype=torch.float32) if one.itemsize == 2 else one for one in own]
        norm = nn.utils.get_total_norm(own, p).to(device, torch.float64)
        part = norm if largest else norm**p
        if key is not None:
            mesh, placements = key
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(part, op=reduce, group=mesh.get_group(dimension))
        total = torch.maximum(total, part) if largest else total + part
    if group is not None:
        dist.all_reduce(total, op=reduce, group=group)
    return total


def _experts_of(model: nn.Module, mesh: object) -> dict[str, ExpertShards]:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"data_parallel: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"data_parallel: mesh must have one dimension or two, got {mesh}")
    experts = {name: module for name, module in model.named_modules() if isinstance(module, ExpertShards)}
    if not experts:
        raise ValueError(f"data_parallel: model must hold a layer sharded before, got a {type(model).__name__} without")
    own = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    names = mesh.mesh_dim_names
    for name, one in experts.items():
        if one.gradient_divisor is not None:
            raise ValueError(f"data_parallel: model must not have been given to it before, as {name!r} has")
        group = dist.get_process_group_ranks(one.sharding.group)
        if group != own:
            raise ValueError(
                f"data_parallel: the last dimension of mesh must be the ranks over which layers are spread, got {own} "
                f"and {name!r} spread over {group}"
            )
        own_names = one.sharding.mesh.mesh_dim_names
        if own_names is not None and names is not None and names[-1] != own_names[0] in names:
            raise ValueError(f"data_parallel: the last dimension of mesh must be {own_names[0]!r}, got {names}")
    return experts


def _blocks_of(model: nn.Module, kind: str, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    if not isinstance(blocks, Iterable):
        raise TypeError(f"data_parallel: blocks must be several modules, got {type(blocks).__name__}")
    blocks = list(blocks)
    if blocks and kind == "ddp":
        raise ValueError(f"data_parallel: blocks must be empty with kind='ddp', got {len(blocks)}")
    inside = set(model.modules())
    for block in blocks:
        if not isinstance(block, nn.Module):
            raise TypeError(f"data_parallel: blocks must be modules, got {type(block).__name__}")
        if block not in inside:
            raise ValueError(f"data_parallel: blocks must be modules of model, got a {type(block).__name__} of another")
    return blocks


def _check_options(mesh: DeviceMesh, kind: str, experts: dict[str, ExpertShards], options: dict[str, Any]) -> None:
    for name in ("process_group", "device_mesh"):
        if name in options:
            raise TypeError(f"data_parallel: the ranks must be given only by mesh, got {name}, too")
    cast = getattr(options.get("mp_policy"), "param_dtype", None)
    if kind == "fsdp" and cast is not None and mesh.ndim == 1:
        raise ValueError(
            f"data_parallel: mesh must have two dimensions, such as (1, {mesh.size()}), for an mp_policy with "
            f"param_dtype, got {mesh}"
        )
    if kind == "fsdp" and _are_cut_further(mesh, options):
        for name, one in experts.items():
            sharding = one.sharding
            if not all(sharding.experts_of_ranks):  # fully_shard computes no gradients for empty parameters
                raise ValueError(
                    f"data_parallel: every rank must have experts with kind='fsdp' and this mesh, got {name!r} with "
                    f"{sharding.num_experts} spread over {sharding.ranks} ranks"
                )


@torch.no_grad()
def _broadcast_from_first_replica(experts: dict[str, ExpertShards], mesh: DeviceMesh) -> None:
    """Broadcast the weights of each expert from the first rank that has it, as DDP does for other parameters.

    Raises:
        GroupError: ranks that should have the same experts differ in experts or placements.
    """
    if mesh.ndim == 1 or mesh.size(0) == 1:
        return
    group = mesh.get_group(0)
    seen = {
        name: {
            "options": one.extra_repr(),
            "placement": one.sharding.order,
            **{own: (tuple(whole.shape), str(whole.dtype)) for own, whole in one.spread_tensors()},
        }
        for name, one in experts.items()
    }
    assert_same_on_all_ranks("data_parallel", group, {"layer": seen}, None)
    first = dist.get_process_group_ranks(group)[0]
    for one in experts.values():
        for _, stacked in one.spread_tensors():
            own = local_data(stacked)
            if own.numel() and not own.is_meta:
                dist.broadcast(own, first, group=group)


def _flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of one dimension with all ranks of ``mesh``.

    If ``mesh`` has two dimensions and does not have all ranks of the default group, create a group for its ranks.
    """
    if mesh.ndim == 1:
        return mesh
    ranks = mesh.mesh.flatten().tolist()
    group = dist.group.WORLD
    if group is None or ranks != dist.get_process_group_ranks(group):
        group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("dp",))


def _ddp(
    model: nn.Module,
    mesh: DeviceMesh,
    data_parallel_mesh: DeviceMesh,
    experts: dict[str, ExpertShards],
    options: dict[str, Any],
) -> DistributedDataParallel:
    sharded = [f"{name}.{own}".lstrip(".") for name, one in experts.items() for own, _ in one.spread_tensors()]
    # Keep DDP from broadcasting the weights of quantised dense layers, which are buffers, in every forward.
    dense = {
        f"{name}.packed".lstrip("."): one.packed
        for name, one in model.named_modules()
        if isinstance(one, QuantizedDenseLinear)
    }
    group = data_parallel_mesh.get_group()
    sums = {name: checksum(packed) for name, packed in dense.items()}
    assert_same_on_all_ranks("data_parallel", group, {"checksum of": sums}, None)
    ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *sharded, *dense]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    if mesh.ndim == 2 and mesh.size(0) > 1:
        wrapped.register_forward_pre_hook(_ReplicaAverage(list(experts.values()), mesh))
    return wrapped


class _ReplicaAverage:
    """Averages the gradients of experts over the ranks with the same experts. It is a forward pre-hook of DDP.

    The whole accumulated gradient is averaged. What was averaged after an earlier backward pass is equal on all ranks,
    so averaging it again changes it only by rounding. DDP does the same for other parameters.
    """

    def __init__(self, experts: list[ExpertShards], mesh: DeviceMesh) -> None:
        self._experts = experts
        self._group, self._ranks = mesh.get_group(0), mesh.size(0)
        self._synchronises = True
        self._hooks: list[RemovableHandle] = []

    def __call__(self, wrapped: nn.Module, _: Any) -> None:
        # Read the flag in the forward, as DDP does: it then applies to this forward's backward pass, even if the latter
        # runs outside of no_sync().
        self._synchronises = wrapped.require_backward_grad_sync  # type: ignore[assignment]
        # Register the hooks again in every forward, because parameters may have been replaced, frozen or unfrozen.
        for hook in self._hooks:
            hook.remove()
        parameters = {id(own): own for one in self._experts for own in one.parameters() if own.requires_grad}
        self._hooks = [own.register_post_accumulate_grad_hook(self._average) for own in parameters.values()]

    def _average(self, parameter: Tensor) -> None:
        if self._synchronises and parameter.grad is not None:
            gradient = local_data(parameter.grad)
            dist.all_reduce(gradient, group=self._group)
            gradient.div_(self._ranks)


def _fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    data_parallel_mesh: DeviceMesh,
    experts: dict[str, ExpertShards],
    blocks: list[nn.Module],
    options: dict[str, Any],
) -> nn.Module:
    options.pop("init_sync", None)  # only DDP has this argument: fully_shard broadcasts nothing
    own: set[nn.Parameter] = set()
    for one in experts.values():
        if _are_cut_further(mesh, options):
            first, last = _names_of(mesh)
            _move_to_mesh(one, mesh[last])
            fully_shard(one, mesh=mesh[first], **options)
        else:
            own.update(one.parameters())
    ignored = {"ignored_params": own | options.pop("ignored_params", set())} if own else {}
    for module in (*blocks, model):
        fully_shard(module, mesh=data_parallel_mesh, **ignored, **options)
    return model


def _are_cut_further(mesh: DeviceMesh, options: dict[str, Any]) -> bool:
    """Return whether fully_shard is applied to experts: to cast them, or to cut each over the ranks that have it."""
    return mesh.ndim == 2 and (mesh.size(0) > 1 or "mp_policy" in options)


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.mesh_dim_names is None:
        raise ValueError("data_parallel: the dimensions of mesh must have names, as ('edp', 'ep'), got None")
    return mesh.mesh_dim_names


def _move_to_mesh(experts: ExpertShards, mesh: DeviceMesh) -> None:
    """Replace the parameters of ``experts`` with DTensors on ``mesh``, which has the same ranks as their own mesh.

    fully_shard requires that the mesh of the parameters and the mesh that it is given are parts of a common mesh.
    """
    for name, parameter in experts.named_parameters():
        if isinstance(parameter, DTensor):
            moved = DTensor.from_local(
                local_data(parameter),
                mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            setattr(experts, name, nn.Parameter(moved, requires_grad=parameter.requires_grad))
            mark_replaced(parameter, "data_parallel")
