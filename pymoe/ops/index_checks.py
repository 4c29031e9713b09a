"""A debug mode that checks the values of index tensors on a GPU.

On the CPU every kernel checks the indices that it reads. A CUDA kernel skips indices that are out of range: to report
them, the host would have to wait for the device in every call. While :class:`check_indices` is on, the host waits and
reports them.
"""

from __future__ import annotations

import os
from types import TracebackType

import torch
from torch import Tensor

from pymoe._common import checks
from pymoe._common.contracts import check_experts, check_offsets, check_order
from pymoe._common.types import Routing
from pymoe._torch_private import FakeTensor

VARIABLE = "PYMOE_CHECK_INDICES"


def _from_environment() -> bool:
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {text!r}")
    return text == "1"


_enabled = _from_environment()


class check_indices:
    """Check the values of index tensors on CUDA devices before every call: a debug mode, off by default.

    While it is on, the operators that take indices (``build_routing``, ``dispatch``, ``combine``, ``grouped_linear``,
    and ``expert_activation`` with a bias) raise for values that are out of range, with the same exception and message
    as on the CPU. Every such call then waits for the device. While it is off, CUDA kernels skip such values: memory is
    safe, and results that depend on them are unspecified. CPU tensors are always checked.

    Calling it sets the mode of the process; as a context manager it restores the previous mode at the end. The
    environment variable ``PYMOE_CHECK_INDICES=1`` turns it on from the start. Code compiled by :func:`torch.compile`
    is not checked. While a CUDA graph is captured, which must not synchronise, a call in debug mode raises
    ``RuntimeError``.

    Args:
        enabled: whether to check from now on.

    Example::

        with pymoe.ops.check_indices():
            loss = model(batch)  # an index out of range raises here, at its operator
    """

    def __init__(self, enabled: bool = True) -> None:
        global _enabled
        if not isinstance(enabled, bool):
            raise TypeError(f"check_indices: enabled must be a bool, got {type(enabled).__name__}")
        self._former = _enabled
        _enabled = enabled

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _enabled
        _enabled = self._former


def are_on() -> bool:
    """Return whether the debug mode is on. The functions below need no such test: they do nothing while it is off."""
    return _enabled


def _kernel_checks(index: Tensor) -> bool:
    """Return whether the kernel that reads ``index`` raises errors for bad values itself."""
    return not index.is_cuda


def _to_check(operator: str, index: Tensor) -> bool:
    # is_compiling() is tested first, so that a compiled graph neither reads the mode nor depends on it.
    if torch.compiler.is_compiling() or not _enabled or _kernel_checks(index) or isinstance(index, FakeTensor):
        return False
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{operator}: indices cannot be checked while a CUDA graph is captured; "
            f"capture under pymoe.ops.check_indices(False)"
        )
    return True


def experts_in_range(operator: str, experts: Tensor, num_experts: int, foreign_experts: bool) -> None:
    """In debug mode, raise if an index is negative or, without ``foreign_experts``, at least ``num_experts``."""
    if _to_check(operator, experts):
        check_experts(operator, experts, num_experts, foreign_experts)


def slots_in_range(operator: str, routing: Routing) -> None:
    """In debug mode, raise if a slot is neither -1 nor the index of a row."""
    if _to_check(operator, routing[0]):
        checks.slots_in_range(operator, routing)


def offsets_in_range(operator: str, offsets: Tensor, rows: int, argument: str = "offsets") -> None:
    """In debug mode, raise unless ``offsets`` start at 0, never decrease, and end at ``rows`` or below."""
    if _to_check(operator, offsets):
        check_offsets(offsets.tolist(), rows, operator, argument)


def order_in_range(operator: str, order: Tensor, offsets: Tensor) -> None:
    """In debug mode, raise unless ``order[:offsets[-1]]`` names rows that exist, each at most once."""
    if _to_check(operator, order):
        check_order(order[: int(offsets[-1])].tolist(), order.shape[0], operator)
