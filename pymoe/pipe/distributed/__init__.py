"""A pipe on several processes: its stages are run by the schedules of ``torch.distributed.pipelining``.

``build_stage`` (:mod:`.stage`) adapts a stage to torch's schedules, ``rank.py`` runs the stages of a process,
``plan.py`` plans which values are sent where, ``messages.py`` describes them, ``transport.py`` sends them,
``tied.py`` knows the parameters of which several ranks have a copy, ``peers.py`` what the ranks know of each other, and
``watchdog.py`` ends all ranks when one of them fails.
"""

from pymoe.pipe.distributed.peers import RankError
from pymoe.pipe.distributed.stage import RankStage, build_stage
from pymoe.pipe.distributed.watchdog import watching

__all__ = ["RankError", "RankStage", "build_stage", "watching"]
