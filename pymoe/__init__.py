"""A mixture-of-experts runtime for PyTorch with a C++/CUDA core.

- :mod:`pymoe.nn`: ``MoE``, a layer that takes the place of a dense feed-forward network, and its parts.
- :mod:`pymoe.ops`: the operators under it; :mod:`pymoe.reference` is their specification in plain PyTorch.
- :mod:`pymoe.ep`: experts of a layer spread over the ranks of a process group.
- :mod:`pymoe.runtime`: ``ExpertBackend`` and ``Runtime``, which serve experts to many clients in large batches;
  :mod:`pymoe.mixture`: a gate over such experts; :mod:`pymoe.remote`: experts on other machines.
- :mod:`pymoe.parallel`: ``map_with_parallel_backward``, which runs calls at the same time, forward and backward.
- :mod:`pymoe.pipe`: ``Pipe`` and ``pipeline``, models cut into stages that run concurrently.
- :mod:`pymoe.integrations`: adapters to transformers, Ray and Prometheus.

The names that most programs need are available here, too.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

# These three packages are exported, although __all__ does not list them.
from pymoe import nn as nn
from pymoe import ops as ops
from pymoe import reference as reference
from pymoe._common.names import no_such_name
from pymoe._native import build_info
from pymoe._torch_versions import warn_of_newer_torch
from pymoe.nn import MoE

if TYPE_CHECKING:
    from pymoe import ep as ep
    from pymoe import mixture as mixture
    from pymoe import parallel as parallel
    from pymoe import pipe as pipe
    from pymoe import runtime as runtime
    from pymoe.mixture import MixtureOfExpertBackends
    from pymoe.parallel import (
        map_with_parallel_backward,
        run_in_background,
        run_isolated_backward,
        run_isolated_forward,
    )
    from pymoe.pipe import (
        LossWrapper,
        MultiUseParameterConfig,
        Pipe,
        PipeSequential,
        SplitPoint,
        TrivialLossWrapper,
        annotate_split_points,
        pipe_split,
        pipeline,
    )
    from pymoe.runtime import BatchTensorProto, ExpertBackend, Runtime, TaskPool, TesseractRuntime

warn_of_newer_torch(torch.__version__)
# MoE(expert_parallel=...) calls this. pymoe.nn cannot import pymoe.ep, because pymoe.ep is built on pymoe.nn.
nn.MoE._shard = lambda layer, ranks: importlib.import_module("pymoe.ep").shard(layer, ranks)

__version__ = "0.1.0"  # pyproject.toml reads the version from here

__all__ = [
    "BatchTensorProto",
    "ExpertBackend",
    "LossWrapper",
    "MixtureOfExpertBackends",
    "MoE",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeSequential",
    "Runtime",
    "SplitPoint",
    "TaskPool",
    "TesseractRuntime",
    "TrivialLossWrapper",
    "annotate_split_points",
    "build_info",
    "map_with_parallel_backward",
    "pipe_split",
    "pipeline",
    "run_in_background",
    "run_isolated_backward",
    "run_isolated_forward",
]
"""The names that ``from pymoe import *`` imports: no packages, because ``nn`` would replace torch's."""

_LAZY_PACKAGES = ("runtime", "parallel", "mixture", "pipe", "ep")
_NEED_MORE = ("remote", "integrations")
"""Packages with further requirements, whose names are not re-exported here."""


_OTHER_NAMES = {
    "ModuleBackend": "ExpertBackend",
    "Server": "pymoe.remote.ExpertServer serves experts",
    **dict.fromkeys(("RemoteExpert", "ExpertClient"), "pymoe.runtime.ExpertClient or pymoe.remote ask experts"),
    **dict.fromkeys(("PipelineStage", "ScheduleGPipe", "Schedule1F1B"), "pymoe.pipeline cuts and runs a model"),
}
"""Names of hivemind, of torch.distributed.pipelining and of subpackages, each with what to use in its place."""


def __getattr__(name: str) -> Any:
    """Import a subpackage, or the subpackage that has ``name``, on first use; raise AttributeError for unknown names.

    These subpackages need ``pymoe._runtime``, ``torch.distributed`` or another package; operators and layers do not.
    """
    if name in _LAZY_PACKAGES or name in _NEED_MORE:
        return importlib.import_module(f"pymoe.{name}")
    if name in __all__:
        homes = (importlib.import_module(f"pymoe.{package}") for package in _LAZY_PACKAGES)
        value = globals()[name] = next(getattr(home, name) for home in homes if hasattr(home, name))
        return value
    packages = ("nn", "ops", "reference", *_LAZY_PACKAGES, *_NEED_MORE)
    parts = [part for package in packages if (part := sys.modules.get(f"pymoe.{package}")) is not None]
    of_parts = {one: f"it is {part.__name__}.{one}" for part in reversed(parts) for one in getattr(part, "__all__", ())}
    raise no_such_name(__name__, name, (*__all__, *packages), _OTHER_NAMES | of_parts)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY_PACKAGES})
