"""Messages between two ranks, over ``isend`` and ``irecv`` of a process group.

A message is a header, its description if the receiver does not have that yet, and tensors. Those of one rank to another
arrive in the order in which they were sent, and an inbox keeps what comes before the one that is asked for. So nobody
has to know in which order another rank works, and nothing depends on tags, which NCCL does not have.

Sending never blocks: the sender goes on, and :meth:`Transport.flush` waits at the end of a step. What was sent is
released as soon as it has arrived. Over gloo, threads wait for messages in both directions while the rank computes.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pymoe.pipe.distributed.messages import Key, Message, Subject, empty, flat, layouts_of

__all__ = ["Inbox", "Polled", "ReadInbox", "Transport", "Waited"]

FIRST_TAG = 20117  # of the first pipe in a group; each has its own, so that it takes its own messages alone
REMEMBERED = 256  # descriptions that both ends keep
HEADER = 4 + 3 + 2  # numbers: the key, the notes, the description's slot and its bytes (0 if the receiver has it)

_pipes: Counter[dist.ProcessGroup] = Counter()  # that were in each group


class _Peer:
    """The descriptions that this rank and another have sent to each other."""

    def __init__(self) -> None:
        self.sent: dict[bytes, int] = {}  # and their slots
        self.received: dict[int, bytes] = {}
        self.next_slot = 0


class Transport:
    """Sends and receives the messages of this rank. Not for several threads at once."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._rank = dist.get_rank(group)
        self._wire = wire_device(group, device)
        self._device = device
        self._tag = FIRST_TAG + _pipes[group]
        _pipes[group] += 1
        self._up, self._down = groups_of_directions(group, self._wire)
        self._peers = [_Peer() for _ in range(dist.get_world_size(group))]
        # gloo's works make no progress of their own, and do not tell whether they are done: threads wait for them.
        has_threads = self._wire.type == "cpu"
        inbox = ReadInbox if has_threads else Inbox
        self._inboxes = [inbox(peer, partial(self._take, peer)) for peer in range(len(self._peers))]
        self._outbox = Waited() if has_threads else Polled()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups in which this rank waits for messages."""
        return self._up, self._down

    def send(self, peer: int, message: Message) -> None:
        """Begin to send a message. Its tensors must not change until it has arrived."""
        known, group = self._peers[peer], self._up if self._rank < peer else self._down
        slot = known.sent.get(message.description)
        size = 0
        if slot is None:
            slot, size = known.next_slot, len(message.description)
            known.next_slot = (slot + 1) % REMEMBERED
            known.sent = {description: s for description, s in known.sent.items() if s != slot}
            known.sent[message.description] = slot
        parts = [torch.tensor([*message.key, *message.notes, slot, size], dtype=torch.int64)]
        if size:
            parts.append(torch.frombuffer(bytearray(message.description), dtype=torch.uint8))
        parts.extend(flat(tensor.to(self._wire)) for tensor in message.tensors if tensor.numel())
        for part in parts:
            there = part.to(self._wire)
            work = dist.isend(there, group=group, group_dst=peer, tag=self._tag)
            self._outbox.add(Posted(work, there, peer, str(message.key)))

    def expect(self, peer: int, count: int) -> None:
        """Announce that ``count`` messages of this step come from ``peer``."""
        self._inboxes[peer].expect(count)

    def receive(self, peer: int, key: Key) -> Message:
        """Wait for the message with this key from ``peer``. Raise RuntimeError if it cannot come any more."""
        return self._inboxes[peer].get(key)

    def flush(self) -> None:
        """Wait until all that was sent has arrived."""
        self._outbox.flush()

    def _take(self, peer: int) -> Message:
        """Wait for the next message of a rank."""
        known = self._peers[peer]
        header = torch.empty(HEADER, dtype=torch.int64, device=self._wire)
        self._fill([header], peer)
        step, subject, stage, micro_batch, *notes, slot, size = header.tolist()
        if size:
            new = torch.empty(size, dtype=torch.uint8, device=self._wire)
            self._fill([new], peer)
            known.received[slot] = new.cpu().numpy().tobytes()
        description = known.received[slot]
        tensors = [empty(layout, self._wire) for layout in layouts_of(description)[0]]
        self._fill([flat(tensor) for tensor in tensors if tensor.numel()], peer)
        here = [tensor.to(self._device) for tensor in tensors]
        key = Key(step, Subject(subject), stage, micro_batch)
        return Message(key, description, here, (notes[0], notes[1], notes[2]))

    def _fill(self, buffers: Sequence[torch.Tensor], peer: int) -> None:
        group = self._up if peer < self._rank else self._down
        works = [dist.irecv(buffer, group=group, group_src=peer, tag=self._tag) for buffer in buffers]
        for work in works:
            wait(work, peer, "a message")


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return where tensors must be for the group to send them. Gloo sends from the host's memory alone."""
    if device.type == "cpu" or device.type not in {there.type for there in group._device_types}:
        return torch.device("cpu")
    return torch.device("cpu") if group._get_backend(device).name() == "gloo" else device


_directions: dict[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def groups_of_directions(group: dist.ProcessGroup, wire: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups for messages to higher and to lower ranks.

    NCCL runs one operation between two ranks after the other, so two that send to each other would deadlock: each
    direction has a communicator of its own. All ranks of the group come here together.
    """
    if wire.type == "cpu":
        return group, group
    if group not in _directions:
        ranks = dist.get_process_group_ranks(group)
        _directions[group] = group, dist.new_group(ranks, use_local_synchronization=True)
    return _directions[group]


def wait(work: Any, peer: int, what: str) -> None:
    """Wait until a ``dist.Work`` between this rank and ``peer`` is done. Raise RuntimeError if it fails.

    The failure of another rank ends the wait, too (:mod:`.watchdog`).
    """
    try:
        work.wait()
    except RuntimeError as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"pymoe.pipe: while waiting for {what}; the other rank was {peer}")
        raise


class Inbox:
    """Messages of another rank, received when they are asked for."""

    def __init__(self, peer: int, take: Callable[[], Message]) -> None:
        """``take`` waits for the next message of rank ``peer``."""
        self._peer = peer
        self._take = take
        self._box: dict[Key, Message] = {}

    def expect(self, count: int) -> None:
        """Announce ``count`` messages."""

    def get(self, key: Key) -> Message:
        """Return the message with this key. Raise RuntimeError if it cannot come any more."""
        while key not in self._box:
            self._drop_before(key)
            message = self._take()
            self._box[message.key] = message
        return self._box.pop(key)

    def _drop_before(self, wanted: Key) -> None:
        """Drop what belongs to a step that has failed. What is of a later step comes after all of this one."""
        for key in [key for key in self._box if key.step < wanted.step]:
            del self._box[key]
        later = {key.step for key in self._box if key.step > wanted.step}
        if later:
            raise RuntimeError(f"rank {self._peer} is in step {min(later)}, and this one in step {wanted.step}")


class ReadInbox(Inbox):
    """Messages of another rank, which a thread receives as soon as they are expected, while this rank computes."""

    def __init__(self, peer: int, take: Callable[[], Message]) -> None:
        super().__init__(peer, take)
        self._changed = threading.Condition()
        self._expected = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def expect(self, count: int) -> None:
        """Announce ``count`` messages."""
        with self._changed:
            self._expected += count
            if self._thread is None:
                name = f"pymoe-pipe-from-{self._peer}"
                self._thread = threading.Thread(target=self._read, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def get(self, key: Key) -> Message:
        """Return the message with this key. Raise RuntimeError if it cannot come any more."""
        with self._changed:
            while key not in self._box:
                self._drop_before(key)
                if self._error is not None:
                    raise self._error
                if not self._expected:
                    self.expect(1)
                self._changed.wait()
            return self._box.pop(key)

    def _read(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._expected)
            try:
                message = self._take()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._expected -= 1
                self._box[message.key] = message
                self._changed.notify_all()
            del message


class Posted(NamedTuple):
    """Something that is being sent."""

    work: Any
    tensor: torch.Tensor
    """Kept until it has arrived."""
    peer: int
    what: str

    def wait(self) -> None:
        """Wait until it has arrived."""
        wait(self.work, self.peer, f"the arrival of {self.what}")


class Polled:
    """What has been sent in a group whose works tell whether they are done."""

    def __init__(self) -> None:
        self._pending: list[Posted] = []

    def add(self, posted: Posted) -> None:
        """Keep what is being sent, and release what has arrived."""
        self._pending = [*(one for one in self._pending if not one.work.is_completed()), posted]

    def flush(self) -> None:
        """Wait until everything has arrived."""
        pending, self._pending = self._pending, []
        for posted in pending:
            posted.wait()


class Waited:
    """What has been sent in a group whose works do not tell: a thread waits for one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Posted | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, posted: Posted) -> None:
        """Have the thread wait for what is being sent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_all, name="pymoe-pipe-sends", daemon=True)
            self._thread.start()
        self._queue.put(posted)

    def flush(self) -> None:
        """Wait until everything has arrived. Raise the first error of what has not."""
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
            try:
                next_one.set() if isinstance(next_one, threading.Event) else next_one.wait()
            except BaseException as error:
                self._error = self._error or error
            del next_one
