"""The arguments of a call as a flat list of leaves, and every leaf by the name that its user would give it."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from pymoe.pipe.capture.errors import CaptureError

__all__ = ["Arguments", "Like", "is_constant"]


class Like(NamedTuple):
    """What a capture needs of an example tensor: not its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Like:
        return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self) -> Tensor:
        """Another example, of any values."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


_CONSTANTS = (
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    slice,
    range,
    type(None),
    type(...),
)


def is_constant(leaf: Any) -> bool:
    """Whether something other than a tensor may be an argument or a result: what is always itself."""
    return isinstance(leaf, _CONSTANTS)


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number


class Arguments:
    """How the arguments of a model's ``forward`` were given when it was captured.

    Calls may give them otherwise: by name or by position, in another order, with or without those that equal their
    defaults.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._signature = inspect.signature(forward)
        paths, self.spec = _pytree.tree_flatten_with_path((args, kwargs))
        positions = self._positions(len(args))
        self.names = [_name(path, positions) for path, _ in paths]
        self.examples: list[Any] = [Like.of(leaf) if isinstance(leaf, Tensor) else leaf for _, leaf in paths]
        """The leaves of the example; in place of tensors what they are like."""
        for name, leaf in zip(self.names, self.examples, strict=True):
            if not isinstance(leaf, Like) and not is_constant(leaf):
                raise CaptureError(
                    f"the model cannot be captured: its argument {name} is a {type(leaf).__name__}. Arguments may be "
                    "tensors, numbers, strings, None, and lists, tuples and dicts of them; register other classes with "
                    "torch.utils._pytree.register_pytree_node, or register_dataclass"
                )

    def example(
        self, dtypes: Sequence[torch.dtype | None] = (), call: Sequence[Any] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An example call, ``(args, kwargs)``; its tensors have the ``dtypes``, and those of another ``call`` say
        whether they require gradients, where that is known.
        """
        none = [None] * len(self.examples)
        leaves = [
            leaf._replace(
                dtype=dtype or leaf.dtype, requires_grad=getattr(now, "requires_grad", leaf.requires_grad)
            ).make()
            if isinstance(leaf, Like)
            else leaf
            for leaf, dtype, now in zip(self.examples, dtypes or none, call or none, strict=True)
        ]
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call, in the order of ``names``.

        Raises:
            TypeError: the call does not have the form of the one that was captured.
        """
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        if spec == self.spec:
            return leaves
        example_args, example_kwargs = _pytree.tree_unflatten([_Slot(n) for n in range(len(self.names))], self.spec)
        expected, expected_spec = _pytree.tree_flatten(self._bound(example_args, example_kwargs))
        given, given_spec = _pytree.tree_flatten(self._bound(args, kwargs))
        if given_spec != expected_spec:
            raise TypeError(
                "the call has another form than the one that was captured: captured were "
                f"{self._describe(example_args, example_kwargs)}, given are {self._describe(args, kwargs)}"
            )
        leaves = [None] * len(self.names)
        for slot, value in zip(expected, given, strict=True):
            if isinstance(slot, _Slot):
                leaves[slot.number] = value
            elif not (slot is value or (type(slot) is type(value) and slot == value)):
                raise TypeError(
                    f"the call gives {value!r} where the one that was captured left the default, {slot!r}: "
                    "capture with an example of it"
                )
        return leaves

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        rest = {
            name: dict(sorted(value.items()))
            for name, value in bound.arguments.items()
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        }
        return {**bound.arguments, **rest}

    def _describe(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        names = self._positions(len(args))
        parts = [f"{names[n]}" for n in range(len(args))] + list(kwargs)
        return "(" + ", ".join(parts) + ")"

    def _positions(self, count: int) -> list[str]:
        """What the first ``count`` positional arguments are called."""
        names: list[str] = []
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                names += [f"{name}[{n}]" for n in range(count - len(names))]
            elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
                names.append(name)
        return names + [f"argument {n}" for n in range(len(names), count)]


def _name(path: tuple[Any, ...], positions: list[str]) -> str:
    which, key, *rest = path
    first = positions[key.idx] if which.idx == 0 else str(key.key)
    return first + _pytree.keystr(tuple(rest))
