"""``capture``: a model and example arguments to a graph."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from pymoe.pipe.capture.arguments import Arguments, Like
from pymoe.pipe.capture.captured import Captured
from pymoe.pipe.capture.choice import Opaque, opaque_by_path
from pymoe.pipe.capture.dynamic import trials
from pymoe.pipe.capture.entry import Entry, Stopped
from pymoe.pipe.capture.errors import CaptureError, asks_for_values, capture_error
from pymoe.pipe.capture.graph import rebuilt
from pymoe.pipe.capture.untouched import untouched

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
    """Capture ``model``, in the mode in which it is, as one graph, by ``torch.export``.

    The graph computes what the model computes, with the same operators in the same order: outputs, gradients, changed
    buffers and random numbers are equal bit by bit. The model stays exactly as it is, also when this fails. What it
    does beside tensors (counts in an attribute, prints) happens during the capture and is forgotten; opaque calls do it
    whenever the graph runs.

    Args:
        model: any module that ``torch.export`` takes.
        args: examples of the arguments; tensors of at least 2 in every dimension that shall be free.
        kwargs: examples of the arguments by name.
        dynamic_shapes: which dimensions are free, as for ``torch.export.export``; by default all that the model's code
            does not fix.
        opaque: types of modules, and qualified names, that are called as they are and not looked into, as layers of
            :mod:`pymoe.nn` and autograd Functions always are. They keep their state, hooks and mode; their outputs'
            shapes must follow from the shapes of their inputs.

    Raises:
        TypeError, ValueError: ``opaque`` or ``dynamic_shapes`` do not fit the model.
        CaptureError: the model cannot be captured; the message names the line of its code.
    """
    kwargs = kwargs or {}
    arguments = Arguments(model.forward, args, kwargs)
    modules = opaque_by_path(model, opaque)
    failure: BaseException | None = None
    for trial in trials(model.forward, args, kwargs, dynamic_shapes):
        if failure is not None and asks_for_values(failure) and any(trial.shapes):
            continue  # other free dimensions will not help
        entry = Entry(model, arguments.examples, arguments.spec, modules)
        with ExitStack() as stack:
            stack.enter_context(_one_at_a_time)
            stack.enter_context(untouched(model))
            stack.enter_context(_plain_surroundings(trial.any_size))
            tensors = tuple(leaf.make() for leaf in arguments.examples if isinstance(leaf, Like))
            try:
                program = torch.export.export(entry, tensors, dynamic_shapes=(tuple(trial.shapes),), strict=False)
            except Stopped as stopped:
                failure = stopped.error
                if isinstance(failure, CaptureError):
                    break
                continue
            except Exception as error:
                failure = error
                continue
        entry.output.warn(model)
        return rebuilt(program, entry, model, arguments)
    assert failure is not None
    raise capture_error(failure) from failure


@contextmanager
def _plain_surroundings(any_size: bool) -> Iterator[None]:
    """The state in which graphs are made, whatever the caller's is; theirs holds when the graph runs."""
    from torch.fx.experimental import _config

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Otherwise torch takes for granted that free dimensions are at least 2, and asks nothing about it.
        stack.enter_context(_silent("torch.fx.experimental.symbolic_shapes"))
        config: Any = _config
        stack.enter_context(config.patch(backed_size_oblivious=any_size))
        yield


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Keeps a logger from warning of what an error will say."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
