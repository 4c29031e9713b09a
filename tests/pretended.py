"""Tensors that say they lie on another device and are computed on the CPU, to prove tests of CUDA without a GPU.

The device is ``maia:0``: torch knows the name, and no build has it, so nothing of torch's own stands in the way. As
on a GPU, a pretended tensor does not meet a CPU tensor in one operation, unless that is a scalar or an index, or the
operation is a copy. The operators of pymoe run their CPU kernels, whatever these are in the library that is loaded:
those of the emulated library are the CUDA twins.
"""

from __future__ import annotations

import functools
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

DEVICE = torch.device("maia", 0)
MAY_MIX = ("aten::copy_", "aten::_to_copy", "aten::to")
INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put")


class Pretended(Tensor):
    """A tensor on :data:`DEVICE`, as far as anyone can ask; ``inner`` holds its values."""

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

    # What Python asks of memory; as on a GPU it is an address that one may compare.
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


Pretended.__name__ = "Tensor"  # as messages call it


def run(func, args, kwargs):
    """One operation, on what the pretended tensors hold."""
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
    """Makes pretended tensors where their device is asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


@functools.cache
def load_guard():
    """Autograd asks the guard of a tensor's device for its stream."""
    source = Path(__file__).with_suffix(".cpp")
    library = source.parents[1] / "build" / "tests" / f"pretended-{torch.__version__}.so"
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


@contextmanager
def pretended():
    """Inside, torch has the device."""
    load_guard()
    with Factories():
        yield
