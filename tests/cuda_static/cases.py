"""The shapes of the design: what an element is in each, which loads are its payload, and what its indices hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from launches import Result, run
from memory import Buffer
from recorded import Case
from sass import Function

DRAM_CYCLES, L2_CYCLES = 600, 270
"""From issue to result of a load that memory answers, or L2, on a GPU that does nothing else (rounded)."""
TOKENS, CHOICES = 4096, 8


@dataclass(frozen=True)
class Work:
    """One line of the tables. ``rounds``: how often a thread fetches, computes and stores."""

    shape: str
    element: str
    elements: int
    payload: frozenset[str]
    rounds: int
    goal_us: float | None = None
    in_l2: frozenset[str] = frozenset()


ROWS, HIDDEN = TOKENS * CHOICES, 7168
MOVED = "T 4096, H 7168, K 8, E 256, bf16"
WORK = {
    "gate": Work("T 4096, E 128, K 8, fp32", "logit", TOKENS * 128, frozenset({"logits"}), 1, 4.0),
    "gate, bf16 logits": Work("T 4096, E 128, K 8, bf16", "logit", TOKENS * 128, frozenset({"logits"}), 1),
    "gate, sigmoid and bias": Work("T 4096, E 128, K 8, fp32", "logit", TOKENS * 128, frozenset({"logits", "bias"}), 1),
    "build_routing": Work("T 4096, K 8, E 128", "choice", ROWS, frozenset(), 1, 5.0, frozenset({"experts"})),
    "dispatch": Work(MOVED, "element of a row", ROWS * HIDDEN, frozenset({"x"}), 1, 135.0),
    "combine": Work(MOVED, "element of a row", ROWS * HIDDEN, frozenset({"y"}), 4, 128.0),
    "combine, float32": Work(MOVED.replace("bf16", "fp32"), "element of a row", ROWS * HIDDEN, frozenset({"y"}), 7),
    "combine_backward": Work(MOVED, "element of a row", ROWS * HIDDEN, frozenset({"y", "grad"}), 4, 260.0),
    "swiglu": Work("S 32768, F 2048, bf16", "result", ROWS * 2048, frozenset({"h"}), 1),
    "swiglu_backward": Work("S 32768, F 2048, bf16", "element of grad", ROWS * 2048, frozenset({"h", "grad"}), 1),
}


def contents(case: Case) -> list[Buffer]:
    """Return the buffers of a call; those that hold indices or logits with values, all others without."""
    generator = np.random.default_rng(0)
    named = generator.integers(0, 128, ROWS).astype(np.int32)
    slot = np.empty(ROWS, np.int32)
    slot[np.argsort(named, kind="stable")] = np.arange(ROWS, dtype=np.int32)
    values: dict[str, np.ndarray] = {"slot": slot, "used": np.array([ROWS], np.int32)}
    if case.name == "build_routing":
        values = {"experts": named, **{name: np.zeros(0, np.int32) for name in ("slot", "token", "offsets")}}
    if case.name.startswith("gate"):
        logits = generator.standard_normal((TOKENS, 128)).astype(np.float32)
        values = {"logits": logits if "bf16" not in case.name else (logits.view(np.uint32) >> 16).astype(np.uint16)}
    buffers = []
    for name, base, size in case.buffers:
        data = values.get(name)
        if data is not None:
            held = np.zeros(size, np.uint8)
            held[: data.nbytes] = data.reshape(-1).view(np.uint8)
            data = held
        buffers.append(Buffer(name, base, size, data))
    return buffers


def trace(case: Case, functions: dict[str, Function]) -> list[Result]:
    """Run the first, a middle and the last block of every launch of a call."""
    work = WORK[case.name]
    latency = {"otherwise": DRAM_CYCLES, **{name: L2_CYCLES for name in work.in_l2}}
    buffers = contents(case)
    results = []
    for launch in case.launches:
        blocks = sorted({0, launch.blocks // 2, launch.blocks - 1})
        results.append(run(functions[launch.kernel], launch, buffers, work.payload, blocks, latency))
    return results
