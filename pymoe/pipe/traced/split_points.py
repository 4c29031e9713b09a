"""Marks where a model is split into stages: at ``pipe_split()`` in the model's code, or at calls of its submodules."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from pymoe._common.names import also_called, suggestion
from pymoe._torch_private import OpOverload, OpOverloadPacket
from pymoe._transforms import is_exporting
from pymoe.pipe.capture.opaque import refuse_boundary

_library = torch.library.Library("pymoe_pipe", "DEF")
_library.define("split() -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("split", lambda: None, "CompositeExplicitAutograd")
_MARKER = torch.ops.pymoe_pipe.split.default
fx.node.has_side_effect(_MARKER)  # otherwise captures would remove markers as dead code
aten_pipe_split_alias = _MARKER
"""PiPPy's name for the target of the node that :func:`pipe_split` leaves in a captured graph."""

SHOWN = 20
"""The maximum number of submodules that an error message names."""

# For each model that :func:`annotate_split_points` has marked: its marked copy, until the copy is captured.
_annotated: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def pipe_split() -> None:
    """Mark the boundary of two stages in a model's ``forward``: :func:`pymoe.pipeline` splits the model there.

    It does nothing when the model is run without a pipeline. A boundary at the very beginning or end, or next to
    another, makes no additional stage.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        ...     def forward(self, x):
        ...         x = self.first(x)
        ...         pymoe.pipe_split()
        ...         return self.second(x)
        >>> pymoe.pipeline(Model(), (torch.randn(2, 8),)).num_stages
        2
    """
    if is_exporting():
        refuse_boundary()
        torch.ops.pymoe_pipe.split()


def is_marker(node: fx.Node) -> bool:
    """Return whether a node is a stage boundary, of pymoe or of ``torch.distributed.pipelining``."""
    if node.op != "call_function":
        return False
    target: Any = node.target
    if target is _MARKER or target is pipe_split:
        return True
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return target in (torch.ops.pymoe_pipe.split,) or str(target).startswith("pippy._pipe_split")
    is_torchs = str(getattr(target, "__module__", "")).startswith("torch.distributed.pipelining")
    return is_torchs and getattr(target, "__name__", "") == "pipe_split"


def mark(graph: fx.Graph, before: fx.Node) -> None:
    """Insert a stage boundary into a captured graph, before the node ``before``."""
    with graph.inserting_before(before):
        graph.call_function(_MARKER)


def mark_boundary(before: fx.Node) -> None:
    """Insert a stage boundary before a node of a captured graph, for split policies of your own.

    ::

        def before_every_linear(module):
            for node in module.graph.nodes:
                if node.target is torch.ops.aten.linear.default:
                    mark_boundary(node)
            return module

    Args:
        before: the first node of the later stage.

    Raises:
        TypeError: ``before`` is not a ``torch.fx.Node``.
    """
    if not isinstance(before, fx.Node):
        raise TypeError(f"mark_boundary: before: expected a torch.fx.Node of a captured graph, got {before!r:.80}")
    mark(before.graph, before)


class SplitPoint(enum.Enum):
    """The side of a module's call on which a stage ends and the next begins.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> pipe = pymoe.pipeline(model, (torch.randn(2, 8),), split_spec={"2": pymoe.SplitPoint.BEGINNING})
        >>> pipe.num_stages
        2
    """

    BEGINNING = 1
    END = 2


class PipeSplitWrapper:
    """Provides PiPPy's name ``PipeSplitWrapper.SplitPoint``. It raises TypeError if it is called to wrap a module."""

    SplitPoint = SplitPoint

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            "PipeSplitWrapper: wrapping modules would rename parameters: use annotate_split_points(model, {'layers.4': "
            "SplitPoint.BEGINNING}), or split_spec of pymoe.pipeline"
        )


class NoSuchModule(ValueError, AttributeError):
    """Says that a model has no submodule with a given name.

    It is a ValueError, as elsewhere in pymoe, and an AttributeError, as in PiPPy.
    """


@also_called(mod="model")
def annotate_split_points(model: nn.Module, spec: Mapping[str, SplitPoint]) -> nn.Module:
    """Return the model with stage boundaries before or after calls of some of its modules.

    The given model is unchanged, so use the returned one: it has the same parameters, buffers and submodules, except
    for shallow copies of the named modules and of those around them, and the same ``state_dict`` keys.
    :func:`pymoe.pipeline` warns if it gets the given model, without other split points, although the returned one was
    dropped.

    Args:
        model: any module.
        spec: for each submodule to be marked, by qualified name, the side of its call on which the boundary is.

    Raises:
        TypeError: a value is not a ``SplitPoint``.
        ValueError: the model has no submodule of a name in ``spec``. The error is also an ``AttributeError``.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> marked = pymoe.annotate_split_points(model, {"0": pymoe.SplitPoint.END, "3": pymoe.SplitPoint.BEGINNING})
        >>> pymoe.pipeline(marked, (torch.randn(2, 8),)).num_stages
        3
    """
    made = marked(model, spec)
    _annotated[next((original for original, copied in _annotated.items() if copied() is model), model)] = ref(made)
    return made


def marked(model: nn.Module, spec: Mapping[str, SplitPoint]) -> nn.Module:
    """Return the same marked copy as :func:`annotate_split_points`, without recording that it was made."""
    copies: dict[str, nn.Module] = {"": _shallow(model)}
    for name, point in spec.items():
        if not isinstance(point, SplitPoint):
            raise TypeError(f"{name!r}: expected SplitPoint.BEGINNING or SplitPoint.END, got {point!r}")
        path = ""
        for step in name.split(".") if name else []:
            around, path = copies[path], f"{path}.{step}".removeprefix(".")
            if path not in copies:
                original = around._modules.get(step)
                if original is None:
                    raise NoSuchModule(_unknown(model, name))
                copies[path] = around._modules[step] = _shallow(original)
        _hook(copies[name], point)
    return copies[""]


def was_annotated_in_vain(model: nn.Module) -> bool:
    """Return whether :func:`annotate_split_points` returned a copy of ``model`` that was then dropped.

    In that case, and if ``model`` is itself such a copy, also delete the record of the copy.
    """
    for original, copied in list(_annotated.items()):
        if copied() is model or (original is model and copied() is None):
            del _annotated[original]
            return original is model
    return False


def _unknown(model: nn.Module, name: str) -> str:
    there = [known for known, _ in model.named_modules() if known]
    hint = suggestion(name, there) or f": it has {', '.join(there[:SHOWN]) or 'none'}{', ...' * (len(there) > SHOWN)}"
    return f"the model ({type(model).__name__}) has no submodule {name!r}{hint}"


def _shallow(module: nn.Module) -> nn.Module:
    """Return a shallow copy that shares the dictionaries of parameters and buffers, but not that of child modules."""
    if parametrize.is_parametrized(module):  # copy() would raise RuntimeError
        made = object.__new__(type(module))
        made.__dict__.update(module.__dict__)
    else:
        made = copy.copy(module)
    made.__dict__["_modules"] = dict(module._modules)
    return made


def _hook(module: nn.Module, point: SplitPoint) -> None:
    """Add a boundary hook to ``module``, a shallow copy, without adding it to the original."""
    kind = "_forward_pre_hooks" if point is SplitPoint.BEGINNING else "_forward_hooks"
    module.__dict__[kind] = module.__dict__[kind].copy()
    if point is SplitPoint.BEGINNING:
        module.register_forward_pre_hook(_Boundary(), prepend=True)
    else:
        module.register_forward_hook(_Boundary())


class _Boundary:
    """A hook that marks a stage boundary.

    For an opaque module, a capture runs the hook outside of the module's call, in which the boundary would be lost.
    """

    is_boundary = True

    def __call__(self, *of_the_call: Any) -> None:
        pipe_split()


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` with a stage boundary between every two adjacent layers; it may be part of any model."""

    @classmethod
    @also_called(sequential_instance="sequential")
    def from_sequential(cls, sequential: nn.Sequential) -> PipeSequential:
        """Return a module with the same layers, under the same names, and in the same mode.

        Args:
            sequential: the module with the layers, which is not changed.
        """
        made = cls()
        made._modules.update(sequential._modules)
        made.training = sequential.training
        return made

    def forward(self, input: Any) -> Any:
        """Return the output of the last layer.

        Args:
            input: the input of the first layer.
        """
        for number, layer in enumerate(self):
            if number:
                pipe_split()
            input = layer(input)
        return input
