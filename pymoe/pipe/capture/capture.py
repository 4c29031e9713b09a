"""``capture``: a model and example arguments to a graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from pymoe.pipe.capture.arguments import Arguments, Like
from pymoe.pipe.capture.captured import Captured
from pymoe.pipe.capture.choice import Opaque, opaque_by_path
from pymoe.pipe.capture.dynamic import candidates
from pymoe.pipe.capture.entry import Entry
from pymoe.pipe.capture.errors import CaptureError, capture_error
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
    for shapes in candidates(model.forward, args, kwargs, dynamic_shapes):
        entry = Entry(model, arguments.examples, arguments.spec, modules)
        with ExitStack() as stack:
            stack.enter_context(_one_at_a_time)
            stack.enter_context(untouched(model))
            stack.enter_context(_plain_surroundings())
            tensors = tuple(leaf.make() for leaf in arguments.examples if isinstance(leaf, Like))
            try:
                program = torch.export.export(entry, tensors, dynamic_shapes=(tuple(shapes),), strict=False)
            except CaptureError:
                raise
            except Exception as error:
                failure = error
                continue
        return rebuilt(program, entry, model, arguments)
    assert failure is not None
    raise capture_error(failure) from failure


@contextmanager
def _plain_surroundings() -> Iterator[None]:
    """The state in which graphs are made, whatever the caller's is; theirs holds when the graph runs."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
