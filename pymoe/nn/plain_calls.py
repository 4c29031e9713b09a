"""Whether a layer may do the work of one of its parts itself, instead of calling it."""

from __future__ import annotations

from torch import nn

from pymoe._torch_private import global_forward_hooks, global_forward_pre_hooks


def is_called_plainly(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether calling ``module`` runs the ``forward`` of ``kind`` and nothing else.

    Nothing may stand between: no subclass (as parametrizations and FSDP make one), no forward hook, no other
    ``forward`` on the instance, no ``module.compile()``.

    Args:
        module: a part of a layer, which its user may have replaced.
        kind: the class of which the layer made it.
    """
    return (
        type(module) is kind
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (global_forward_hooks or global_forward_pre_hooks)
        and module._compiled_call_impl is None
        and "forward" not in module.__dict__
    )
