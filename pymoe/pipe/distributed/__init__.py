"""The same pipe on several processes: its stages are run by the schedules of ``torch.distributed.pipelining``.

``build_stage`` (:mod:`.stage`) makes of a stage what torch's schedules ask for; ``rank.py`` runs it for one mini-batch,
``plan.py`` says which values go where, ``exchange.py`` sends them, ``tied.py`` adds up the gradients of parameters of
which several ranks have a copy, and ``waiting.py`` is how all of them wait and fail.
"""

from pymoe.pipe.distributed.stage import RankStage, build_stage

__all__ = ["RankStage", "build_stage"]
