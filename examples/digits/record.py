"""The record of both runs, and what it must show. It holds no host name and no path."""

from __future__ import annotations

import statistics
from argparse import Namespace
from datetime import datetime, timezone
from typing import Any

from lm.record import machine_facts

import pymoe
from pymoe.runtime import BackendStats

from .run import DYING, SLOW, History

FALL = 0.8  # a loss fell if its last tenth is below this share of its first


def make_record(options: Namespace, slow_by: float, healthy: History, faulty: History) -> dict[str, Any]:
    """Everything that was measured."""
    build = pymoe.build_info()
    return {
        "what": "pymoe examples/train_mixture.py",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "data": "scikit-learn's digits: 1437 images to train on, 360 held back",
        "machine": machine_facts(),
        "versions": {name: build[name] for name in ("pymoe", "torch", "python")},
        "slow": {"expert": f"expert{SLOW}", "seconds_more_a_pass": slow_by},
        "dead": {"expert": f"expert{DYING}", "from_step": options.steps // 2},
        "healthy": run_record(healthy),
        "faulty": run_record(faulty),
    }


def run_record(history: History) -> dict[str, Any]:
    """One run."""
    seconds = sorted(history.seconds)
    return {
        "loss": {"first": tenth(history.loss, first=True), "last": tenth(history.loss, first=False)},
        "held_back_accuracy": history.accuracy[-1][1] if history.accuracy else None,
        "step_ms": {
            "p50": 1e3 * statistics.median(seconds),
            "p99": 1e3 * seconds[int(0.99 * len(seconds))],
            "longest": 1e3 * seconds[-1],
        },
        "updates": history.updates,
        "experts": {name: backend_record(one) for name, one in history.backends.items()},
        "answered_at_death": {name: one.forward.answered for name, one in history.at_death.items()},
        "pools": {
            name: {
                key: getattr(one, key)
                for key in ("submitted", "completed", "failed", "cancelled", "expired", "queued", "running")
            }
            for name, one in history.pools.items()
        },
        "curves": {
            "loss": [round(loss, 4) for loss in history.loss],
            "step_ms": [round(1e3 * one, 2) for one in history.seconds],
            "accuracy": [[step, round(share, 4)] for step, share in history.accuracy],
        },
    }


def backend_record(one: BackendStats) -> dict[str, Any]:
    """What a mixture counted for an expert, in each pass."""
    return {way: getattr(one, way)._asdict() for way in ("forward", "backward")}


def checks(record: dict[str, Any]) -> dict[str, bool]:
    """What the runs must show, in words, and whether they did."""
    found = {}
    limit = 2e3 * record["options"]["timeout"]
    for name in ("healthy", "faulty"):
        run = record[name]
        loss, longest = run["loss"], run["step_ms"]["longest"]
        ways = [way for expert in run["experts"].values() for way in expert.values()]
        told = sum(way[key] for way in ways for key in ("answered", "failed", "anomalous", "given_up"))
        asked = sum(way["requests"] for way in ways)
        ended = sum(
            one[key] for one in run["pools"].values() for key in ("completed", "failed", "cancelled", "expired")
        )
        taken = sum(one["submitted"] for one in run["pools"].values())
        left = sum(one["queued"] + one["running"] for one in run["pools"].values())
        found[f"{name}: the loss fell, {loss['first']:.3f} to {loss['last']:.3f}"] = loss["last"] < FALL * loss["first"]
        found[f"{name}: no step took longer than its timeouts allow, {longest:.0f} of {limit:.0f} ms"] = (
            longest <= limit
        )
        found[f"{name}: nothing was lost or left, {asked} requests asked, {taken} taken in by pools still there"] = (
            told == asked and ended == taken and left == 0
        )
    dead, slow = record["dead"]["expert"], record["slow"]["expert"]
    experts, at_death = record["faulty"]["experts"], record["faulty"]["answered_at_death"]
    after = experts[dead]["forward"]["answered"] - at_death[dead]
    refused = experts[dead]["forward"]["failed"]
    found[f"the dead expert answered {at_death[dead]} times before its death, {after} times after it"] = (
        after == 0 and refused > 0
    )
    given_up = experts[slow]["forward"]["given_up"]
    found[f"the slow expert was given up {given_up} times"] = given_up > 0
    return found


def tenth(values: list[float], *, first: bool) -> float:
    """The mean of the first tenth, or of the last."""
    count = max(1, len(values) // 10)
    return statistics.fmean(values[:count] if first else values[-count:])
