"""Messages between ranks, exchanged with ``isend`` and ``irecv`` of a process group. A message consists of a key, a
description, and the memory of tensors.

The description contains everything except the data of the tensors: structure, shapes, strides, which tensors require
gradients, and leaves that are not tensors. Most messages have the same description as an earlier one, so a description
is only sent when it is new.

Messages from one rank to another arrive in the order in which they were sent, and an inbox keeps messages that arrive
before the one that is waited for. So no rank depends on the order in which another works, or on tags, which NCCL
does not have.

Sending never waits for the receiver: the sender continues, and :meth:`Transport.flush` waits at the end of a step.
Memory that was sent is released when it has arrived: over gloo at once, because threads wait for messages in both
directions while the rank computes; over NCCL when the next message is sent, or in :meth:`Transport.flush`.
"""

from __future__ import annotations

import io
import pickle
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pymoe._errors import add_note
from pymoe._torch_private import pytree
from pymoe.pipe.execution.graph import BoundaryTensor, GradAccumulator, StageValue, boundaries_of, memory_of, receive


class Subject(IntEnum):
    """The kind of content of a message."""

    VALUES = 0
    GRADIENTS = 1
    TIED_GRADIENTS = 2
    COPY = 3
    END = 4


WORDS = (
    "the values",
    "the gradients of the values",
    "the gradients of shared parameters",
    "the shared parameters",
    "the end of the forwards",
)
"""The subjects of messages, in words: values of a micro-batch, or parameters that a stage shares with others."""


class Key(NamedTuple):
    """Identifies a message between two ranks."""

    step: int
    subject: Subject
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        of = f" for micro-batch {self.micro_batch}" if self.subject in (Subject.VALUES, Subject.GRADIENTS) else ""
        return f"{WORDS[self.subject]} of stage {self.stage}{of}"


class TensorLayout(NamedTuple):
    """The dtype, shape and strides of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TensorPlace(NamedTuple):
    """Tells where in a message a tensor is, and how the receiver may use it."""

    number: int
    """The index of the sent tensor that contains it."""
    view: tuple[TensorLayout, int] | None
    """Layout and offset (in elements) in a sent tensor that contains several tensors; None: it is the whole tensor."""
    requires_grad: bool
    """True if the receiver sends a gradient back."""
    is_fixed: bool
    """True if the tensor must not be changed in place (:class:`.BoundaryTensor`)."""
    taken_until: int
    """The last stage on a rank other than the receiver's that takes the same memory; -1: none."""


def describe_values(
    values: Sequence[StageValue], taken_until: Callable[[torch.Tensor], int] = lambda tensor: -1
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the description of values, and their tensors.

    ``taken_until``: the last stage on a rank other than the receiver's that takes the memory of a tensor.

    Raises:
        TypeError: a value, or something in it, cannot be sent to another process.
        RuntimeError: a stage that has taken one of the tensors has changed it in place.
    """
    boundaries = boundaries_of(values)
    sent, views = _lay_out_all([receive(boundary, None) for boundary in boundaries])
    places = iter(
        TensorPlace(number, view, boundary.accumulator is not None, boundary.is_fixed, taken_until(boundary.tensor))
        for boundary, (number, view) in zip(boundaries, views, strict=True)
    )
    described = [
        ([next(places) if type(leaf) is BoundaryTensor else leaf for leaf in value.leaves], value.structure)
        for value in values
    ]
    return _dump(([layout for _, layout in sent], described)), [tensor for tensor, _ in sent]


def describe_tensors(tensors: Sequence[torch.Tensor | None]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the description of tensors, some of which may be missing, and the tensors that are present."""
    there = [_lay_out(_checked(tensor)) for tensor in tensors if tensor is not None]
    description = [layout for _, layout in there], [tensor is not None for tensor in tensors]
    return _dump(description), [tensor for tensor, _ in there]


def read_values(
    described: Any, tensors: Sequence[torch.Tensor], accumulator: GradAccumulator | None
) -> list[StageValue]:
    """Return the values of a message. Gradients of their tensors go to ``accumulator``, numbered in the order of the
    tensors.

    ``described``: the second part of the unpickled description; the first part has the layouts of ``tensors``.
    ``accumulator``: None in a step without backwards.
    """
    values = []
    count = 0
    for leaves, structure in described:
        for place, leaf in enumerate(leaves):
            if type(leaf) is TensorPlace:
                tensor = tensors[leaf.number]
                if leaf.view is not None:
                    layout, offset = leaf.view
                    whole = tensor[: tensor.numel() // layout.dtype.itemsize * layout.dtype.itemsize]
                    tensor = whole.view(layout.dtype).as_strided(layout.shape, layout.stride, offset).detach()
                receiver = accumulator if leaf.requires_grad else None
                leaves[place] = boundary = BoundaryTensor(tensor, receiver, count, leaf.is_fixed)
                boundary.taken_until = leaf.taken_until
                count += 1
        values.append(StageValue(leaves, structure))
    if accumulator is not None:
        accumulator.grads = [None] * count
    return values


def read_tensors(are_there: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the received tensors, with None at the indices of missing ones."""
    rest = iter(tensors)
    return [next(rest) if is_there else None for is_there in are_there]


def empty(layout: TensorLayout, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor with this layout, to receive into."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor without gaps as a flat view of dtype uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _lay_out_all(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[tuple[torch.Tensor, TensorLayout]], list[tuple[int, tuple[TensorLayout, int] | None]]]:
    """Return the tensors to send with their layouts and, for every given tensor, where it is: the index of the sent
    tensor that contains it, and its layout and offset therein (None: it is the whole sent tensor).

    Tensors that overlap in memory are sent as one tensor of bytes, so that they overlap at the receiver as well. An
    in-place change of one then changes the others, or is refused, as it is in a single process.
    """
    sent: list[tuple[torch.Tensor, TensorLayout]] = []
    found: list[tuple[int, tuple[TensorLayout, int] | None]] = [(0, None)] * len(tensors)
    for group in _overlapping([_checked(tensor) for tensor in tensors]):
        number = len(sent)
        if len(group) == 1:
            sent.append(_lay_out(tensors[group[0]]))
            found[group[0]] = number, None
            continue
        spans = [_span(tensors[one]) for one in group]
        first, last = min(spans)[0] // ALIGNED * ALIGNED, max(end for _, end in spans)
        storage = tensors[group[0]].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, first, (last - first,), (1,))
        sent.append((whole, TensorLayout(torch.uint8, (last - first,), (1,))))
        for one in group:
            tensor = tensors[one]
            if tensor.is_conj() or tensor.is_neg():
                raise TypeError("conjugates and negatives that share memory with other values cannot be sent: copy one")
            layout = TensorLayout(tensor.dtype, tuple(tensor.shape), tensor.stride())
            found[one] = number, (layout, int(tensor.storage_offset()) - first // tensor.itemsize)
    return sent, found


ALIGNED = 16
"""Alignment of sent ranges of memory, in bytes: a multiple of every dtype's element size."""


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the tensors by overlapping memory. Return lists of indices; a tensor that overlaps no other is alone."""
    groups: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(memory_of(tensor) if tensor.numel() else -1 - number, []).append(number)
    found: list[list[int]] = []
    for group in groups.values():
        if len(group) > 1:
            end = -1
            for number in sorted(group, key=lambda number: _span(tensors[number])):
                if _span(tensors[number])[0] >= end:
                    found.append([])
                found[-1].append(number)
                end = max(end, _span(tensors[number])[1])
        else:
            found.append(group)
    return sorted(found)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets, in a strided tensor's storage, of its first byte and of the byte after its last."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + int(elements) * tensor.itemsize


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor. Raise TypeError if it cannot be sent."""
    is_plain = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        what = f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
        raise TypeError(f"{what} cannot be sent between ranks: only dense strided tensors can")
    return tensor


def _lay_out(tensor: torch.Tensor) -> tuple[torch.Tensor, TensorLayout]:
    """Return the detached tensor, copied if its memory has gaps or needs conversion, and the layout of the result."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():  # there are gaps between its elements
        tensor = tensor.contiguous()
    return tensor, TensorLayout(tensor.dtype, tuple(tensor.shape), tensor.stride())


class _Pickler(pickle.Pickler):
    """Pickles pytree's leaf specification by reference, because torch warns when its class, ``LeafSpec``, is called."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is type(_LEAF) and obj == _LEAF:
            return _leaf, ()
        return NotImplemented


_LEAF = pytree.tree_flatten(0)[1]


def _leaf() -> Any:
    return _LEAF


def _dump(what: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(what)
    except Exception as error:
        raise TypeError(f"a value cannot be sent between ranks: it cannot be pickled ({error})") from error
    return buffer.getvalue()


# Sending and receiving.

FIRST_TAG = 20117
"""The tag of the first pipe in a group. Each pipe has its own tag, so that it takes only its own messages."""
REMEMBERED = 256  # maximum number of descriptions that sender and receiver remember, per direction
HEADER = 4 + 3 + 2  # integers: key, notes, slot of the description and its size (0 if already sent)

_pipes: Counter[dist.ProcessGroup] = Counter()  # the number of pipes that each group has had


Notes = tuple[int, int, int]
"""Three numbers that go with a message: rows of the micro-batch, base of random numbers, and whether a stage has
drawn.
"""


class Message(NamedTuple):
    """A message received from another rank."""

    key: Key
    described: Any
    """The part of the description that ``read_values`` or ``read_tensors`` needs."""
    tensors: list[torch.Tensor]
    notes: Notes


class Transport:
    """Sends and receives the messages of this rank. Not thread-safe."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._rank = dist.get_rank(group)
        self._wire = wire_device(group, device)
        self._device = device
        self.tag = FIRST_TAG + _pipes[group]
        """The tag of this pipe's messages: the same on all ranks, and different for every pipe of the group."""
        _pipes[group] += 1
        self.groups = groups_of_directions(group, self._wire)
        """The groups in which this rank waits for messages: one for messages to higher, one for messages to lower
        ranks."""
        peers = range(dist.get_world_size(group))
        # Lists with an item for each peer. A description is sent once and gets a slot; later messages give the slot.
        # ``_slots``: the slots of sent descriptions; ``_descriptions``: received descriptions, by slot; ``_inboxes``:
        # messages that have arrived before this rank asked for them.
        self._slots: list[dict[bytes, int]] = [{} for _ in peers]
        self._descriptions: list[dict[int, bytes]] = [{} for _ in peers]
        self._inboxes: list[dict[Key, Message]] = [{} for _ in peers]
        self._posted: list[tuple[Any, Callable[[], None]]] = []  # sends in progress, with functions that wait for them
        self._sender: Background | None = None
        self._readers: list[Background] = []
        if self._wire.type == "cpu":
            # gloo's operations make no progress on their own, and do not tell whether they are done, so threads wait
            # for them.
            self._sender = Background("pymoe-pipe-sends")
            self._readers = [Background(f"pymoe-pipe-from-{peer}") for peer in peers]

    def send(
        self, peer: int, key: Key, description: bytes, tensors: Sequence[torch.Tensor], notes: Notes = (0, 0, 0)
    ) -> None:
        """Begin to send a message. Its tensors must not change until the message has arrived."""
        up, down = self.groups
        group, slots = up if self._rank < peer else down, self._slots[peer]
        new = b"" if description in slots else description
        if new and len(slots) == REMEMBERED:
            slots.clear()
        slot = slots.setdefault(description, len(slots))
        parts = [torch.tensor([*key, *notes, slot, len(new)], dtype=torch.int64)]
        if new:
            parts.append(torch.frombuffer(bytearray(new), dtype=torch.uint8))
        parts.extend(flat(tensor.to(self._wire)) for tensor in tensors if tensor.numel())
        for part in parts:
            there = part.to(self._wire)
            work = dist.isend(there, group=group, group_dst=peer, tag=self.tag)
            arrival = partial(wait, work, peer, key, there)
            if self._sender is not None:
                self._sender.put(arrival)
            else:
                self._posted = [*(one for one in self._posted if not one[0].is_completed()), (work, arrival)]

    def expect(self, peer: int, count: int) -> None:
        """Receive ``count`` messages from ``peer`` in the background. Do nothing without background threads (NCCL)."""
        if self._readers:
            for _ in range(count):
                self._readers[peer].put(partial(self._take, peer))

    def receive(self, peer: int, key: Key) -> Message:
        """Wait for the message with this key from ``peer``. Raise RuntimeError if it can no longer arrive."""
        inbox = self._inboxes[peer]
        while key not in inbox:
            for other in [other for other in inbox if other.step < key.step]:  # messages of a step that has failed
                del inbox[other]
            if later := {other.step for other in inbox if other.step > key.step}:  # no message of this step can follow
                raise RuntimeError(f"rank {peer} is in step {min(later)}, and this one in step {key.step}")
            if self._readers:  # background threads receive the messages
                if not self._readers[peer].pending:
                    self.expect(peer, 1)
                message = self._readers[peer].get()
            else:
                message = self._take(peer)
            inbox[message.key] = message
        return inbox.pop(key)

    def flush(self) -> None:
        """Wait until all sent messages have arrived."""
        posted, self._posted = self._posted, []
        for _, arrival in posted:
            arrival()
        while self._sender is not None and self._sender.pending:
            self._sender.get()

    def _take(self, peer: int) -> Message:
        """Wait for the next message from ``peer``, and return it."""
        header = torch.empty(HEADER, dtype=torch.int64, device=self._wire)
        self._fill([header], peer)
        step, subject, stage, micro_batch, *notes, slot, size = header.tolist()
        known = self._descriptions[peer]
        if size:
            new = torch.empty(size, dtype=torch.uint8, device=self._wire)
            self._fill([new], peer)
            known[slot] = new.cpu().numpy().tobytes()
        layouts, described = pickle.loads(known[slot])
        tensors = [empty(layout, self._wire) for layout in layouts]
        self._fill([flat(tensor) for tensor in tensors if tensor.numel()], peer)
        here = [tensor.to(self._device) for tensor in tensors]
        return Message(Key(step, Subject(subject), stage, micro_batch), described, here, (notes[0], notes[1], notes[2]))

    def _fill(self, buffers: Sequence[torch.Tensor], peer: int) -> None:
        up, down = self.groups
        group = up if peer < self._rank else down
        works = [dist.irecv(buffer, group=group, group_src=peer, tag=self.tag) for buffer in buffers]
        for work in works:
            wait(work, peer)


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device from which the group sends tensors: the CPU for gloo, which sends from host memory only."""
    if device.type == "cpu" or device.type not in {there.type for there in group._device_types}:
        return torch.device("cpu")
    return torch.device("cpu") if group._get_backend(device).name() == "gloo" else device


_directions: dict[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def groups_of_directions(group: dist.ProcessGroup, wire: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups for messages to higher and to lower ranks.

    NCCL runs the operations between two ranks one after the other, so two ranks that send to each other would deadlock.
    Therefore each direction has its own communicator. All ranks of the group must call this together.
    """
    if wire.type == "cpu":
        return group, group
    if group not in _directions:
        ranks = dist.get_process_group_ranks(group)
        _directions[group] = group, dist.new_group(ranks, use_local_synchronization=True)
    return _directions[group]


def wait(work: Any, peer: int, sent: Key | None = None, kept: torch.Tensor | None = None) -> None:
    """Wait until a ``dist.Work`` between this rank and ``peer`` is done. Raise RuntimeError if it fails.

    The failure of another rank ends the wait, too (:mod:`.watchdog`). ``sent``: the message that is being sent; None if
    one is being received. ``kept``: a tensor that must stay alive until the end of the wait.
    """
    try:
        work.wait()
    except RuntimeError as error:
        what = "a message" if sent is None else f"the arrival of {sent}"
        add_note(error, f"pymoe.pipe: while waiting for {what}; the other rank was {peer}")
        raise


class Background:
    """A daemon thread that runs functions one after the other until one raises.

    Used instead of an executor, because the interpreter waits for the threads of executors when it exits, and a wait
    for a message may never end.
    """

    def __init__(self, name: str) -> None:
        self.pending = 0
        """The number of results that have not been taken."""
        self._functions: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, function: Callable[[], Any]) -> None:
        """Make the thread call ``function`` after those that were given before."""
        if self._thread.ident is None:
            self._thread.start()
        self.pending += 1
        self._functions.put(function)

    def get(self) -> Any:
        """Wait for the next result. If the function has raised, raise its exception, and again in every later call."""
        result, error = self._results.get()
        if error is not None:
            self._results.put((None, error))
            raise error
        self.pending -= 1
        return result

    def _run(self) -> None:
        result: Any = None
        error: BaseException | None = None
        while error is None:
            function = self._functions.get()
            try:
                result = function()
            except BaseException as raised:
                error = raised
            del function  # release the sent memory before the arrival is reported
            self._results.put((result, error))
            result = None
