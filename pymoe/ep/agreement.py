"""What ranks tell each other before rows travel: how many rows go where, and that all of them make the same call.

One all-gather of int32 numbers a call of a layer, and one read of them by the host, unless rows travel in padded
buffers (:mod:`pymoe.ep.padded`). Its length is the same for all layers of a group, so that ranks in different layers
understand each other, too: whoever disagrees in a forward makes every rank raise, where the rows' exchange would hang
or mix them up. Backward passes announce nothing: ranks that run those of several calls in different orders are not
noticed.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pymoe._errors import describe_error
from pymoe.ep.arrangement import Arrangement
from pymoe.ep.errors import GroupError
from pymoe.ep.groups import most_announced
from pymoe.reference import checks

BLOCK = 512  # numbers: a message's length is a multiple of it
LARGEST = 3e38  # a capacity factor in a message, as a float32
FAILED = 1

_layers: dict[int, str] = {}  # titles of layers, by what stands for them in a message
_options: dict[int, str] = {}  # the same of options of layers, of the calls of late
MOST_OPTIONS = 256
_PARAMETERS = ("w_in", "w_out", "b_in", "b_out")


class Call(NamedTuple):
    """What must be the same on all ranks of a group in one call of a layer, as whole numbers."""

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
        """Return one of the numbers as what it stands for."""
        value: int = getattr(self, field)
        if field == "layer":
            return _layers.get(value, f"unknown ({value})")
        if field == "options":
            return _options.get(value, "others")
        if field == "experts_need_gradients":
            return " and ".join(name for place, name in enumerate(_PARAMETERS) if value >> place & 1) or "none"
        if field == "dtype":
            return str(checks.FLOATING[value]).removeprefix("torch.")
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
HEADER = len(MEANING) + 2  # and whether the rank has failed, and its number of tokens


def message_length(numbers: int) -> int:
    """Return how many int32 numbers a rank sends where it announces so many, such as the loads of its experts."""
    return -(-(HEADER + numbers) // BLOCK) * BLOCK


class Announced(NamedTuple):
    """What all ranks have said."""

    loads: list[list[int]]
    """(R, E): for how many of its slots each rank chose each expert, before any were dropped."""
    tokens: list[int]
    """How many tokens each rank has."""
    rows: list[list[int]]
    """(R, n): how many rows each rank sends to each destination; none if that follows from the loads."""


def call_of(
    arrangement: Arrangement,
    rows_TH: Tensor,
    weights_TK: Tensor,
    experts: Iterable[tuple[str, Tensor]],
    top_k: int,
    capacity_factor: float | None,
    options: tuple[Any, ...],
) -> Call:
    """Return what this rank is about to do.

    Args:
        arrangement: of the layer.
        rows_TH: (T, H), the tokens as they will travel.
        weights_TK: (T, K), of the gate.
        experts: the parameters of this rank's experts, and their names.
        top_k: K.
        capacity_factor: of the layer, or None. Compared as float32.
        options: what else rows and gradients depend on, as names and values in turns.
    """
    recorded = torch.is_grad_enabled()
    return Call(
        number_of(arrangement.title),
        arrangement.num_experts,
        rows_TH.shape[1],
        checks.FLOATING.index(rows_TH.dtype),
        int(recorded and rows_TH.requires_grad),
        sum(1 << _PARAMETERS.index(name) for name, one in experts if recorded and one.requires_grad),
        int(recorded and arrangement.deduplicate and weights_TK.requires_grad),
        top_k,
        0 if capacity_factor is None else struct.unpack("<i", struct.pack("<f", min(capacity_factor, LARGEST)))[0],
        _number_of_options(options),
    )


class Announcement:
    """An all-gather under way. It begins when it is made; every rank of the group must make one.

    Args:
        arrangement: of the layer.
        call: what this rank is about to do; None if it cannot, and tells the others why.
        numbers: (n,) int32, as many as the arrangement announces: for how many slots each expert was chosen here, and
            rows for each destination.
        tokens: T.
        error: why this rank cannot go on.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        call: Call | None,
        numbers: Tensor | None = None,
        tokens: int = 0,
        error: BaseException | None = None,
    ) -> None:
        self._arrangement = arrangement
        length = message_length(max(arrangement.announced, most_announced(arrangement.group)))
        device = torch.device(arrangement.mesh.device_type) if numbers is None else numbers.device
        if call is not None and numbers is not None:
            head = _on_device((*call, 0, tokens), device)
            mine = torch.cat([head, numbers, numbers.new_zeros(length - HEADER - numbers.shape[0])])
        else:
            mine = torch.tensor(_why(arrangement, error, length), dtype=torch.int32).to(device)
        self._all = mine.new_empty(arrangement.ranks * length)
        self._mine = mine  # must be there until the work is done
        try:
            self._work = all_gather(self._all, mine, arrangement.group)
        except RuntimeError as lost:
            raise lost_rank(arrangement, "the announcement of its rows", lost) from lost

    def wait(self) -> Tensor:
        """Wait for what all ranks have said; return it, unread, as (R, n) int32.

        Raises:
            GroupError: a rank is gone.
        """
        arrangement = self._arrangement
        try:
            self._work.wait()
        except RuntimeError as lost:
            raise lost_rank(arrangement, "the announcement of its rows", lost) from lost
        return self._all.view(arrangement.ranks, -1)

    def read(self) -> Announced:
        """Wait for what all ranks have said, and read it.

        Raises:
            GroupError: ranks disagree, one of them cannot go on, or one is gone.
        """
        arrangement = self._arrangement
        said: list[list[int]] = self.wait().tolist()  # the one read of a call
        raise_for_difference(arrangement, said)
        rows, end = HEADER + arrangement.num_experts, HEADER + arrangement.announced
        return Announced(
            [one[HEADER:rows] for one in said], [one[HEADER - 1] for one in said], [one[rows:end] for one in said]
        )


def tell_failure(arrangement: Arrangement, error: BaseException) -> None:
    """Tell the other ranks that this one has failed before it could announce its rows: they raise, too."""
    with contextlib.suppress(GroupError):  # which is what all ranks are told
        Announcement(arrangement, None, error=error).read()


@contextlib.contextmanager
def while_others_wait(arrangement: Arrangement) -> Iterator[None]:
    """Say in errors of this rank, raised after its announcement, that the others do not learn of them."""
    try:
        yield
    except GroupError:
        raise
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(
                f"MoE {arrangement.title}: this rank had announced its rows already; other ranks of the "
                f"group that have not failed, too, wait for them until this process ends or the group's timeout is over"
            )
        raise


def all_gather(output: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Any:
    """Begin to gather equal tensors of all ranks in one; return the work."""
    if hasattr(dist, "all_gather_single"):  # torch 2.13 has a new name for it, and warns of the old one
        return dist.all_gather_single(output, mine, group=group, async_op=True)
    return dist.all_gather_into_tensor(output, mine, group=group, async_op=True)


def lost_rank(arrangement: Arrangement, what: str, error: BaseException) -> GroupError:
    """Return the error for a collective that the process group could not finish."""
    return GroupError(
        f"MoE {arrangement.title}: {what} did not arrive: a rank of the expert-parallel group has died, has left, or "
        f"took longer than the group's timeout ({describe_error(error)})",
        arrangement.layer,
    )


def number_of(title: str) -> int:
    """Return what stands for a layer in messages, and remember its title for errors."""
    number = zlib.crc32(title.encode()) & 0x7FFFFFFF
    _layers[number] = title
    return number


def raise_for_difference(arrangement: Arrangement, said: list[list[int]]) -> None:
    """Raise unless all ranks are about to do the same.

    Args:
        arrangement: of the layer.
        said: for every rank its message, or the first ``HEADER`` numbers of it.

    Raises:
        GroupError: ranks disagree, or one of them cannot go on.
    """
    _raise_for_failures(arrangement, said)
    _raise_for_disagreement(arrangement, [Call(*one[: len(MEANING)]) for one in said])


@functools.lru_cache(maxsize=MOST_OPTIONS, typed=True)
def _number_of_options(options: tuple[Any, ...]) -> int:
    text = ", ".join(f"{name}={value!r}" for name, value in zip(options[::2], options[1::2], strict=True))
    number = zlib.crc32(text.encode()) & 0x7FFFFFFF
    if len(_options) >= MOST_OPTIONS:  # of coefficients that change in every step
        _options.clear()
        _number_of_options.cache_clear()
    _options[number] = text
    return number


@functools.lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int32 numbers on a device; those of calls like earlier ones are there already."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)


def _why(arrangement: Arrangement, error: BaseException | None, length: int) -> list[int]:
    """Return a message that carries an error's text in place of a load, a character a number."""
    text = "" if error is None else describe_error(error)
    head = [number_of(arrangement.title), *[0] * (HEADER - 3), FAILED, 0]
    return (head + [ord(character) for character in text] + [0] * length)[:length]


def _raise_for_failures(arrangement: Arrangement, said: list[list[int]]) -> None:
    failed = tuple(rank for rank, one in enumerate(said) if one[HEADER - 2] == FAILED)
    if failed:
        text = "".join(map(chr, said[failed[0]][HEADER:])).rstrip("\0") or "its own error says why"
        raise GroupError(
            f"MoE {arrangement.title}: rank {failed[0]} of the expert-parallel group failed before it sent rows: "
            f"{text}",
            arrangement.layer,
            failed,
        )


def _raise_for_disagreement(arrangement: Arrangement, calls: list[Call]) -> None:
    for field in MEANING:
        values = [getattr(call, field) for call in calls]
        if len(set(values)) > 1:
            usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
            others = tuple(rank for rank, value in enumerate(values) if value != usual)
            seen = ", ".join(f"rank {rank}: {call.shown(field)}" for rank, call in enumerate(calls))
            raise GroupError(
                f"MoE {arrangement.title}: the ranks of an expert-parallel group must agree on {MEANING[field]}, got "
                f"{seen}",
                arrangement.layer,
                others,
            )
