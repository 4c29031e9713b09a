"""Parameters and buffers that several stages use."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx, nn

from pymoe.pipe.traced.effects import Effects

__all__ = ["MultiUseParameterConfig", "Spec", "State", "by_first_name"]


class MultiUseParameterConfig(enum.Enum):
    """How several stages come by one parameter.

    In one process a replicated parameter is one object, in the stages that use it; across processes it is a copy in
    each, and their gradients are summed.
    """

    TRANSMIT = 1
    """The first stage that uses it has it, and its value travels to the others, gradients back."""
    REPLICATE = 2
    """Every stage that uses it has it."""


Spec = MultiUseParameterConfig | Mapping[str, MultiUseParameterConfig] | None


@dataclass(frozen=True)
class State:
    """What is known about the parameters and buffers of a graph."""

    parameters: frozenset[str]
    """Names of those that are parameters."""
    spec: Spec
    """For all parameters, or by name; None, and for those without a name: they are replicated."""
    apart: bool = False
    """Whether stages are on devices of their own: then what nothing is said about travels."""

    def travels(self, graph: fx.Graph, numbers: Mapping[fx.Node, int], effects: Effects) -> dict[fx.Node, int]:
        """For the parameters and buffers whose value travels, the stage that has them."""
        found = {}
        for node in graph.nodes:
            if node.op != "get_attr":
                continue
            users = _users_of(node, numbers)
            if len(users) < 2:
                continue
            if node.target in self.parameters:
                travels = self._is_sent(str(node.target))
            else:
                travels = _is_edited(node, users, numbers, effects)
            if travels:
                found[node] = users[0]
        return found

    def _is_sent(self, name: str) -> bool:
        default = MultiUseParameterConfig.TRANSMIT if self.apart else MultiUseParameterConfig.REPLICATE
        spec = self.spec.get(name) if isinstance(self.spec, Mapping) else self.spec
        return (spec or default) is MultiUseParameterConfig.TRANSMIT


def _users_of(node: fx.Node, numbers: Mapping[fx.Node, int]) -> list[int]:
    """The stages that use a parameter or buffer."""
    return sorted({numbers[user] for user in node.users if user in numbers})


def by_first_name(spec: Spec, model: nn.Module) -> Spec:
    """The specification by the names that captured graphs use: of a shared parameter the first.

    Raises:
        TypeError: it is no configuration, and no mapping to such.
        ValueError: the model has no parameter of a name.
    """
    if spec is None or isinstance(spec, MultiUseParameterConfig):
        return spec
    if not isinstance(spec, Mapping) or not all(isinstance(use, MultiUseParameterConfig) for use in spec.values()):
        raise TypeError(f"multi_use_param_spec: MultiUseParameterConfig, or a dict of them by name, got {spec!r}")
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    if unknown := [name for name in spec if name not in every]:
        raise ValueError(f"multi_use_param_spec: the model has no parameter {unknown[0]!r}")
    return {first[id(every[name])]: use for name, use in spec.items()}


def _is_edited(node: fx.Node, users: list[int], numbers: Mapping[fx.Node, int], effects: Effects) -> bool:
    """Is the buffer changed by one stage and read by later ones? Then they get what it was at that time.

    Raises:
        ValueError: an earlier one reads it, too, or several change it and others read it.
    """
    editors = sorted({numbers[editor] for editor in effects.editors(node)})
    if not editors or editors == users:
        return False  # stages that all change it take turns
    if editors == users[:1]:
        return True
    raise ValueError(
        f"the buffer {node.target!r} is used by stages {users} and changed by {editors}: the next micro-batch would "
        "read it before this one has changed it. Cut the model so that one stage has it all"
    )
