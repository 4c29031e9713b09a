"""Expert parallelism on paper: bytes, times, balance and memory of an MoE layer whose experts are spread over ranks.

>>> from pymoe.ep.simulate import MACHINES, NETWORKS, PRESETS, simulate, uniform
>>> block = PRESETS["mixtral-8x7b"]
>>> found = simulate(block, 8, 1024, uniform(block, 8 * 1024), MACHINES["h100"], NETWORKS["nvlink"])
>>> [round(one.rows, 2) for one in found.traffic]
[1.75, 1.75]

:func:`simulate` takes a :class:`Block` (of :data:`~pymoe.ep.simulate.block.PRESETS`, or own numbers), a
:class:`Machine`, a :class:`Network` and a :class:`Load` (:func:`uniform`, :func:`zipf`, or :func:`recorded` by a
:class:`LoadRecorder`), and returns a :class:`Simulation`; :func:`text` and :func:`draw` show it. In a shell:

    python -m pymoe.ep simulate --model qwen3-30b-a3b --ranks 8 --network nvlink --load zipf:0.5 --png costs.png

The formulas are on the page :doc:`/concepts/expert_parallel_costs`.
"""

from pymoe.ep.simulate.alternatives import Alternative
from pymoe.ep.simulate.balance import BALANCES, Balance
from pymoe.ep.simulate.block import PRESETS, Block
from pymoe.ep.simulate.gates import Load, load_of, recorded, uniform, zipf
from pymoe.ep.simulate.load_files import LoadRecorder, RecordedLoads, read_loads, write_loads
from pymoe.ep.simulate.machine import MACHINES, NETWORKS, Machine, Network
from pymoe.ep.simulate.memory import Memory
from pymoe.ep.simulate.picture import draw
from pymoe.ep.simulate.report import text
from pymoe.ep.simulate.simulation import Pass, Passes, Simulation, Traffic, simulate
from pymoe.ep.simulate.step import Layer
from pymoe.ep.simulate.timeline import Event, Phases, Task, Timeline, best_possible, run, timeline

__all__ = [
    "BALANCES",
    "MACHINES",
    "NETWORKS",
    "PRESETS",
    "Alternative",
    "Balance",
    "Block",
    "Event",
    "Layer",
    "Load",
    "LoadRecorder",
    "Machine",
    "Memory",
    "Network",
    "Pass",
    "Passes",
    "Phases",
    "RecordedLoads",
    "Simulation",
    "Task",
    "Timeline",
    "Traffic",
    "best_possible",
    "draw",
    "load_of",
    "read_loads",
    "recorded",
    "run",
    "simulate",
    "text",
    "timeline",
    "uniform",
    "write_loads",
    "zipf",
]
