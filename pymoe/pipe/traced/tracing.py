"""``pipeline``: from any model to a pipe."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pymoe.pipe.capture.errors import stack_level
from pymoe.pipe.traced.losses import LossWrapper
from pymoe.pipe.traced.model import TracedModel
from pymoe.pipe.traced.shared_state import Spec
from pymoe.pipe.traced.split_points import SplitPoint
from pymoe.pipe.traced.trace import SplitPolicy, Trace, why_one_stage

if TYPE_CHECKING:
    from pymoe.pipe.pipe import Pipe

__all__ = ["pipeline"]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    chunks: int = 1,
    checkpoint: str = "except_last",
    devices: Sequence[torch.device | str | int] | None = None,
    multi_use_param_spec: Spec = None,
    output_loss_value_spec: Any = None,
    dynamic_shapes: Any = None,
    opaque: Sequence[type[nn.Module] | str] = (),
) -> Pipe:
    """Capture a model and cut it into stages: a :class:`pymoe.Pipe` that does what the model does.

    ::

        pipe = pipeline(model, (x[:2],), split_spec={"layers.4": SplitPoint.BEGINNING}, chunks=8)
        losses = pipe.step(x, target=y, loss_fn=nn.functional.cross_entropy)

    It is cut where the model's code calls :func:`pymoe.pipe_split` (or that of ``torch.distributed.pipelining``), and
    where ``split_spec`` or ``split_policy`` say; with no boundary it is one stage. Boundaries at the very beginning or
    end, or next to each other, make no stages. The model stays as it is, and goes on sharing parameters and buffers
    with the pipe.

    The model's Python code runs when it is captured, not when the pipe runs. Of what it does and reads there

    - is watched, and a change leads to another capture at the next call: modes; hooks; submodules; attributes of
      modules, what lists, dictionaries and objects of one's own among them hold, attributes of their classes; global
      variables, those of enclosing functions; variables of the environment; torch's default dtype and device; and,
      once the code asks for one, dtypes, grad mode, autocast and what requires gradients. Parameters and buffers may
      be replaced at any time by others of their shape;
    - is called as it is, in one piece, whenever the pipe runs: modules with hooks, and modules whose forward changes
      attributes, where no boundary is inside; ``opaque`` ones; autograd Functions; layers of :mod:`pymoe.nn`, recurrent
      layers, deferred batch norms;
    - is refused: changes of attributes and of other values outside of such modules, random numbers that do not come
      from torch's default generators, seeds, hooks on tensors, gradients within the forward, decisions by values of
      tensors;
    - is fixed, unseen: clocks, files, iterators and whatever else the world is asked; attributes of modules that are no
      submodules (in a plain list); what C extensions keep; values in containers of more than 256 items, and beyond the
      thousandth within one. Prints happen in captures alone. Hooks of the model
      itself, and of modules with boundaries inside, are part of the graph: they get micro-batches, and leave what they
      compute.

    Args:
        module: any model that can be captured by ``torch.export``.
        mb_args: examples of its arguments, of a micro-batch; of at least 2 in every dimension that shall be free.
        mb_kwargs: examples of its arguments by name. What is not a tensor, here and in ``mb_args``, is a constant.
        split_spec: for qualified names of submodules, whether a stage begins or ends there.
        split_policy: puts boundaries into the captured graph (``torch.fx.GraphModule``), and returns it:
            :func:`pymoe.pipe.split_into_equal_parameters` and its like, or one of your own, which calls
            :func:`pymoe.pipe.mark_boundary` or inserts calls of ``pipe_split``.
        chunks: into how many micro-batches a mini-batch is cut, as of :class:`pymoe.Pipe`.
        checkpoint: which micro-batches are run again for their backward, ``"always"``, ``"except_last"`` or
            ``"never"``, as of :class:`pymoe.Pipe`.
        devices: a device for every stage. None: they stay where they are.
        multi_use_param_spec: how several stages come by one parameter: a :class:`MultiUseParameterConfig`, or some by
            qualified name. None: it is replicated, or between devices transmitted.
        output_loss_value_spec: where in the output the loss is, which ``step()`` then minimises: like the output, with
            True there and False elsewhere; of dictionaries the one name is enough, ``{"loss": True}``. The loss is a
            mean over rows, or ``step(reduction="sum")``.
        dynamic_shapes: which dimensions are free, as for ``torch.export.export``; by default all that the model's code
            does not fix.
        opaque: modules, by type or qualified name, that are called as they are, uncut.

    Raises:
        CaptureError: the model cannot be captured; the message names the line of its code.
        TypeError: an argument is of the wrong kind.
        ValueError: an argument does not fit the model.

    Warns:
        UserWarning: ``split_spec`` or ``split_policy`` leave one stage; a module is called in one piece because it
            changes its attributes; the model is captured again and again.
    """
    from pymoe.pipe.pipe import Pipe

    if split_spec and split_policy is not None:
        raise ValueError("pipeline: split_spec or split_policy, not both")
    if not isinstance(module, nn.Module):
        raise TypeError(f"pipeline: the model must be an nn.Module, got {type(module).__name__}")
    if not isinstance(mb_args, (tuple, list)):
        raise TypeError(f"pipeline: mb_args must be a tuple of arguments, got {type(mb_args).__name__}")
    if output_loss_value_spec is None and isinstance(module, LossWrapper):
        output_loss_value_spec = module.loss_spec
    options: dict[str, Any] = {"dynamic_shapes": dynamic_shapes}
    if opaque:
        options["opaque"] = opaque
    trace = Trace(split_spec, split_policy, options)
    staged = TracedModel(
        module,
        tuple(mb_args),
        dict(mb_kwargs or {}),
        trace,
        multi_use=multi_use_param_spec,
        loss_spec=output_loss_value_spec,
        devices=devices,
    )
    if len(staged.parts) == 1 and (why := why_one_stage(trace)) is not None:
        warnings.warn(f"pipeline: the model is one stage: {why}", stacklevel=stack_level())
    return Pipe.of(staged, chunks, checkpoint)
