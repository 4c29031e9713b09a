"""The record of a run, and what it must show. It holds no host name and no path."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch
from lm.data import Text
from lm.record import machine_facts
from torch import Tensor, nn

import pymoe
from pymoe.runtime import ExpertBackend
from pymoe.runtime.monitoring.statistics import PoolStats

from .clients import History
from .model import NextByte, Windows

FALL = 0.9  # a loss fell if its last tenth is below this share of its first
POINTS = 120  # of a curve in the record


def make_record(
    options: dict[str, Any],
    text: Text,
    history: History,
    stats: dict[str, PoolStats],
    backends: Sequence[ExpertBackend],
    untrained: Sequence[nn.Module],
    model: NextByte,
) -> dict[str, Any]:
    """Everything that was measured."""
    build = pymoe.build_info()
    trained = [loss for _, loss in history.trained]
    asked = [loss for _, loss, _ in history.asked]
    answers = sorted(took for _, _, took in history.asked)
    windows = Windows(text.validation, seed=7).draw(2048)
    return {
        "what": "pymoe examples/serve_experts.py",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "options": {name: value for name, value in options.items() if name not in ("text", "out")},
        "text": {"name": text.name, "sha256": text.sha256},
        "machine": machine_facts(),
        "versions": {name: build[name] for name in ("pymoe", "torch", "python")},
        "steps": len(trained),
        "questions": len(asked),
        "training_loss": {"first": start_of(trained), "last": end_of(trained)},
        "unseen_loss": {"first": start_of(asked), "last": end_of(asked)},
        "unseen_loss_at_the_end": {
            "with the experts as they are": held_back_loss(model, [one.expert for one in backends], windows),
            "with the experts as they were": held_back_loss(model, untrained, windows),
        },
        "answer_ms": {
            "p50": 1e3 * statistics.median(answers) if answers else None,
            "p99": 1e3 * answers[int(0.99 * len(answers))] if answers else None,
        },
        "updates": {backend.name: backend.updates for backend in backends},
        "pools": {name: pool_record(one) for name, one in stats.items()},
        "curves": {
            "training": thinned([(when, loss) for when, loss in history.trained]),
            "unseen": thinned([(when, loss) for when, loss, _ in history.asked]),
            "pools": [
                {"seconds": round(when, 3)} | {name: pool_record(one) for name, one in pools.items()}
                for when, pools in history.pools
            ],
        },
    }


def checks(record: dict[str, Any]) -> dict[str, bool]:
    """What a run must show, in words, and whether it did."""
    training, unseen, ended = record["training_loss"], record["unseen_loss"], record["unseen_loss_at_the_end"]
    now, before = ended["with the experts as they are"], ended["with the experts as they were"]
    pools = record["pools"].values()
    lost = sum(one["failed"] + one["cancelled"] + one["expired"] + one["rejected"] for one in pools)
    forward = [one for name, one in record["pools"].items() if name.endswith("_forward")]
    requests, batches = sum(one["completed"] for one in forward), sum(one["batches"] for one in forward)
    return {
        f"the training loss fell: {training['first']:.3f} to {training['last']:.3f} nats per byte in "
        f"{record['steps']} steps": training["last"] < FALL * training["first"],
        f"so did that of {record['questions']} questions about unseen text: {unseen['first']:.3f} to "
        f"{unseen['last']:.3f}": record["questions"] > 0 and unseen["last"] < FALL * unseen["first"],
        f"the experts learned: {now:.3f} on unseen text, {before:.3f} with the experts as they began": now < before,
        f"every expert was updated: {record['updates']}": all(
            0 < updates <= record["steps"] for updates in record["updates"].values()
        ),
        f"no request was lost of {sum(one['submitted'] for one in pools)}": lost == 0,
        f"batches formed: {requests / max(1, batches):.1f} forward requests a batch": requests > batches,
    }


def held_back_loss(model: NextByte, experts: Sequence[nn.Module], windows: tuple[Tensor, Tensor]) -> float:
    """The loss of the model with these experts, called directly."""
    contexts, targets = windows
    with torch.no_grad():
        x, rows = model.read(contexts)
        outputs = [expert(x[own]) for expert, own in zip(experts, rows, strict=True)]
        return nn.functional.cross_entropy(model.write(x, rows, outputs), targets).item()


def pool_record(one: PoolStats) -> dict[str, Any]:
    """A pool's numbers, without the histograms of times."""
    return {
        "queued": one.queued,
        "submitted": one.submitted,
        "completed": one.completed,
        "failed": one.failed,
        "cancelled": one.cancelled,
        "expired": one.expired,
        "rejected": one.rejected,
        "batches": one.batches,
        "rows": one.rows,
        "requests_per_batch": round(one.completed / max(1, one.batches), 2),
        "mean_batch_size": round(one.mean_batch_size, 2),
        "batch_sizes": [[int(bucket.low), int(bucket.high) - 1, bucket.count] for bucket in one.batch_sizes],
        "requests_per_second": round(one.requests_per_second, 1),
        "wait_ms": {"p50": 1e3 * one.wait.p50, "p99": 1e3 * one.wait.p99},
        "latency_ms": {"p50": 1e3 * one.latency.p50, "p99": 1e3 * one.latency.p99},
    }


def start_of(values: list[float]) -> float:
    """The mean of the first twentieth, at most of 20 values, while little is learned yet."""
    return statistics.fmean(values[: max(1, min(20, len(values) // 20))]) if values else float("nan")


def end_of(values: list[float]) -> float:
    """The mean of the last tenth."""
    return statistics.fmean(values[-max(1, len(values) // 10) :]) if values else float("nan")


def thinned(curve: list[tuple[float, float]]) -> dict[str, list[float]]:
    """The mean of every :data:`POINTS`-th part of the time in which there is something."""
    parts: dict[int, list[tuple[float, float]]] = {}
    end = max((when for when, _ in curve), default=1.0)
    for when, loss in curve:
        parts.setdefault(int(POINTS * when / end), []).append((when, loss))
    return {
        "seconds": [round(statistics.fmean(when for when, _ in part), 3) for _, part in sorted(parts.items())],
        "loss": [round(statistics.fmean(loss for _, loss in part), 4) for _, part in sorted(parts.items())],
    }
