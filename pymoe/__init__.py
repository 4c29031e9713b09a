"""pymoe: a mixture-of-experts runtime for PyTorch with a C++/CUDA core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymoe import nn, ops, reference, runtime
from pymoe._native import build_info
from pymoe.runtime import (
    BatchTensorProto,
    ExpertBackend,
    Runtime,
    TaskPool,
    TesseractRuntime,
)

if TYPE_CHECKING:
    from pymoe.runtime import (
        MixtureOfExpertBackends,
        map_with_parallel_backward,
        run_in_background,
        run_isolated_backward,
        run_isolated_forward,
    )

__all__ = [
    "BatchTensorProto",
    "ExpertBackend",
    "MixtureOfExpertBackends",
    "Runtime",
    "TaskPool",
    "TesseractRuntime",
    "build_info",
    "map_with_parallel_backward",
    "nn",
    "ops",
    "reference",
    "run_in_background",
    "run_isolated_backward",
    "run_isolated_forward",
    "runtime",
]


def __getattr__(name: str) -> Any:
    """What the runtime itself imports when somebody asks for it."""
    if name in __all__:
        value = globals()[name] = getattr(runtime, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
