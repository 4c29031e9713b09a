"""Runs a pipe on several processes, with the schedules of ``torch.distributed.pipelining``.

``build_stage`` (:mod:`.stage`) adapts a stage to torch's schedules, ``rank.py`` runs the stages of a process and plans
which values and gradients are sent where, ``messages.py`` describes and sends them, and ``watchdog.py`` makes the step
fail on all ranks when it fails on one of them.
"""

from pymoe.pipe.distributed.stage import RankStage, build_stage
from pymoe.pipe.distributed.watchdog import RankError, watching

__all__ = ["RankError", "RankStage", "build_stage", "watching"]
