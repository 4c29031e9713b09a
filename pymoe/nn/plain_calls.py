"""Whether a layer may do the work of one of its parts itself, instead of calling it.

Others stand between a layer and its parts in many ways: hooks of a module or of all modules, a ``forward`` that was
replaced on the module or on its class, another class (parametrizations, FSDP), another module around it (PEFT),
``module.compile()``. Whoever passes over a part asks here whether one of them would not be heard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import CALL_HOOKS, global_call_hooks

_as_written: dict[type, tuple[Any, ...]] = {}
"""The functions that calls of a class run, for classes in which they are those of its source."""


def is_called_plainly(module: Any, kind: type[nn.Module], harmless: Callable[[Any], bool] | None = None) -> bool:
    """Return whether calling ``module``, and differentiating the call, runs the ``forward`` of ``kind`` alone.

    Args:
        module: a part of a layer, which its user may have replaced.
        kind: the class of which the layer made it.
        harmless: of hooks of its own that need not count.
    """
    if type(module) is not kind or module._compiled_call_impl is not None:
        return False
    for hooks in global_call_hooks:
        if hooks:
            return False
    return not attached_to(module, harmless) and _is_as_written(kind)


def attached_to(module: nn.Module, harmless: Callable[[Any], bool] | None = None) -> str:
    """Return what a call of ``module`` runs in addition to, or in place of, the ``forward`` of its class.

    Args:
        module: of any class. Hooks of all modules do not count.
        harmless: returns true for hooks that do not count either.

    Returns:
        Words for an error; "" if there is nothing.
    """
    for name in CALL_HOOKS:
        hooks = getattr(module, name)
        if hooks and (harmless is None or not all(harmless(hook) for hook in hooks.values())):
            return "hooks"
    # Read as calls read it, which torch.compile guards: what takes its place after a compilation is compiled anew.
    own = module.__dict__
    plain = getattr(module.forward, "__func__", None) is type(module).forward
    return "" if plain and "forward" not in own and "_call_impl" not in own else "a forward of its own"


def _is_as_written(kind: Any) -> bool:
    """Return whether calls of a class run what its source, and that of its bases, says: nobody has patched them."""
    functions = (kind.forward, kind.__call__, kind._call_impl)
    if _as_written.get(kind) == functions:
        return True
    canaries.modules()
    if all(is_of_its_source(kind, name) for name in ("forward", "__call__", "_call_impl")):
        _as_written[kind] = functions
        return True
    return False


def is_of_its_source(kind: type, name: str) -> bool:
    """Return whether a function of a class is that of the module in which the class, or its base that has it, stands.

    Args:
        kind: the class.
        name: of the function.
    """
    owner = next(base for base in kind.__mro__ if name in vars(base))
    source = sys.modules.get(owner.__module__)
    return source is not None and getattr(vars(owner)[name], "__globals__", None) is vars(source)


# torch.compile asks once, as it does for hooks: it cannot trace the look at sources.
_is_as_written._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_of_its_source._dynamo_marked_constant = True  # type: ignore[attr-defined]
