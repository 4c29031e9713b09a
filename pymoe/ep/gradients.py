"""Gradients of models whose experts are spread over ranks: averaged over all ranks, and clipped by one norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pymoe.ep.experts import ShardedExperts, local_part
from pymoe.reference import checks


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    kind: Literal["ddp", "fsdp"] = "ddp",
    blocks: Iterable[nn.Module] = (),
    **options: Any,
) -> nn.Module:
    """Make every gradient the mean over all ranks of ``mesh`` of the gradients of their losses.

    For a loss L_r on rank r of R, every parameter p gets ``(1 / R) * sum over r of dL_r / dp``, the gradient of the
    mean of all losses. What a rank has a copy of (router, attention, ...) is averaged over all ranks. An expert's
    gradient has come from all ranks of its group already, with their rows: it is summed over the ranks that have the
    same expert, and divided by R, too. So a learning rate means the same for all parameters, on any number of ranks.

    Gradients accumulate over several backward passes as in the module that does the work: with DDP's ``no_sync()``, or
    with ``set_requires_gradient_sync(False)`` of FSDP.

    Args:
        model: what :func:`shard` has been called with. Cast it before, as for DDP and FSDP by themselves, copy it
            before, and make optimizers afterwards.
        mesh: two dimensions, ranks with the same experts and ranks of an expert-parallel group, in this order:
            ``init_device_mesh("cpu", (2, 4), mesh_dim_names=("edp", "ep"))``, where ``model`` has been sharded over
            ``mesh["ep"]``; or that one dimension alone.
        kind: ``"ddp"`` for ``DistributedDataParallel``, in which every rank holds all of the rest; ``"fsdp"`` for
            ``fully_shard``, which cuts that over all ranks, and each expert's parameters over the ranks that have it.
        blocks: modules of ``model``, layers mostly, that ``fully_shard`` treats as units, inner ones first; with
            ``"fsdp"`` alone.
        options: further arguments of ``DistributedDataParallel``, or of every call of ``fully_shard``.

    Returns:
        The ``DistributedDataParallel`` around ``model``, or ``model`` itself, which ``fully_shard`` has changed.

    Raises:
        TypeError: ``mesh`` is not a mesh.
        ValueError: ``mesh`` does not fit ``model``, ``model`` holds no sharded layer or has been given to this before,
            or an argument is out of range.
    """
    checks.choice("data_parallel", "kind", kind, ("ddp", "fsdp"))
    blocks = list(blocks)
    if blocks and kind == "ddp":
        raise ValueError(f"data_parallel: blocks must be empty with kind='ddp', got {len(blocks)}")
    experts = _experts_of(model, mesh)
    parallel = _ddp(model, mesh, experts, options) if kind == "ddp" else _fsdp(model, mesh, experts, blocks, options)
    for one in experts.values():
        # The rest of the mean, over the ranks with the same experts, is taken after the backward pass.
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
    """Scale gradients so that the norm of all of them together is at most ``max_norm``; in place.

    What ``torch.nn.utils.clip_grad_norm_`` does, for parameters of which some are whole on every rank and others are
    DTensors on one mesh or several: each expert counts once, wherever it is. All ranks get the same norm, and call this
    for the same parameters. The host waits for nothing (but with ``error_if_nonfinite``).

    Args:
        parameters: those of the model; without a gradient they count as zero.
        max_norm: the greatest norm.
        norm_type: the p of the p-norm, above 0; ``math.inf`` for the largest element.
        error_if_nonfinite: raise if the norm is infinite or not a number.
        group: ranks that have other parameters of the same model, as the stages of a pipeline have, whose gradients
            belong to the norm, too.

    Returns:
        The norm before, a scalar.

    Raises:
        RuntimeError: with ``error_if_nonfinite``, the norm is not finite.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = _power_of_norm(parameters, norm_type, group)
    if norm_type != float("inf"):
        total = total ** (1 / norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} must be finite, got {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            local.mul_(factor.to(local.device))
    return total


def _power_of_norm(parameters: list[Tensor], p: float, group: dist.ProcessGroup | None) -> Tensor:
    """Return the p-th power of the p-norm of all gradients; the norm itself for infinity."""
    largest = p == float("inf")
    # A key a way of being spread, in the same order on all ranks, also where some have no gradient.
    gradients: dict[Any, list[Tensor]] = {None: []}
    for parameter in parameters:
        gradient = parameter.grad
        spread = isinstance(parameter, DTensor)
        if isinstance(gradient, DTensor) and any(isinstance(one, Partial) for one in gradient.placements):
            gradient, spread = gradient.full_tensor(), False
        key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) and spread else None
        own = gradients.setdefault(key, [])
        if gradient is not None and local_part(gradient).numel():
            own.append(local_part(gradient))
    device = parameters[0].device if parameters else torch.device("cpu")
    reduce = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    total = torch.zeros((), dtype=torch.float64, device=device)
    for key, own in gradients.items():
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


def _experts_of(model: nn.Module, mesh: object) -> dict[str, ShardedExperts]:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"data_parallel: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"data_parallel: mesh must have one dimension or two, got {mesh}")
    experts = {name: module for name, module in model.named_modules() if isinstance(module, ShardedExperts)}
    if not experts:
        raise ValueError(f"data_parallel: model must hold a layer sharded before, got a {type(model).__name__} without")
    own = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    for name, one in experts.items():
        if one.gradient_divisor is not None:
            raise ValueError(f"data_parallel: model must not have been given to it before, as {name!r} has")
        group = dist.get_process_group_ranks(one.arrangement.group)
        if group != own:
            raise ValueError(
                f"data_parallel: the last dimension of mesh must be the ranks over which layers are spread, got {own} "
                f"and {name!r} spread over {group}"
            )
    return experts


def _all_ranks(mesh: DeviceMesh) -> DeviceMesh:
    """Return all ranks of a mesh as one dimension."""
    if mesh.ndim == 1:
        return mesh
    ranks = mesh.mesh.flatten().tolist()
    everyone = dist.group.WORLD
    if everyone is None or ranks != dist.get_process_group_ranks(everyone):
        everyone = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(everyone, dist.ProcessGroup)
    return DeviceMesh.from_group(everyone, mesh.device_type, mesh_dim_names=("dp",))


def _ddp(
    model: nn.Module, mesh: DeviceMesh, experts: dict[str, ShardedExperts], options: dict[str, Any]
) -> DistributedDataParallel:
    spread = [f"{name}.{own}".lstrip(".") for name, one in experts.items() for own, _ in one.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, spread)
    wrapped = DistributedDataParallel(model, process_group=_all_ranks(mesh).get_group(), **options)
    if mesh.ndim == 2 and mesh.size(0) > 1:
        wrapped.register_forward_pre_hook(_AverageOfTwins(list(experts.values()), mesh))
    return wrapped


class _AverageOfTwins:
    """A hook before each forward of DDP, after whose backward the gradients of experts are means over their twins.

    Twins are the ranks that have the same experts. A new gradient comes divided, and is added to what there is. The
    mean over twins takes both, and leaves as it is what has been averaged before: so DDP treats its own.
    """

    def __init__(self, experts: list[ShardedExperts], mesh: DeviceMesh) -> None:
        self._experts = experts
        self._group, self._ranks = mesh.get_group(0), mesh.size(0)
        self._synchronises = True
        self._hooks: list[RemovableHandle] = []

    def __call__(self, wrapped: nn.Module, _: Any) -> None:
        # As DDP does, in the forward: a backward pass belongs to it, wherever it is called.
        self._synchronises = wrapped.require_backward_grad_sync  # type: ignore[assignment]
        # Every time anew, since parameters may have been replaced, frozen or thawed.
        for hook in self._hooks:
            hook.remove()
        parameters = {id(own): own for one in self._experts for own in one.parameters() if own.requires_grad}
        self._hooks = [own.register_post_accumulate_grad_hook(self._average) for own in parameters.values()]

    def _average(self, parameter: Tensor) -> None:
        if self._synchronises and parameter.grad is not None:
            gradient = local_part(parameter.grad)
            dist.all_reduce(gradient, group=self._group)
            gradient.div_(self._ranks)


def _fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    experts: dict[str, ShardedExperts],
    blocks: list[nn.Module],
    options: dict[str, Any],
) -> nn.Module:
    everyone = _all_ranks(mesh)
    own: set[nn.Parameter] = set()
    for one in experts.values():
        if mesh.ndim == 2 and mesh.size(0) > 1:
            fully_shard(one, mesh=mesh[_name_of_first(mesh)], **options)
        else:
            own.update(one.parameters())
    ignored = {"ignored_params": own | options.pop("ignored_params", set())} if own else {}
    for module in (*blocks, model):
        fully_shard(module, mesh=everyone, **ignored, **options)
    return model


def _name_of_first(mesh: DeviceMesh) -> str:
    if mesh.mesh_dim_names is None:
        raise ValueError("data_parallel: the dimensions of mesh must have names, as ('edp', 'ep'), got None")
    return mesh.mesh_dim_names[0]
