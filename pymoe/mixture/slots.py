"""Which backend sits at which column of a mixture's gate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pymoe.mixture.counts import BackendStats, Log, PassCounts
from pymoe.mixture.rest import Rest
from pymoe.runtime.backend import ExpertBackend
from pymoe.runtime.task_pool import TaskPool


class Pass(NamedTuple):
    """Where one of a backend's passes is asked for, and what became of it."""

    name: str
    """``forward`` or ``backward``."""
    pool: TaskPool
    counts: PassCounts


class Member:
    """A backend in its slot."""

    def __init__(self, slot: int, backend: ExpertBackend) -> None:
        self.slot = slot
        self.backend = backend
        self.name: str = backend.get_info()["name"]
        pools: tuple[TaskPool, TaskPool] = backend.get_pools()
        self.forward = Pass("forward", pools[0], PassCounts())
        self.backward = Pass("backward", pools[1], PassCounts())
        self.log = Log(self.name)
        self.rest = Rest()

    def stats(self) -> BackendStats:
        return BackendStats(self.name, self.slot, self.forward.counts.read(), self.backward.counts.read())

    def at(self, slot: int) -> Member:
        """The same member, counts and all, in another slot."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.slot = slot
        return made


class Slots:
    """A fixed number of slots, some of them taken. Names are unique.

    ``members`` is a snapshot in the order of slots and never changes; every change makes another. All functions may be
    called from any thread.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.members: tuple[Member, ...] = ()
        self._lock = threading.Lock()

    def find(self, which: str | ExpertBackend) -> Member:
        """Raises KeyError where there is none such."""
        for member in self.members:
            if which is member.backend or which == member.name:
                return member
        name = getattr(which, "name", which)
        raise KeyError(f"the mixture has no backend {name!r}, but {sorted(self.names())}")

    def names(self) -> dict[str, int]:
        return {member.name: member.slot for member in self.members}

    def free(self, slot: int | None, name: str) -> int:
        """The slot that a new backend ``name`` may take. Raises ValueError if there is none, TypeError for no int."""
        names = self.names()
        if name in names:
            raise ValueError(f"the mixture has a backend {name!r} already, in slot {names[name]}")
        taken = set(names.values())
        if slot is not None and (isinstance(slot, bool) or not isinstance(slot, int)):
            raise TypeError(f"slot must be an int, got {type(slot).__name__}")
        if slot is None:
            slot = next((one for one in range(self.count) if one not in taken), None)
            if slot is None:
                raise ValueError(
                    f"all {self.count} slots of the mixture are taken: remove a backend, or make the mixture with more "
                    f"slots (max_experts=)"
                )
        if not 0 <= slot < self.count or slot in taken:
            raise ValueError(f"slot {slot} is not one of the free slots {sorted(set(range(self.count)) - taken)}")
        return slot

    def put(self, backend: ExpertBackend, slot: int | None, prepare: Callable[[int], None] | None = None) -> Member:
        """Into ``slot``, or the first that is free, once it is prepared. Raises ValueError, as :meth:`free`."""
        with self._lock:  # while the slot is prepared too: nobody else may take it, and it must be nobody's
            slot = self.free(slot, backend.name)
            if prepare is not None:
                prepare(slot)
            made = Member(slot, backend)
            self._set([*self.members, made])
        return made

    def remove(self, which: str | ExpertBackend) -> Member:
        with self._lock:
            found = self.find(which)
            self._set([member for member in self.members if member is not found])
        return found

    def replace(self, which: str | ExpertBackend, backend: ExpertBackend) -> Member:
        with self._lock:
            found = self.find(which)
            others = [member for member in self.members if member is not found]
            made = Member(found.slot, backend)
            if made.name in {member.name for member in others}:
                raise ValueError(f"the mixture has another backend {made.name!r} already")
            self._set([*others, made])
        return made

    def arrange(self, names: Mapping[str, int]) -> None:
        """Move the backends that are named to the slots that are said; the others stay, or move to free ones."""
        with self._lock:
            wanted = {name: slot for name, slot in names.items() if 0 <= slot < self.count}
            placed = [member.at(wanted[member.name]) for member in self.members if member.name in wanted]
            taken = {member.slot for member in placed}
            if len(taken) < len(placed):
                raise ValueError(f"every backend must have a slot of its own, got {dict(names)}")
            for member in self.members:
                if member.name in wanted:
                    continue
                slot = member.slot
                if slot in taken:
                    slot = next(one for one in range(self.count) if one not in taken)
                taken.add(slot)
                placed.append(member.at(slot))
            self._set(placed)

    def _set(self, members: list[Member]) -> None:
        self.members = tuple(sorted(members, key=lambda member: member.slot))

    def __deepcopy__(self, memo: dict[int, Any]) -> Slots:
        """The same backends, with counts of its own."""
        made = memo[id(self)] = Slots(self.count)
        made.members = tuple(Member(member.slot, member.backend) for member in self.members)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a MixtureOfExpertBackends cannot be pickled: it asks backends of this process. Save its state_dict, and "
            "those of the backends."
        )
