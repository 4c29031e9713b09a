"""A captured model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree

from pymoe.pipe.capture.arguments import Arguments
from pymoe.pipe.capture.fits import Fits
from pymoe.pipe.capture.guards import Guards

__all__ = ["Captured"]


@dataclass(frozen=True, eq=False)
class Captured:
    """A model as one graph, in one of its modes (training, evaluation).

    The nodes of ``graph``, in this order of kinds:

    - a ``placeholder`` for every leaf of ``(args, kwargs)``, also for those that are no tensors: these are constants of
      the capture and have no users;
    - ``get_attr`` of parameters and buffers by their qualified names in the model (shared ones under one name), of
      ``_constant_N`` for other tensors that the model's code holds;
    - ``call_function``: operators, arithmetic on sizes, blocks with a state of their own (a ``Region``), and calls that
      are made as they are (``OpaqueFunction``, ``OpaqueModule``); the last three return lists;
    - one ``output`` with the list of output leaves.

    The graph module looks parameters and buffers up in the model's own modules: what the model gets in their place,
    by ``load_state_dict(assign=True)`` or ``.to()``, the graph sees.

    A node's ``meta`` holds ``val`` (a fake tensor or number), ``stack_trace`` and ``nn_module_stack``.
    """

    graph: fx.GraphModule
    arguments: Arguments
    out_spec: _pytree.TreeSpec
    training: bool
    modes: tuple[bool, ...]
    """``training`` of every module of the model, in the order of ``modules()``: the graph holds for these."""
    names: dict[str, str]
    """What the user calls the parameters and buffers of the graph."""
    fits: Fits
    guards: Guards
    """What the capture takes for granted about Python."""

    @property
    def in_spec(self) -> _pytree.TreeSpec:
        """The structure of ``(args, kwargs)``."""
        return self.arguments.spec

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call. Arguments may be given by name or position; those that equal their defaults may be
        left out.

        Raises:
            TypeError: the call has another form than the captured one.
        """
        return self.arguments.flatten(args, kwargs)

    def check(self, leaves: Sequence[Any]) -> None:
        """Whether a call fits. Dimensions that the model leaves free may have any size; dtypes any precision.

        Raises:
            ValueError: it does not; the message names argument and dimension.
        """
        self.fits.check(leaves)
