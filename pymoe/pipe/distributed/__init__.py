"""The same pipe on several processes: its stages are run by the schedules of ``torch.distributed.pipelining``.

``build_stage`` (:mod:`.stage`) makes of a stage what torch's schedules ask for; ``rank.py`` runs it for one mini-batch,
``plan.py`` says which values go where, ``transport.py`` sends them, ``tied.py`` adds up the gradients of parameters of
which several ranks have a copy, and ``watchdog.py`` ends all ranks when one of them fails.
"""

from pymoe.pipe.distributed.liveness import RankError
from pymoe.pipe.distributed.stage import RankStage, build_stage
from pymoe.pipe.distributed.watchdog import watching

__all__ = ["RankError", "RankStage", "build_stage", "watching"]
