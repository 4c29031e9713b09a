"""Members of a mixture: the slot (column of the gate) of each backend, and its backoff after timeouts."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pymoe.mixture.options import NAME, Rules
from pymoe.mixture.stats import BackendLog, BackendStats, PassStats
from pymoe.runtime.protocols import Backend, RequestPool

MAX_BACKOFF_DOUBLINGS = 6
KEPT_LATENCIES = 1000
COUNTS = ("requests", "rows", "answered", "failed", "anomalous", "given_up", "late")


class MemberPass:
    """A backend's forward or backward pass: its pool, and the outcomes of its requests. Thread-safe."""

    def __init__(self, name: str, pool: RequestPool) -> None:
        self.name = name
        self.pool = pool
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._latencies: deque[float] = deque(maxlen=KEPT_LATENCIES)

    def count(self, name: str, *, rows: int = 0, latency: float | None = None) -> None:
        with self._lock:
            self._counts[name] += 1
            self._counts["rows"] += rows
            if latency is not None:
                self._latencies.append(latency)

    def stats(self) -> PassStats:
        with self._lock:
            counts, latencies = self._counts.copy(), sorted(self._latencies) or [0.0]
        return PassStats(
            **{name: counts[name] for name in COUNTS},
            latency_mean=sum(latencies) / len(latencies),
            latency_p50=latencies[len(latencies) // 2],
            latency_p99=latencies[int(0.99 * len(latencies))],
            latency_max=latencies[-1],
        )


class Backoff:
    """Computes for how long a mixture sends no requests to a backend whose requests timed out. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timeouts = 0  # number of consecutive timeouts
        self._last = 0.0  # time of the latest timeout

    def answered(self) -> None:
        """Reset the backoff, after the backend answered in time, with a result or an error."""
        with self._lock:
            self._timeouts = 0

    def timed_out(self) -> None:
        """Record a timeout: the mixture has stopped waiting for a request."""
        with self._lock:
            self._timeouts += 1
            self._last = time.monotonic()

    def seconds_left(self, after: int, first_span: float) -> float:
        """Return for how many more seconds the backend must get no requests; see :func:`members_to_ask`.

        Args:
            after: the number of consecutive timeouts that starts the backoff.
            first_span: seconds of the first backoff, which every further timeout doubles.
        """
        with self._lock:
            if self._timeouts < after:
                return 0.0
            span = first_span * 2 ** min(self._timeouts - after, MAX_BACKOFF_DOUBLINGS)
            return max(0.0, self._last + span - time.monotonic())


class Member:
    """A backend of a mixture, with its slot, its statistics and its backoff."""

    def __init__(self, slot: int, backend: Backend) -> None:
        self.slot = slot
        self.backend = backend
        self.name: str = backend.get_info()["name"]
        forward_pool, backward_pool = backend.get_pools()
        self.forward = MemberPass("forward", forward_pool)
        self.backward = MemberPass("backward", backward_pool)
        self.log = BackendLog(self.name)
        self.backoff = Backoff()

    def stats(self) -> BackendStats:
        return BackendStats(self.name, self.slot, self.forward.stats(), self.backward.stats())

    def moved_to(self, slot: int) -> Member:
        """Return a copy of the member in another slot; both share the counts, the log and the backoff."""
        made = copy.copy(self)
        made.slot = slot
        return made


def members_to_ask(members: Sequence[Member], rules: Rules) -> Sequence[Member]:
    """Return the ``members`` that are served and not in backoff.

    If there are fewer than ``k_min`` of them, return all served members; if these are fewer, too, return all members. A
    member is served as long as its pool's ``served`` is true. A member backs off after ``rest_after`` consecutive
    timeouts (None: never), for ``rest`` seconds at first; every further timeout doubles the span, up to 64 times
    ``rest``.
    """
    served = [member for member in members if member.forward.pool.served]
    found: Sequence[Member] = served
    if rules.rest_after is not None:
        found = [member for member in served if member.backoff.seconds_left(rules.rest_after, rules.rest) == 0]
    for choice in (found, served):
        if len(choice) >= rules.k_min:
            return choice
    return members


class Slots:
    """A fixed number of slots, each free or taken. Names of members are unique. Thread-safe.

    ``members`` is an immutable snapshot in the order of slots; every change replaces it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.members: tuple[Member, ...] = ()
        self._lock = threading.Lock()

    def find(self, which: str | Backend) -> Member:
        """Return the member with this name or backend; raise KeyError if there is none."""
        for member in self.members:
            if which is member.backend or which == member.name:
                return member
        name = getattr(which, "name", which)
        raise KeyError(f"{NAME}: there is no backend {name!r}, only {sorted(self.names())}")

    def names(self) -> dict[str, int]:
        """Return the slot of every member, by name."""
        return {member.name: member.slot for member in self.members}

    def _free_slot(self, slot: int | None, name: str) -> int:
        """Return ``slot``, or the first free one, for a new member ``name``.

        Raises:
            TypeError: ``slot`` is not an int.
            ValueError: ``slot`` is taken or does not exist, no slot is free, or the name is taken.
        """
        names = self.names()
        if name in names:
            raise ValueError(
                f"{NAME}: there already is a backend {name!r}, in slot {names[name]}: give each a name of its own"
            )
        free = sorted(set(range(self.count)) - set(names.values()))
        if slot is not None and (isinstance(slot, bool) or not isinstance(slot, int)):
            raise TypeError(f"{NAME}: slot must be an int, got {type(slot).__name__}")
        if slot is None:
            if not free:
                raise ValueError(
                    f"{NAME}: all {self.count} slots are taken: remove a backend, or build the mixture with more slots "
                    f"(max_experts=)"
                )
            return free[0]
        if slot not in free:
            raise ValueError(f"{NAME}: slot must be one of the free slots {free}, got {slot}")
        return slot

    def add(self, backend: Backend, slot: int | None, prepare: Callable[[int], None] | None = None) -> Member:
        """Call ``prepare(slot)``, if given, and then add ``backend`` in ``slot`` (None: in the first free slot).

        Return the new member. Raises the errors of :meth:`_free_slot`.
        """
        with self._lock:  # hold the lock during prepare(), too: the slot must stay free until the backend is in it
            slot = self._free_slot(slot, backend.name)
            if prepare is not None:
                prepare(slot)
            made = Member(slot, backend)
            self._set([*self.members, made])
        return made

    def remove(self, which: str | Backend) -> Member:
        with self._lock:
            found = self.find(which)
            self._set([member for member in self.members if member is not found])
        return found

    def replace(self, which: str | Backend, backend: Backend) -> Member:
        with self._lock:
            found = self.find(which)
            others = [member for member in self.members if member is not found]
            made = Member(found.slot, backend)
            if made.name in {member.name for member in others}:
                raise ValueError(f"{NAME}: there already is another backend {made.name!r}")
            self._set([*others, made])
        return made

    def arrange(self, names: Mapping[str, int]) -> None:
        """Move the members named in ``names`` to the slots given there.

        Other members stay in their slots, or move to free slots if theirs are taken. Slots that do not exist here are
        ignored.

        Raises:
            ValueError: two of the members would get the same slot.
        """
        with self._lock:
            wanted = {name: slot for name, slot in names.items() if 0 <= slot < self.count}
            placed = [member.moved_to(wanted[member.name]) for member in self.members if member.name in wanted]
            taken = {member.slot for member in placed}
            if len(taken) < len(placed):
                raise ValueError(f"{NAME}: every backend must have a slot of its own, got {dict(names)}")
            for member in self.members:
                if member.name in wanted:
                    continue
                slot = member.slot
                if slot in taken:
                    slot = next(one for one in range(self.count) if one not in taken)
                taken.add(slot)
                placed.append(member.moved_to(slot))
            self._set(placed)

    def _set(self, members: list[Member]) -> None:
        self.members = tuple(sorted(members, key=lambda member: member.slot))

    def __deepcopy__(self, memo: dict[int, Any]) -> Slots:
        """Return slots with the same backends; counts, log and backoff start anew."""
        made = memo[id(self)] = Slots(self.count)
        made.members = tuple(Member(member.slot, member.backend) for member in self.members)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{NAME}: a mixture cannot be pickled, because it asks backends of this process: save its "
            "state_dict, and those of the backends"
        )
