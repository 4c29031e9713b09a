"""Computes rows, bytes, balance and memory of an MoE layer with experts spread over ranks, without running it.

>>> from pymoe.ep.simulate import PRESETS, simulate, uniform
>>> block = PRESETS["mixtral-8x7b"]
>>> found = simulate(block, 8, 1024, uniform(block, 8 * 1024))
>>> [round(one.rows, 2) for one in found.traffic[:2]]
[1.75, 1.75]

:func:`simulate` takes a :class:`Block` (one of :data:`~pymoe.ep.simulate.block.PRESETS`, or your own sizes) and a
:class:`Load` (:func:`uniform`, :func:`zipf`, or :func:`recorded` by a :class:`LoadRecorder`), and returns a
:class:`Simulation`; :func:`text` formats it as tables. In a shell:

    python -m pymoe.ep simulate --model qwen3-30b-a3b --ranks 8 --load zipf:0.5

The formulas are on the page :doc:`/concepts/expert_parallel_costs`.
"""

from pymoe.ep.simulate.block import PRESETS, Block
from pymoe.ep.simulate.loads import Load, LoadRecorder, load_of, recorded, uniform, zipf
from pymoe.ep.simulate.rows import SPREADS, Balance
from pymoe.ep.simulate.simulation import Memory, Simulation, Traffic, simulate, text

__all__ = [
    "PRESETS",
    "SPREADS",
    "Balance",
    "Block",
    "Load",
    "LoadRecorder",
    "Memory",
    "Simulation",
    "Traffic",
    "load_of",
    "recorded",
    "simulate",
    "text",
    "uniform",
    "zipf",
]
