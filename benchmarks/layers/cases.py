"""Measures one case: a block, a dtype and a number of tokens.

All contenders are timed in turns, and compared with lower bounds on the time and with exact results.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.layers.contenders import TRANSFORMERS, Contender, Plan, contenders
from benchmarks.layers.exact import sample
from benchmarks.layers.limits import Reader, dense_products, last_level_cache, read, weights_read
from benchmarks.moe_layer import ratio
from benchmarks.peers import Absent, failure
from pymoe.bench.cold import Rotating
from pymoe.bench.layer import training_step
from pymoe.bench.timing import Timer, Timing, measure

Record = dict[str, Any]
MODES: Mapping[str, tuple[int, ...]] = {"decode": (1, 4, 16), "prefill": (128, 512, 2048), "train": (512,)}
"""Numbers of tokens of a call, by mode."""
MOST_DECODED = 64
"""Maximum number of tokens for which a call counts as decoding."""
TIMES_THE_CACHE = 4
"""All inputs of decoding together read this many times the size of the cache, even in 4-bit weights."""
MOST_INPUTS = 24


@dataclass(frozen=True)
class Effort:
    """The time that is spent on a case."""

    timer: Timer
    reader: Reader
    budget: float = 5.0
    """Seconds per case for all contenders together, after warm-up."""
    rounds: tuple[int, int] = (3, 60)
    limit: float = 20.0
    """If the first call takes more seconds, only that call is timed; in training, only the second one."""


@dataclass(frozen=True)
class AfterOne:
    """Times calls after one untimed call of the same contender.

    The memory of gradients then already has the page size that this contender causes, whichever one ran before.
    """

    timer: Timer

    def now(self) -> float:
        """Return the clock of the timer."""
        return self.timer.now()

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        """Return seconds per call of ``function`` over ``calls`` calls."""
        function()
        return self.timer(function, calls)


def tokens_of(mode: str, chosen: tuple[int, ...]) -> list[int]:
    """Return the numbers of tokens for a mode: its defaults, or all in ``chosen`` that suit the mode."""
    if not chosen:
        return list(MODES[mode])
    return [tokens for tokens in chosen if (tokens <= MOST_DECODED) == (mode == "decode")]


def run_case(plan: Plan, mode: str, effort: Effort) -> Record:
    """Measure all contenders, and check their results for the first input.

    Returns:
        A record for the report and for JSON: the case, the times of the limits, and a row for each contender with its
        relative error, its time, its speed-up over the best of transformers (``speed_up``), and the share of each limit
        that it reaches (``of``).
    """
    one, block, train = plan.one, plan.one.block, plan.train
    load = os.getloadavg()[0]
    one.module.train(train)
    inputs = inputs_of(plan)
    grad = torch.randn(plan.tokens, block.hidden).to(one.dtype) if train else None
    rows: dict[str, Record] = {}
    absent: list[Absent] = []
    steps: dict[str, Rotating] = {}
    first: dict[str, float] = {}
    apart: set[str] = set()
    with torch.set_grad_enabled(train):
        for contender in contenders(plan):
            if isinstance(contender, Absent):
                absent.append(contender)
                continue
            try:
                calls = [step_of(contender, x, grad) for x in inputs]
                error, took = first_call(plan, contender, calls[0], inputs[0], grad, effort.timer)
                if train and took > effort.limit:  # the first step also had to allocate pages for its gradients
                    took = effort.timer(calls[0], 1)
            except Exception as problem:  # a contender that fails must not stop the measurement of the others
                absent.append(Absent(contender.name, failure(problem)))
                continue
            verdict = "close" if error <= contender.tolerance else "WRONG"
            rows[contender.name] = {"name": contender.name, "error": error, "verdict": verdict}
            first[contender.name] = took
            steps[contender.name] = Rotating(calls)
            if contender.apart:
                apart.add(contender.name)
        with torch.no_grad():
            chosen = [one.choice(x)[0] for x in inputs]
        limits = limits_of(plan, mode, chosen, effort.reader)
        timings = timed(steps, first, limits, apart, train, effort)
    touched = sum(index.unique().numel() for index in chosen) / len(chosen)
    theirs = [name for name in rows if name in TRANSFORMERS]
    best = min(theirs, key=lambda name: timings[name].median, default=None)
    for name, row in rows.items():
        row["seconds"] = asdict(timings[name].spread) | {"rounds": len(timings[name].seconds)}
        row["speed_up"] = ratio(timings[best], timings[name]) if best else None
        row["of"] = {limit: ratio(timings[limit], timings[name]) for limit in limits}
    return {
        "title": str(block),
        "dtype": str(one.dtype).removeprefix("torch."),
        "mode": mode,
        "tokens": plan.tokens,
        "rows_per_expert": plan.tokens * block.choices / block.experts,
        "touched": touched,
        "bytes": (touched + block.shared) * block.per_expert * one.dtype.itemsize,
        "flops": block.flops(plan.tokens, train),
        "inputs": len(inputs),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "best": best,
        "rows": list(rows.values()),
        "limits": {name: asdict(timings[name].spread) for name in limits},
        "absent": [asdict(one) for one in absent],
    }


def inputs_of(plan: Plan) -> list[Tensor]:
    """Return inputs of shape (T, H) that choose different experts, enough of them that no cache holds all the
    weights.
    """
    block = plan.one.block
    count = 2
    if plan.tokens <= MOST_DECODED:
        touched = min(plan.tokens * block.choices, block.experts) * block.per_expert // 2
        count = min(max(-(-TIMES_THE_CACHE * last_level_cache() // touched), 4), MOST_INPUTS)
    random = torch.Generator().manual_seed(plan.tokens)
    return [
        torch.randn(plan.tokens, block.hidden, generator=random).to(plan.one.dtype).requires_grad_(plan.train)
        for _ in range(count)
    ]


def step_of(contender: Contender, x: Tensor, grad: Tensor | None) -> Callable[[], tuple[Tensor, ...]]:
    """Return the call to time: forward and, with ``grad``, backward to the input and all parameters."""
    if grad is not None:
        return training_step(contender.layer, x, grad, contender.forward)
    return lambda: (contender.forward(x),)


def first_call(
    plan: Plan,
    contender: Contender,
    step: Callable[[], tuple[Tensor, ...]],
    x: Tensor,
    grad: Tensor | None,
    timer: Timer,
) -> tuple[float, float]:
    """Return the relative error of the first call's results and the seconds that it took."""
    begin = timer.now()
    output, *gradients = step()
    took = timer.now() - begin
    exact = sample(plan.one, contender.choice, x, grad)
    if grad is None:
        return exact.error(output), took
    of_x, *of_parameters = gradients
    found = {id(parameter): one for parameter, one in zip(contender.layer.parameters(), of_parameters, strict=True)}
    w_in, w_out = (found[id(weight)] for weight in plan.one.touched)
    return exact.error(output, of_x, (w_in, w_out)), took


def limits_of(plan: Plan, mode: str, chosen: list[Tensor], reader: Reader) -> dict[str, Callable[[], object]]:
    """Return the limits of a mode by name: ``read`` for inference, ``mm`` for many tokens."""
    limits: dict[str, Callable[[], object]] = {}
    if mode != "train":
        limits["read"] = Rotating([partial(read, reader, weights_read(plan.one, index)) for index in chosen])
    if mode != "decode":
        limits["mm"] = dense_products(plan.one, plan.tokens, plan.train)
    return limits


def timed(
    steps: Mapping[str, Callable[[], object]],
    first: Mapping[str, float],
    limits: Mapping[str, Callable[[], object]],
    apart: set[str],
    train: bool,
    effort: Effort,
) -> dict[str, Timing]:
    """Time contenders and limits in turns.

    Contenders in ``apart`` are timed separately. For a contender whose first call exceeds the limit, that call is the
    result.
    """
    timer = AfterOne(effort.timer) if train else effort.timer
    slow = {name for name, took in first.items() if took > effort.limit}
    timings = {name: Timing((first[name],), 1) for name in slow}
    took = {name: first[name] for name in steps if name not in slow}
    for name, limit in limits.items():
        limit()
        took[name] = effort.timer(limit, 1)
    everyone: dict[str, Callable[[], object]] = {**steps, **limits}
    for group in ([name for name in took if name not in apart], *([name] for name in took if name in apart)):
        budget = effort.budget * (1.0 if len(group) > 1 else 0.2)
        gc.collect()
        timings |= measure(
            {name: everyone[name] for name in group},
            budget=budget,
            rounds=effort.rounds,
            timer=timer,
            first={name: took[name] for name in group},
        )
    return timings
