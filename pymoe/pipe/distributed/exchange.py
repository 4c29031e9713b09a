"""Messages between two ranks, over ``isend`` and ``irecv`` of a process group.

A message is a header, its description if the receiver does not have that yet, and tensors. Those of one rank to another
arrive in the order in which they were sent; whoever wants one takes what comes before it into a box. So nobody has to
know in which order another rank works, and nothing depends on tags, which NCCL has not.

Sending never blocks: a sender goes on, and :meth:`Exchange.flush` waits at the end of a step. What was sent is let go
of as soon as it has arrived. Over gloo, threads wait for what comes and goes, so that it does while the rank computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from pymoe.pipe.distributed.inbox import Inbox, ReadInbox
from pymoe.pipe.distributed.message import Key, Message, Subject
from pymoe.pipe.distributed.outbox import Polled, Posted, Waited
from pymoe.pipe.distributed.waiting import wait
from pymoe.pipe.distributed.wire import empty, flat, layouts_of

__all__ = ["Exchange"]

TAG = 20117  # of the first pipe in a group; each has its own, so that nobody else takes its messages
REMEMBERED = 256  # descriptions that both ends keep


_pipes: Counter[dist.ProcessGroup] = Counter()  # that were in each group
HEADER = 4 + 3 + 2  # numbers: the key, the notes, the description's slot and the number of its bytes if it is new


class _Peer:
    """What is between this rank and another."""

    def __init__(self) -> None:
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
        self._tag = TAG + _pipes[group]
        _pipes[group] += 1
        self._up, self._down = groups_of_directions(group, self._wire)
        self._peers = [_Peer() for _ in range(dist.get_world_size(group))]
        by_threads = self._wire.type == "cpu"
        inbox = ReadInbox if by_threads else Inbox
        self._inboxes = [inbox(peer, partial(self._take, peer)) for peer in range(len(self._peers))]
        self._outbox = Waited() if by_threads else Polled()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """In which this rank waits for messages."""
        return self._up, self._down

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
            work = dist.isend(there, group=group, group_dst=peer, tag=self._tag)
            self._outbox.add(Posted(work, there, peer, str(message.key)))

    def expect(self, peer: int, count: int) -> None:
        """So many messages of this step come from ``peer``."""
        self._inboxes[peer].expect(count)

    def receive(self, peer: int, key: Key) -> Message:
        """The message with this key, which must come from ``peer``.

        Raises:
            RuntimeError: it cannot come any more.
        """
        return self._inboxes[peer].get(key)

    def flush(self) -> None:
        """Until all that was sent has arrived."""
        self._outbox.flush()

    def _take(self, peer: int) -> Message:
        """The next one."""
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
        group = self._up if peer < self.rank else self._down
        works = [dist.irecv(buffer, group=group, group_src=peer, tag=self._tag) for buffer in buffers]
        for work in works:
            wait(work, peer, "a message")


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where tensors must be for the group to send them. Gloo sends from the host's memory alone."""
    if device.type == "cpu" or device.type not in {there.type for there in group._device_types}:
        return torch.device("cpu")
    return torch.device("cpu") if group._get_backend(device).name() == "gloo" else device


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
