"""The switch for whole models, whatever their architecture: :func:`enable` and :func:`disable`."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import place
from pymoe.integrations.transformers.outside import FORWARDS, REFUSED
from pymoe.reference import checks

_BEFORE = "_experts_implementation_before_pymoe"


def enable(model: nn.Module) -> list[str]:
    """Run the experts of ``model`` on pymoe, also where transformers has no interface for them.

    Experts behind the interface get ``experts_implementation="pymoe"``. Those outside it that pymoe knows (of Dbrx,
    JetMoe, Llama4, LongcatFlash and Step3p7) get another forward, by a class of the same name derived from their own.
    transformers' classes stay as they are, and so do other models (that share no configuration with this one),
    parameters, hooks and the state dict; the model can be copied, pickled and compiled as before. Either everything
    changes or, on an error, nothing does.

    Args:
        model: a model of transformers, or a part of one that holds experts.

    Returns:
        The names, within ``model``, of the modules that changed; those that ran on pymoe before are not among them.

    Raises:
        ValueError: ``model`` holds no experts that pymoe knows, or some that it cannot compute.
        TypeError: experts have weights of a dtype that pymoe does not compute in, as in a quantised model.
    """
    named = list(model.named_modules())
    behind = [(name, module) for name, module in named if interface.is_behind(module)]
    outside = [(name, module) for name, module in named if place(type(module)) in FORWARDS]
    refused = [type(module) for _, module in named if place(type(module)) in REFUSED]
    if refused:
        raise ValueError(
            f"enable: expected a model whose experts pymoe can compute, got {type(model).__name__} with "
            f"{refused[0].__name__}: {REFUSED[place(refused[0])]}"
        )
    if not behind and not outside:
        raise ValueError(
            "enable: expected a model with experts behind transformers' interface, or of "
            f"{', '.join(sorted(name for _, name in FORWARDS))}, got {type(model).__name__} with none of them"
        )
    for name, module in behind + outside:
        for parameter_name, parameter in module.named_parameters():
            checks.floating("enable", f"{name}.{parameter_name}".lstrip("."), parameter)
    changed = []
    for name, module in behind:
        before = interface.implementation(module)
        if before != interface.NAME:
            setattr(module, _BEFORE, before)
            changed.append(name)
    for _, module in behind:  # modules share configurations
        interface.set_implementation(module, interface.NAME)
    for name, module in outside:
        if not isinstance(module, OnPymoe):
            cls: Any = type(module)
            module.__class__ = _on_pymoe(cls)
            changed.append(name)
    return changed


def disable(model: nn.Module) -> list[str]:
    """Undo :func:`enable`: every module of ``model`` runs again as it did before.

    Args:
        model: what ``enable`` was called with, or a part of it. Modules that it did not change, or that got another
            implementation since, are left alone.

    Returns:
        The names, within ``model``, of the modules that changed.
    """
    marked = [(name, module) for name, module in model.named_modules() if hasattr(module, _BEFORE)]
    behind = [(name, module) for name, module in marked if interface.implementation(module) == interface.NAME]
    outside = [(name, module) for name, module in model.named_modules() if isinstance(module, OnPymoe)]
    for _, module in behind:  # modules share configurations
        interface.set_implementation(module, getattr(module, _BEFORE))
    for _, module in marked:
        delattr(module, _BEFORE)
    for _, module in outside:
        module.__class__ = type(module).__mro__[2]  # OnPymoe stands between
    return [name for name, _ in behind + outside]


class OnPymoe:
    """Marks the classes that :func:`enable` gives to modules outside transformers' interface."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the class of transformers, since that of this object has no place in any module."""
        return _empty, (type(self).__mro__[2],), self.__dict__


@functools.cache
def _on_pymoe(cls: Any) -> Any:
    """Return a class like ``cls``, of its name, with the forward on pymoe."""
    body = {"forward": FORWARDS[place(cls)], "__doc__": cls.__doc__}
    return type(cls.__name__, (OnPymoe, cls), body | {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _empty(cls: Any) -> Any:
    derived = _on_pymoe(cls)
    return derived.__new__(derived)
