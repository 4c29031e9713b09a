"""The switch for whole models, whatever their architecture: :func:`enable` and :func:`disable`."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from pymoe._common import checks
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import place
from pymoe.integrations.transformers.outside import FORWARDS, REFUSED, may_do_work_of_parts

_BEFORE = "_experts_implementation_before_pymoe"
"""Of modules behind the interface: a dictionary of what they ran, by this name, or an empty one once that was undone.

Modules of one configuration have one dictionary, since whoever changes one of them changes all.
"""


def enable(model: nn.Module) -> list[str]:
    """Run the experts of ``model`` on pymoe, also where transformers has no interface for them.

    Experts behind the interface get ``experts_implementation="pymoe"``. Those outside it that pymoe knows (of Dbrx,
    JetMoe, Llama4, LongcatFlash and Step3p7) get another forward, by a class of the same name derived from their own;
    it leaves the work to transformers' code while a part that it would not call has hooks or was replaced.
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
    marks: dict[int, dict[str, str | None]] = {}
    for name, module in behind:
        before = interface.implementation(module)
        if before != interface.NAME:
            setattr(module, _BEFORE, marks.setdefault(id(module.config), {_BEFORE: before}))
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
            implementation since, are left alone. A part takes with it all modules behind the interface that share its
            configuration, also those outside the part, as ``enable`` does.

    Returns:
        The names, within ``model``, of the modules that changed.

    Raises:
        TypeError: a class was derived since from that of a module outside the interface, as a parametrization or
            ``fully_shard`` does; nothing changes then.
    """
    named = list(model.named_modules())
    marked = [(name, module, getattr(module, _BEFORE)) for name, module in named if hasattr(module, _BEFORE)]
    behind = [
        (name, module, mark[_BEFORE])
        for name, module, mark in marked
        if mark and interface.implementation(module) == interface.NAME
    ]
    outside = [(name, module, _off_pymoe(type(module))) for name, module in named if isinstance(module, OnPymoe)]
    for name, module, before in outside:
        if before is None:
            raise TypeError(
                f"disable: expected {name or 'the module'} to have the class that enable gave it, got "
                f"{type(module).__name__}, derived from it since; undo that first"
            )
    for _, module, implementation in behind:  # modules share configurations
        interface.set_implementation(module, implementation)
    for _, module, mark in marked:
        mark.clear()
        delattr(module, _BEFORE)
    for _, module, before in outside:
        module.__class__ = before
    return [name for name, _, _ in behind + outside]


class OnPymoe:
    """Marks the classes that :func:`enable` gives to modules outside transformers' interface."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the class of transformers, since that of this object has no place in any module."""
        before = _off_pymoe(type(self))
        return super().__reduce_ex__(protocol) if before is None else (_empty, (before,), self.__dict__)


@functools.cache
def _on_pymoe(cls: Any) -> Any:
    """Return a class like ``cls``, of its name, with the forward on pymoe."""
    on_pymoe = FORWARDS[place(cls)]

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return (on_pymoe if may_do_work_of_parts(self, cls) else cls.forward)(self, *arguments, **named)

    body = {"forward": forward, "__doc__": cls.__doc__}
    return type(cls.__name__, (OnPymoe, cls), body | {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _off_pymoe(cls: type) -> Any:
    """Return the class that ``cls`` was made of, or None if :func:`_on_pymoe` did not make it."""
    return cls.__bases__[1] if cls.__bases__[0] is OnPymoe else None


def _empty(cls: Any) -> Any:
    derived = _on_pymoe(cls)
    return derived.__new__(derived)
