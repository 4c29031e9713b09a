"""Stand-ins for DeepGEMM and QuACK: they compute on the CPU what the packages document, and insist on their rules.

* DeepGEMM, ``m_grouped_bf16_gemm_nt_contiguous`` and ``..._nn_contiguous``: d[r] = a[r] b[e]^T (nn: a[r] b[e]). All
  operands are contiguous. Without ``use_psum_layout`` the layout names the expert e of every row r; each block of
  ``get_mk_alignment_for_contiguous_layout()`` rows has a single value, and a block of -1 is skipped. (DeepGEMM 1.0.0,
  ``jit_kernels/m_grouped_gemm.py``.) With it, the layout has the end of every expert's rows, which begin where the
  expert before ended, rounded up. (transformers 5.23, ``integrations/deepgemm.py``, for Blackwell.)
* QuACK, ``quack.gemm_interface.gemm``: out[r] = A[r] B[e], for the rows r from ``cu_seqlens_m[e]`` to the next; others
  are not written. (quack-kernels 0.6.5: ``gemm_ref`` is this.)
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import torch

from pymoe import ops
from pymoe.ops import package_products


@contextmanager
def taken_for_a_gpu(monkeypatch):
    """Take the CPU for the GPU whose products are handed over; restore pymoe's own choice of products at the end.

    The value has the GPU's ``capability``.
    """
    one = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(package_products, "DEVICE", "cpu")
    monkeypatch.setattr(package_products, "_device_of_deep_gemm", [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: one.capability)
    try:
        yield one
    finally:
        ops.use_products_of(None)


def installed(monkeypatch, package, alignment=128):
    """Install a stand-in, choose it, and return it."""
    module = DeepGemm(alignment) if package == "deep_gemm" else Quack()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if package == "quack":
        monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    ops.use_products_of(package)
    return module


class DeepGemm(ModuleType):
    """The module ``deep_gemm``, with the calls that it got."""

    def __init__(self, alignment=128):
        super().__init__("deep_gemm")
        self.alignment = alignment
        self.calls = []

    def get_mk_alignment_for_contiguous_layout(self):
        return self.alignment

    def m_grouped_bf16_gemm_nt_contiguous(self, a, b, d, grouped_layout, use_psum_layout=False):
        self.multiply("nt", a, b, b.transpose(1, 2), d, grouped_layout, use_psum_layout)

    def m_grouped_bf16_gemm_nn_contiguous(self, a, b, d, grouped_layout, use_psum_layout=False):
        self.multiply("nn", a, b, b, d, grouped_layout, use_psum_layout)

    def multiply(self, kind, a, given, b, d, layout, psum):
        self.calls.append((kind, psum))
        for operand in (a, given, d):
            assert operand.dtype == torch.bfloat16
            assert operand.is_contiguous()
        experts, inner, outer = b.shape
        assert (a.shape[1], d.shape) == (inner, (a.shape[0], outer))
        assert layout.dtype == torch.int32
        assert layout.is_contiguous()
        if psum:
            assert layout.shape == (experts,)
            begin = 0
            for expert, end in enumerate(layout.tolist()):
                begin = -(-begin // self.alignment) * self.alignment
                assert begin <= end <= a.shape[0]
                d[begin:end] = (a[begin:end].float() @ b[expert].float()).bfloat16()
                begin = end
            return
        assert layout.shape == (a.shape[0],)
        assert a.shape[0] % self.alignment == 0
        for begin in range(0, a.shape[0], self.alignment):
            block = slice(begin, begin + self.alignment)
            (expert,) = set(layout[block].tolist())
            assert -1 <= expert < experts
            if expert >= 0:
                d[block] = (a[block].float() @ b[expert].float()).bfloat16()


class Quack(ModuleType):
    """The module ``quack.gemm_interface``, with the calls that it got."""

    def __init__(self):
        super().__init__("quack.gemm_interface")
        self.calls = []

    def gemm(self, A, B, out=None, bias=None, alpha=1.0, cu_seqlens_m=None, tuned=True):
        self.calls.append(tuned)
        assert bias is None
        assert alpha == 1.0
        assert A.dtype == B.dtype == out.dtype == torch.bfloat16
        assert A.is_contiguous()
        assert B.is_contiguous() or B.mT.is_contiguous()
        assert all(size % 8 == 0 for size in B.shape[1:])
        assert A.data_ptr() % 16 == B.data_ptr() % 16 == out.data_ptr() % 16 == 0
        assert cu_seqlens_m.dtype == torch.int32
        assert cu_seqlens_m.shape == (B.shape[0] + 1,)
        ends = cu_seqlens_m.tolist()
        assert ends == sorted(ends)
        assert (ends[0], ends[-1] <= A.shape[0]) == (0, True)
        assert out.shape == (A.shape[0], B.shape[2])
        for expert, (begin, end) in enumerate(pairwise(ends)):
            out[begin:end] = (A[begin:end].float() @ B[expert].float()).bfloat16()
        return out
