"""A graph module whose parameters and buffers are looked up in a model's own modules."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, fx, nn

from pymoe.pipe.capture.opaque import opaque_modules

__all__ = ["on_model", "owners"]


def on_model(graph: fx.Graph, model: nn.Module, constants: dict[str, Tensor], name: str = "Captured") -> fx.GraphModule:
    """The module of ``graph``, in which ``get_attr`` names a parameter or buffer of ``model``, or one of ``constants``.

    It holds no parameters itself: its modules share the dictionaries of the model's, so that it sees every parameter
    and buffer that the model gets. Opaque modules are in it themselves. Its ``state_dict`` has the keys of the model's,
    for all of the modules that the graph uses.
    """
    targets = [node.target for node in graph.nodes if node.op == "get_attr"]
    root = nn.Module()
    _share(root, model)
    for call in opaque_modules(graph):
        _add_module(root, model, call.path, call.module)
    for path in owners(target for target in targets if isinstance(target, str) and target not in constants):
        _add_path(root, model, path)
    for target in targets:
        if isinstance(target, str) and target in constants:
            # Not a buffer: it would be added to the model's.
            root.__dict__[target] = constants[target]
    module = fx.GraphModule(nn.Module(), fx.Graph(), name)
    module.__dict__.update({key: root.__dict__[key] for key in _STATE})
    module.__dict__["_modules"] = root._modules
    module.__dict__.update({target: root.__dict__[target] for target in constants if target in root.__dict__})
    module.graph = graph
    return module


_STATE = ("_parameters", "_buffers", "_non_persistent_buffers_set")


def owners(targets: Iterable[str]) -> list[str]:
    """The modules whose attributes these are, by qualified name, each once."""
    return list(dict.fromkeys(target.rpartition(".")[0] for target in targets))


def _add_module(root: nn.Module, model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    _add_path(root, model, owner)
    if name:
        root.get_submodule(owner)._modules[name] = module


def _add_path(root: nn.Module, model: nn.Module, path: str) -> None:
    here, original = root, model
    for name in path.split(".") if path else []:
        if here is original:  # an opaque module, which is here itself
            return
        original = original.get_submodule(name)
        if name not in here._modules:
            part = nn.Module()
            _share(part, original)
            here._modules[name] = part
        step = here._modules[name]
        assert step is not None
        here = step


def _share(part: nn.Module, original: nn.Module) -> None:
    for key in _STATE:
        part.__dict__[key] = original.__dict__[key]
    part.training = original.training
