"""Code shared by the functions that ranks run: groups, and counters of what a rank does."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode


@functools.cache
def groups():
    """Return the groups of the first n ranks, by n. All ranks must call this together."""
    return {n: dist.new_group(list(range(n)), backend="gloo") for n in (1, 2, 3, 4)}


@functools.cache
def group_of_one():
    """Return a group of this rank only."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


@functools.cache
def mesh_of(*shape):
    """Return a mesh of all ranks whose last dimension is called "ep"."""
    names = ("edp", "ep")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class HostReads(TorchFunctionMode):
    """A mode that counts how often the host reads a tensor's values."""

    NAMES = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in self.NAMES:
            self.count += 1
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def exchanges():
    """Collect the rows that this rank sends in every exchange, by destination, in a list that fills up."""
    seen, real = [], dist.all_to_all_single

    def spy(output, rows, received, sent, **options):
        seen.append({"sent": list(sent), "dtype": str(rows.dtype).removeprefix("torch."), "width": rows.shape[1]})
        return real(output, rows, received, sent, **options)

    dist.all_to_all_single = spy
    try:
        yield seen
    finally:
        dist.all_to_all_single = real


def full(tensor):
    """Return a tensor whole, even if it is spread over ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same_bits(a, b):
    """Return whether shape, dtype and values are equal; zeros of either sign are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
