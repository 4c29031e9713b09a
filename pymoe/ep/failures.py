"""Messages between ranks outside of the exchanges of a call: whether ranks agree, and which rank has failed.

Before functions such as ``shard`` change a model, :func:`assert_same_on_all_ranks` compares descriptions of it. After a
rank has failed, the waits for exchanges of its group end with an error, on all ranks: over gloo as described below,
over other backends when the group's timeout has passed.

Over gloo, a rank that dies closes its connections, so the exchanges of ranks that are connected to it fail immediately.
These ranks then close their own connections (:func:`pymoe._ranks.abort_waits`), so the exchanges of the ranks that wait
for them fail, too. The first rank on the same host that finds the process ended writes a record to the group's store:
which rank has died. The other ranks read this record for their error messages. A rank that waits for a live rank which
is busy elsewhere finds the failure only through this record.

A rank that raises an error and lives on keeps its connections. It reports the error in the store, and a wait that takes
longer than ``LOOK`` reads such reports. A report counts only for ranks that are in the same call, wait for an exchange
that the failed rank has not begun, and have not raised an error between the same two exchanges themselves. So if all
ranks raise an error at the same point of a call and go on, none of them fails because of the reports.

Exchanges without a failure or a long wait neither read nor write the store.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pymoe import _torch_private as private
from pymoe._errors import add_note, describe_error
from pymoe._ranks import GroupStore, Process, abort_waits, is_about_connections
from pymoe._torch_canaries import Exercises, canary
from pymoe.ep.sharding import ExpertSharding

LOOK = timedelta(seconds=1)  # interval at which a wait reads the records of failures
NAMING_S = 2.0  # time limit for finding the failed rank: its process may end some time after its connections
STORE_TIMEOUT_S = 5.0  # time limit of an access to the store


class GroupError(RuntimeError):
    """The ranks of an expert-parallel group disagree, one has failed, or rows would not fit.

    If ranks disagree, rows would not fit, or a rank has failed before it sent its counts, every rank of the group
    raises this error from the same call before any row is sent, and the group can be used afterwards. (The rank that
    has failed raises its own error. With ``transport="padded"``, the others raise in :func:`check_calls`, or while they
    wait for rows.) If rows or counts did not arrive because a rank has died, has raised an error or is late, the group
    cannot be used any more.
    """

    def __init__(self, message: str, layer: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.layer = layer
        """Name of the layer in its model; empty if the error is not about a layer."""
        self.ranks = ranks
        """The ranks that the message is about, numbered within the group; empty if they are not known."""

    def __reduce__(self) -> tuple[type[GroupError], tuple[str, str, tuple[int, ...]]]:
        return type(self), (str(self), self.layer, self.ranks)


class Failure(NamedTuple):
    """The reason why exchanges of a group cannot be completed."""

    ranks: tuple[int, ...]
    what: str
    exchanges: int = 0
    """Number of exchanges that the failed rank had begun in the group; 0 if its process has ended."""


@dataclass
class GroupMembers:
    """A rank's record of the processes, calls and exchanges of a group, used to find out which rank has failed."""

    rank: int
    processes: Sequence[Process]
    """(R,): the process of each rank."""
    store: GroupStore | None
    """The store for records; None if the group has none, or one that allows no second connection. Then ranks that live
    on after an error cannot report it."""
    calls: int = 0
    """Number of calls of layers that have begun."""
    exchanges: int = 0
    """Number of exchanges that have begun."""
    failure: Failure | None = None
    """The failure that ended an exchange on this rank; None so far."""
    reports: list[str] = field(default_factory=list)
    """Keys of this rank's reports."""
    raised_after: int = -1
    """Number of exchanges that had begun when this rank last reported an error; -1 if it has not reported one."""

    def report_error(self, what: str) -> None:
        """Tell the ranks that wait for this rank in the current call that this rank has left the call with an error."""
        self.raised_after = self.exchanges
        if self.store is not None and self.failure is None:
            key = f"raised in call {self.calls}"
            self.store.write_first(
                key, Failure((self.rank,), f"rank {self.rank} of the expert-parallel group {what}", self.exchanges)
            )
            self.reports.append(key)

    def reported(self, exchange: int) -> Failure | None:
        """Return the reported failure because of which exchange number ``exchange`` cannot end, or None."""
        if self.store is None:
            return None
        # Also read the record of a lost connection: this rank may wait for a rank that is busy in another group. That
        # rank keeps its connections until it uses this group again.
        failure: Failure | None = self.store.read("failure")
        raised: Failure | None = self.store.read(f"raised in call {self.calls}")
        if failure is None and raised is not None and raised.exchanges < exchange:
            return None if raised.exchanges == self.raised_after else raised
        return failure

    def remove_reports(self) -> None:
        """Remove this rank's reports from the store. Call this only when all ranks have begun a later call."""
        while self.reports and self.store is not None:
            self.store.delete(self.reports.pop())

    def find_failure(self) -> Failure | None:
        """Find and record the failure that closed a connection; return None if ``NAMING_S`` seconds do not suffice."""
        limit = time.monotonic() + NAMING_S
        while self.failure is None and time.monotonic() < limit:
            self.failure = None if self.store is None else self.store.read("failure")
            ended = tuple(rank for rank, process in enumerate(self.processes) if process.has_ended())
            if self.failure is None and ended:
                what = "the process of " + " and ".join(f"rank {rank}" for rank in ended)
                self.note(Failure(ended, f"{what} of the expert-parallel group has ended"))
            time.sleep(0.0 if self.failure else 0.02)
        return self.failure

    def note(self, failure: Failure) -> None:
        """Record ``failure`` as the reason why exchanges cannot be completed, unless a rank has recorded one before."""
        self.failure = failure if self.store is None else self.store.write_first("failure", failure)


_members: WeakKeyDictionary[dist.ProcessGroup, GroupMembers] = WeakKeyDictionary()


def remember_members(group: dist.ProcessGroup, processes: Sequence[Process], name: str) -> None:
    """Store which processes are the ranks of ``group``, so that failures can be found later. All ranks must call this.

    ``name`` is a name of the group that no other group has had. Do nothing for a group of one rank, or in a later call.
    """
    if group not in _members and len(processes) > 1:
        store = None
        with contextlib.suppress(RuntimeError):  # there is no store, or it allows no second connection
            store = GroupStore(group, f"pymoe.ep {name}", STORE_TIMEOUT_S)
        _members[group] = GroupMembers(group.rank(), processes, store)


def lost_rank(group: dist.ProcessGroup, subject: str, layer: str, what: str, lost: RuntimeError) -> GroupError:
    """Return the error to raise for a failed collective. If a connection was lost, also end all waits in the group.

    Args:
        group: the group of the collective.
        subject: the subject of the message, such as the layer.
        layer: name of the layer in its model, or an empty string.
        what: the data that did not arrive.
        lost: the error that the collective raised.
    """
    failure = None
    if is_about_connections(lost):
        members = _members.get(group)
        failure = None if members is None else members.find_failure()
        abort_waits((group,))
    if failure is None:
        why = "a rank of the expert-parallel group has died, has left, or took longer than the group's timeout"
        return GroupError(f"{subject}: {what} did not arrive: {why} ({describe_error(lost)})", layer)
    return GroupError(
        f"{subject}: {what} did not arrive: {failure.what} ({describe_error(lost)})", layer, failure.ranks
    )


# Comparison of the ranks' descriptions of a model, before the model is changed.

Description = dict[str, dict[str, Any]]
"""A description of each object, by kind of object (such as ``"layer"``) and name."""


def assert_same_on_all_ranks(
    function: str, group: dist.ProcessGroup, mine: Description, problem: Exception | None
) -> None:
    """Raise on all ranks of a group unless their descriptions are equal. This is a collective call.

    It also exchanges the processes of the ranks, for :func:`remember_members`.

    Args:
        function: the public function that the ranks have called, for error messages.
        group: the group of the ranks.
        mine: this rank's description.
        problem: the error because of which this rank cannot continue, or None. This rank raises it, and the others
            raise :class:`GroupError`.

    Raises:
        GroupError: the descriptions differ, or another rank has a ``problem``, has died or is late.
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
    """Return the first difference as text: the property that differs or, if a value has no properties, both values."""
    if isinstance(here, dict) and isinstance(there, dict):
        part = next(name for name in [*here, *there] if here.get(name, "none") != there.get(name, "none"))
        return f"{part} {here.get(part, 'none')} here and {there.get(part, 'none')}"
    here, there = (one["options"] if isinstance(one, dict) else one for one in (here, there))
    return f"{here} here and {there}"


# Waits for exchanges.


class Exchange:
    """A collective over a layer's ranks, which the constructor begins.

    Args:
        sharding: the sharding of the layer.
        what: name of the exchanged data, for errors.
        start: begins the collective, and returns its work.
        begins_call: true for the first collective of a call of the layer.

    Raises:
        GroupError: the collective cannot begin, since a rank has failed.
    """

    def __init__(
        self, sharding: ExpertSharding, what: str, start: Callable[[], Any], *, begins_call: bool = False
    ) -> None:
        self._sharding, self._what = sharding, what
        self._members = _members.get(sharding.group)
        self._number = 0
        if self._members is not None:
            self._members.calls += begins_call
            self._members.exchanges += 1
            self._number = self._members.exchanges
        try:
            self._work = start()
        except RuntimeError as lost:
            raise self._error(lost) from lost

    def wait(self) -> None:
        """Wait until the collective is done; on a GPU, make only the current stream wait.

        Raises:
            GroupError: a rank has failed or is late.
        """
        members = self._members
        try:
            # On a GPU, wait without a timeout: then only the stream waits, whereas a timeout would block the host.
            if members is None or self._sharding.mesh.device_type != "cpu":
                self._work.wait()
            else:
                self._wait_or_abort(members)
        except RuntimeError as lost:
            raise self._error(lost) from lost
        if members is not None and members.reports:
            members.remove_reports()

    def _wait_or_abort(self, members: GroupMembers) -> None:
        """Wait for the collective. Every ``LOOK``, look for the record of a failure.

        If there is a record, end all waits in the group; the wait then raises RuntimeError.
        """
        while True:
            begun = time.monotonic()
            try:
                self._work.wait(LOOK)
                return
            except RuntimeError:
                # Stop if this was not a timeout: the collective has failed, or the backend does not support timeouts.
                if self._work.is_completed() or time.monotonic() - begun < LOOK.total_seconds() / 2:
                    break
            reported = members.reported(self._number)
            if reported is not None:
                members.note(reported)
                abort_waits((self._sharding.group,))
                break
        self._work.wait()  # raises the error of the collective

    def _error(self, lost: RuntimeError) -> GroupError:
        sharding = self._sharding
        return lost_rank(sharding.group, f"MoE {sharding.title}", sharding.layer, self._what, lost)


# Reports of errors that a rank raises after it has sent its counts. The count exchange cannot report these.


@contextlib.contextmanager
def while_others_wait(sharding: ExpertSharding) -> Iterator[None]:
    """Return a context manager that reports an error of this rank to the ranks that wait for its rows.

    Use it once the count exchange has begun. It adds a note to the error. A :class:`GroupError` is not reported.
    """
    try:
        yield
    except GroupError:
        raise
    except BaseException as error:
        # In a recomputation during a backward pass, checkpointing raises here to stop early. That is a failure only if
        # the backward pass raises, too.
        if not report_failed_backward(sharding):
            report_error(sharding, f"raised {describe_error(error)}")
        add_note(
            error,
            f"MoE {sharding.title}: this rank had sent its counts already; other ranks of the group that have not "
            f"failed, too, raise GroupError, and the group cannot be used any more",
        )
        raise


def report_error(sharding: ExpertSharding, what: str) -> None:
    """Tell the ranks that wait for this rank in a call of a layer that this rank has left the call.

    ``what`` is the reason, a phrase for messages such as "raised ValueError".
    """
    members = _members.get(sharding.group)
    if members is not None:
        members.report_error(f"{what} in MoE {sharding.title}")


def report_failed_backward(sharding: ExpertSharding) -> bool:
    """If a backward pass runs on this thread, arrange that an error of the pass is reported to the other ranks.

    Return True if a backward pass runs. Return False if none or a compiled one runs, or if :func:`remember_members`
    has stored no processes for the group.
    """
    if sharding.group not in _members:
        return False
    ends_are_heard()
    end = _Backward(partial(report_error, sharding, "raised in the backward pass"))
    try:
        private.queue_callback(end)
    except RuntimeError:  # no backward pass runs, or a compiled one, which accepts no callback
        end()
        return False
    return True


class _Backward:
    """Calls ``failed`` if a backward pass raises an error.

    This object is queued as a callback of the pass. Autograd calls the object at the end of the pass; after an error,
    autograd deletes it without a call, and its destructor calls ``failed``.
    """

    def __init__(self, failed: Callable[[], object]) -> None:
        self._failed, self._has_ended = failed, False

    def __call__(self) -> None:
        self._has_ended = True

    def __del__(self) -> None:
        if not self._has_ended:
            self._failed()


class _Fail(torch.autograd.Function):
    """An autograd Function whose backward queues the callback ``end``, and then raises if ``fails`` is true."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end: _Backward, fails: bool) -> Tensor:
        ctx.end, ctx.fails = end, fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        end, ctx.end = ctx.end, None
        private.queue_callback(end)
        if ctx.fails:
            raise ArithmeticError
        return grad, None, None


@canary
def ends_are_heard() -> Exercises:
    """Exercise torch's private ``queue_callback``, through which ranks report that a backward pass has failed."""
    heard: list[bool] = []
    for fails in (False, True):
        x = torch.ones(1, requires_grad=True, device="cpu")
        loss = _Fail.apply(x, _Backward(partial(heard.append, fails)), fails)
        with contextlib.suppress(ArithmeticError):
            loss.backward()
        del loss
    yield "queue_callback", heard == [True]
