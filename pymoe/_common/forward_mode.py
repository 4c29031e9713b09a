"""Tells whether a call is inside forward mode (``jvp``, ``jacfwd``, ``hessian``, ``forward_ad``), also in a graph.

Dynamo traces the ``forward`` of an ``autograd.Function`` as if it were any function: a graph has neither the Function's
rule for tangents nor its refusal of them, and native operators in it drop tangents. The tensors of a trace do not show
the tangents of its arguments, either. Code that is traced therefore asks :func:`in_forward_mode`, and raises there.
Without ``fullgraph``, Dynamo then leaves the call out of the graph, and the call sees the tangents itself.
"""

from __future__ import annotations

from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling


def in_forward_mode() -> bool:
    """Return whether a level of forward mode is open, in compiled code as well."""
    # Dynamo guards what it reads: a graph that was traced outside of forward mode does not serve calls inside. But
    # Dynamo reads a name only once in a trace, and the traced code may enter forward mode later.
    return forward_ad._current_level >= 0 or (is_dynamo_compiling() and _is_entered())


def _is_entered() -> bool:
    """Return whether the process is in forward mode now; True if Dynamo traces this function and does not call it."""
    return is_dynamo_compiling() or forward_ad._current_level >= 0


_is_entered._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does
