"""pymoe: a mixture-of-experts runtime for PyTorch with a C++/CUDA core."""

from pymoe import nn, ops, reference, runtime
from pymoe._native import build_info
from pymoe.runtime import BatchTensorProto, ExpertBackend, Runtime, TaskPool, TesseractRuntime

__all__ = [
    "BatchTensorProto",
    "ExpertBackend",
    "Runtime",
    "TaskPool",
    "TesseractRuntime",
    "build_info",
    "nn",
    "ops",
    "reference",
    "runtime",
]
