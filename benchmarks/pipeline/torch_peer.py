"""Runs torch's schedules over gloo, with one process per rank, and controls them from the benchmark's process."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.children import Child, ChildError, answers
from benchmarks.pipeline import torch_orders
from benchmarks.pipeline.systems import AbsentError, Check, System
from benchmarks.pipeline.work import Case
from pymoe.pipe.schedules import Schedule

RANK = "benchmarks.pipeline.torch_rank"
Answer = dict[str, Any]


class Ranks:
    """A group of ``world`` processes. A failure ends all of them; the next request starts new ones."""

    def __init__(self, world: int, program: Sequence[str] = (sys.executable, "-m", RANK)) -> None:
        self.world = world
        self.program = program
        """The command of each process; rank, number of ranks and the rendezvous file are appended to it."""
        self.children: list[Child] = []
        self.generation = 0
        """Number of times that the processes were started. New processes know nothing of what earlier ones opened."""
        self._folder: tempfile.TemporaryDirectory | None = None

    def start(self) -> None:
        """Start the processes, unless they are running."""
        if self.children:
            return
        self._folder = tempfile.TemporaryDirectory()
        self.generation += 1
        meeting = str(Path(self._folder.name) / "meeting")
        variables = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        for rank in range(self.world):
            self.children.append(Child([*self.program, str(rank), str(self.world), meeting], variables))

    def ask(self, **request: Any) -> list[Answer]:
        """Return the answers of all ranks. After an error all processes are ended, since some of them may hang."""
        self.start()
        try:
            for child in self.children:
                child.send(request)
            return answers(self.children)
        except ChildError:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for child in self.children:
            child.kill()
        self.children = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class OnRanks:
    """Runs steps in the processes of ``ranks``, which set them up from the request ``opening`` under ``key``."""

    def __init__(self, ranks: Ranks, key: str, opening: dict[str, Any]) -> None:
        self.ranks = ranks
        self.planned: Schedule | None = None
        self._key, self._opening = key, opening
        self._generation = -1
        self._open()

    def _open(self) -> None:
        self.ranks.start()
        if self._generation == self.ranks.generation:
            return
        try:
            self.ranks.ask(key=self._key, **self._opening)
        except ChildError as error:
            raise AbsentError(str(error)) from None
        self._generation = self.ranks.generation

    def _ask(self, what: str) -> list[Answer]:
        self._open()
        return self.ranks.ask(key=self._key, do=what)

    def step(self) -> tuple[float, float]:
        """Return the seconds from the first rank's start, behind a barrier, to the last rank's end."""
        answers = self._ask("step")
        spans = list(zip(*(answer["spans"] for answer in answers), strict=True))
        wall = sum(max(end for _, end in step) - min(start for start, _ in step) for step in spans)
        return wall / len(spans), sum(answer["cpu"] for answer in answers)

    def close(self) -> None:
        if self.ranks.children and self._generation == self.ranks.generation:
            self.ranks.ask(key=self._key, close=True)


class TorchSchedule(OnRanks):
    """Runs one of torch's schedules for a case on ``ranks``."""

    def __init__(self, name: str, case: Case, ranks: Ranks, stages: int) -> None:
        self.name, self.case, self.stages = name, case, stages
        super().__init__(ranks, f"{name} {case} {stages}", {"open": asdict(case), "schedule": name, "stages": stages})

    def check(self) -> Check:
        answers = self._ask("check")
        live = {int(stage): peak for answer in answers for stage, peak in answer["live"].items()}
        if self.stages == torch_orders.stages_of(self.name, self.ranks.world):
            orders = answers[0]["orders"]
            self.planned = torch_orders.schedule(self.name, self.ranks.world, self.case.micro_batches, orders)
        return Check(max(answer["error"] for answer in answers), [live[i] for i in range(self.stages)])

    def plain(self) -> tuple[float, float]:
        """Return wall and processor seconds of the sequential run in the rank's process; needs a single rank."""
        (answer,) = self._ask("plain")
        return answer["wall"], answer["cpu"]


def torch_systems(ranks: dict[int, Ranks]) -> list[System]:
    """Return a system for each of torch's schedules, with one process per worker.

    ``ranks`` maps a number of workers to its processes; missing entries are added.
    """

    def opener(name: str) -> Callable[[Case], TorchSchedule]:
        def open_(case: Case) -> TorchSchedule:
            stages = torch_orders.stages_of(name, case.workers)
            return TorchSchedule(name, case, ranks.setdefault(case.workers, Ranks(case.workers)), stages)

        return open_

    about = "`torch.distributed.pipelining.{}`, one process a rank, over gloo"
    names = (*torch_orders.SAME_AS, *torch_orders.SEVERAL)
    return [System(title(name), about.format(name), opener(name)) for name in names]


def on_one_rank(ranks: dict[int, Ranks], stages: int) -> list[tuple[System, int]]:
    """Return a system and its number of stages for each of torch's schedules, with all stages on one rank.

    No rank sends anything then. There are ``stages`` stages if the schedule permits any number on a rank.
    """

    def opener(name: str, own: int) -> Callable[[Case], TorchSchedule]:
        def open_(case: Case) -> TorchSchedule:
            return TorchSchedule(name, replace(case, workers=own), ranks.setdefault(1, Ranks(1)), own)

        return open_

    found = []
    for name in (*torch_orders.SAME_AS, *torch_orders.SEVERAL):
        any_number = torch_orders.SEVERAL.get(name) == "loop"
        own = stages if any_number else torch_orders.stages_of(name, 1)
        found.append((System(title(name), "on one rank", opener(name, own)), own))
    return found


def title(name: str) -> str:
    """Return the name of a schedule in tables."""
    return f"torch {name.removeprefix('Schedule')}"
