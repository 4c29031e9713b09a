"""Messages between two ranks, over ``isend`` and ``irecv`` of a process group.

A message is a header, its description if the receiver does not have that yet, and tensors. Those of one rank to another
arrive in the order in which they were sent; whoever wants one takes what comes before it into a box. So nobody has to
know in which order another rank works, and nothing depends on tags, which NCCL has not.

Sending never blocks: a sender goes on, and :meth:`Exchange.flush` waits at the end of a step. What was sent is let go
of as soon as it has arrived. Groups whose works tell that they are done are asked; gloo's do not, so a thread waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pymoe.pipe.distributed.waiting import wait
from pymoe.pipe.distributed.wire import empty, flat, layouts_of

__all__ = ["Exchange", "Key", "Message", "Subject"]

TAG = 20117  # of all messages, so that others who use the group do not take them
REMEMBERED = 256  # descriptions that both ends keep


class Subject(IntEnum):
    """What a message is about."""

    VALUES = 0  # that a stage has made for a micro-batch
    GRADIENTS = 1  # of these values
    TIED_GRADIENTS = 2  # of parameters that a stage shares with others
    COPY = 3  # of such parameters


class Key(NamedTuple):
    """Which message."""

    step: int
    subject: Subject
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """In words."""
        of = f"of stage {self.stage}"
        if self.subject in (Subject.VALUES, Subject.GRADIENTS):
            what = "the values" if self.subject is Subject.VALUES else "the gradients of the values"
            return f"{what} {of} for micro-batch {self.micro_batch}"
        return (
            f"the gradients of shared parameters {of}"
            if self.subject is Subject.TIED_GRADIENTS
            else (f"the shared parameters {of}")
        )


@dataclass
class Message:
    """What one rank tells another."""

    key: Key
    description: bytes
    tensors: list[torch.Tensor]
    notes: tuple[int, int, int] = (0, 0, 0)
    """Three numbers that go with it."""

    def read(self) -> Any:
        """The object of the description that :mod:`.wire` reads values from."""
        return layouts_of(self.description)[1]


HEADER = 4 + 3 + 2  # numbers: the key, the notes, the description's slot and the number of its bytes if it is new


class _Peer:
    """What is between this rank and another."""

    def __init__(self) -> None:
        self.box: dict[Key, Message] = {}  # arrived, and nobody has asked for it
        self.sent: dict[bytes, int] = {}  # descriptions that the other has, and their slots
        self.received: dict[int, bytes] = {}
        self.next_slot = 0


class Exchange:
    """The messages of this rank. Not for several threads at once."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self._wire = wire_device(group, device)
        self._device = device
        self._up, self._down = groups_of_directions(group, self._wire)
        self._peers = [_Peer() for _ in range(dist.get_world_size(group))]
        self._outbox = _Polled() if self._wire.type != "cpu" else _Waited()

    def send(self, peer: int, message: Message) -> None:
        """Begin to send. Its tensors must not change until it has arrived."""
        known, group = self._peers[peer], self._up if self.rank < peer else self._down
        slot = known.sent.get(message.description)
        new = slot is None
        if slot is None:
            slot = known.next_slot
            known.next_slot = (slot + 1) % REMEMBERED
            known.sent = {description: s for description, s in known.sent.items() if s != slot}
            known.sent[message.description] = slot
        size = len(message.description) if new else 0
        parts = [torch.tensor([*message.key, *message.notes, slot, size], dtype=torch.int64)]
        if new:
            parts.append(torch.frombuffer(bytearray(message.description), dtype=torch.uint8))
        parts.extend(flat(tensor.to(self._wire)) for tensor in message.tensors if tensor.numel())
        for part in parts:
            there = part.to(self._wire)
            work = dist.isend(there, group=group, group_dst=peer, tag=TAG)
            self._outbox.add(_Sent(work, there, peer, message.key))

    def receive(self, peer: int, key: Key) -> Message:
        """The message with this key, which must come from ``peer``.

        Raises:
            RuntimeError: it cannot come any more.
        """
        box = self._peers[peer].box
        while key not in box:
            self._take(peer, key)
        return box.pop(key)

    def flush(self) -> None:
        """Until all that was sent has arrived."""
        self._outbox.flush()

    def _take(self, peer: int, wanted: Key) -> None:
        known = self._peers[peer]
        header = torch.empty(HEADER, dtype=torch.int64, device=self._wire)
        self._fill([header], peer, wanted)
        step, subject, stage, micro_batch, *notes, slot, size = header.tolist()
        if size:
            new = torch.empty(size, dtype=torch.uint8, device=self._wire)
            self._fill([new], peer, wanted)
            known.received[slot] = new.cpu().numpy().tobytes()
        description = known.received[slot]
        tensors = [empty(layout, self._wire) for layout in layouts_of(description)[0]]
        self._fill([flat(tensor) for tensor in tensors if tensor.numel()], peer, wanted)
        key = Key(step, Subject(subject), stage, micro_batch)
        if step < wanted.step:
            return  # of a step that has failed
        if step > wanted.step:
            raise RuntimeError(f"rank {peer} is in step {step}, and this one, rank {self.rank}, in step {wanted.step}")
        here = [tensor.to(self._device) for tensor in tensors]
        known.box[key] = Message(key, description, here, (notes[0], notes[1], notes[2]))

    def _fill(self, buffers: Sequence[torch.Tensor], peer: int, wanted: Key) -> None:
        group = self._up if peer < self.rank else self._down
        works = [dist.irecv(buffer, group=group, group_src=peer, tag=TAG) for buffer in buffers]
        for work in works:
            wait(work, peer, str(wanted))


class _Sent(NamedTuple):
    work: Any
    tensor: torch.Tensor
    peer: int
    key: Key


class _Polled:
    """Sends that are asked whether they are done."""

    def __init__(self) -> None:
        self._under_way: list[_Sent] = []

    def add(self, sent: _Sent) -> None:
        self._under_way = [sent for sent in self._under_way if not sent.work.is_completed()]
        self._under_way.append(sent)

    def flush(self) -> None:
        under_way, self._under_way = self._under_way, []
        for sent in under_way:
            wait(sent.work, sent.peer, f"the arrival of {sent.key}")


class _Waited:
    """Sends that a thread waits for, one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Sent | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, sent: _Sent) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_all, name="pymoe-pipe-sends", daemon=True)
            self._thread.start()
        self._queue.put(sent)

    def flush(self) -> None:
        if self._thread is not None:
            all_done = threading.Event()
            self._queue.put(all_done)
            all_done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait_for_all(self) -> None:
        while True:
            next_one = self._queue.get()
            if isinstance(next_one, threading.Event):
                next_one.set()
                continue
            try:
                wait(next_one.work, next_one.peer, f"the arrival of {next_one.key}")
            except BaseException as error:
                self._error = self._error or error
            del next_one


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where tensors must be for the group to send them. Gloo sends from the host's memory alone."""
    host = torch.device("cpu")
    if device.type == "cpu":
        return host
    return host if group._get_backend(device).name() == "gloo" else device


_directions: dict[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def groups_of_directions(group: dist.ProcessGroup, wire: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups for messages to higher and to lower ranks.

    NCCL works one operation between two ranks after the other, so two that send to each other would wait for each
    other for ever: each direction has a communicator of its own. All ranks of the group come here together.
    """
    if wire.type == "cpu":
        return group, group
    if group not in _directions:
        ranks = dist.get_process_group_ranks(group)
        _directions[group] = group, dist.new_group(ranks, use_local_synchronization=True)
    return _directions[group]
