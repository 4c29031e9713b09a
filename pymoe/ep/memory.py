"""Memory for rows that come from other ranks.

Fresh memory costs a page fault every 4 KiB where it is first written, which is more than the copy that writes it. Large
rows on the CPU are asked for in pages of 2 MiB, as the operators ask for theirs. Where the system has none, that
changes nothing.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20


def empty_rows(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows (count, width) that hold anything.

    Args:
        count: how many.
        width: of a row, in elements.
        dtype: of an element.
        device: where.
    """
    rows = torch.empty(count, width, dtype=dtype, device=device)
    advise = _advice()
    if advise is not None and rows.is_cpu and rows.nbytes >= 2 * _HUGE_PAGE:
        begin = -(-rows.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (rows.data_ptr() + rows.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return rows


@cache
def _advice() -> Callable[[int, int, int], int] | None:
    """Return the system's ``madvise``, if it knows of huge pages."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise  # type: ignore[no-any-return]
