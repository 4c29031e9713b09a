"""``capture``: from a model and example arguments to a graph."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import fx, nn

from pymoe import _torch_private
from pymoe.pipe.capture.arguments import Arguments, Like, Trial, trials
from pymoe.pipe.capture.entry import Entry, Output, Stopped
from pymoe.pipe.capture.errors import BoundaryInside, CaptureError, branches_on_values, capture_error, stack_level
from pymoe.pipe.capture.external_values import caches_of, external_values
from pymoe.pipe.capture.graph import Captured, captured_graph
from pymoe.pipe.capture.guards import Guards
from pymoe.pipe.capture.opaque import Choice, Opaque, RealModule, choose_opaque, must_be_opaque
from pymoe.pipe.capture.python_reads import Answers, Recorder, ambient_answers
from pymoe.pipe.capture.snapshots import attributes_restored

__all__ = ["capture"]

_one_at_a_time = threading.RLock()  # torch.export replaces methods of torch's classes


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    opaque: Opaque = (),
) -> Captured:
    """Capture ``model``, in its present mode, as one graph, by ``torch.export``.

    The graph computes what the model computes, with the same operators in the same order: outputs, gradients, changed
    buffers and random numbers are equal bit by bit. The model stays exactly as it is, also when this fails.

    Python values are constants of the capture: ``Captured.guards`` tells whether they are still what they were. A
    submodule whose forward changes its attributes becomes opaque, with a warning; other changes of Python values by the
    model's code, and random numbers that are not torch's, are refused. What leaves no trace in them (prints) happens
    during the capture alone.

    Args:
        model: any module that ``torch.export`` takes.
        args: examples of the arguments; at least 2 in every dimension that is to be free.
        kwargs: examples of the arguments by name.
        dynamic_shapes: which dimensions are free, as for ``torch.export.export``; by default all that the model's code
            does not fix.
        opaque: types of modules, and qualified names, that are called as a whole instead of being traced, as layers of
            :mod:`pymoe.nn`, autograd Functions and modules with hooks always are. They keep their state, hooks and
            mode; their outputs' shapes must follow from the shapes of their inputs.

    Raises:
        TypeError, ValueError: ``opaque`` or ``dynamic_shapes`` does not fit the model.
        CaptureError: the model cannot be captured; the message names the line of its code.
    """
    ambient, choice = ambient_answers(), Choice()
    while True:
        attempt = _Attempt(model, args, kwargs or {}, dynamic_shapes, choose_opaque(model, opaque, choice), ambient)
        try:
            program, entry = attempt.export()
        except BoundaryInside as error:
            if error.path in choice.opened or must_be_opaque(model, opaque, error.path):
                raise capture_error(error) from error.__cause__
            choice.opened.add(error.path)
            continue
        changes = entry.output.users_changes(model)
        if not changes and not entry.output.side_effects:
            entry.output.recorder.reads.dtypes |= _asserts_dtypes(program)
            return captured_graph(program, entry, model, attempt.arguments, attempt.guards(entry.output))
        if entry.output.side_effects or not choice.close(changes):
            attempt.refuse(entry.output.side_effects, changes)
        warnings.warn(
            f"the forward of {', '.join(map(repr, changes))} changes attributes "
            f"({', '.join(sorted(name for names in changes.values() for name in names))}), which a graph cannot: the "
            "module is opaque, called as a whole",
            stacklevel=stack_level(),
        )


def _asserts_dtypes(program: Any) -> bool:
    """Return whether a graph holds for the dtypes of the example alone: ``x.float()`` of a float32 ``x`` was ``x``."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    return any(node.target is _torch_private.assert_tensor_metadata for graph in graphs for node in graph.nodes)


class _Attempt:
    """Captures of one model with the same opaque modules."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic_shapes: Any,
        modules: dict[str, RealModule],
        ambient: Answers,
    ) -> None:
        self.arguments = Arguments(model.forward, args, kwargs)
        self._model = model
        self._modules = modules
        self._ambient = ambient
        self._external = external_values(model)  # also of opaque modules: what they do in a capture is undone
        self._caches = caches_of(model)
        self._trials = list(trials(model.forward, args, kwargs, dynamic_shapes))

    def export(self) -> tuple[Any, Entry]:
        """Return what ``torch.export`` makes, and what it was given.

        Raises:
            CaptureError: the model cannot be captured.
        """
        failure: BaseException | None = None
        for trial in self._trials:
            if failure is not None and branches_on_values(failure) and any(trial.shapes):
                continue  # other free dimensions will not help
            entry = self._entry()
            try:
                return self._export(entry, trial), entry
            except Stopped as stopped:
                failure = stopped.error
                if isinstance(failure, BoundaryInside):
                    raise failure from failure.__cause__
                if isinstance(failure, CaptureError):
                    break
            except Exception as error:
                failure = error
        assert failure is not None
        raise capture_error(failure) from failure

    def guards(self, output: Output) -> Guards:
        """Return what a capture assumes; not what torch's own layers set before they read it."""
        opaque, reads = tuple(self._modules), output.recorder.reads
        for path, name in list(reads.attributes):
            if f"{path}.{name}".lstrip(".") in output.changed:
                del reads.attributes[path, name]
        return Guards(self._model, opaque, reads, external_values(self._model, opaque), self.arguments)

    def refuse(self, side_effects: Sequence[str], changes: Mapping[str, Sequence[str]]) -> NoReturn:
        """Raise the CaptureError for what a graph cannot do, with the line that does it."""
        entry = self._entry(finds_line=True)
        with suppress(Exception, Stopped):
            self._export(entry, self._trials[-1])
        if side_effects:
            why = f"it {side_effects[0]}: a graph would do that once, in the capture, and never again"
        else:
            names = ", ".join(name for of_module in changes.values() for name in of_module)
            why = (
                f"it changes attributes ({names}) of the model, or of a module with a stage boundary inside, and a "
                "graph changes tensors alone. Keep numbers in buffers; make what is the same in every call before the "
                "capture, in __init__ or by one call of the model"
            )
        raise capture_error(CaptureError(why), entry.output.place)

    def _entry(self, finds_line: bool = False) -> Entry:
        recorder = Recorder(self._model, self._ambient)
        return Entry(self._model, self.arguments, self._modules, self._external, recorder, finds_line)

    def _export(self, entry: Entry, trial: Trial) -> Any:
        with (
            _one_at_a_time,
            attributes_restored(self._model),
            _cleared(self._caches),
            _plain_surroundings(trial.any_size),
        ):
            tensors = tuple(leaf.make() for leaf in self.arguments.examples if isinstance(leaf, Like))
            shapes = (tuple(trial.shapes),) if tensors else None
            return torch.export.export(entry, tensors, dynamic_shapes=shapes, strict=False)


@contextmanager
def _cleared(caches: Sequence[Any]) -> Iterator[None]:
    """Empty the caches that the block has put something into: it may be a tensor without values."""
    misses = [cache.cache_info().misses for cache in caches]
    try:
        yield
    finally:
        for cache, before in zip(caches, misses, strict=True):
            if cache.cache_info().misses != before:
                cache.cache_clear()


@contextmanager
def _plain_surroundings(any_size: bool) -> Iterator[None]:
    """Set the state in which graphs are made, whatever the caller's is; that holds when the graph runs."""
    config: Any = _torch_private.fx_config  # imported when it is first used
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.compiler.set_stance("force_eager"),
        _silent("torch.fx.experimental.symbolic_shapes"),
        # Otherwise torch assumes that free dimensions are at least 2, and adds no guard for it.
        config.patch(backed_size_oblivious=any_size),
    ):
        yield


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Keep a logger from warning of what an error will say."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
