"""Checks that all ranks of a group do the same, and exchanges counts before the rows of every call.

Before functions such as ``shard`` change a model, :func:`assert_same_on_all_ranks` compares descriptions of it.

Before the rows of a call travel, a :class:`CountExchange` tells every rank how many rows go where, and compares the
calls: one all-gather of int32 numbers, and one read of them by the host, unless rows travel in padded buffers. Messages
have the same length for all layers of a group, so that even ranks in different layers can read each other's. If ranks
disagree in a forward, all of them raise; otherwise the all-to-all would hang or mix rows up. Backward passes exchange
no counts, so it goes unnoticed if ranks run the backward passes of several calls in different orders.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pymoe._common.dtypes import FLOATING
from pymoe._errors import describe_error
from pymoe._gloo_at_exit import wait_for_gloo_at_exit
from pymoe._ranks import Process
from pymoe.ep.failures import Exchange, GroupError, lost_rank, remember_members, report_error
from pymoe.ep.sharding import PARAMETERS, ExpertSharding

BLOCK = 512  # a message's length in numbers is a multiple of this
MAX_CAPACITY_FACTOR = 3e38  # limit for a message, which holds it as a float32
FAILED = 1
MAX_OPTIONS = 256

_titles: dict[int, str] = {}  # titles of layers, by the numbers that messages use for them
_options: dict[int, str] = {}  # options of layers in recent calls, by the numbers that messages use for them


# Comparison of descriptions, where a model is changed.

Description = dict[str, dict[str, Any]]
"""For every kind of object (such as ``"layer"``), a description of each object, by name."""


def assert_same_on_all_ranks(
    function: str, group: dist.ProcessGroup, mine: Description, problem: Exception | None
) -> None:
    """Raise on all ranks of a group unless their descriptions are equal.

    Args:
        function: the public function that the ranks have called.
        group: the ranks; all of them call this.
        mine: this rank's description.
        problem: the error for which this rank cannot continue; this rank raises it, the others raise
            :class:`GroupError`.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    own = None if problem is None else describe_error(problem), mine, Process.own(), secrets.token_hex(8)
    try:
        dist.all_gather_object(gathered, own, group=group)
    except RuntimeError as lost:
        raise lost_rank(group, function, "", "descriptions of models", lost) from lost
    _, _, processes, names = zip(*gathered, strict=True)
    remember_members(group, processes, names[0])
    if problem is not None:
        raise problem
    for rank, (error, theirs, *_) in enumerate(gathered):
        if error is not None:
            raise GroupError(f"{function}: rank {rank} of the group failed: {error}", "", (rank,))
        for kind in mine:
            _raise_unless_equal(function, kind, mine[kind], theirs[kind], rank)


def _raise_unless_equal(function: str, kind: str, mine: dict[str, Any], theirs: dict[str, Any], rank: int) -> None:
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(name, "none"), theirs.get(name, "none")
        if here != there:
            raise GroupError(
                f"{function}: all ranks of the group must have the same {kind} {name!r}, got "
                f"{_difference(here, there)} on rank {rank}",
                name if kind == "layer" else "",
                (rank,),
            )


def _difference(here: Any, there: Any) -> str:
    """Return the first difference: a property of a layer that both ranks have, or else the whole descriptions."""
    if isinstance(here, dict) and isinstance(there, dict):
        part = next(name for name in [*here, *there] if here.get(name, "none") != there.get(name, "none"))
        return f"{part} {here.get(part, 'none')} here and {there.get(part, 'none')}"
    here, there = (one["options"] if isinstance(one, dict) else one for one in (here, there))
    return f"{here} here and {there}"


# The state that all layers over one group share. All ranks call shard in the same order, so their numbers agree.


@dataclass
class _GroupState:
    models: int = 0
    max_counts: int = 0


_states: WeakKeyDictionary[dist.ProcessGroup, _GroupState] = WeakKeyDictionary()


def next_model_number(group: dist.ProcessGroup) -> int:
    """Return the number of a new model that is sharded over a group: 1, then 2, ..."""
    wait_for_gloo_at_exit()
    state = _states.setdefault(group, _GroupState())
    state.models += 1
    return state.models


def register_layer(sharding: ExpertSharding) -> None:
    """Record a layer's title for error messages, and its number of counts, which determines the length of its group's
    messages.
    """
    layer_number(sharding.title)
    state = _states.setdefault(sharding.group, _GroupState())
    state.max_counts = max(state.max_counts, sharding.num_counts)


@functools.cache
def layer_number(title: str) -> int:
    """Return the number of a layer in messages, and remember its title for errors."""
    number = zlib.crc32(title.encode()) & 0x7FFFFFFF
    _titles[number] = title
    return number


# The count exchange of a call.

# torch 2.13 has a new name for it, and warns about the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CallSignature(NamedTuple):
    """The properties of a call that must be equal on all ranks of a group, as whole numbers."""

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
        """Return the meaning of one of the numbers."""
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
HEADER = len(MEANING) + 2  # the signature, then FAILED or 0, then the number of tokens


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
    """Return the length of a rank's message, in int32 numbers, for this number of counts (such as the loads of
    experts).
    """
    return -(-(HEADER + counts) // BLOCK) * BLOCK


class ExchangedCounts(NamedTuple):
    """The counts of all ranks."""

    loads: list[list[int]]
    """(R, E): the number of slots for which each rank chose each expert, before any were dropped."""
    tokens: list[int]
    """(R,): the number of tokens of each rank."""
    rows: list[list[int]]
    """(R, n): the rows that each rank sends to each destination; empty if they follow from the loads."""


class CountExchange:
    """An all-gather under way. It begins when it is made; every rank of the group must make one.

    Args:
        sharding: the layer's sharding.
        signature: the signature of the call; None if this rank cannot make the call and tells the others why.
        counts: (n,) int32, n = ``sharding.num_counts``: the load of each expert here, then rows for destinations.
        tokens: T, the number of tokens.
        error: the reason why this rank cannot continue.
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
        state = _states.get(sharding.group)  # there is none if this process has unpickled the layer
        length = message_length(max(sharding.num_counts, 0 if state is None else state.max_counts))
        device = torch.device(sharding.mesh.device_type) if counts is None else counts.device
        if signature is not None and counts is not None:
            header = _on_device((*signature, 0, tokens), device)
            message = torch.cat([header, counts, counts.new_zeros(length - HEADER - counts.shape[0])])
        else:
            message = torch.tensor(_failure_message(sharding, error, length), dtype=torch.int32).to(device)
        self._gathered = message.new_empty(sharding.ranks * length)
        self._message = message  # must be there until the work is done
        start = functools.partial(all_gather, self._gathered, message, group=sharding.group, async_op=True)
        self._exchange = Exchange(sharding, "the counts of rows", start, begins_call=True)

    def wait(self) -> Tensor:
        """Wait for the messages of all ranks; return them, unread, as (R, n) int32.

        Raises:
            GroupError: a rank is gone.
        """
        self._exchange.wait()
        return self._gathered.view(self._sharding.ranks, -1)

    def read(self) -> ExchangedCounts:
        """Wait for the messages of all ranks, compare their signatures, and return their counts.

        Raises:
            GroupError: ranks disagree, one of them cannot continue, or one is gone.
        """
        sharding = self._sharding
        messages: list[list[int]] = self.wait().tolist()  # the one read of a call
        raise_for_difference(sharding, messages)
        rows, end = HEADER + sharding.num_experts, HEADER + sharding.num_counts
        counts = ExchangedCounts([], [], [])
        for message in messages:
            counts.loads.append(message[HEADER:rows])
            counts.tokens.append(message[HEADER - 1])
            counts.rows.append(message[rows:end])
        return counts


def report_failure(sharding: ExpertSharding, error: BaseException) -> None:
    """Tell the other ranks that this one has failed before it could send its counts: they raise, too."""
    with contextlib.suppress(GroupError):  # which all ranks get
        CountExchange(sharding, None, error=error).read()
    if sharding.transport == "padded":  # the others do not read it, and wait for rows
        report_error(sharding, f"raised {describe_error(error)}")


def raise_for_difference(sharding: ExpertSharding, messages: list[list[int]]) -> None:
    """Raise unless all ranks are about to make the same call.

    Args:
        sharding: the layer's sharding.
        messages: the message of every rank, or the first ``HEADER`` numbers of each.

    Raises:
        GroupError: ranks disagree, or one of them cannot continue.
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


@functools.lru_cache(maxsize=MAX_OPTIONS, typed=True)
def _options_number(options: tuple[Any, ...]) -> int:
    text = ", ".join(f"{name}={value!r}" for name, value in zip(options[::2], options[1::2], strict=True))
    number = zlib.crc32(text.encode()) & 0x7FFFFFFF
    if len(_options) >= MAX_OPTIONS:  # coefficients that change in every step would fill the cache without end
        _options.clear()
        _options_number.cache_clear()
    _options[number] = text
    return number


@functools.lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int32 numbers on a device; numbers of recent calls are kept there."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)


def _failure_message(sharding: ExpertSharding, error: BaseException | None, length: int) -> list[int]:
    """Return a message that carries an error's text in place of counts, one character per number."""
    text = "" if error is None else describe_error(error)
    header = [layer_number(sharding.title), *[0] * (HEADER - 3), FAILED, 0]
    return (header + [ord(character) for character in text] + [0] * length)[:length]
