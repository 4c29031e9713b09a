"""Detects forward mode (``jvp``, ``jacfwd``, ``hessian``, ``forward_ad``), also while torch.compile traces.

Dynamo traces the ``forward`` of an ``autograd.Function`` like any other function. The graph therefore has neither the
Function's ``jvp`` nor the error that the ``jvp`` may raise, and native operators in the graph drop tangents. Traced
tensors do not show the tangents of the arguments, either. Traced code therefore raises if :func:`in_forward_mode` is
true. Without ``fullgraph``, Dynamo then leaves the call out of the graph, and the call runs eagerly, with tangents.
"""

from __future__ import annotations

from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling


def in_forward_mode() -> bool:
    """Return whether a level of forward mode is open, in compiled code as well."""
    # Dynamo guards on the level that it reads here: a graph traced outside forward mode does not serve calls inside it.
    # But Dynamo reads it only once per trace, and the traced code may enter forward mode later: hence _is_entered.
    return forward_ad._current_level >= 0 or (is_dynamo_compiling() and _is_entered())


def _is_entered() -> bool:
    """Return whether forward mode is on now. While Dynamo traces this function, return True."""
    return is_dynamo_compiling() or forward_ad._current_level >= 0


_is_entered._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does
