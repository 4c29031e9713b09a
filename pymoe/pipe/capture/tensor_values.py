"""Whose values the model's code takes out of torch: those of tensors that are neither parameters nor buffers.

A graph holds such a tensor and follows what is written into it. A number that ``.item()`` has made of it, an index, or
a fill value is a constant of the graph instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pymoe._torch_private import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    disable_current_modes,
    local_scalar_dense,
    pytree,
)

_TELLS_NO_VALUE = frozenset(
    (
        "__get__",
        "__hash__",
        "__len__",
        "data_ptr",
        "dense_dim",
        "dim",
        "element_size",
        "get_device",
        "has_names",
        "is_coalesced",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_neg",
        "is_pinned",
        "is_same_size",
        "is_set_to",
        "is_shared",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "size",
        "sparse_dim",
        "storage_offset",
        "stride",
        "type",
    )
)
"""Methods of tensors that tell something else about them."""


class TakenValues:
    """Notes the tensors of whose values the model's code has made values of Python's."""

    def __init__(self) -> None:
        self.tensors: dict[int | None, Tensor] = {}
        """Those tensors, by address."""
        self._single: dict[int | None, Tensor] = {}  # all that it has used of one element

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function of torch returns, and note of whose values that is made."""
        given = _leaves((args, kwargs))
        real = {_address(leaf): leaf for leaf in given if _is_real(leaf)}
        if isinstance(func, HigherOrderOperator) or not (real or any(map(_is_known, given))):
            return func(*args, **kwargs)
        self._single.update({address: tensor for address, tensor in real.items() if tensor.numel() == 1})
        with _Operators() as operators:
            result = func(*args, **kwargs)
        results = _leaves(result)
        made = any(isinstance(leaf, FakeTensor) for leaf in results)
        copied = any(_is_real(leaf) and _address(leaf) not in real for leaf in results)
        if not made and result is not None and getattr(func, "__name__", "") not in _TELLS_NO_VALUE:
            copied = copied or not any(_is_real(leaf) for leaf in results)
        for address, tensor in real.items():
            is_lost = made and address not in operators.seen
            if copied or is_lost or address in operators.asked:
                self.tensors[address] = tensor
        if operators.asked_known:
            self.tensors.update(self._single)
        return result


def bytes_of(tensor: Tensor) -> bytes:
    """Return the elements of a tensor."""
    with torch.inference_mode(False), torch.no_grad(), disable_current_modes():
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
        return bytes(flat.view(torch.uint8).numpy())


class _Operators(TorchDispatchMode):
    """Notes the addresses of the real tensors that operators get, and of those that are asked for a number, and whether
    one is of which torch knows that alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int | None] = set()
        self.asked: set[int | None] = set()
        self.asked_known = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.asked if func is local_scalar_dense else self.seen
        leaves = _leaves((args, kwargs))
        found.update(_address(leaf) for leaf in leaves if _is_real(leaf))
        self.asked_known |= func is local_scalar_dense and any(map(_is_known, leaves))
        return func(*args, **(kwargs or {}))


def _leaves(values: Any) -> list[Any]:
    leaves = pytree.tree_leaves(values)
    parts = [part for leaf in leaves if isinstance(leaf, slice) for part in (leaf.start, leaf.stop, leaf.step)]
    return leaves + parts


def _is_real(value: Any) -> bool:
    """Return whether a value is a tensor with elements, not one that stands for what a graph computes."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and _address(value) is not None


def _is_known(value: Any) -> bool:
    """Return whether torch knows the value of a tensor of a graph: it is made of tensors of one known element."""
    return isinstance(value, FakeTensor) and value.constant is not None


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a stand-in
        return None
