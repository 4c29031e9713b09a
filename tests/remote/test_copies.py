"""Counts how often a tensor's bytes are copied on their way, as the table in the benchmarks' documentation states."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pymoe.remote import encodings, wire
from pymoe.remote.requests import RemoteCall
from pymoe.remote.wire import FRAME

SHORT, LONG = torch.randn(1, 64), torch.randn(64, 1 << 14)
"""A tensor inside a message, and one that follows it in frames: 4 MiB."""


def address(data: Any) -> int:
    """Return the address of the bytes."""
    if isinstance(data, Tensor):
        return data.data_ptr()
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


@pytest.mark.parametrize("x", [SHORT, LONG], ids=["short", "long"])
def test_a_contiguous_tensor_is_packed_without_a_copy(x: Tensor) -> None:
    (packed,) = wire.pack([x], "raw")
    assert address(packed.data) == x.data_ptr()
    assert [address(one) for one in wire.detach_long([packed])] in ([], [x.data_ptr()])


def test_a_short_tensor_is_copied_into_its_message_and_out_of_it() -> None:
    packed = wire.pack([SHORT], "raw")
    message = wire.encode(wire.Request("e", packed))  # the first copy
    begin, end = address(message), address(message) + len(message)
    came = wire.decode(message, wire.Request).tensors
    assert begin < address(came[0].data) < end, "a view of the message"
    (tensor,) = wire.unpack(came)  # the second
    assert not begin <= tensor.data_ptr() < end
    assert torch.equal(tensor, SHORT)


def test_a_long_tensor_is_copied_into_frames_and_to_its_place() -> None:
    """Only one frame exists at a time, and the frames are copied to the final tensor."""
    packed = wire.pack([LONG], "raw")
    tail = wire.detach_long(packed)
    assert len(wire.encode(wire.Request("e", packed))) < 100
    came = wire.Tail(packed)
    assert isinstance(place := came.data[0], Tensor)
    tracemalloc.start()
    for frame in wire.frames(tail):  # the first copy
        came.take(frame)  # the second
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * FRAME, "a frame, and the next one while it is made"
    (tensor,) = wire.unpack(packed, came)
    assert tensor.data_ptr() == place.data_ptr()
    assert torch.equal(tensor, LONG)


def test_an_answer_is_handed_over_where_it_was_received() -> None:
    """No bytes are copied between the message, or its frames, and the caller."""
    call = RemoteCall.__new__(RemoteCall)
    call.method, call._rows, call._device = "Backward", len(LONG), LONG.device
    proto = type("Proto", (), {"size": LONG.shape[1:], "dtype": LONG.dtype})

    class Stub:
        schema = type("Schema", (), {"inputs": [proto]})
        name = "e"

    call.stub = Stub()  # type: ignore[assignment]
    packed = wire.pack([LONG], "raw")
    tail = wire.detach_long(packed)
    came = wire.Tail(packed)
    for frame in wire.frames(tail):
        came.take(frame)
    (answer,) = call.answer(wire.Reply(packed, "life", 0), came)
    assert isinstance(place := came.data[0], Tensor)
    assert answer.data_ptr() == place.data_ptr()


def test_short_answers_are_aligned_and_writable() -> None:
    for dtype in encodings.DTYPES.values():
        x = torch.ones(3, 5).to(dtype)
        data = b"?" + bytes(encodings.encode(x, "raw"))
        found = encodings.decode(memoryview(data)[1:], dtype, [3, 5], "raw")
        assert found.data_ptr() % encodings.ALIGNMENT == 0
        found += 0 if dtype is not torch.bool else False
        assert torch.equal(found, x)
