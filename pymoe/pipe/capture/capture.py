"""``capture``: from a model and example arguments to a graph."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from pymoe import _torch_private
from pymoe.autograd.fork import start_engine
from pymoe.pipe.capture.arguments import Arguments, Like, Trial, trials
from pymoe.pipe.capture.entry import Entry, ModelRun, Stopped
from pymoe.pipe.capture.errors import BoundaryInside, CaptureError, branches_on_values, capture_error, stack_level
from pymoe.pipe.capture.external_values import ExternalValues
from pymoe.pipe.capture.graph import Captured, captured_graph
from pymoe.pipe.capture.guards import Guards
from pymoe.pipe.capture.opaque import Opaque, choose_opaque, must_be_opaque
from pymoe.pipe.capture.python_reads import ambient_answers
from pymoe.pipe.capture.snapshots import attributes_restored, patched

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
    kwargs = kwargs or {}
    arguments = Arguments(model.forward, args, kwargs)
    ways = list(trials(model.forward, args, kwargs, dynamic_shapes))
    external = ExternalValues(model)  # also of opaque modules: what they do in a capture is undone
    ambient = ambient_answers()
    opened: set[str] = set()  # opaque modules with boundaries inside
    closed: set[str] = set()  # modules that change their attributes
    while True:
        new_run = partial(ModelRun, model, arguments, choose_opaque(model, opaque, opened, closed), external, ambient)
        try:
            program, run = _first_to_succeed(new_run, ways)
        except BoundaryInside as error:
            if error.path in opened or must_be_opaque(model, opaque, error.path):
                raise capture_error(error) from error.__cause__
            opened.add(error.path)
            continue
        changes = run.users_changes()
        if not changes and not run.side_effects:
            return captured_graph(program, run, _guards(program, run))
        if run.side_effects or "" in changes or changes.keys() & (opened | closed):
            raise _refusal(new_run(finds_line=True), ways[-1], run.side_effects, changes)
        closed |= changes.keys()
        warnings.warn(
            f"the forward of {', '.join(map(repr, changes))} changes attributes "
            f"({', '.join(sorted(name for names in changes.values() for name in names))}), which a graph cannot: the "
            "module is opaque, called as a whole",
            stacklevel=stack_level(),
        )


def _first_to_succeed(new_run: Callable[[], ModelRun], ways: Sequence[Trial]) -> tuple[Any, ModelRun]:
    """Return what ``torch.export`` makes, and the run that it made of it.

    Raises:
        BoundaryInside: a stage boundary is inside an opaque module.
        CaptureError: the model cannot be captured.
    """
    failure: BaseException | None = None
    for trial in ways:
        if failure is not None and branches_on_values(failure) and any(trial[0]):
            continue  # other free dimensions will not help
        run = new_run()
        try:
            return _export(run, trial), run
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


def _export(run: ModelRun, trial: Trial) -> Any:
    shapes, any_size = trial
    start_engine()  # before torch.export pretends that there is a GPU
    with (
        _one_at_a_time,
        attributes_restored(run.model),
        _cleared(run.external.caches.values()),
        _plain_surroundings(any_size),
    ):
        tensors = tuple(leaf.make() for leaf in run.arguments.examples if isinstance(leaf, Like))
        return torch.export.export(Entry(run), tensors, dynamic_shapes=(shapes,) if tensors else None, strict=False)


def _guards(program: Any, run: ModelRun) -> Callable[[nn.Module], Guards]:
    """Return what a capture assumes; not what torch's own layers set before they read it."""
    reads = run.recorder.reads
    # A graph may hold for the dtypes of the example alone: ``x.float()`` of a float32 ``x`` was ``x``.
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    reads.dtypes |= any(
        node.target is _torch_private.assert_tensor_metadata for graph in graphs for node in graph.nodes
    )
    for path, name in list(reads.attributes):
        if f"{path}.{name}".lstrip(".") in run.changed:
            del reads.attributes[path, name]
    guards = partial(Guards, opaque=tuple(run.opaque), reads=reads, arguments=run.arguments)
    try:
        guards(run.model)
    except CaptureError as error:  # a value that cannot be watched
        raise capture_error(error) from None
    return guards


def _refusal(
    run: ModelRun, trial: Trial, side_effects: Sequence[str], changes: Mapping[str, Sequence[str]]
) -> CaptureError:
    """Return the error for what a graph cannot do, with the line that does it, which ``run`` finds."""
    with suppress(Exception, Stopped):
        _export(run, trial)
    if side_effects:
        why = f"it {side_effects[0]}: a graph would do that once, in the capture, and never again"
    else:
        names = ", ".join(name for of_module in changes.values() for name in of_module)
        why = (
            f"it changes attributes ({names}) of the model, or of a module with a stage boundary inside, and a "
            "graph changes tensors alone. Keep numbers in buffers; make what is the same in every call before the "
            "capture, in __init__ or by one call of the model"
        )
    return capture_error(CaptureError(why), run.place)


@contextmanager
def _cleared(caches: Collection[Any]) -> Iterator[None]:
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
        # They report what an error will say.
        patched((logging.getLogger("torch.fx.experimental.symbolic_shapes"), "disabled", True)),
        patched((logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)),
        # Otherwise torch assumes that free dimensions are at least 2, and adds no guard for it.
        config.patch(backed_size_oblivious=any_size),
    ):
        yield
