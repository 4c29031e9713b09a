"""Runs layers forward and backward on fake CUDA tensors; test_moe_fake_cuda.py starts it.

    python tests/nn/trace_on_fake_cuda.py path/of/fake_cuda.so

Fake tensors know shape, dtype and device, and no values. So code cannot be traced if it reads a value on the host
(``.item()``, a Python branch on a tensor: a synchronisation, which no CUDA graph can hold), or if it mixes a CPU tensor
into a computation on CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path


def load_before_torch(library: str) -> ctypes.CDLL:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


fake_cuda = load_before_torch(sys.argv[1])
sys.path.insert(0, str(Path(__file__).parent))
import pytest  # noqa: E402
import torch  # noqa: E402
from moe_layers import OPTIONS, make_layer  # noqa: E402
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402

from pymoe.nn import MoE  # noqa: E402

CUDA = torch.device("cuda", 0)
fake_cuda.take_the_place_of_the_guard()


def trace(dtype: torch.dtype, shape: tuple[int, ...], spoil: Callable[[MoE], object] = id, **options: object) -> None:
    layer = make_layer(**{**options, "hidden_size": shape[-1], "dtype": dtype, "device": "cuda"})
    spoil(layer)
    x = torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)
    y = layer(x)
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, CUDA), y
    y.sum().backward()
    for name, leaf in [("x", x), *layer.named_parameters()]:
        assert leaf.grad is not None, name
        assert (leaf.grad.shape, leaf.grad.dtype, leaf.grad.device) == (leaf.shape, dtype, CUDA), name
    for name, tensor in [*layer.stats._asdict().items(), *layer.named_buffers()]:
        assert tensor.device == CUDA, name
    layer.update_bias()
    layer.eval()(x.detach())


def leave_scale_on_the_cpu(layer: MoE) -> None:
    layer.losses.scale = torch.ones(3)


def notices(error: type[Exception], about: str, **arguments: object) -> None:
    """Check that tracing a layer with this planted fault raises an error."""
    with pytest.raises(error, match=about):
        trace(torch.float32, (5, 16), **arguments)


def main() -> None:
    with FakeTensorMode():
        for options in OPTIONS.values():
            trace(torch.bfloat16, (3, 5, 16), **options)
        for name in ("plain", "everything"):
            for dtype in (torch.float16, torch.float32, torch.float64):
                trace(dtype, (15, 16), **OPTIONS[name])
            trace(torch.float32, (0, 16), **OPTIONS[name])
        notices(DataDependentOutputException, "", backend="reference")  # this backend reads its offsets on the host
        notices(RuntimeError, "devices", spoil=leave_scale_on_the_cpu, aux_loss_coef=0.1)
    print(f"traced {len(OPTIONS)} kinds of layer on {CUDA}")


if __name__ == "__main__":
    main()
