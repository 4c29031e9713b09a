"""Routing replay: a forward that sends every token to the experts that were recorded in earlier forwards.

Reinforcement learning needs this, because the program that generates and the program that trains may choose different
experts for the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from pymoe import _torch_private as private
from pymoe.nn.choices import ChoosingLayer, Removable, choosing_layers
from pymoe.nn.options import check_model


@dataclass
class Forward:
    """The experts chosen in one forward of a model."""

    shape: tuple[int, ...] | None
    """The shape of the tokens, such as (B, S); None if the model was given no tensor."""
    ids: Tensor | None
    """The token ids, of shape ``shape``; None if the model was given no ids."""
    choices: dict[str, Tensor] = field(default_factory=dict)
    """(T, K) int32, the experts of every token, by the name of the layer."""


@dataclass
class Routes:
    """The experts that the layers of a model chose in one or more forwards, one after another."""

    experts: dict[str, int]
    """E of every layer, by name, in the model's order."""
    forwards: list[Forward] = field(default_factory=list)

    def joined(self) -> Forward:
        """Join the routes of all forwards along each sequence; return them as those of one forward over all tokens.

        Raises:
            ValueError: there is no forward; or there are several, and some have tokens that are not (B, S) with the
                same B, called other layers, or called a layer for only some of the tokens.
        """
        if not self.forwards:
            raise ValueError("Routes: expected at least one recorded forward, got none")
        first, *others = self.forwards
        if not others:
            return first
        shapes = [forward.shape for forward in self.forwards]
        rows = shapes[0][0] if shapes[0] else 0
        for forward in self.forwards:
            shape, layers = forward.shape, forward.choices
            if (
                shape is None
                or len(shape) != 2
                or shape[0] != rows
                or layers.keys() != first.choices.keys()
                or any(len(choice) != shape[0] * shape[1] for choice in layers.values())
            ):
                raise ValueError(
                    f"Routes: forwards can be joined if each was given tokens (B, S) with the same B and called the "
                    f"same layers for all of them, got shapes {shapes}"
                )
        joined = {
            name: torch.cat([one.choices[name].unflatten(0, (rows, -1)) for one in self.forwards], 1).flatten(0, 1)
            for name in first.choices
        }
        ids = [forward.ids for forward in self.forwards if forward.ids is not None]
        length = sum(shape[1] for shape in shapes if shape)
        return Forward((rows, length), torch.cat(ids, dim=1) if len(ids) == len(shapes) else None, joined)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routes]:
    """Record the experts that every layer chooses in all forwards of ``model`` within a ``with`` block.

    ::

        with record_routing(model) as routes:
            ids = model.generate(prompt, max_new_tokens=20)
        with replay_routing(model, routes):
            loss = criterion(model(ids[:, :-1]))  # the last token was generated, but not given to the model
            loss.backward()

    Forwards that activation checkpointing repeats in a backward pass are not recorded. Recording changes no results.

    Args:
        model: a model with :class:`pymoe.nn.MoE` layers, or one of transformers whose experts are behind its interface,
            after the import of :mod:`pymoe.integrations.transformers`.

    Yields:
        The routes. They contain copies on the model's device: 4 K bytes per token and layer.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no such layers, or the choice of one of them cannot be observed.
        RuntimeError: at the end of the block, if no forward was recorded, or one without a call of a layer (code that
            was compiled before the block is not recorded); within the block, if code is compiled, or if a layer runs
            twice in a forward of the model, or outside of one.

    Example:
        >>> model = torch.nn.Sequential(pymoe.nn.MoE(16, 32, num_experts=4, top_k=2))
        >>> x = torch.randn(6, 16)
        >>> with pymoe.nn.record_routing(model) as routes:
        ...     recorded = model(x)
        >>> with pymoe.nn.replay_routing(model, routes):
        ...     torch.equal(model(x), recorded)
        True
    """
    check_model("record_routing", model)
    layers = choosing_layers("record_routing", model)
    routes = Routes({name: layer.num_experts for name, layer in layers.items()})
    watched = _Watched("record_routing", model, layers, lambda shape, ids: routes.forwards.append(Forward(shape, ids)))

    def keep(name: str, experts_TK: Tensor) -> None:
        if private.current_graph_task_id() != -1:  # a forward that is recomputed in the backward pass
            return
        watched.check_within(name)
        choices = routes.forwards[-1].choices
        if name in choices:
            raise RuntimeError(f"record_routing: expected one call of {name} in a forward, got two")
        choices[name] = experts_TK.detach().to(torch.int32, copy=True)

    with watched:
        for name, layer in layers.items():
            watched.hooks.append(layer.observe(partial(keep, name)))
        yield routes
    if not all(forward.choices for forward in routes.forwards) or not routes.forwards:
        raise RuntimeError(
            "record_routing: expected forwards of the model in the block, got none that was seen; code that was "
            "compiled before the block is not"
        )


@contextmanager
def replay_routing(model: nn.Module, routes: Routes) -> Iterator[None]:
    """Make one forward of ``model`` within a ``with`` block, and its backward pass, use the recorded experts.

    The router computes the weights of the recorded experts from its present scores, by its usual rule, and gets
    gradients through them (the routing replay of R3, arXiv 2510.11370). If neither the model nor its inputs have
    changed, the output is bit for bit that of the recorded forward. The routes of several recorded forwards, such as
    those of a prompt and of the tokens generated after it, are joined along each sequence: replay them in one forward
    over all tokens.

    The model must be given the same token ids as in the recorded forwards, including padding: sequences of different
    lengths must be generated and replayed in one batch, with the same padding. Ids are compared. For models that are
    given embeddings, only the shape is compared.

    Args:
        model: the model that was recorded, or a model with the same layers.
        routes: the result of :func:`record_routing`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the routes differ from the model in the number of layers, tokens, choices or experts; they were
            recorded for other ids; the recorded forwards cannot be joined; or a router would choose other experts and
            cannot give the weights of the recorded ones, for example because it has masked the scores of some groups.
        RuntimeError: the block contains no forward, or more than one; a layer ran twice, not at all, or outside of a
            forward of the model; code is compiled; or the backward pass must recompute activations, but is not in the
            block.

    Example:
        >>> model = torch.nn.Sequential(pymoe.nn.MoE(16, 32, num_experts=4, top_k=2))
        >>> x = torch.randn(6, 16)
        >>> with pymoe.nn.record_routing(model) as routes:
        ...     before = model(x)
        >>> load, weight = model[0].stats.load, torch.nn.init.zeros_(model[0].router.weight)  # another router
        >>> with pymoe.nn.replay_routing(model, routes):
        ...     after = model(x)
        >>> torch.equal(model[0].stats.load, load)  # the same choice
        True
    """
    check_model("replay_routing", model)
    if not isinstance(routes, Routes):
        raise TypeError(f"replay_routing: routes must be Routes of record_routing, got {type(routes).__name__}")
    layers = choosing_layers("replay_routing", model)
    replay = _Replay(routes, layers)
    with _Watched("replay_routing", model, layers, replay.begin) as watched:
        for name, layer in layers.items():
            used = partial(replay.use, watched, name)
            choice = replay.choices.get(name)
            watched.hooks.append(layer.observe(used) if choice is None else layer.replace(choice, used))
        yield
    replay.end()


class _Replay:
    """Replays the routes of one forward, and records which layers have used their routes."""

    def __init__(self, routes: Routes, layers: dict[str, ChoosingLayer]) -> None:
        recorded, given = list(routes.experts.items()), [(name, one.num_experts) for name, one in layers.items()]
        alike = len(recorded) == len(given) and all(
            experts == other_experts and (name.endswith(other) or other.endswith(name))
            for (name, experts), (other, other_experts) in zip(recorded, given, strict=True)
        )
        if not alike:
            raise ValueError(
                f"replay_routing: expected a model with the recorded layers (names and experts) {recorded}, got {given}"
            )
        joined = routes.joined()
        self.shape, self.ids = joined.shape, joined.ids
        names = dict(zip(routes.experts, layers, strict=True))  # recorded name -> name here; wrappers add a prefix
        self.choices = {names[name]: choice.to(torch.int64, copy=True) for name, choice in joined.choices.items()}
        self.begun = False
        self.taken: set[str] = set()
        self.grad = False
        self.checkpointed = self.recomputed = False

    def begin(self, shape: tuple[int, ...] | None, ids: Tensor | None) -> None:
        """Begin the forward. Raise unless it is the first one, with the recorded shape and ids (None fits any)."""
        if self.begun:
            raise RuntimeError("replay_routing: expected one forward of the model in the block, got another")
        self.begun, self.grad = True, torch.is_grad_enabled()
        if None not in (self.shape, shape) and self.shape != shape:
            raise ValueError(
                f"replay_routing: expected tokens of the recorded shape {self.shape}, got {shape}; the last token that "
                "was generated has no routes, because the model was not given it"
            )
        if self.ids is not None and ids is not None and not torch.equal(self.ids, ids.to(self.ids.device)):
            raise ValueError("replay_routing: expected the ids that were recorded, padding included, got others")

    def use(self, watched: _Watched, name: str, experts_TK: Tensor) -> None:
        """Record that the layer ``name`` uses its recorded routes; raise if they do not fit this call of the layer."""
        choice = self.choices.get(name)
        if choice is None:
            raise ValueError(f"replay_routing: expected calls of only the recorded layers, got one of {name}")
        if choice.shape != experts_TK.shape:
            recorded, got = (f"{tokens} tokens with {k} choices" for tokens, k in (choice.shape, experts_TK.shape))
            raise ValueError(f"replay_routing: expected {recorded} in {name}, as recorded, got {got}")
        if private.current_graph_task_id() != -1:
            self.recomputed = True
            return
        watched.check_within(name)
        if name in self.taken:
            raise RuntimeError(f"replay_routing: expected one call of {name} in the forward, got two")
        self.taken.add(name)
        self.checkpointed = self.checkpointed or self.grad != torch.is_grad_enabled() or _in_checkpoint()

    def end(self) -> None:
        """Raise unless all routes were used and the backward pass, if it recomputes activations, ran in the block."""
        missing = [name for name in self.choices if name not in self.taken]
        if missing:
            raise RuntimeError(
                f"replay_routing: expected a forward through the recorded layers, got none of {', '.join(missing)}; "
                "code that was compiled before the block does not replay"
            )
        if self.checkpointed and not self.recomputed:
            raise RuntimeError(
                "replay_routing: expected the backward pass in the block, because activations are recomputed in it, "
                "got the end of the block first"
            )


def _in_checkpoint() -> bool:
    """Return whether the forward runs inside a ``torch.utils.checkpoint`` with ``use_reentrant=False``."""
    hooks = private.top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


class _Watched:
    """Observes the forwards of a model in a ``with`` block, and removes all hooks at the end of the block.

    A wrapper's ``forward`` may be bypassed: PEFT's ``generate``, for example, calls the model inside the wrapper. So
    the outermost call of any module that contains all layers counts as the forward.
    """

    def __init__(
        self,
        function: str,
        model: nn.Module,
        layers: dict[str, ChoosingLayer],
        begin: Callable[[tuple[int, ...] | None, Tensor | None], None],
    ) -> None:
        self.function = function
        self.begin = begin
        self.depth = 0
        self.hooks: list[Removable] = []
        paths = [name.split(".")[:-1] for name in layers]
        shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
        self.modules = [model, *(model.get_submodule(".".join(shared[: n + 1])) for n in range(len(shared)))]

    def __enter__(self) -> _Watched:
        for module in self.modules:
            self.hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self.hooks.append(module.register_forward_hook(self._after, always_call=True))
        return self

    def __exit__(self, *raised: Any) -> None:
        for hook in self.hooks:
            hook.remove()

    def check_within(self, name: str) -> None:
        """Raise unless a forward of the model is running."""
        if not self.depth:
            raise RuntimeError(f"{self.function}: expected layers to run in a forward of the model, got {name} alone")

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(f"{self.function}: expected eager code, got torch.compile")
        if private.current_graph_task_id() != -1:
            return
        self.depth += 1
        if self.depth == 1:
            self.begin(*_tokens(arguments, named))

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if private.current_graph_task_id() == -1 and self.depth:
            self.depth -= 1


def _tokens(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[int, ...] | None, Tensor | None]:
    """Return the shape of the tokens that a model is given, and the token ids; either is None if it is not given."""
    preferred = [named.get(name) for name in ("input_ids", "inputs_embeds")]
    for value in (*preferred, *arguments, *named.values()):
        if isinstance(value, Tensor):
            is_ids = not value.is_floating_point()
            return tuple(value.shape if is_ids else value.shape[:-1]), value.detach().clone() if is_ids else None
    return None, None
