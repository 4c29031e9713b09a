"""Switches models of any architecture to pymoe and back: :func:`enable` and :func:`disable`."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from pymoe._common import checks
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import place
from pymoe.integrations.transformers.outside import FORWARDS, REFUSED, may_do_work_of_parts

_BEFORE = "_experts_implementation_before_pymoe"
"""Name of an attribute that :func:`enable` sets on modules behind the interface: a dictionary with the implementation
that they ran before. :func:`disable` empties the dictionary.

Modules that share a configuration share the dictionary, because the implementation is an entry of the configuration.
"""


def enable(model: nn.Module) -> list[str]:
    """Run the experts of ``model`` on pymoe, including experts for which transformers has no interface.

    Experts behind the interface get ``experts_implementation="pymoe"``. Experts outside of the interface that pymoe
    supports (of Dbrx, JetMoe, Llama4, LongcatFlash and Step3p7) get a class of the same name, derived from their own,
    with another forward. This forward does the work of some submodules itself; while one of these has hooks or has been
    replaced, it calls transformers' forward instead. Transformers' classes do not change, nor do parameters, hooks, the
    state dict, or models that do not share the configuration. The model can be copied, pickled and compiled as before.
    If there is an error, nothing changes.

    Args:
        model: a model of transformers, or a part of one that has experts.

    Returns:
        The names, within ``model``, of the modules that changed; modules that already ran on pymoe are not among them.

    Raises:
        ValueError: ``model`` has no experts that pymoe supports, or has experts that pymoe cannot compute.
        TypeError: experts have parameters of a dtype in which pymoe does not compute, as in a quantised model.

    Example:
        >>> from pymoe.integrations.transformers import enable
        >>> from transformers import OlmoeConfig, OlmoeForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, eos_token_id=0)
        >>> model = OlmoeForCausalLM(OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
        >>> enable(model)
        ['model.layers.0.mlp.experts']
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 64])
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
        before = interface.implementation(module.config)
        if before != interface.NAME:
            setattr(module, _BEFORE, marks.setdefault(id(module.config), {_BEFORE: before}))
            changed.append(name)
    # A second loop, because modules share configurations: setting one would change what the first loop reads.
    for _, module in behind:
        interface.set_implementation(module, interface.NAME)
    for name, module in outside:
        if not isinstance(module, OnPymoe):
            cls: Any = type(module)
            module.__class__ = _on_pymoe(cls)
            changed.append(name)
    return changed


def disable(model: nn.Module) -> list[str]:
    """Undo :func:`enable`: the modules of ``model`` that it changed run as they did before.

    Args:
        model: the model that was passed to ``enable``, or a part of it. Modules that ``enable`` did not change, or that
            have since got another implementation, are left alone. For a part, all modules behind the interface that
            share its configuration change, even outside of the part, as in ``enable``.

    Returns:
        The names, within ``model``, of the modules that changed.

    Raises:
        TypeError: a module outside of the interface has since got a subclass of the class that ``enable`` gave it, for
            instance from a parametrization or ``fully_shard``. Nothing changes then.
    """
    named = list(model.named_modules())
    marked = [(name, module, getattr(module, _BEFORE)) for name, module in named if hasattr(module, _BEFORE)]
    behind = [
        (name, module, mark[_BEFORE])
        for name, module, mark in marked
        if mark and interface.implementation(module.config) == interface.NAME
    ]
    outside = [(name, module, _off_pymoe(type(module))) for name, module in named if isinstance(module, OnPymoe)]
    for name, module, before in outside:
        if before is None:
            raise TypeError(
                f"disable: expected {name or 'the module'} to have the class that enable gave it, got "
                f"{type(module).__name__}, derived from it since; undo that first"
            )
    # Modules share configurations, so ``behind`` had to be computed before any configuration changes.
    for _, module, implementation in behind:
        interface.set_implementation(module, implementation)
    for _, module, mark in marked:
        mark.clear()
        delattr(module, _BEFORE)
    for _, module, before in outside:
        module.__class__ = before
    return [name for name, _, _ in behind + outside]


class OnPymoe:
    """Marks the classes that :func:`enable` gives to modules outside of transformers' interface."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle with transformers' class, because no Python module contains the object's own class."""
        before = _off_pymoe(type(self))
        return super().__reduce_ex__(protocol) if before is None else (_empty, (before,), self.__dict__)


@functools.cache
def _on_pymoe(cls: Any) -> Any:
    """Return a subclass of ``cls`` that has the same name, and a forward that runs on pymoe."""
    on_pymoe = FORWARDS[place(cls)]

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return (on_pymoe if may_do_work_of_parts(self, cls) else cls.forward)(self, *arguments, **named)

    body = {"forward": forward, "__doc__": cls.__doc__}
    return type(cls.__name__, (OnPymoe, cls), body | {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _off_pymoe(cls: type) -> Any:
    """Return the class from which ``cls`` was made, or None if :func:`_on_pymoe` did not make it."""
    return cls.__bases__[1] if cls.__bases__[0] is OnPymoe else None


def _empty(cls: Any) -> Any:
    derived = _on_pymoe(cls)
    return derived.__new__(derived)
