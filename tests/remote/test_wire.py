"""Messages: what arrives equals what was sent, and anything else is refused."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import pytest
import torch
from limits import rounds

from pymoe.remote import wire
from pymoe.remote.errors import WireError
from pymoe.remote.wire import Info, Packed, Reply, Request

GOOD = Request("expert", wire.pack([torch.randn(4, 8), torch.arange(3)], "raw"), "int8", "client", 3, 1, 0, "life")


def decoded(data: bytes) -> list[torch.Tensor]:
    return wire.unpack(wire.decode(data, Request).tensors)


def test_a_request_arrives_as_it_was_sent() -> None:
    x, y = torch.randn(5, 4), torch.tensor([True, False])
    request = Request("expert", wire.pack([x, y], "raw"), "bf16", "client", 7, 5, 2, "life")
    came = wire.decode(wire.encode(request), Request)
    assert (came.expert, came.reply_encoding, came.client, came.seq) == ("expert", "bf16", "client", 7)
    assert (came.ack, came.attempt, came.incarnation) == (5, 2, "life")
    first, second = wire.unpack(came.tensors)
    assert torch.equal(first, x)
    assert torch.equal(second, y)


def test_tensors_are_copied_once_into_a_message_and_once_out_of_it() -> None:
    x = torch.randn(1 << 20)
    (packed,) = wire.pack([x], "raw")
    assert torch.frombuffer(packed.data, dtype=torch.float32).data_ptr() == x.data_ptr(), "no copy before the message"
    data = wire.encode(Request("e", [packed]))
    tracemalloc.start()
    came = wire.decode(data, Request)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 16, "no copy when the message is decoded"
    assert torch.equal(wire.unpack(came.tensors)[0], x)


def test_fields_that_this_side_does_not_know_are_ignored() -> None:
    later = msgspec.to_builtins(GOOD, builtin_types=(memoryview, bytes)) | {"priority": 3, "trace": {"id": [1, "x"]}}
    assert wire.decode(msgspec.msgpack.encode(later), Request).client == "client"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"pickle",
        b"\x80\x04\x95",
        b"\x81\xa6expert\xc0",
        b"\xff" * 100,
        b"\x91" * 10_000,
        b"\x81" * 10_000,
    ],
)
@pytest.mark.parametrize("kind", [Request, Reply, Info])
def test_what_is_no_message_raises_one_error(data: bytes, kind: type[msgspec.Struct]) -> None:
    with pytest.raises(WireError):
        wire.decode(data, kind)


def test_text_that_is_none_raises_the_same_error() -> None:
    data = wire.encode(Request("expert", [])).replace(b"expert", b"\xff\xfe\xfd\xfc\xfb\xfa", 2)
    with pytest.raises(WireError):
        wire.decode(data, Request)


@pytest.mark.parametrize(
    "packed",
    [
        Packed("f32", [1 << 40], "raw", memoryview(b"")),
        Packed("f32", [(1 << 63) - 1, 3], "raw", memoryview(bytes(16))),
        Packed("f32", [1 << 30], "int8", memoryview(bytes(16))),
        Packed("f32", [-1], "raw", memoryview(bytes(4))),
        Packed("f32", [2, 0, 1 << 60], "raw", memoryview(b"")),
        Packed("object", [1], "raw", memoryview(bytes(4))),
    ],
)
def test_shapes_that_lie_are_refused_before_memory_is_taken(packed: Packed) -> None:
    data = wire.encode(Request("expert", [packed]))
    tracemalloc.start()
    with pytest.raises(WireError):
        decoded(data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def test_a_message_does_not_unfold_to_more_than_a_message_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 1 << 16)
    packed = wire.pack([torch.zeros(1, 1 << 13)] * 2, "int8")
    assert len(decoded(wire.encode(Request("e", packed)))) == 2
    data = wire.encode(Request("e", packed * 2))  # 8 KiB for each 32 KiB
    with pytest.raises(WireError, match="at most 65536 bytes"):
        decoded(data)


def test_a_message_that_is_too_long_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 256 tensors of 1000 bytes in all, got 1 of 4000"):
        wire.pack([torch.zeros(1000)], "raw")
    with pytest.raises(ValueError, match="at most 1000 bytes"):
        wire.encode(Request("e" * 1000, []))


def mutated(good: bytes, chance: random.Random) -> bytes:
    """Return bytes that are flipped, cut off, added, or entirely random."""
    bad = bytearray(good)
    kind = chance.randrange(5)
    if kind == 0:
        for _ in range(chance.randrange(1, 9)):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
    elif kind == 1:
        for _ in range(chance.randrange(1, 4)):
            bad[chance.randrange(min(len(bad), 90))] = chance.randrange(256)
    elif kind == 2:
        del bad[chance.randrange(len(bad)) :]
    elif kind == 3:
        bad[chance.randrange(len(bad)) : 0] = chance.randbytes(chance.randrange(1, 20))
    else:
        bad = bytearray(chance.randbytes(chance.randrange(200)))
    return bytes(bad)


def test_mutated_messages_are_refused_or_well_formed() -> None:
    chance = random.Random(0)
    good = [wire.encode(GOOD), wire.encode(Request("e", wire.pack([torch.randn(3, 100)], "int8"), "raw", "c", 1))]
    refused = 0
    for _ in range(rounds(20_000, 1_000_000)):
        data = mutated(chance.choice(good), chance)
        try:
            for one in decoded(data):
                assert one.nbytes <= 8 * len(data) + 64
            assert wire.Tail(wire.decode(data, Request).tensors).missing <= wire.MAX_BYTES
        except WireError:
            refused += 1
    assert refused > 1000
