"""Tests of the operators as they ship for CUDA, from a CUDA tensor to the launch of a kernel. Run with the plugin
``cuda_ops``.

A GPU runs launches for the current device, in the order of a stream. So every kernel and memset must go to the device
of the tensors and to the current stream of that device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cuda_ops import runtime
from specs import WITHOUT_CUDA, all_raw_calls
from torch import Tensor


def on_cuda(value, device: int = 1):
    """Copy a tensor, or those of a list or tuple, to a device."""
    if isinstance(value, (list, tuple)):
        return type(value)(on_cuda(one, device) for one in value)
    if not isinstance(value, Tensor):
        return value
    moved = torch.ops.cuda_device.empty(list(value.shape), value.dtype, device)
    source = value.detach().contiguous()
    ctypes.memmove(moved.data_ptr(), source.data_ptr(), source.nbytes)
    return moved


def back(value: Tensor) -> Tensor:
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    ctypes.memmove(result.data_ptr(), value.data_ptr(), value.nbytes if value.is_contiguous() else 0)
    return result


@contextmanager
def current(device: int, *streams: int) -> Iterator[None]:
    """Make ``device`` the current device, and make one stream of each device current."""
    torch.ops.cuda_device.use(device, streams)
    try:
        yield
    finally:
        torch.ops.cuda_device.use(0, [0, 0])


def record() -> list[str]:
    """Return the work that was queued on streams since the last call: ``"DEVICE STREAM WORK"``."""
    return runtime.pymoe_ptx_record().decode().splitlines()


def where() -> set[str]:
    return {line.rsplit(" ", 1)[0] for line in record()}


CALLS = {}
for _call in all_raw_calls():
    if _call.operator not in WITHOUT_CUDA:
        CALLS.setdefault(_call.operator, []).append(_call)


def run(call):
    """Return the results of a raw call on the CPU, and on device 1 with the streams that it used."""
    operator = getattr(torch.ops.pymoe, call.operator)
    expected = operator(*call.args)
    args = on_cuda(call.args)
    record()
    found = operator(*args)
    return expected, found, where()


def tensors(results) -> list[Tensor]:
    return [one for one in (results if isinstance(results, (tuple, list)) else [results]) if isinstance(one, Tensor)]


@pytest.mark.parametrize("operator", sorted(CALLS))
def test_work_goes_to_the_tensors_device_and_its_current_stream(operator):
    """The other device is current, and both have side streams, so that work on the default device or stream would
    show.
    """
    used = set()
    for i, call in enumerate(CALLS[operator]):
        stream = 5 if i % 2 == 0 else 0  # the default stream belongs to the current device
        with current(0, 3, stream):
            expected, found, streams = run(call)
            assert torch.ops.cuda_device.current() == 0
        assert streams <= {f"1 {stream}"}
        used |= streams
        for wanted, got in zip(tensors(expected), tensors(found), strict=True):
            assert got.device == torch.device("cuda", 1)
            torch.testing.assert_close(back(got), wanted.contiguous(), equal_nan=True, rtol=2e-2, atol=1e-4)
    assert used


def gate(logits: Tensor):
    call = next(call for call in CALLS["gate_topk"])
    return torch.ops.pymoe.gate_topk(logits, *call.args[1:])


def logits(seed: int, tokens: int = 300) -> Tensor:
    experts = next(call for call in CALLS["gate_topk"]).args[0].shape[1]
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def test_each_call_takes_the_stream_that_is_current_then():
    """The operators keep no streams: each of two streams, and then the default one, gets its own kernels and
    memsets.
    """
    x = on_cuda(logits(1), 0)
    with current(0, 0, 0):
        for stream in (1, 2, 0, 1):
            torch.ops.cuda_device.use(0, [stream, 7])
            record()
            gate(x)
            asked = record()
            assert {line.rsplit(" ", 1)[0] for line in asked} == {f"0 {stream}"}
            assert any(line.endswith(" memset") for line in asked)  # blocks of the gate add up their counts


@pytest.mark.parametrize("accepted", [0, 1])
def test_an_error_of_a_launch_is_raised_and_forgotten(accepted):
    """The gate's memset or kernel is refused; the next call succeeds."""
    x = on_cuda(logits(2), 1)
    with current(0, 0, 4):
        wanted = [back(one) for one in gate(x)]
        runtime.pymoe_ptx_refuse_after(accepted)
        with pytest.raises(RuntimeError, match="gate_topk: refused on purpose"):
            gate(x)
        assert torch.ops.cuda_device.current() == 0  # also after an error
        record()
        for got, value in zip(gate(x), wanted, strict=True):
            assert torch.equal(back(got), value)
        assert where() == {"1 4"}


def test_what_a_graph_captures_runs_when_it_is_replayed():
    """All work goes to the captured stream, nothing waits, and a replay computes again from the same memory."""
    x = on_cuda(logits(3), 1)
    with current(1, 0, 6):
        runtime.pymoe_ptx_begin_capture(1, ctypes.c_int64(6))
        try:
            captured = gate(x)
        finally:
            runtime.pymoe_ptx_end_capture()
        for seed in (4, 5):
            new = logits(seed)
            ctypes.memmove(x.data_ptr(), new.data_ptr(), new.nbytes)
            runtime.pymoe_ptx_replay()
            for got, wanted in zip(captured, gate(new), strict=True):
                torch.testing.assert_close(back(got), wanted)


def test_work_for_another_stream_breaks_a_capture():
    x = on_cuda(logits(6), 1)
    with current(1, 0, 2):
        runtime.pymoe_ptx_begin_capture(1, ctypes.c_int64(6))
        try:
            with pytest.raises(RuntimeError, match="another stream than the one that is captured"):
                gate(x)
        finally:
            runtime.pymoe_ptx_end_capture()
