"""What the functions share that ranks run: groups, and counters of what a rank does."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode


@functools.cache
def groups():
    """The group of the first n ranks, by n. All ranks come here together."""
    return {n: dist.new_group(list(range(n)), backend="gloo") for n in (1, 2, 3, 4)}


@functools.cache
def group_of_one():
    """A group of this rank alone."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


@functools.cache
def mesh_of(*shape):
    """A mesh of all ranks, its last dimension called "ep"."""
    names = ("edp", "ep")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class HostReads(TorchFunctionMode):
    """Counts how often the host asks a tensor for its values."""

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
    """The rows of every exchange that this rank sends, and to whom, in a list that fills up."""
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
    """A tensor that may be spread over ranks, whole."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same_bits(a, b):
    """Equal shape, dtype and values; zeros of both signs are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
