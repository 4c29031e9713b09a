"""The exchanges of a call: first of counts, then of the rows that the counts announce.

A :class:`CountExchange` tells every rank how many rows go where, and compares the calls of the ranks. It is an
all-gather of int32 values, which the host reads once, except for padded buffers. Messages have the same length for all
layers of a group, so that ranks can read each other's messages even if they call different layers. If ranks disagree in
a forward, all of them raise, because the all-to-all would hang or mix up rows (with padded buffers, only
:func:`~pymoe.ep.check_calls` raises). Backward passes exchange no counts: if ranks run the backward passes of several
calls in different orders, nothing detects it.

Except for padded buffers, the counts determine a :class:`RowPlan`. An :class:`AllToAll` has two ends. On the rank of
the tokens all rows are in one tensor, sorted by chunk and destination; on the rank of the experts every chunk is a
separate tensor. So a dispatch starts all chunks and waits for each separately, and a combine starts each chunk
separately and waits for all. The gradient of a dispatch is a combine, and vice versa; so exchanges overlap with
computation in backward passes, too, and can be differentiated again. Handles, tensors without elements, connect the
start of an exchange with the wait in the autograd graph, since autograd must not read rows that are still in flight.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pymoe._common.types import FLOATING, Routing
from pymoe._errors import describe_error
from pymoe._gloo_at_exit import wait_for_gloo_at_exit
from pymoe.ep.failures import Exchange, GroupError, report_error, report_failed_backward
from pymoe.ep.sharding import PARAMETERS, ExpertSharding

BLOCK = 512  # the length of every message, in int32 values, is a multiple of BLOCK
MAX_CAPACITY_FACTOR = 3e38  # messages contain the factor as a float32, so larger ones are clamped
FAILED = 1
MAX_OPTIONS = 256
_HUGE_PAGE = 2 << 20

_titles: dict[int, str] = {}  # identifier of a layer in messages (a checksum of its title) -> that title
_options: dict[int, str] = {}  # identifier of a call's options in messages (a checksum of their text) -> that text


# The state shared by all layers of a group. It is equal on all ranks, since they call shard in the same order.


@dataclass
class _GroupState:
    models: int = 0
    max_counts: int = 0


_states: WeakKeyDictionary[dist.ProcessGroup, _GroupState] = WeakKeyDictionary()


def next_model_number(group: dist.ProcessGroup) -> int:
    """Count a new model that is sharded over ``group``; return the model's number: 1, then 2, ...

    This also makes the process wait at exit for the threads of gloo (:func:`wait_for_gloo_at_exit`).
    """
    wait_for_gloo_at_exit()
    state = _states.setdefault(group, _GroupState())
    state.models += 1
    return state.models


def register_layer(sharding: ExpertSharding) -> None:
    """Record the title of a layer for error messages, and its number of counts.

    The largest number of counts among the layers of a group determines the length of the group's messages.
    """
    layer_number(sharding.title)
    state = _states.setdefault(sharding.group, _GroupState())
    state.max_counts = max(state.max_counts, sharding.num_counts)


@cache
def layer_number(title: str) -> int:
    """Store the title of a layer for errors; return the layer's identifier in messages, a checksum of ``title``."""
    number = zlib.crc32(title.encode()) & 0x7FFFFFFF
    _titles[number] = title
    return number


# The count exchange of a call.

# torch 2.13 renames this function, and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CallSignature(NamedTuple):
    """The properties of a call that must be equal on all ranks of a group, encoded as integers."""

    layer: int
    experts: int
    width: int
    dtype: int
    rows_need_gradients: int
    experts_need_gradients: int
    weights_need_gradients: int
    top_k: int
    capacity: int
    options: int

    def shown(self, field: str) -> str:
        """Return the value of a field as text for error messages."""
        value: int = getattr(self, field)
        if field == "layer":
            return _titles.get(value, f"unknown ({value})")
        if field == "options":
            return _options.get(value, "others")
        if field == "experts_need_gradients":
            return " and ".join(name for place, name in enumerate(PARAMETERS) if value >> place & 1) or "none"
        if field == "dtype":
            return str(FLOATING[value]).removeprefix("torch.")
        if field.endswith("gradients"):
            return "yes" if value else "no"
        if field == "capacity":
            return f"{struct.unpack('<f', struct.pack('<i', value))[0]:g}" if value else "None"
        return str(value)


MEANING = {
    "layer": "which layer they call",
    "experts": "its number of experts",
    "width": "the width of its rows",
    "dtype": "the dtype of its rows",
    "rows_need_gradients": "whether its rows need gradients",
    "experts_need_gradients": "which parameters of its experts need gradients",
    "weights_need_gradients": "whether the weights that travel need gradients",
    "top_k": "its top_k",
    "capacity": "its capacity_factor",
    "options": "the options of its router, experts and losses",
}
HEADER = len(MEANING) + 2  # a message begins with the signature, FAILED or 0, and the number of tokens


def call_signature(
    sharding: ExpertSharding,
    rows_TH: Tensor,
    weights_TK: Tensor,
    experts: Mapping[str, Tensor],
    top_k: int,
    capacity_factor: float | None,
    options: tuple[Any, ...],
) -> CallSignature:
    """Return the signature of the call that this rank is about to make.

    Args:
        sharding: the layer's sharding.
        rows_TH: (T, H), the tokens as they will travel.
        weights_TK: (T, K), the weights of the gate.
        experts: the parameters of this rank's experts, by name.
        top_k: K, the number of choices.
        capacity_factor: the layer's capacity factor, or None. It is compared as a float32.
        options: all other options on which rows and gradients depend, as alternating names and values.
    """
    recorded = torch.is_grad_enabled()
    trained = 0
    for name, parameter in experts.items():
        trained |= parameter.requires_grad << PARAMETERS.index(name)
    factor = None if capacity_factor is None else min(capacity_factor, MAX_CAPACITY_FACTOR)
    return CallSignature(
        layer_number(sharding.title),
        sharding.num_experts,
        rows_TH.shape[1],
        FLOATING.index(rows_TH.dtype),
        int(recorded and rows_TH.requires_grad),
        trained if recorded else 0,
        int(recorded and sharding.deduplicate and weights_TK.requires_grad),
        top_k,
        0 if factor is None else struct.unpack("<i", struct.pack("<f", factor))[0],
        _options_number(options),
    )


def message_length(counts: int) -> int:
    """Return the length, in int32 values, of a message with ``counts`` counts."""
    return -(-(HEADER + counts) // BLOCK) * BLOCK


class ExchangedCounts(NamedTuple):
    """The counts of all ranks."""

    loads: list[list[int]]
    """(R, E): the number of slots for which each rank chose each expert, before any were dropped."""
    tokens: list[int]
    """(R,): the number of tokens of each rank."""
    rows: list[list[int]]
    """(R, n): the number of rows that each rank sends to each destination; n is 0 if the loads determine it."""


class CountExchange:
    """The all-gather of a call's counts. The constructor starts it, so every rank of the group must construct one.

    Args:
        sharding: the layer's sharding.
        signature: the signature of the call; None if this rank cannot make the call and sends ``error`` instead.
        counts: (n,) int32, n = ``sharding.num_counts``: this rank's load of each expert, then, with deduplication, its
            number of rows for each destination.
        tokens: T, the number of tokens.
        error: the error because of which this rank cannot make the call.

    Raises:
        GroupError: the all-gather cannot start, since a rank has failed.
    """

    def __init__(
        self,
        sharding: ExpertSharding,
        signature: CallSignature | None,
        counts: Tensor | None = None,
        tokens: int = 0,
        error: BaseException | None = None,
    ) -> None:
        self._sharding = sharding
        state = _states.get(sharding.group)  # None if the layer was unpickled in this process
        length = message_length(max(sharding.num_counts, 0 if state is None else state.max_counts))
        device = torch.device(sharding.mesh.device_type) if counts is None else counts.device
        if signature is not None and counts is not None:
            header = _on_device((*signature, 0, tokens), device)
            message = torch.cat([header, counts, counts.new_zeros(length - HEADER - counts.shape[0])])
        else:
            message = torch.tensor(_failure_message(sharding, error, length), dtype=torch.int32).to(device)
        self._gathered = message.new_empty(sharding.ranks * length)
        self._message = message  # kept alive until the all-gather is done
        start = partial(all_gather, self._gathered, message, group=sharding.group, async_op=True)
        self._exchange = Exchange(sharding, "the counts of rows", start, begins_call=True)

    def wait(self) -> Tensor:
        """Wait for the messages of all ranks; return them as (R, n) int32, without copying them to the host.

        On a GPU, only the current stream waits.

        Raises:
            GroupError: a rank has died, has raised an error or is late.
        """
        self._exchange.wait()
        return self._gathered.view(self._sharding.ranks, -1)

    def read(self) -> ExchangedCounts:
        """Wait for the messages of all ranks, compare their signatures, and return their counts.

        Raises:
            GroupError: ranks disagree, or one of them cannot make the call, has died or is late.
        """
        sharding = self._sharding
        messages: list[list[int]] = self.wait().tolist()  # the only copy to the host in a call
        raise_for_difference(sharding, messages)
        rows, end = HEADER + sharding.num_experts, HEADER + sharding.num_counts
        counts = ExchangedCounts([], [], [])
        for message in messages:
            counts.loads.append(message[HEADER:rows])
            counts.tokens.append(message[HEADER - 1])
            counts.rows.append(message[rows:end])
        return counts


def report_failure(sharding: ExpertSharding, error: BaseException) -> None:
    """Tell the other ranks that this rank has failed before it could send its counts, so that they raise, too.

    This waits until all ranks have called a layer of the group.
    """
    with contextlib.suppress(GroupError):  # read() raises it on all ranks; the caller raises `error`
        CountExchange(sharding, None, error=error).read()
    if sharding.transport == "padded":  # the other ranks wait for rows, and do not read the message
        report_error(sharding, f"raised {describe_error(error)}")


def raise_for_difference(sharding: ExpertSharding, messages: list[list[int]]) -> None:
    """Raise unless all ranks are about to make the same call.

    Args:
        sharding: the layer's sharding.
        messages: the message of every rank, or the first ``HEADER`` numbers of each.

    Raises:
        GroupError: ranks disagree, or one of them cannot make the call.
    """
    *signature, failures, _ = itertools.islice(zip(*messages, strict=True), HEADER)
    if FAILED in failures:
        failed = tuple(rank for rank, failure in enumerate(failures) if failure == FAILED)
        text = "".join(map(chr, messages[failed[0]][HEADER:])).rstrip("\0") or "its own error says why"
        raise GroupError(
            f"MoE {sharding.title}: rank {failed[0]} of the expert-parallel group failed before it sent rows: {text}",
            sharding.layer,
            failed,
        )
    for field, values in zip(MEANING, signature, strict=True):
        if len(set(values)) > 1:
            signatures = [CallSignature(*message[: len(MEANING)]) for message in messages]
            usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
            others = tuple(rank for rank, value in enumerate(values) if value != usual)
            seen = ", ".join(f"rank {rank}: {signature.shown(field)}" for rank, signature in enumerate(signatures))
            raise GroupError(
                f"MoE {sharding.title}: the ranks of an expert-parallel group must agree on {MEANING[field]}, got "
                f"{seen}",
                sharding.layer,
                others,
            )


@lru_cache(maxsize=MAX_OPTIONS, typed=True)
def _options_number(options: tuple[Any, ...]) -> int:
    text = ", ".join(f"{name}={value!r}" for name, value in zip(options[::2], options[1::2], strict=True))
    number = zlib.crc32(text.encode()) & 0x7FFFFFFF
    if len(_options) >= MAX_OPTIONS:  # bound the cache: coefficients may change in every step
        _options.clear()
        _options_number.cache_clear()
    _options[number] = text
    return number


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``numbers`` as an int32 tensor on ``device``; recently returned tensors are cached."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)


def _failure_message(sharding: ExpertSharding, error: BaseException | None, length: int) -> list[int]:
    """Return a message that contains, in place of counts, the text of an error: one character code per number."""
    text = "" if error is None else describe_error(error)
    header = [layer_number(sharding.title), *[0] * (HEADER - 3), FAILED, 0]
    return (header + [ord(character) for character in text] + [0] * length)[:length]


# The rows of a call, and their exchange.


class RowCounts(NamedTuple):
    """The numbers of rows that this rank exchanges with each rank of the group."""

    sharding: ExpertSharding
    sent: list[list[int]]
    """(chunks, R): the number of rows that this rank sends to each rank."""
    received: list[list[int]]
    """(chunks, R): the number of rows that this rank receives from each rank."""


class WeightSends(NamedTuple):
    """The experts whose weights this rank sends, in a call, to the ranks that clone them."""

    experts: list[list[int]]
    """(R,): the experts of this rank that each rank clones."""
    counts: RowCounts
    """The number of experts that this rank sends to each rank, and receives from each rank, in a single chunk."""


class RowPlan:
    """The numbers of rows of a call, counting a row for every choice: lists on the host, from all ranks' counts.

    Args:
        sharding: the layer's sharding.
        exchanged: the counts of all ranks.
        top_k: K, the number of choices.
        capacity_factor: the layer's capacity factor, or None.

    Raises:
        GroupError: a rank would receive too many rows.
    """

    weight_sends: WeightSends | None = None
    """The experts whose weights this rank sends to clones; None if there are no clones in this call."""

    def __init__(
        self, sharding: ExpertSharding, exchanged: ExchangedCounts, top_k: int, capacity_factor: float | None
    ) -> None:
        self.sharding = sharding
        self.loads, self.tokens, self.exchanged_rows = exchanged
        self.kept = self.loads
        """(R, E): the number of rows that each rank sends to each expert."""
        if capacity_factor is not None:
            self.kept = _within_capacity(sharding, self.loads, self.tokens, top_k, capacity_factor)
        self.at_owners = self._rows_at_owners()
        """(R, E): how many of the rows in ``kept`` the owners of the experts compute; without clones, all of them."""
        if sharding.max_recv_rows is not None:
            self._check_received(sharding.max_recv_rows)
        self.counts = RowCounts(sharding, [], [])
        own = self.at_owners[sharding.rank]
        self.rows_by_expert: list[list[list[int]]] = []
        """(chunks, R, n): the number of rows from each rank for each of the n experts of this rank in the chunk."""
        for by_rank in sharding.chunk_experts:
            here = by_rank[sharding.rank]
            rows = [[of_source[expert] for expert in here] for of_source in self.at_owners]
            self.rows_by_expert.append(rows)
            self.counts.sent.append([sum([own[expert] for expert in experts]) for experts in by_rank])
            self.counts.received.append(list(map(sum, rows)))

    def rows_of_ranks(self) -> list[int]:
        """Return the number of rows that each rank computes."""
        of_experts = list(map(sum, zip(*self.at_owners, strict=True)))
        return [sum([of_experts[expert] for expert in own]) for own in self.sharding.experts_of_ranks]

    def expert_of_rows(self, chunk: int, device: torch.device) -> tuple[Tensor, int]:
        """Return the expert of each row that arrives in a chunk, (n, 1) int32, and the number of experts in the chunk.

        Only this rank's experts in the chunk are counted and numbered, from 0. Rows arrive sorted by source rank, and
        the rows of each source rank are sorted by expert.
        """
        rows = torch.tensor(self.rows_by_expert[chunk], dtype=torch.int64)
        experts = rows.shape[1]
        indices = torch.arange(experts, dtype=torch.int32).repeat(self.sharding.ranks)
        total = sum(self.counts.received[chunk])
        rows, indices = rows.reshape(-1).to(device), indices.to(device)
        return indices.repeat_interleave(rows, output_size=total)[:, None], experts

    def without_dropped(self, routing: Routing, experts_TK: Tensor) -> Routing:
        """Return a routing that keeps, for each expert, only the first rows, as many as this rank may send.

        ``build_routing`` cannot do this, since its capacity is the same for all experts. If the group shares the
        capacity, the limits of a rank differ between experts.

        Args:
            routing: the routing of all choices.
            experts_TK: (T, K) int32, the choices from which ``routing`` was built: the indices of the experts in
                ``sharding.send_order``.
        """
        own = self.kept[self.sharding.rank]
        limit_E = torch.tensor([own[e] for e in self.sharding.send_order], dtype=torch.int32).to(experts_TK.device)
        chosen = experts_TK.long()
        place_TK = routing.slot - routing.offsets[chosen]
        offsets = torch.cat([limit_E.new_zeros(1), limit_E.cumsum(0, dtype=torch.int32)])
        slot_TK = torch.where(place_TK < limit_E[chosen], offsets[chosen] + place_TK, -1)
        token_TK = torch.arange(chosen.shape[0], dtype=torch.int32, device=chosen.device)[:, None].expand_as(chosen)
        # Dropped choices write to an additional row, which is cut off below.
        rows = slot_TK.numel()
        token = routing.token.new_full((rows + 1,), -1)
        token[torch.where(slot_TK < 0, rows, slot_TK).reshape(-1).long()] = token_TK.reshape(-1)
        return Routing(slot_TK, token[:rows], offsets)

    def _rows_at_owners(self) -> list[list[int]]:
        return self.kept

    def _check_received(self, limit: int) -> None:
        sharding = self.sharding
        rows = self.rows_of_ranks()
        full = tuple(rank for rank, count in enumerate(rows) if count > limit)
        if full:
            seen = ", ".join(f"rank {rank} would receive {rows[rank]}" for rank in full)
            raise GroupError(
                f"MoE {sharding.title}: a rank must receive at most room = {limit} rows in a call, got {seen}",
                sharding.layer,
                full,
            )


def capacity(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """Return the capacity, the maximum number of rows of an expert, with the formula of :class:`pymoe.nn.MoE`."""
    return max(1, math.ceil(min(factor, num_experts) * (tokens * top_k) / num_experts))


def _within_capacity(
    sharding: ExpertSharding, loads: list[list[int]], tokens: list[int], top_k: int, factor: float
) -> list[list[int]]:
    """Return (R, E): how many rows of each rank for each expert fit into the capacity of the expert."""
    experts = sharding.num_experts
    if sharding.scope == "rank":  # each rank limits its own rows
        limits = [capacity(factor, count, top_k, experts) for count in tokens]
        return [[min(n, limit) for n in load] for load, limit in zip(loads, limits, strict=True)]
    # With scope "group", an expert takes rows in the order of ranks until its capacity is reached.
    left = [capacity(factor, sum(tokens), top_k, experts)] * experts
    kept = []
    for load in loads:
        kept.append([min(n, limit) for n, limit in zip(load, left, strict=True)])
        left = [limit - n for n, limit in zip(kept[-1], left, strict=True)]
    return kept


class AllToAll:
    """A dispatch or a combine of the rows of a call; :attr:`gradients` is the exchange of their gradients.

    Args:
        counts: the numbers of rows that this rank sends and receives in a dispatch.
        total: S, the number of rows of the tensor on the rank of the tokens. A combine sets rows that are not exchanged
            to zero: those past the sum of the counts.
        like: a tensor with the width, dtype and device of the rows.
        last_first: start the last chunk first, since a backward pass needs it first.
    """

    def __init__(self, counts: RowCounts, total: int, like: Tensor, *, last_first: bool = False) -> None:
        self.counts, self.total, self.last_first = counts, total, last_first
        self.chunks = len(counts.sent)
        self.width, self.dtype, self.device = like.shape[1], like.dtype, like.device
        self._under_way: dict[int, tuple[Exchange, Tensor, Tensor]] = {}  # chunk -> exchange, output and input
        self._combined: Tensor | None = None
        self._gradients: AllToAll | None = None

    @property
    def gradients(self) -> AllToAll:
        """Return the exchange of the gradients, which runs in the opposite direction."""
        if self._gradients is None:
            like = torch.empty(0, self.width, dtype=self.dtype, device=self.device)
            self._gradients = AllToAll(self.counts, self.total, like, last_first=not self.last_first)
        return self._gradients

    def start_dispatch(self, rows_SH: Tensor) -> tuple[Tensor, ...]:
        """Start sending all chunks to the ranks of the experts; return a handle for each chunk."""
        parts, handles = self._parts(rows_SH.contiguous()), []
        for chunk in sorted(range(self.chunks), reverse=self.last_first):
            received = self.counts.received[chunk]
            out = empty_rows(sum(received), self.width, self.dtype, self.device)
            self._start(chunk, out, parts[chunk], received, self.counts.sent[chunk])
            handles.append(rows_SH.new_empty(0))
        return tuple(handles)

    def start_combine(self, rows: Tensor, chunk: int) -> Tensor:
        """Start sending a chunk to the ranks of the tokens; return a handle."""
        if self._combined is None:
            self._combined = empty_rows(self.total, self.width, self.dtype, self.device)
            self._combined[sum(map(sum, self.counts.sent)) :].zero_()
        out = self._parts(self._combined)[chunk]
        self._start(chunk, out, rows.contiguous(), self.counts.sent[chunk], self.counts.received[chunk])
        return rows.new_empty(0)

    def wait(self, chunk: int) -> Tensor:
        """Wait for a chunk to arrive; return its rows."""
        exchange, out, _ = self._under_way.pop(chunk)
        exchange.wait()
        return out

    def wait_combine(self) -> Tensor:
        """Wait for all chunks of a combine to arrive; return their rows in one tensor."""
        for chunk in range(self.chunks):
            self.wait(chunk)
        combined, self._combined = self._combined, None
        assert combined is not None
        return combined

    def _parts(self, rows_SH: Tensor) -> Sequence[Tensor]:
        sizes = list(map(sum, self.counts.sent))
        return rows_SH[: sum(sizes)].split(sizes)

    def _start(self, chunk: int, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> None:
        if chunk in self._under_way:
            # An earlier backward pass did not wait for this exchange, which may still write to the memory of a combine.
            self.wait(chunk)
        sharding = self.counts.sharding
        start = partial(dist.all_to_all_single, out, rows, received, sent, group=sharding.group, async_op=True)
        self._under_way[chunk] = Exchange(sharding, "rows", start), out, rows


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, exchange: AllToAll) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.start_dispatch(rows_SH)

    @staticmethod
    def backward(ctx: Any, *handles: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return wait_combine(ctx.exchange.gradients, *handles), None


class _WaitDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, exchange: AllToAll, chunk: int) -> Tensor:
        ctx.exchange, ctx.chunk = exchange, chunk
        return exchange.wait(chunk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return start_combine(grad, ctx.exchange.gradients, ctx.chunk), None, None


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AllToAll, chunk: int) -> Tensor:
        ctx.exchange, ctx.chunk = exchange, chunk
        return exchange.start_combine(rows, chunk)

    @staticmethod
    def backward(ctx: Any, handle: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return wait_dispatch(handle, ctx.exchange.gradients, ctx.chunk), None, None


class _WaitCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AllToAll, *handles: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait_combine()

    @staticmethod
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # This is the first node of a layer's backward that exchanges rows: from here on, ranks wait for each other.
        report_failed_backward(ctx.exchange.counts.sharding)
        return None, *start_dispatch(grad_SH, ctx.exchange.gradients)


# Autograd nodes that start a dispatch or a combine, or wait for it.

start_dispatch: Callable[[Tensor, AllToAll], tuple[Tensor, ...]] = _StartDispatch.apply
"""Start sending all chunks of rows (S, H) to the ranks of the experts; return a handle for each chunk."""
wait_dispatch: Callable[[Tensor, AllToAll, int], Tensor] = _WaitDispatch.apply
"""Wait, on the rank of the experts, for the chunk of a handle; return its rows (n, H), sorted by source rank."""
start_combine: Callable[[Tensor, AllToAll, int], Tensor] = _StartCombine.apply
"""Start sending a chunk of rows (n, H) to the ranks of the tokens; return a handle."""
wait_combine: Callable[..., Tensor] = _WaitCombine.apply
"""Wait, on the rank of the tokens, for all chunks of an exchange, given its handles; return the rows (S, H)."""


def empty_rows(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised rows (count, width). On the CPU, ask the system for huge pages (2 MiB) from 4 MiB on.

    The operators do the same for their results. With small pages, the first write to new memory causes a page fault per
    4 KiB, and the faults take longer than the copy itself. If the system has no huge pages, the request for them has no
    effect.

    Args:
        count: the number of rows.
        width: elements per row.
        dtype: the dtype of the rows.
        device: the device of the rows.
    """
    rows = torch.empty(count, width, dtype=dtype, device=device)
    advise = _madvise()
    if advise is not None and rows.is_cpu and rows.nbytes >= 2 * _HUGE_PAGE:
        begin = -(-rows.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (rows.data_ptr() + rows.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return rows


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the function ``madvise`` of the C library; None if it or ``MADV_HUGEPAGE`` does not exist."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise  # type: ignore[no-any-return]
