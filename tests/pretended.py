"""Defines tensors that report another device but are computed on the CPU, to run tests for CUDA without a GPU.

The device is ``maia:0``, a name that torch knows but no build implements. As on a GPU, an operation cannot combine a
pretended tensor with a CPU tensor, except a scalar, an index, or a copy. Operators of pymoe run the CPU kernels of the
loaded library; in the emulated library these are the CUDA kernels.

:func:`cuda_tensor` makes tensors of ``cuda:0``, which the runtime's C++ code takes for CUDA tensors, but which no
operator of torch accepts. Tests define the operators that they need (:class:`torch.library.Library`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from pymoe.nn import router_product

DEVICE = torch.device("maia", 0)
MAY_MIX = ("aten::copy_", "aten::_to_copy", "aten::to")
INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put")


class Pretended(Tensor):
    """A tensor that reports :data:`DEVICE`; ``inner``, a CPU tensor, holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"Pretended({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    # Addresses may be compared, as on a GPU.
    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def tolist(self):
        return self.inner.tolist()

    def __deepcopy__(self, memo):
        copy = Pretended(self.inner.detach().clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy


Pretended.__name__ = "Tensor"  # the name in messages


def run(func, args, kwargs):
    """Run one operation on the values that the pretended tensors hold."""
    name = str(func._schema.name) + "." + func._schema.overload_name
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    pretended = any(isinstance(value, Pretended) for value in tensors)
    named = kwargs.get("device")
    wanted = torch.device(named).type if named is not None else None
    if pretended and not name.startswith(MAY_MIX):
        for value in tensors:
            alien = not isinstance(value, Pretended) and value.dim() > 0 and not value.is_meta
            if alien and not (name.startswith(INDEXING) and value.dtype in (torch.int64, torch.bool)):
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {DEVICE} and cpu")
    unwrapped_args, unwrapped = tree_map(lambda v: v.inner if isinstance(v, Pretended) else v, (args, kwargs))
    if wanted == DEVICE.type:
        unwrapped["device"] = torch.device("cpu")
    result = func(*unwrapped_args, **unwrapped)
    if wanted in ("cpu", "meta") or (not pretended and wanted != DEVICE.type):
        return result
    # An operation in place returns the tensor that it was given, not another one of the same memory.
    given = {id(value.inner): value for value in tensors if isinstance(value, Pretended)}

    def outside(value):
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        return given[id(value)] if id(value) in given else Pretended(value)

    return tree_map(outside, result)


class Factories(TorchDispatchMode):
    """Makes pretended tensors when a factory function is called with their device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


@functools.cache
def load_library() -> Path:
    """Build and load the library that registers a device guard for the pretended device, which autograd requires."""
    source = Path(__file__).with_suffix(".cpp")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:8]
    library = source.parents[1] / "build" / "tests" / f"pretended-{torch.__version__}-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        links = [f"-L{path}" for path in cpp_extension.library_paths()]
        compiler = os.environ.get("CXX", "g++")
        command = [compiler, "-std=c++20", "-shared", "-fPIC", "-w", str(source), *includes, *links, "-lc10"]
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.rename(library)
    torch.ops.load_library(str(library))
    return library


def cuda_tensor(values: Tensor, index: int = 0) -> Tensor:
    """Return a dense float32 tensor of device ``cuda:index`` that shares the memory of ``values``."""
    assert values.is_contiguous()
    assert values.dtype == torch.float32
    make = ctypes.CDLL(str(load_library())).pretended_cuda_tensor
    make.restype = ctypes.c_void_p
    sizes = (ctypes.c_int64 * values.dim())(*values.shape)
    made = make(ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(values.dim()), sizes, ctypes.c_int(index))
    wrap = ctypes.pythonapi.PyCapsule_New
    wrap.restype, wrap.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(wrap(made, None, None))
    tensor.memory = values
    return tensor


def wide_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply 16-bit matrices as cuBLAS does into float32: exact products, summed in float32."""
    assert a.dtype == b.dtype != out_dtype == torch.float32, (a.dtype, b.dtype, out_dtype)
    return a.float() @ b.float()


@functools.cache
def give_the_cpu_wide_products() -> torch.library.Library:
    """Implement ``torch.mm(..., out_dtype=torch.float32)``, which torch has only for GPUs, on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", wide_mm, "CPU")
    return library


@contextmanager
def wide_products(device_type: str):
    """Make routers on this type of device multiply as on a GPU, within the block."""
    give_the_cpu_wide_products()
    there = device_type in router_product.DEVICES
    router_product.DEVICES.add(device_type)
    try:
        yield
    finally:
        if not there:
            router_product.DEVICES.discard(device_type)


@contextmanager
def pretended():
    """Make the pretended device usable, within the block."""
    load_library()
    with wide_products(DEVICE.type), Factories():
        yield
