"""Checks whether a layer may do the work of one of its parts itself, instead of calling the part.

Other code can change the effect of calling a part in many ways: hooks of a module or of all modules, a ``forward`` that
was replaced on the module or on its class, another class (parametrizations, FSDP), another module around it (PEFT),
``module.compile()``. Code that does the work of a part without calling it would lose these effects, so it first checks
here that there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import CALL_HOOKS, global_call_hooks

PLAIN_TENSORS = (nn.Parameter, Tensor)
"""The types of plain tensors; a subclass may have operators of its own."""
_as_written: dict[type, tuple[Any, ...]] = {}
"""The functions that a call runs, by class; only classes with unpatched functions are included."""


def are_called_plainly(*parts: tuple[Any, type[nn.Module]], harmless: Callable[[Any], bool] | None = None) -> bool:
    """Return whether each module is of exactly the given class, and a call of it runs only that class's ``forward``.

    This is false if there are hooks (forward or backward, of one module or of all), patched methods or a compiled call.

    Args:
        parts: pairs (module, class): a part that a layer has now, which a user may have replaced, and the class of the
            part that the layer created.
        harmless: returns True for a hook of a module if the hook may be ignored.
    """
    for hooks in global_call_hooks:
        if hooks:
            return False
    for module, kind in parts:
        if type(module) is not kind or module._compiled_call_impl is not None or attached_to(module, harmless):
            return False
    _, kinds = zip(*parts, strict=True)
    return _are_as_written(kinds)


def attached_to(module: nn.Module, harmless: Callable[[Any], bool] | None = None) -> str:
    """Name what a call of ``module`` runs in addition to, or in place of, the ``forward`` of its class.

    Args:
        module: a module of any class. Hooks that are registered for all modules do not count.
        harmless: returns True for hooks of the module that may be ignored as well.

    Returns:
        A phrase for an error message; "" if there is nothing.
    """
    for name in CALL_HOOKS:
        hooks = getattr(module, name)
        if hooks and (harmless is None or not all(harmless(hook) for hook in hooks.values())):
            return "hooks"
    # torch.compile guards attributes that are read, but not the contents of ``__dict__``: reading ``module.forward``
    # makes it compile again when ``forward`` is replaced. torch.compile cannot trace the ``__func__`` of a module's
    # method nor, before torch 2.13, a method that ``__get__`` makes.
    own = module.__dict__
    plain = module.forward is not None and hasattr(type(module).forward, "__get__")
    return "" if plain and "forward" not in own and "_call_impl" not in own else "a forward of its own"


def _are_as_written(kinds: Any) -> bool:
    """Return whether calls of modules of these classes run only unpatched functions; see :func:`is_of_its_source`."""
    for kind in kinds:
        functions = (kind.forward, kind.__call__, kind._call_impl)
        if _as_written.get(kind) == functions:
            continue
        canaries.modules()
        if not all(is_of_its_source(kind, name) for name in ("forward", "__call__", "_call_impl")):
            return False
        _as_written[kind] = functions
    return True


def is_of_its_source(kind: type, name: str) -> bool:
    """Return whether a method of a class was defined in the Python module of the class, not patched in from elsewhere.

    Args:
        kind: the class; for an inherited method, the base class that has the method counts.
        name: name of the method.
    """
    owner = next(base for base in kind.__mro__ if name in vars(base))
    source = sys.modules.get(owner.__module__)
    return source is not None and getattr(vars(owner)[name], "__globals__", None) is vars(source)


# With this mark, torch.compile calls these functions once, while it compiles, and keeps their results as constants: it
# can neither trace how they inspect sources nor guard the dictionary that they fill.
_are_as_written._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_of_its_source._dynamo_marked_constant = True  # type: ignore[attr-defined]
