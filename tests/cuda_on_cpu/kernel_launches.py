"""Records the names of the kernels that a CUDA device would launch, in order, without such a device.

Tensors lie on the pretended device. Operators of pymoe run their CUDA kernels on the emulator, which records its
launches. Operators of torch are recorded by a dispatch mode: :data:`LAUNCHES` lists the kernels that each of them
launches on CUDA, and an operator without an entry is an error.

torch's grouped product is replaced by a function that behaves like torch's kernel for compute capability 9.x: it trusts
its offsets, and does not write the rows past the last offset, which are NaN here. So a NaN in the results shows that
something read a row that was never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NONE: tuple[str, ...] = ()
GROUPED = ("torch: prepare a grouped product", "torch: grouped product")
"""The launches in aten/src/ATen/native/cuda/GroupMM.cu: a block that writes pointers, sizes and strides, and the
product."""

QUESTIONS = {"promote_types", "is_same_size", "_has_compatible_shallow_copy_type"}
LAUNCHES = {
    # Views and uninitialised memory launch nothing.
    **dict.fromkeys(
        ["alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "narrow", "new_empty"], NONE
    ),
    **dict.fromkeys(["permute", "reshape", "select", "slice", "split", "squeeze", "t", "transpose", "unbind"], NONE),
    **dict.fromkeys(["unsqueeze", "view", "_unsafe_view", "new_empty_strided"], NONE),
    # These launch one kernel each. A product of cuBLAS counts as one, although it takes two if split over its depth.
    **{
        name: (f"torch: {name}",)
        for name in (
            *("_to_copy", "add", "add_", "addmm_", "clamp_", "clone", "copy_", "cumsum", "div", "fill_", "full", "mm"),
            *("mul", "new_zeros", "new_ones", "ones", "ones_like", "sub", "sum", "zero_", "zeros", "zeros_like"),
        )
    },
    "addmm": ("torch: copy what is added to", "torch: addmm"),
    "_grouped_mm": GROUPED,
}


class Launches(TorchDispatchMode):
    """Appends to :attr:`names` the launches of every operation inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if namespace == "pymoe":
            seen = len(torch.ops.pymoe_emulator.history(0).splitlines())
            begin = len(self.names)
            with listening(self.names):
                result = func(*args, **(kwargs or {}))
            own = torch.ops.pymoe_emulator.history(seen).splitlines()
            # pymoe's launches come first, then torch's, since their order within one operator is not recorded.
            self.names[begin:begin] = [f"pymoe: {one}" for one in own]
            return result
        if namespace == "aten" and name not in QUESTIONS:
            if name not in LAUNCHES:
                raise AssertionError(f"say in LAUNCHES how many kernels aten::{name} starts")
            overload = func._schema.overload_name
            self.names += [f"{one}, {overload}" if overload == "dtype" else one for one in LAUNCHES[name]]
        return func(*args, **(kwargs or {}))


_listener: list[str] | None = None


@contextmanager
def listening(names: list[str]) -> Iterator[None]:
    """Append to ``names``, inside the context, the launches of torch's operators that pymoe's operators call."""
    global _listener
    before, _listener = _listener, names
    try:
        yield
    finally:
        _listener = before


def grouped_mm(a: Tensor, b: Tensor, offs=None, bias=None, out_dtype=None) -> Tensor:
    """Multiply groups as torch does, with NaN in the rows that torch's CUDA kernel does not write."""
    if _listener is not None:
        _listener.extend(GROUPED)
    ends = [0, *offs.tolist()]
    groups = list(pairwise(ends))
    assert all(begin <= end <= a.shape[-1 if b.dim() == 2 else 0] for begin, end in groups), ends
    if b.dim() == 2:  # (N, S) x (S, H) -> (E, N, H)
        parts = [a[:, begin:end].float() @ b[begin:end].float() for begin, end in groups]
        return torch.stack(parts).to(a.dtype)
    out = torch.full((a.shape[0], b.shape[2]), float("nan"), dtype=a.dtype)
    for (begin, end), weight in zip(groups, b, strict=True):
        out[begin:end] = (a[begin:end].float() @ weight.float()).to(a.dtype)
    return out


_library = torch.library.Library("aten", "IMPL")
_library.impl("_grouped_mm", grouped_mm, "CPU")
