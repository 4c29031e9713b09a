"""Which modules of a model are opaque: called as they are, never looked into."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pymoe.pipe.auxiliary import keeps_counts
from pymoe.pipe.capture.by_running import RealModule
from pymoe.pipe.capture.errors import CaptureError
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm

__all__ = ["Opaque", "opaque_by_path"]

Opaque = Iterable[type[nn.Module] | str]
"""Types of modules, and qualified names."""


def opaque_by_path(model: nn.Module, opaque: Opaque) -> dict[str, RealModule]:
    """The opaque modules of a model, by qualified name; none within another.

    They are those that ``opaque`` says, and those that act on more than their output: layers of ``pymoe.nn`` that
    count or inject losses, batch norms that wait for the mini-batch, modules with backward hooks; and recurrent layers,
    whose graph would hold for one length.

    Raises:
        TypeError: ``opaque`` holds something else.
        ValueError: it names a module that the model does not have.
        CaptureError: the whole model would be opaque by itself.
    """
    types: list[type] = []
    paths: set[str] = set()
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry in [opaque] if isinstance(opaque, (str, type)) else opaque:
        if isinstance(entry, str):
            if entry not in modules:
                raise ValueError(f"opaque names {entry!r}, which the model does not have")
            paths.add(entry)
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            types.append(entry)
        else:
            raise TypeError(f"opaque takes types of modules and qualified names, got {entry!r}")
    if _has_backward_hooks(model) and "" not in paths:
        raise CaptureError(
            "The model cannot be captured: it has backward hooks of its own, which a graph would lose. Put them on its "
            "layers, or add them to the parameters."
        )
    chosen: dict[str, RealModule] = {}
    for path, module in model.named_modules():
        if any(path == outer or path.startswith(f"{outer}.") or not outer for outer in chosen):
            continue
        named = any(modules[name] is module for name in paths)
        if named or isinstance(module, tuple(types)) or _runs_itself(module):
            chosen[path] = RealModule(module)
    return chosen


def _runs_itself(module: nn.Module) -> bool:
    return isinstance(module, (DeferredBatchNorm, nn.RNNBase)) or keeps_counts(module) or _has_backward_hooks(module)


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
