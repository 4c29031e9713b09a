"""Counts what a CUDA device would be asked to run, by name and in order, without one.

Tensors lie on the pretended device and operators of pymoe run their CUDA kernels on the emulator, which keeps a list of
its launches. Operators of torch are seen by a dispatch mode; :data:`LAUNCHES` says how many kernels each of them starts
on CUDA, and one that it does not name is an error.

torch's grouped product is replaced here by one that behaves as its kernel for compute capability 9.x does: it trusts
its offsets and leaves rows past the last of them as they were, which are NaN here. So results tell whether anything
reads a row that nobody wrote. On another GPU, or as another version of torch (:func:`elsewhere`), it leaves NaN in the
gradients of experts without rows, too.
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
"""aten/src/ATen/native/cuda/GroupMM.cu: one block writes pointers, sizes and strides; then the product itself."""

QUESTIONS = {"promote_types", "is_same_size", "_has_compatible_shallow_copy_type"}
LAUNCHES = {
    # Views, and memory that nobody clears.
    **dict.fromkeys(
        ["alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "narrow", "new_empty"], NONE
    ),
    **dict.fromkeys(["permute", "reshape", "select", "slice", "split", "squeeze", "t", "transpose", "unbind"], NONE),
    **dict.fromkeys(["unsqueeze", "view", "_unsafe_view", "new_empty_strided"], NONE),
    # These start one kernel each. cuBLAS makes a product in one, or, split over its depth, in two: it counts as one.
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
    """Inside, :attr:`names` grows by what every operation launches."""

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
            # Ours first and torch's after them: the order within one operator is not ours to know.
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
    """Add to ``names`` what operators of pymoe ask of torch."""
    global _listener
    before, _listener = _listener, names
    try:
        yield
    finally:
        _listener = before


_clears_idle_experts = True


@contextmanager
def elsewhere(capability: int, torch_version: tuple[int, int], clears_idle_experts: bool) -> Iterator[None]:
    """Have the library find this GPU (90 for 9.0) and version of torch, whose product does that or not."""
    global _clears_idle_experts
    before, _clears_idle_experts = _clears_idle_experts, clears_idle_experts
    torch.ops.pymoe_emulator.pretend(capability, *torch_version)
    try:
        yield
    finally:
        _clears_idle_experts = before
        torch.ops.pymoe_emulator.pretend(90, 0, 0)


def grouped_mm(a: Tensor, b: Tensor, offs=None, bias=None, out_dtype=None) -> Tensor:
    """Multiply groups as torch does, with NaN where its CUDA kernel writes nothing."""
    if _listener is not None:
        _listener.extend(GROUPED)
    ends = [0, *offs.tolist()]
    groups = list(pairwise(ends))
    assert all(begin <= end <= a.shape[-1 if b.dim() == 2 else 0] for begin, end in groups), ends
    if b.dim() == 2:  # (N, S) x (S, H) -> (E, N, H)
        parts = [a[:, begin:end].float() @ b[begin:end].float() for begin, end in groups]
        if not _clears_idle_experts:
            for part, (begin, end) in zip(parts, groups, strict=True):
                part[begin == end] = float("nan")
        return torch.stack(parts).to(a.dtype)
    out = torch.full((a.shape[0], b.shape[2]), float("nan"), dtype=a.dtype)
    for (begin, end), weight in zip(groups, b, strict=True):
        out[begin:end] = (a[begin:end].float() @ weight.float()).to(a.dtype)
    return out


_library = torch.library.Library("aten", "IMPL")
_library.impl("_grouped_mm", grouped_mm, "CPU")
