"""Requests on streams behave like separate gRPC calls, and long messages travel in frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from experts import ROW, WIDTH, Held, mlp, of
from limits import LONG
from test_security import MIB, TOKEN, X, memory, pymoe_options
from torch import Tensor, nn

from pymoe.remote import ExpertServer, ProtocolError, ServerLost, WireError, connect, requests, service, wire
from pymoe.remote.channel import Streams
from pymoe.remote.encodings import ENCODINGS
from pymoe.remote.wire import FRAME, Tail
from pymoe.runtime import BatchTensorProto, ExpertBackend, QueueFull
from pymoe.runtime.timers import TimerHandle

LONG_ROWS = 3 * FRAME // (4 * WIDTH) + 5


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].repeat(1, 4 * MIB)


def until(condition: Any) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# --- streams ---


def test_one_caller_keeps_one_stream() -> None:
    with ExpertServer(mlp("a")) as server, connect(server.address) as there:
        (a,) = there.backends()
        for _ in range(20):
            a.forward_pool(X)
            a.backward_pool(X, X)
        assert server._service._streams == 1
        assert len(there.streams._idle) == 1
        there.close()
        until(lambda: server._service._streams == 0)


def test_an_error_of_a_request_leaves_its_stream_open() -> None:
    with ExpertServer(mlp("a")) as server, connect(server.address, retries=False) as there:
        (a,) = there.backends()
        a.forward_pool(X)
        (stream,) = there.streams._idle
        server._service.budget.limit = 1
        with pytest.raises(QueueFull):
            a.forward_pool(X)
        server._service.budget.limit = MIB
        a.forward_pool(X)
        assert there.streams._idle == [stream]


def test_a_request_that_times_out_ends_its_stream_and_no_other() -> None:
    held = Held()
    with ExpertServer([of(held, "held"), mlp("a")]) as server, connect(server.address, timeout=LONG) as there:
        slow, quick = there.backends("held", "a")
        waiting = threading.Thread(target=lambda: quick.forward_pool(X))
        first = slow.forward_pool.submit_task(X, timeout=1.0)  # time to reach the server
        waiting.start()
        with pytest.raises(TimeoutError, match=r"held_forward@"):
            first.result()
        waiting.join(LONG)
        assert server._service.counts["forward"] == 2
        until(lambda: server._service._streams <= 1)
        held.open.set()
        assert slow.forward_pool(X)[0].shape == X.shape


def test_a_caller_who_gives_up_takes_the_request_out_of_the_server_s_queue() -> None:
    held = Held()
    with ExpertServer(of(held), workers=1) as server, connect(server.address, timeout=LONG) as there:
        (remote,) = there.backends()
        pool = server.experts["expert"].forward_pool
        running = pool.submit_task(X)
        assert held.begun.wait(LONG)
        late = remote.forward_pool.submit_task(X, timeout=1.0)
        until(lambda: pool._statistics()["queued"] == 1)
        with pytest.raises(TimeoutError):
            late.result()
        until(lambda: pool._statistics()["queued"] == 0)
        held.open.set()
        running.result()
        assert held.calls == 1


def test_streams_that_wait_do_not_hold_up_a_drain() -> None:
    with ExpertServer(mlp("a"), grace=LONG) as server, connect(server.address, retries=False) as there:
        (a,) = there.backends()
        a.forward_pool(X)
        begun = time.monotonic()
        server.drain()
        assert time.monotonic() - begun < LONG / 2
        with pytest.raises(ServerLost):
            a.forward_pool(X)


@pytest.mark.slow
def test_a_stream_that_ended_while_it_was_idle_is_not_used_again() -> None:
    """Without retries, a request would fail although the server is back."""
    with ExpertServer(mlp("a")) as server:
        address = server.address
        there = connect(address, retries=False)
        (a,) = there.backends()
        a.forward_pool(X)
    with there, ExpertServer(mlp("a"), address):
        until(lambda: there.reachable)
        assert a.forward_pool(X)[0].shape == X.shape


def test_clients_beyond_the_most_streams_are_served_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymoe.remote.service.MAX_STREAMS", 1)
    x = torch.randn(LONG_ROWS, WIDTH)
    with (
        ExpertServer(mlp("a", max_batch_size=1 << 17)) as server,
        connect(server.address, retries=False) as first,
        connect(server.address, retries=False) as second,
    ):
        (a,), (b,) = first.backends(), second.backends()
        for _ in range(2):
            assert torch.equal(a.forward_pool(x)[0], b.forward_pool(x)[0])
            b.backward_pool(X, X)
        assert server._service._streams == 1


def test_a_refusal_of_streams_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request tried a stream first, which the server counted as a refused request."""
    monkeypatch.setattr("pymoe.remote.service.MAX_STREAMS", 0)
    with ExpertServer(mlp("a")) as server, connect(server.address, retries=False) as there:
        (a,) = there.backends()
        for _ in range(20):
            a.forward_pool(X)
        assert server.counts["shed"] == 1
        assert server.counts["forward"] == 20
        monkeypatch.setattr("pymoe.remote.channel.REFUSED_S", 0.0)
        a.forward_pool(X)
        assert server.counts["shed"] == 2, "it is forgotten after a while"
        monkeypatch.setattr("pymoe.remote.service.MAX_STREAMS", 1)
        for _ in range(2):
            a.forward_pool(X)
        assert server.counts["shed"] == 2
        assert server._service._streams == 1


@pytest.mark.parametrize(
    ("answer", "raised"),
    [(lambda: b"no reply", ProtocolError), (lambda: throw(ValueError("Cannot invoke RPC")), ServerLost)],
    ids=["nonsense", "closed"],
)
def test_errors_of_a_call_in_place_of_a_stream_are_those_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, answer: Any, raised: type[Exception]
) -> None:
    monkeypatch.setattr("pymoe.remote.service.MAX_STREAMS", 0)
    with ExpertServer(mlp("a")) as server, connect(server.address, retries=False) as there:
        (a,) = there.backends()
        future = type("Answered", (), {"result": lambda self: answer()})()
        monkeypatch.setattr("pymoe.remote.requests.RemoteCall._begin", lambda *all_: future)
        with pytest.raises(raised, match="a_forward@127"):
            a.forward_pool(X)


def throw(error: Exception) -> Any:
    raise error


def test_a_stream_that_nobody_uses_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that once had many requests under way kept its streams for ever, and a server has only 1,024."""
    monkeypatch.setattr("pymoe.remote.channel.IDLE_S", 0.1)
    with ExpertServer(mlp("a")) as server, connect(server.address, retries=False) as there:
        (a,) = there.backends()
        for _ in range(3):
            a.forward_pool(X)
        until(lambda: server._service._streams == 0)
        assert a.forward_pool(X)[0].shape == X.shape
        assert server.counts["failed"] == 0


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let a stream's idle time end without its function beginning; return a function that begins it."""
    streams, taken, go_on, called = [], threading.Event(), threading.Event(), threading.Event()
    real = TimerHandle._call

    def call(self: TimerHandle) -> None:
        if any(self is stream.timer for stream in streams):
            taken.set()
            assert go_on.wait(LONG)
        real(self)
        if taken.is_set():
            called.set()

    def over(stream: Any) -> Any:
        streams.append(stream)
        stream.timer.reset(0.0)
        assert taken.wait(LONG)
        return lambda: (go_on.set(), called.wait(LONG))

    monkeypatch.setattr(TimerHandle, "_call", call)
    yield over
    go_on.set()


def test_a_stream_whose_idle_time_is_over_is_given_to_no_request(late: Any) -> None:
    """The request lost its stream when the function finally ran: with 30 s left, it timed out immediately."""
    held = Held(opened=True)
    with ExpertServer(of(held)) as server, connect(server.address, retries=False, timeout=LONG) as there:
        (remote,) = there.backends()
        remote.forward_pool(X)
        (stream,) = there.streams._idle
        begin = late(stream)
        held.open.clear()
        held.begun.clear()
        request = remote.forward_pool.submit_task(X)
        waiting = threading.Thread(target=request.exception)  # runs the request
        waiting.start()
        assert held.begun.wait(LONG)
        begin()
        held.open.set()
        assert torch.equal(request.result()[0], X)
        waiting.join(LONG)


def test_a_stream_whose_request_was_answered_as_its_time_was_over_is_not_used_again(
    late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, taken = Held(), []
    real = Streams._take
    monkeypatch.setattr(Streams, "_take", lambda *all_: taken.append(real(*all_)) or taken[-1])
    with ExpertServer(of(held)) as server, connect(server.address, retries=False, timeout=LONG) as there:
        (remote,) = there.backends()
        request = remote.forward_pool.submit_task(X)
        waiting = threading.Thread(target=request.exception)
        waiting.start()
        assert held.begun.wait(LONG)
        begin = late(taken[0])
        held.open.set()
        assert torch.equal(request.result()[0], X)
        waiting.join(LONG)
        assert not there.streams._idle
        begin()
        assert torch.equal(remote.forward_pool(X)[0], X)


def test_a_request_whose_deadline_nobody_can_watch_is_refused_and_the_next_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If no thread can be started, a request whose deadline passes unnoticed would hang."""
    real, left = TimerHandle.reset, [1]

    def reset(self: TimerHandle, seconds: float) -> bool:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        return real(self, seconds)

    with ExpertServer(mlp("a")) as server, connect(server.address, retries=False, timeout=LONG) as there:
        (a,) = there.backends()
        with monkeypatch.context() as patch:
            patch.setattr(TimerHandle, "reset", reset)
            assert a.forward_pool(X)[0].shape == X.shape  # only the idle time cannot be limited
            assert not there.streams._idle
            with pytest.raises(RuntimeError, match="can't start new thread"):
                a.forward_pool(X)
        until(lambda: server._service._streams == 0)
        assert a.forward_pool(X)[0].shape == X.shape
        assert len(there.streams._idle) == 1


def test_a_stream_without_the_token_is_refused_before_it_is_read() -> None:
    with (
        ExpertServer(mlp("a"), token=TOKEN) as server,
        grpc.insecure_channel(server.address, pymoe_options()) as channel,
    ):
        before = memory()
        streams = [channel.stream_stream(f"/{wire.SERVICE}/Exchange")(iter([bytes(64 * MIB)])) for _ in range(4)]
        for stream in streams:
            assert stream.code() is grpc.StatusCode.UNAUTHENTICATED
        assert memory() - before < 400 * MIB  # memory of this process, the client: just 64 MiB each


def test_a_stream_reads_no_more_than_a_frame_before_there_is_room() -> None:
    with ExpertServer(mlp("a")) as server, grpc.insecure_channel(server.address, pymoe_options()) as channel:
        stream = channel.stream_stream(f"/{wire.SERVICE}/Exchange")(iter([bytes(wire.MAX_READ + 1)]))
        assert stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        said = wire.Request("a", [wire.Packed("f32", [1 << 20, WIDTH], "raw", memoryview(b""), 4 * WIDTH << 20)])
        server._service.budget.limit = MIB
        stream = channel.stream_stream(f"/{wire.SERVICE}/Exchange")(iter([wire.encode(said), bytes(100)]))
        reply = wire.decode(next(stream), wire.Reply)
        assert reply.kind == "QueueFull"
        assert next(stream, None) is None, "what follows would be taken for requests"


@pytest.mark.parametrize("frames", [[b""], [bytes(31)], [bytes(33)], [bytes(16), bytes(17)], []])
def test_frames_that_are_not_what_was_said_end_the_stream(frames: list[bytes]) -> None:
    packed = [wire.Packed("f32", [1, WIDTH], "raw", memoryview(b""), 4 * WIDTH)]
    head = wire.encode(wire.Request("a", packed, seconds=LONG))
    with ExpertServer(mlp("a")) as server, grpc.insecure_channel(server.address) as channel:
        stream = channel.stream_stream(f"/{wire.SERVICE}/Exchange")(iter([head, *frames]))
        assert wire.decode(next(stream), wire.Reply).kind == "WireError"
        assert next(stream, None) is None
        assert server.counts["malformed"] == 1
        assert server.bytes_in_flight == 0


def test_a_client_that_stops_in_the_middle_of_a_message_gives_its_room_back() -> None:
    packed = [wire.Packed("f32", [1, WIDTH], "raw", memoryview(b""), 4 * WIDTH)]
    head = wire.encode(wire.Request("a", packed, seconds=0.2))
    silent = threading.Event()

    def messages() -> Any:
        yield head
        silent.wait(LONG)

    with ExpertServer(mlp("a")) as server, grpc.insecure_channel(server.address) as channel:
        stream = channel.stream_stream(f"/{wire.SERVICE}/Exchange")(messages())
        reply = wire.decode(next(stream), wire.Reply)
        assert (reply.kind, reply.details) == ("TimeoutError", "the message did not come in time")
        assert server.bytes_in_flight == 0
        silent.set()


# --- frames ---


@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_long_messages_arrive_as_they_were_sent(coalesce: bool, encoding: str) -> None:
    backend = mlp("a", optimizer=None, max_batch_size=1 << 17)
    x = torch.randn(LONG_ROWS, WIDTH)
    options = {"coalesce": coalesce, "encoding": encoding, "gradient_encoding": encoding, "timeout": LONG}
    with ExpertServer(backend) as server, connect(server.address, **options) as there:
        (remote,) = there.backends()
        (y,), (local,) = remote.forward_pool(x), backend.forward(x)
        (grad,), (local_grad,) = remote.backward_pool(x, x), backend.backward(x, x)
        assert server.bytes_in_flight == 0
    for found, wanted in ((y, local), (grad, local_grad)):
        if encoding == "raw":
            assert torch.equal(found, wanted)
        else:  # a slightly different input may be on the other side of a ReLU
            assert (found - wanted).abs().mean() < 0.01


def test_tensors_are_cut_at_frames_and_put_together_again() -> None:
    x, y, none = torch.arange(FRAME // 4 + 7), torch.randn(5), torch.empty(0, 3)
    packed = wire.pack([x, none, y], "raw")
    tail = wire.detach_long(packed)
    cut = list(wire.frames(tail))
    assert [len(one) for one in cut] == [FRAME, FRAME, 8 * 7, 4 * 5]
    request = wire.decode(wire.encode(wire.Request("e", packed)), wire.Request)
    came = Tail(request.tensors)
    for frame in cut:
        assert came.missing
        came.take(frame)
    assert not came.missing
    for found, wanted in zip(wire.unpack(request.tensors, came), [x, none, y], strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises(WireError, match="at most 0 bytes"):
        came.take(b"x")


def test_short_messages_are_one() -> None:
    packed = wire.pack([torch.zeros(FRAME // 8), torch.zeros(FRAME // 8)], "raw")
    assert wire.detach_long(packed) == []
    assert all(one.following == 0 for one in packed)


def test_more_is_not_announced_than_a_message_may_have() -> None:
    packed = [wire.Packed("f32", [1], "raw", memoryview(b""), wire.MAX_BYTES)] * 2
    with pytest.raises(WireError, match="at most 268435456 bytes"):
        Tail(packed)
    packed[0].following = wire.MAX_BYTES + 1
    with pytest.raises(WireError):
        wire.decode(wire.encode(wire.Request("e", packed)), wire.Request)


def test_what_was_announced_takes_no_memory_until_it_comes() -> None:
    before = memory()
    tails = [Tail([wire.Packed("f32", [1], "raw", memoryview(b""), wire.MAX_BYTES)]) for _ in range(8)]
    assert len(tails) == 8
    assert memory() - before < 64 * MIB


def test_a_long_reply_that_nobody_reads_takes_room_and_is_held_no_longer_than_its_request_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reply was not charged to the byte budget, and was held for as long as its client stayed."""
    monkeypatch.setattr(service, "SLOW_REPLY_S", 0.5)
    size = 16 * MIB
    backend = ExpertBackend("wide", Wide(), None, args_schema=[ROW], outputs_schema=BatchTensorProto(size // 4))
    with ExpertServer(backend) as server, grpc.insecure_channel(server.address) as channel:
        request = wire.Request("wide", wire.pack([torch.ones(1, WIDTH)], "raw"), seconds=0.5)
        ended = threading.Event()

        def requests() -> Iterator[bytes]:
            yield wire.encode(request)
            ended.wait()

        stream = channel.stream_stream(f"/{wire.SERVICE}/Exchange")(requests())
        until(lambda: server.bytes_in_flight >= size)
        until(lambda: server.bytes_in_flight == 0 and server._service._streams == 0)
        assert server.counts["failed"] == 1
        ended.set()
        stream.cancel()


# --- deadlines ---


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the seconds that each call was given."""
    seconds: list[float] = []
    real = requests.RemoteCall

    def made(*all_: Any) -> Any:
        seconds.append(all_[-1] - time.monotonic())
        return real(*all_)

    monkeypatch.setattr(requests, "RemoteCall", made)
    return seconds


def test_a_call_has_the_time_of_its_most_patient_request_and_of_no_other(given: list[float]) -> None:
    held = Held()
    with ExpertServer(of(held), grace=0) as server, connect(server.address, timeout=LONG) as there:
        pool = there.backends()[0].forward_pool
        held.open.set()
        pool.submit_task(X, timeout=10 * LONG).result()
        assert 9 * LONG < given.pop() <= 10 * LONG
        held.open.clear()
        begun = time.monotonic()
        with pytest.raises(TimeoutError):  # not the previous call's deadline
            pool.submit_task(X, timeout=0.3).result()
        assert time.monotonic() - begun < LONG
        first = pool.submit_task(X, timeout=LONG)  # its call begins
        until(lambda: len(given) == 2)
        waiting = [pool.submit_task(X, timeout=seconds) for seconds in (LONG / 2, 2 * LONG, 3 * LONG)]
        cancelled = waiting.pop()
        assert cancelled.cancel()
        held.open.set()
        first.result()
        until(lambda: len(given) == 3)
        assert LONG < given.pop() <= 2 * LONG
        assert [one.result()[0].shape for one in waiting] == [X.shape] * 2


def test_a_future_that_nobody_has_counts_for_nobody(given: list[float]) -> None:
    """A request that its caller had dropped passed its deadline to the next call."""
    held = Held()
    with ExpertServer(of(held, max_batch_size=8), grace=0) as server, connect(server.address, timeout=LONG) as there:
        pool = there.backends()[0].forward_pool
        first = pool.submit_task(X[:2], timeout=LONG)  # its call begins
        until(held.begun.is_set)
        assert pool.submit_task(X[:1], timeout=9 * LONG).cancel()
        pool.submit_task(X[:1], timeout=8 * LONG)
        waiting = [pool.submit_task(X[:2], timeout=2 * LONG) for _ in range(3)]
        held.open.set()
        for future in (first, *waiting):
            future.result()
        assert LONG < given[1] <= 2 * LONG
        held.open.clear()
        first = pool.submit_task(X[:2], timeout=3 * LONG)
        until(lambda: len(given) == 3)
        pool.submit_task(X[:1], timeout=5 * LONG)
        pool.submit_task(X[:1], timeout=5 * LONG)
        held.open.set()
        first.result()
        until(lambda: len(given) == 4)
        assert given[3] <= LONG, "nobody has a future of the call: it has the time of the connection"


def test_what_is_not_queued_is_not_waited_for(given: list[float]) -> None:
    with ExpertServer(mlp("a")) as server, connect(server.address, timeout=1.0) as there:
        pool = there.backends()[0].forward_pool
        for wrong in ([X, X], [X[:, 1:]], [None], []):
            with pytest.raises((TypeError, ValueError)):
                pool.submit_task(*wrong, timeout=LONG)
        pool(X)
        (seconds,) = given
        assert seconds <= 1.0


def test_who_waits_for_ever_has_all_the_time(given: list[float]) -> None:
    with ExpertServer(mlp("a")) as server, connect(server.address, timeout=1.0) as there:
        pool = there.backends()[0].forward_pool
        pool(X, timeout=float("inf"))
        assert given.pop() == float("inf")
