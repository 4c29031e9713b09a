"""Stages that share a state take turns, in the order in which the model would run micro-batch after micro-batch.

Stages run concurrently. They may share parameters freely, and tables that forwards read. But what their forwards write
(running statistics, a scale, a cache) has to be written, and read, by one stage after the other: of one micro-batch
first, then of the next. So the first of such stages waits with a micro-batch for the last of them to be done with the
one before, where the schedule allows it (:class:`pymoe.pipe.execution.plan.Plan`); else no forward may write.

Who writes is found out in each step. Stages whose forwards have written nothing in the last step take no turns as long
as what they share is as it was then, parameters excepted; if one writes nevertheless, the step fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from pymoe.pipe.auxiliary import is_weighted
from pymoe.pipe.execution.held_state import HeldState, State
from pymoe.pipe.execution.held_values import Layout

_WRITTEN_UNSEEN = {"running_mean", "running_var", "fake_quant_enabled"}
"""Buffers of layers whose kernels write to buffers behind the version counter's back: batch norms and observers."""


def turns_of(layouts: Sequence[Layout], known: Sequence[Turns | None] = ()) -> list[Turns | None]:
    """Return for each stage, given by what its modules hold, its turns; None: it shares nothing.

    ``known``: those of an earlier time, which are the same where the same stages share the same.
    """
    users: dict[Any, list[int]] = {}
    for number, layout in enumerate(layouts):
        for key in layout.shareable:
            users.setdefault(key, []).append(number)
    group = list(range(len(layouts)))  # for each stage the least that it shares something with, in steps
    shared = {key: stages for key, stages in users.items() if len(stages) > 1}
    for stages in shared.values():
        joined = {group[stage] for stage in stages}
        group = [min(joined) if least in joined else least for least in group]
    turns: list[Turns | None] = [None] * len(layouts)
    for least in {group[stages[0]] for stages in shared.values()}:
        roots: dict[int, tuple[str, Any]] = {}
        for key, stages in shared.items():
            if group[stages[0]] == least:
                for stage in stages:
                    name, root = layouts[stage].shareable[key]
                    roots.setdefault(id(root), (name, root))
        made = Turns([stage for stage, other in enumerate(group) if other == least], [*roots.values()])
        made = next((one for one in known if one is not None and one.is_like(made)), made)
        for stage in made.stages:
            turns[stage] = made
    return turns


class Turns:
    """Some stages, and the state that they share."""

    def __init__(self, stages: Sequence[int], roots: Sequence[tuple[str, Any]]) -> None:
        """``roots``: modules, containers and tensors, with their names."""
        self.stages = tuple(stages)
        self.lock = StageLock()
        """Held by a forward that may write, and by recomputations: no other stage sees what is put back for these."""
        self.is_ordered = False
        """Whether the schedule that runs keeps the order; set by whoever runs it."""
        self._roots = roots
        self._held = HeldState(roots)
        self._may_write = self._may_write_at_first = not all(_only_reads(root) for _, root in roots)
        self._code: Sequence[Any] = ()
        # Auxiliary losses are written to and put back: nobody may see them meanwhile, in whatever order.
        self._one_at_a_time = any(isinstance(root, nn.Module) and is_weighted(root) for _, root in roots)
        self._wrote = False
        self._checked: State | None = None  # the state in which forwards were last seen to write nothing

    def is_like(self, other: Turns) -> bool:
        """Return whether the other's stages are the same, and what they share."""
        pairs = zip(self._roots, other._roots, strict=False)
        same = len(self._roots) == len(other._roots) and all([one is another for (_, one), (_, another) in pairs])
        return same and self.stages == other.stages

    def begin_step(self, code: Sequence[Any]) -> bool:
        """Begin a step with forwards; return whether they have to come in order.

        ``code``: what the stages run, in which mode; of other code than the last step's nothing is known.
        """
        state = self._held.look()
        if code != self._code:
            self._code, self._may_write = code, self._may_write_at_first
        elif self._checked is not None or self._wrote:
            self._may_write = self._wrote or not state.is_but_for_parameters(self._checked)
        self._may_write = self._may_write or bool(_writing_unseen(state.layout))
        self._wrote, self._checked = False, None
        return self._may_write

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context in which one of the stages runs a forward.

        Raises:
            RuntimeError: it has written to what is shared, out of turn.
        """
        with self.lock if self._may_write or self._one_at_a_time else nullcontext():
            before = self._held.seen(to_compare=True)
            yield
            names = self._held.changes(before) + before.layout.opaque
            names += [before.layout.names[id(layer)] for layer in _writing_unseen(before.layout)]
            if not names:
                self._checked = before.state
                return
            self._wrote = True
            if not (self._may_write and self.is_ordered):
                raise RuntimeError(self._why(names[0]))

    def _why(self, name: str) -> str:
        shared = f"stages {', '.join(map(str, self.stages))} share state to which a forward has written ({name!r})"
        if not self._may_write:
            return (
                f"{shared}, and none had before: they may have run at the same time. No gradient is added. Run the "
                "step again: from now on they take turns"
            )
        return (
            f"{shared}, and this schedule cannot run them in the order of the model, one micro-batch after the other: "
            "use another ('gpipe' or '1f1b', in one process), put the layers into one stage, or give each a state of "
            "its own"
        )


def _only_reads(root: Any) -> bool:
    """Return whether forwards are taken to leave it alone before any has run: parameters, and layers of torch's own."""
    if isinstance(root, nn.Module):
        return type(root).__module__.startswith("torch.nn.modules") and not any(
            buffer is not None for buffer in root._buffers.values()
        )
    return isinstance(root, nn.Parameter)


def _writing_unseen(layout: Layout) -> list[nn.Module]:
    """Return the layers whose kernels are taken to write to them: a look at their buffers would wait for a device."""
    layers = [layer for layer in layout.modules.values() if not _WRITTEN_UNSEEN.isdisjoint(layer._buffers.keys())]
    layers = [layer for layer in layers if layer.training or "fake_quant_enabled" in layer._buffers]
    return [layer for layer in layers if not all([buffer.is_cpu for buffer in layer.buffers()])]


class StageLock:
    """A reentrant lock. That of a copied pipe is its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return StageLock, ()
