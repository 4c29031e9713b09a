"""Which modules of a model are opaque: called as they are, never looked into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from pymoe.pipe.auxiliary import keeps_counts
from pymoe.pipe.capture.by_running import RealModule
from pymoe.pipe.capture.errors import CaptureError
from pymoe.pipe.capture.outside import users_hooks
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm

__all__ = ["Choice", "Opaque", "must_be_opaque", "opaque_by_path"]

Opaque = Iterable[type[nn.Module] | str]
"""Types of modules, and qualified names."""


@dataclass
class Choice:
    """What was found out by captures that failed."""

    opened: set[str] = field(default_factory=set)
    """Modules that boundaries stand in: they are not opaque for their forward hooks' sake."""
    closed: set[str] = field(default_factory=set)
    """Modules whose forward changes their attributes, which a graph would not."""

    def close(self, paths: Iterable[str]) -> bool:
        """Let such modules be opaque. Whether they all can be, and were not."""
        paths = set(paths)
        if "" in paths or paths & (self.opened | self.closed):
            return False
        self.closed |= paths
        return True


def must_be_opaque(model: nn.Module, opaque: Opaque, path: str) -> bool:
    """Whether a module is opaque for more than its forward hooks and changed attributes."""
    everything_open = Choice(opened={name for name, _ in model.named_modules()})
    return any(
        path == outer or path.startswith(f"{outer}.") for outer in opaque_by_path(model, opaque, everything_open)
    )


def opaque_by_path(model: nn.Module, opaque: Opaque, choice: Choice) -> dict[str, RealModule]:
    """The opaque modules of a model, by qualified name; none within another.

    They are those that ``opaque`` says, and those that act on more than their output: layers of ``pymoe.nn`` that
    count or inject losses, batch norms that wait for the mini-batch, modules with hooks (but the model itself, and
    those that boundaries stand in), and those that change their attributes; and recurrent layers, whose graph would
    hold for one length.

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
        if named or isinstance(module, tuple(types)) or _runs_itself(module) or _is_kept(path, module, choice):
            chosen[path] = RealModule(module)
    return chosen


def _runs_itself(module: nn.Module) -> bool:
    return isinstance(module, (DeferredBatchNorm, nn.RNNBase)) or keeps_counts(module) or _has_backward_hooks(module)


def _is_kept(path: str, module: nn.Module, choice: Choice) -> bool:
    if not path or path in choice.opened:
        return False
    return path in choice.closed or any(True for _ in users_hooks(module))


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
