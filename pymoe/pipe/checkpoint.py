"""Saves checkpoints of pipes that run on any number of processes, and loads them into the model itself or into pipes
with any other split.

Keys are the model's own, so the checkpoint of a pipe is a checkpoint of the model. With
``torch.distributed.checkpoint``::

    save(pipe, folder, stages=[rank], optimizer=optimizer)                      # in every process
    load(other_pipe, folder, stages=[0, 1], optimizer=other_optimizer)          # in more or fewer processes
    torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id=folder)      # the model itself

As safetensors (needs the package ``safetensors``), in files that other libraries can read, too::

    save_safetensors(pipe, folder, stages=[rank])
    load_safetensors(model, folder)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["load", "load_safetensors", "save", "save_safetensors", "stage_state_dict"]

INDEX = "model.safetensors.index.json"


def stage_state_dict(pipe: Any, stages: Iterable[int] | None = None) -> dict[str, Any]:
    """Return the stages' part of the model's ``state_dict``, under the model's names.

    It contains everything that their modules save: parameters, buffers, extra state, and what ``_save_to_state_dict``
    or state-dict hooks substitute for them (packed weights, clones). An entry that belongs to no stage, such as a
    parameter that the forward never uses, is in every stage's part.

    In a process that runs only some of the stages, the other stages keep their initial values, so ``pipe.state_dict()``
    is out of date for them.

    Args:
        pipe: a :class:`pymoe.Pipe`.
        stages: the indices of the stages; None: all.

    Raises:
        ValueError: only some stages are asked for, and a module that contains several stages saves something other
            than its parameters, buffers and extra state.
        IndexError: there is no stage with one of the indices.
    """
    owned, state = _Owned(pipe, stages), pipe.state_dict(keep_vars=True)
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
        if owned.has(name, value)
    }


class _Owned:
    """Tells which entries of a pipe's ``state_dict`` belong to the given stages."""

    def __init__(self, pipe: Any, stages: Iterable[int] | None) -> None:
        parts = pipe.staged.present_parts()
        own = parts if stages is None else [parts[index] for index in stages]
        self._is_all = {*map(id, own)} == {*map(id, parts)}
        self._own, self._held = _ids(own), _ids(parts)
        self._modules: dict[str, nn.Module] = dict(pipe.named_modules(remove_duplicate=False))
        self._tensors: dict[str, torch.Tensor] = {
            **dict(pipe.named_parameters(remove_duplicate=False)),
            **dict(pipe.named_buffers(remove_duplicate=False)),
        }
        self._known = {*map(id, self._tensors.values())}

    def has(self, name: str, value: Any = None) -> bool:
        """Return True if the entry ``name`` of the ``state_dict`` belongs to these stages, or to no stage.

        ``value``: the entry; None if the caller does not have it. Raise ValueError if a module of several stages has
        made the entry, and only some stages are asked for.
        """
        if id(value) in self._known:
            about = {id(value)}
        elif name in self._tensors:  # a state-dict hook of the model has saved a copy
            about = {id(self._tensors[name])}
        else:
            owner, _, last = name.rpartition(".")
            while owner not in self._modules:
                owner = owner.rpartition(".")[0]
            module = self._modules[owner]
            about = {id(module), *map(id, module._parameters.values()), *map(id, module._buffers.values())}
            if not (self._is_all or about & self._held or value is None or last == "_extra_state"):
                raise ValueError(
                    f"pymoe.pipe.checkpoint: expected values of modules that are in one stage, got {name!r}, which "
                    f"{owner or 'the model itself'} makes for several stages, for part of the stages; let the layers "
                    "save it, or save all stages in one process"
                )
        return self._is_all or bool(about & self._own) or not about & self._held


def _ids(parts: Iterable[nn.Module]) -> set[int]:
    return {id(one) for part in parts for one in (*part.modules(), *part.parameters(), *part.buffers())}


def save(
    pipe: Any,
    folder: str | Path,
    *,
    stages: Iterable[int] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save stages and their optimizer with ``torch.distributed.checkpoint``. Every process of the group must call this.

    If several processes have copies of a shared parameter, one of them writes it. A parameter with several names in
    the model's ``state_dict`` can be loaded under each name.

    Args:
        pipe: a :class:`pymoe.Pipe`.
        folder: the folder for the files; the same for all processes.
        stages: the stages that this process runs; None: all.
        optimizer: the optimizer of the parameters of these stages; None: none is saved.
        group: the processes that run the pipe; None: the default group, or this process alone without one.

    Raises:
        ValueError, IndexError: see :func:`stage_state_dict`.
    """
    from torch.distributed.checkpoint import state_dict_saver

    state_dict_saver.save(
        _state(pipe, stages, optimizer), checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized()
    )


def load(
    pipe: Any,
    folder: str | Path,
    *,
    stages: Iterable[int] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load stages and their optimizer from files of :func:`save`, with any split. Every process must call this.

    Args:
        pipe: a :class:`pymoe.Pipe` of the same model.
        folder: the folder of the files.
        stages: the stages that this process runs; None: all.
        optimizer: the optimizer of the parameters of these stages; None: none is loaded.
        group: see :func:`save`.

    Raises:
        torch.distributed.checkpoint.CheckpointException: files or keys are missing, there are keys that the model does
            not have, or sizes differ.
        RuntimeError: modules of these stages miss keys, or do not load some of the keys that they save.
        ValueError, IndexError: see :func:`stage_state_dict`.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    state, planner = _state(pipe, stages, optimizer), _planner(pipe)
    alone = not dist.is_initialized()
    state_dict_loader.load(state, checkpoint_id=folder, planner=planner, process_group=group, no_dist=alone)
    owned, found = _Owned(pipe, stages), pipe.load_state_dict(state["model"], strict=False)
    if faults := [*found.unexpected_keys, *[name for name in found.missing_keys if owned.has(name)]]:
        raise RuntimeError(
            "pymoe.pipe.checkpoint.load: expected modules that load the keys which they save, got modules that do not "
            f"load, or miss: {', '.join(faults)}"
        )
    if optimizer is not None:
        set_optimizer_state_dict(pipe, optimizer, state["optimizer"], options=_by_name())


def _state(pipe: Any, stages: Iterable[int] | None, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state: dict[str, Any] = {"model": stage_state_dict(pipe, stages)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(pipe, optimizer, options=_by_name())
    return state


def _planner(pipe: Any) -> Any:
    """Return a planner that raises ValueError if the files contain keys that the model does not have."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            elsewhere = pipe.state_dict().keys() - state_dict["model"].keys()  # keys of stages that are not loaded here
            saved = (metadata.planner_data or {}).items()
            model = {key: path[1] for key, path in saved if path[0] == "model" and key not in self.mappings}
            if unknown := sorted(key.removeprefix("model.") for key, name in model.items() if name not in elsewhere):
                raise ValueError(f"expected a checkpoint of this model, got one with {', '.join(unknown)} as well")

    return Planner()


def _by_name() -> Any:
    """Return options that key optimizer states by parameter names, because parameter indices depend on the split."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


def save_safetensors(
    pipe: Any, folder: str | Path, *, stages: Iterable[int] | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Export stages as safetensors: one file per process, and an index that says which tensor is in which file (the
    layout of sharded models on the Hugging Face hub). Every process of the group must call this. Each tensor is
    written once, under one name.

    Args:
        pipe: a :class:`pymoe.Pipe`.
        folder: the folder for the files, created if necessary.
        stages: the stages that this process runs; None: all.
        group: the processes that run the pipe; None: the default group, or this process alone without one.

    Raises:
        ImportError: the package safetensors is not installed.
        TypeError: something in the state is not a tensor.
        ValueError, IndexError: see :func:`stage_state_dict`.
    """
    safetensors = _safetensors()
    tensors: dict[str, torch.Tensor] = {}
    first_names: dict[int, str] = {}
    state = pipe.state_dict(keep_vars=True)
    for name, value in state.items():
        first_names.setdefault(id(value), name)
    own = stage_state_dict(pipe, stages)
    for name, value in state.items():
        if name in own:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"save_safetensors: {name!r} must be a tensor, got {type(value).__name__}")
            tensors[first_names[id(value)]] = value.detach().cpu().contiguous()
    alone = not dist.is_initialized()
    rank, ranks = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    names = [list(tensors)] * ranks
    if not alone:
        dist.all_gather_object(names, list(tensors), group=group)
    files = [f"model-{number + 1:05d}-of-{ranks:05d}.safetensors" for number in range(ranks)]
    where = {name: file for file, there in reversed(list(zip(files, names, strict=True))) for name in there}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(
        {name: tensor for name, tensor in tensors.items() if where[name] == files[rank]},
        folder / files[rank],
        metadata={"format": "pt"},
    )
    if rank == 0:
        index = {"metadata": {}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
    if not alone:
        dist.barrier(group)


def load_safetensors(module: nn.Module, source: str | Path) -> None:
    """Load the state of a model, or of a pipe with any split, from safetensors.

    Args:
        module: the model or pipe; its devices and dtypes stay the same.
        source: a folder that :func:`save_safetensors` has written, or one file.

    Raises:
        ImportError: the package safetensors is not installed.
        RuntimeError: names or sizes differ from the module's.
    """
    safetensors = _safetensors()
    files = [Path(source)]
    if files[0].is_dir():
        index = json.loads((files[0] / INDEX).read_text())
        files = [files[0] / name for name in sorted(set(index["weight_map"].values()))]
    found: dict[str, Any] = {}
    for file in files:
        found.update(safetensors.load_file(file))
    # A tensor with several names was written under only one of them.
    state = module.state_dict(keep_vars=True)
    written = {id(value): found[name] for name, value in reversed(state.items()) if name in found}
    found.update({name: written[id(value)] for name, value in state.items() if id(value) in written})
    module.load_state_dict(found)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors files need the package safetensors: pip install safetensors") from error
    return safetensors.torch
