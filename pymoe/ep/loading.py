"""shard_on_load: spread the experts of a model of transformers while ``from_pretrained`` reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pymoe.ep.agreement import assert_same_on_all_ranks
from pymoe.ep.shard import checksum, shard
from pymoe.ep.sharding import shard_ranges
from pymoe.nn.stacked_experts import OnLoad, on_load


@contextmanager
def shard_on_load(mesh: DeviceMesh | dist.ProcessGroup, **options: Any) -> Iterator[None]:
    """Shard the model that ``from_pretrained`` loads in the context, so that each rank reads only its own experts.

    ::

        with pymoe.ep.shard_on_load(mesh):
            model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="pymoe")

    :func:`shard` is called for the model on the meta device, before any weight is read. Then transformers reads, of
    every tensor of experts, the part of this rank: whole tensors for single experts, slices of stacked ones. So the
    peak of a rank's memory is its own share of the model and one layer of that share, besides pages of mapped files.
    Weights of the model are those that ``from_pretrained`` and :func:`shard` give one after the other. All other
    weights are on every rank. With a ``PymoeConfig``, or files that pymoe has saved, each layer's experts are packed or
    taken from the file as in one process, and cut to this rank's: a layer's part of the peak is the whole layer.

    One model is loaded in a context. If this fails on one rank, every rank raises at the end of the context or before.

    Args:
        mesh: the ranks, as for :func:`shard`. All of them load the same checkpoint.
        options: the other arguments of :func:`shard`.

    Raises:
        ValueError: no model was loaded, or several; another package quantises it; the checkpoint lacks weights of
            experts, which transformers would initialise with random numbers; or :func:`shard` refuses the model.
        RuntimeError: transformers cannot read only a part of the weights, as in versions that are too old.
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
    # A rank that fails before it calls shard tells the others, which wait in shard, here.
    same = {} if problem is not None or loading.model is None else _checksums(loading.model)
    assert_same_on_all_ranks("shard_on_load", loading.group, {"weight": same}, problem)


class _Loading:
    """The model that is loaded in a context."""

    def __init__(self, mesh: DeviceMesh | dist.ProcessGroup, options: dict[str, Any]) -> None:
        self._mesh, self._options = mesh, options
        self.group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        self.model: nn.Module | None = None
        self.told = False
        """True if ``shard`` has raised, which every rank of the group does."""

    def begins(self, model: nn.Module) -> bool:
        """Remember the model that is loaded; return False for an adapter, which is read into this model later."""
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
    """Return the checksums of what every rank has, by name."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: checksum(tensor) for name, tensor in tensors if not isinstance(tensor, DTensor)}
