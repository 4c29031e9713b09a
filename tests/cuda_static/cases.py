"""The shapes of the design: what an element is in each, which loads are its payload, and what its indices hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from launches import Result, run
from memory import Buffer
from recorded import Case, Recorded
from sass import Function

DRAM_CYCLES, L2_CYCLES = 600, 270
"""From issue to result of a load that memory answers, or L2, on a GPU that does nothing else (rounded)."""
TOKENS, CHOICES = 4096, 8


@dataclass(frozen=True)
class Work:
    """One line of the tables.

    ``rounds``: how often a thread fetches, computes and stores. ``traced``: how many blocks are run, 3 or 1 in the
    middle. ``busy``: how many have work, the first of them (None: all); the others end at once.
    """

    shape: str
    element: str
    elements: int
    payload: frozenset[str]
    rounds: int
    goal_us: float | None = None
    in_l2: frozenset[str] = frozenset()
    traced: int = 3
    busy: int | None = None


ROWS, HIDDEN = TOKENS * CHOICES, 7168
MOVED = "T 4096, H 7168, K 8, E 256, bf16"
PRODUCT, PRODUCTS = "S 32768, H 7168, N 4096, E 256, fp16", "1024 multiplications"
ACTIVATIONS = ("swiglu", "clamped_swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu", "relu_squared")
"""The kinds of expert_activation."""


def activation(kind: str) -> Iterator[tuple[str, Work]]:
    """Name the calls of a kind of activation, forward and backward."""
    for dtype in ("bf16", "fp16", "fp32") if kind == "swiglu" else ("bf16",):
        shape, suffix = f"S 32768, F 2048, {dtype}", "" if dtype == "bf16" else f", {dtype}"
        yield kind + suffix, Work(shape, "result", ROWS * 2048, frozenset({"h"}), 1, traced=1)
        yield (
            f"{kind}_backward{suffix}",
            Work(shape, "element of grad", ROWS * 2048, frozenset({"h", "grad"}), 1, traced=1),
        )


WORK = {
    "gate": Work("T 4096, E 128, K 8, fp32", "logit", TOKENS * 128, frozenset({"logits"}), 1, 4.0),
    "gate, bf16 logits": Work("T 4096, E 128, K 8, bf16", "logit", TOKENS * 128, frozenset({"logits"}), 1),
    "gate, sigmoid and bias": Work("T 4096, E 128, K 8, fp32", "logit", TOKENS * 128, frozenset({"logits", "bias"}), 1),
    "gate alone": Work("T 4096, E 128, K 8, fp32", "logit", TOKENS * 128, frozenset({"logits"}), 1, 4.0),
    "build_routing": Work(
        "T 4096, K 8, E 128", "choice", ROWS, frozenset({"counts"}), 1, 5.0, frozenset({"experts", "counts"})
    ),
    "build_routing alone": Work("T 4096, K 8, E 128", "choice", ROWS, frozenset(), 1, 5.0, frozenset({"experts"})),
    "dispatch": Work(MOVED, "element of a row", ROWS * HIDDEN, frozenset({"x"}), 1, 135.0),
    "combine": Work(MOVED, "element of a row", ROWS * HIDDEN, frozenset({"y"}), 4, 128.0),
    "combine, float32": Work(MOVED.replace("bf16", "fp32"), "element of a row", ROWS * HIDDEN, frozenset({"y"}), 7),
    "combine_backward": Work(MOVED, "element of a row", ROWS * HIDDEN, frozenset({"y", "grad"}), 4, 260.0),
    **{name: work for kind in ACTIVATIONS for name, work in activation(kind)},
    "gate_backward": Work(
        "T 4096, E 128, K 8, fp32 to bf16", "logit", TOKENS * 128, frozenset({"logits"}), 1, traced=1
    ),
    "router_losses": Work("T 4096, E 128, fp32", "logit", TOKENS * 128, frozenset({"logits"}), 1, traced=1),
    "router_losses_backward": Work("T 4096, E 128, fp32", "logit", TOKENS * 128, frozenset({"logits"}), 1, traced=1),
    "grouped_linear": Work(PRODUCT, PRODUCTS, ROWS * HIDDEN * 4, frozenset(), 1, traced=1, busy=256 * 32),
    "grouped_linear, gradient of x": Work(
        PRODUCT, PRODUCTS, ROWS * HIDDEN * 4, frozenset(), 1, traced=1, busy=256 * 56
    ),
    "grouped_linear, gradient of the weight": Work(PRODUCT, PRODUCTS, ROWS * HIDDEN * 4, frozenset(), 1, traced=1),
    "grouped_linear, gradient of the bias": Work(
        "S 32768, N 4096, E 256, fp16", "element of grad", ROWS * 4096, frozenset({"grad"}), 2, traced=1
    ),
    "gather_batch": Work("64 rows of 4 KiB", "4 bytes", 64 * 1024, frozenset({"sources"}), 1),
}


def contents(case: Case) -> list[Buffer]:
    """Return the buffers of a call; those that hold indices or logits with values, all others without."""
    generator = np.random.default_rng(0)
    named = generator.integers(0, 128, ROWS).astype(np.int32)
    slot = np.empty(ROWS, np.int32)
    slot[np.argsort(named, kind="stable")] = np.arange(ROWS, dtype=np.int32)
    values: dict[str, np.ndarray] = {"slot": slot, "used": np.array([ROWS], np.int32)}
    if case.name.startswith("grouped_linear"):
        values = {"offsets": np.arange(257, dtype=np.int32) * 128, "workspace": np.zeros(0, np.int32)}
    if case.name == "gate_backward":
        every = np.tile(np.arange(128, dtype=np.int32), (TOKENS, 1))
        values = {"experts": np.ascontiguousarray(generator.permuted(every, axis=1)[:, :CHOICES])}
    if case.name.startswith("build_routing"):
        outputs = ("slot", "token", "offsets", "load")
        values = {"experts": named, **{name: np.zeros(0, np.int32) for name in outputs}}
        counts = next((size for name, _, size in case.buffers if name == "counts"), 0)
        if counts:
            tiles = counts // 2 // 128  # of the gate, which have equally many choices
            of_tiles = [np.bincount(one, minlength=128) for one in named.reshape(tiles, -1)]
            values["counts"] = np.array(of_tiles, np.uint16)
    if case.name.startswith("gate") and "backward" not in case.name:
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
    """Run some blocks of every launch of a call: the first, a middle and the last one, or fewer."""
    work = WORK[case.name]
    latency = {"otherwise": DRAM_CYCLES, **{name: L2_CYCLES for name in work.in_l2}}
    buffers = contents(case)
    results = []
    for launch in case.launches:
        count = blocks_with_work(work, launch)
        blocks = sorted({0, count // 2, count - 1}) if work.traced == 3 else [count // 2]
        results.append(run(functions[launch.kernel], launch, buffers, work.payload, blocks, latency))
    return results


def blocks_with_work(work: Work, launch: Recorded) -> int:
    """Return how many blocks of a launch do something; of a plan or a sum over blocks there is one block."""
    return min(launch.blocks, work.busy or launch.blocks)
