"""pymoe: a mixture-of-experts runtime for PyTorch with a C++/CUDA core."""

from pymoe import nn, ops, reference
from pymoe._native import build_info

__all__ = ["build_info", "nn", "ops", "reference"]
