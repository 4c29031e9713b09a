"""Serves four experts to a training loop and an inference load at the same time, for a minute.

    python examples/serve_experts.py                   # with a live view of the experts' pools
    python examples/serve_experts.py --seconds 20 --plain
    python -m pymoe.runtime.top                        # the same view, from another terminal

A runtime serves the experts, and combines the requests of all clients into batches. An ordinary training loop calls the
experts as modules of its model, which predicts the next byte of a text (the interpreter's Python manual); the backends
compute the experts' gradients and update the experts. Threads and coroutines run the same model on unseen text. At the
end the program checks that the losses on both texts fell, that the experts caused this, that no request was lost and
that batches formed. It exits with status 1 if a check fails, and writes a record and a picture to runs/serve_experts.
"""

from __future__ import annotations

import sys

from common import require

require(("pymoe", "rich", "matplotlib"))

import argparse
import asyncio
import contextlib
import copy
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
from common import INTERRUPTED, Text, TextError, at_least, load_text, machine_facts, parser_of, tell, write_record
from matplotlib.axes import Axes
from torch import Tensor, nn

import pymoe
from pymoe.runtime import BatchTensorProto, ExpertBackend, ExpertClient, PoolStats, Runtime, StatsReader, top

matplotlib.use("Agg")

EXPERTS = 4
CONTEXT = 8  # number of earlier bytes from which a byte is predicted
BYTES = 256


def served_experts(width: int, ffn: int, learning_rate: float) -> list[ExpertBackend]:
    """Make feed-forward experts, each with its own optimizer, which only the server uses."""
    backends = []
    for i in range(EXPERTS):
        expert = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, ffn), nn.GELU(), nn.Linear(ffn, width))
        optimizer = torch.optim.Adam(expert.parameters(), lr=learning_rate)
        row = BatchTensorProto(width)
        backends.append(
            # With "mean", the size of a step does not depend on the number of requests in a batch.
            ExpertBackend(f"expert{i}", expert, optimizer, args_schema=(row,), gradient_reduction="mean")
        )
    return backends


class NextByte(nn.Module):
    """Predicts the next byte; the last byte of a row determines the row's expert.

    This fixed choice (a "hash layer") keeps the example simple; ``pymoe.nn.MoE`` has a learned router.
    """

    def __init__(self, experts: Sequence[ExpertClient], width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width // 2)
        self.mix = nn.Linear(CONTEXT * (width // 2), width)
        self.head = nn.Linear(width, BYTES)
        self.experts = nn.ModuleList(experts)

    def forward(self, contexts: Tensor) -> Tensor:
        """Map contexts (rows, CONTEXT) int64 to logits (rows, BYTES)."""
        x, rows = self.read(contexts)
        calls = [expert.submit(x[own]) for expert, own in zip(self.experts, rows, strict=True)]
        return self.write(x, rows, [call.result() for call in calls])

    async def forward_async(self, contexts: Tensor) -> Tensor:
        """Compute the same as :meth:`forward`, for coroutines."""
        x, rows = self.read(contexts)
        calls = (expert.call_async(x[own]) for expert, own in zip(self.experts, rows, strict=True))
        return self.write(x, rows, await asyncio.gather(*calls))

    def read(self, contexts: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the experts' inputs, and the rows of each expert, which may be none."""
        x = self.mix(self.embedding(contexts).flatten(1))
        expert = contexts[:, -1] % EXPERTS
        return x, [(expert == i).nonzero().flatten() for i in range(EXPERTS)]

    def write(self, x: Tensor, rows: list[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        """Return the logits, from the experts' inputs and outputs."""
        return self.head(x.index_add(0, torch.cat(rows), torch.cat(tuple(outputs))))


class Windows:
    """Draws random contexts from a text, each with its next byte."""

    def __init__(self, text: Tensor, seed: int) -> None:
        self.text, self.random = text, torch.Generator().manual_seed(seed)

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return contexts (rows, CONTEXT) and next bytes (rows,), both int64."""
        starts = torch.randint(len(self.text) - CONTEXT, (rows, 1), generator=self.random)
        window = self.text[starts + torch.arange(CONTEXT + 1)].long()
        return window[:, :-1], window[:, -1]


LARGEST_QUESTION = 4  # rows


@dataclass
class History:
    """The measurements of a run; times are in seconds since the start, losses in nats per byte."""

    start: float = field(default_factory=time.perf_counter)
    trained: list[tuple[float, float]] = field(default_factory=list)
    """(time, loss of the batch) of every training step."""
    asked: list[tuple[float, float, float]] = field(default_factory=list)
    """(time, loss, seconds until the answer) of every call on unseen text."""
    pools: list[tuple[float, dict[str, PoolStats]]] = field(default_factory=list)
    """(time, recent statistics of every pool)."""

    def now(self) -> float:
        return time.perf_counter() - self.start


def train(
    model: NextByte, text: Tensor, history: History, *, seconds: float, steps: int, rows: int, learning_rate: float
) -> None:
    """Run an ordinary training loop, which does not depend on where the experts are."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    windows = Windows(text, seed=0)
    while history.now() < seconds and len(history.trained) < steps:
        contexts, targets = windows.draw(rows)
        loss = nn.functional.cross_entropy(model(contexts), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.trained.append((history.now(), loss.item()))


class Load:
    """Runs the model on unseen text in ``threads`` threads and ``coroutines`` coroutines, until it is stopped.

    Each of them pauses for ``pause`` seconds after an answer.
    """

    def __init__(
        self, model: NextByte, text: Tensor, history: History, *, threads: int, coroutines: int, pause: float
    ) -> None:
        self.model, self.text, self.history, self.pause = model, text, history, pause
        self.ended = threading.Event()
        self.errors: list[BaseException] = []
        jobs: list[Callable[[], None]] = [lambda i=i: self.ask(i) for i in range(threads)]
        if coroutines:
            jobs.append(lambda: asyncio.run(self.ask_together(coroutines)))
        self.threads = [threading.Thread(target=self.guard, args=(job,), daemon=True) for job in jobs]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def guard(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self.errors.append(error)

    @torch.no_grad()
    def ask(self, seed: int) -> None:
        windows = Windows(self.text, seed=100 + seed)
        while not self.ended.is_set():
            contexts, targets = windows.draw(1 + len(self.history.asked) % LARGEST_QUESTION)
            begin = time.perf_counter()
            self.note(self.model(contexts), targets, begin)
            time.sleep(self.pause)

    async def ask_together(self, coroutines: int) -> None:
        async def one(seed: int) -> None:
            windows = Windows(self.text, seed=200 + seed)
            while not self.ended.is_set():
                contexts, targets = windows.draw(1 + len(self.history.asked) % LARGEST_QUESTION)
                begin = time.perf_counter()
                with torch.no_grad():
                    logits = await self.model.forward_async(contexts)
                self.note(logits, targets, begin)
                await asyncio.sleep(self.pause)

        await asyncio.gather(*(one(i) for i in range(coroutines)))

    def note(self, logits: Tensor, targets: Tensor, begin: float) -> None:
        took = time.perf_counter() - begin
        self.history.asked.append((self.history.now(), nn.functional.cross_entropy(logits, targets).item(), took))


class Watch:
    """Records the pools' statistics every ``interval`` seconds."""

    def __init__(self, runtime: Runtime, history: History, interval: float) -> None:
        self.reader, self.history, self.interval = StatsReader(runtime.pools, recent=True), history, interval
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def run(self) -> None:
        while not self.ended.wait(self.interval):
            self.history.pools.append((self.history.now(), self.reader.read()))


FALL = 0.9  # a loss fell if its last tenth is below this share of its first
POINTS = 120  # number of points of a curve in the record


def make_record(
    options: dict[str, Any],
    text: Text,
    history: History,
    stats: dict[str, PoolStats],
    backends: Sequence[ExpertBackend],
    untrained: Sequence[nn.Module],
    model: NextByte,
) -> dict[str, Any]:
    """Return all measurements."""
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
    """Return the checks of a run: for each a sentence and its result."""
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
    """Return the model's loss on held-back windows, calling the given experts directly."""
    contexts, targets = windows
    with torch.no_grad():
        x, rows = model.read(contexts)
        outputs = [expert(x[own]) for expert, own in zip(experts, rows, strict=True)]
        return nn.functional.cross_entropy(model.write(x, rows, outputs), targets).item()


def pool_record(one: PoolStats) -> dict[str, Any]:
    """Return a pool's statistics, without the histograms of times."""
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
    """Return the mean of the first twentieth, at most 20 values, when little has been learned."""
    return statistics.fmean(values[: max(1, min(20, len(values) // 20))]) if values else float("nan")


def end_of(values: list[float]) -> float:
    """Return the mean of the last tenth."""
    return statistics.fmean(values[-max(1, len(values) // 10) :]) if values else float("nan")


def thinned(curve: list[tuple[float, float]]) -> dict[str, list[float]]:
    """Return the mean in each of :data:`POINTS` parts of the time, without empty parts."""
    parts: dict[int, list[tuple[float, float]]] = {}
    end = max((when for when, _ in curve), default=1.0)
    for when, loss in curve:
        parts.setdefault(int(POINTS * when / end), []).append((when, loss))
    return {
        "seconds": [round(statistics.fmean(when for when, _ in part), 3) for _, part in sorted(parts.items())],
        "loss": [round(statistics.fmean(loss for _, loss in part), 4) for _, part in sorted(parts.items())],
    }


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by colour-blind eyes


def plot(record: dict[str, Any], path: Path) -> Path:
    """Draw losses, requests per second and batch sizes over time."""
    figure, (losses, rates, sizes) = plt.subplots(3, 1, figsize=(7, 8), layout="constrained")
    curves = record["curves"]
    for name, label, color in (
        ("training", "training batches", COLORS[0]),
        ("unseen", "questions about unseen text", COLORS[1]),
    ):
        losses.plot(curves[name]["seconds"], curves[name]["loss"], color=color, lw=1.2, label=label)
    losses.set_ylabel("nats per byte")
    losses.set_title(f"Four served experts learn {record['text']['name']} while they are asked", fontsize=10)
    pools = [name for name in curves["pools"][0] if name != "seconds"] if curves["pools"] else []
    points = whole_intervals(curves["pools"])
    for axes, key, label in (
        (rates, "requests_per_second", "requests per second"),
        (sizes, "requests_per_batch", "requests per batch, mean"),
    ):
        for ending, style in (("_forward", "-"), ("_backward", "--")):
            for color, name in zip(COLORS, (one for one in pools if one.endswith(ending)), strict=False):
                values = [point[name][key] for point in points]
                axes.plot([point["seconds"] for point in points], values, style, color=color, lw=1, label=name)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    sizes.set_xlabel("seconds")
    for axes in (losses, rates, sizes):
        tidy(axes)
    if pools:
        handles, labels = rates.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=7, ncols=4)
    losses.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def whole_intervals(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points without the last one if its interval was short, since it counts only a few requests."""
    if len(points) < 3:
        return points
    usual = points[1]["seconds"] - points[0]["seconds"]
    return points[:-1] if points[-1]["seconds"] - points[-2]["seconds"] < usual / 2 else points


def tidy(axes: Axes) -> None:
    """Draw a faint grid, and no frame at the top and on the right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: list[str]) -> int:
    """Run; return 0 if all checks hold."""
    options = parse(argv)
    try:
        text = load_text(options.text, CONTEXT)
    except TextError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    backends = served_experts(options.width, 4 * options.width, options.expert_learning_rate)
    untrained = [copy.deepcopy(backend.expert) for backend in backends]
    model = NextByte([ExpertClient(backend) for backend in backends], options.width)
    try:
        with Runtime({backend.name: backend for backend in backends}, monitor=options.monitor) as runtime:
            history = History()
            load = Load(
                model,
                text.validation,
                history,
                threads=options.askers,
                coroutines=options.coroutines,
                pause=options.pause,
            )
            interval = min(1.0, options.seconds / 20)
            with view(runtime, options.plain), Watch(runtime, history, interval), load:
                train(
                    model,
                    text.train,
                    history,
                    seconds=options.seconds,
                    steps=options.steps,
                    rows=options.rows,
                    learning_rate=options.learning_rate,
                )
            stats = runtime.stats()
    except KeyboardInterrupt:
        print("\nstopped")
        return INTERRUPTED
    if load.errors:
        raise load.errors[0]
    record = make_record(vars(options), text, history, stats, backends, untrained, model)
    found = checks(record)
    record["checks"] = {name: bool(holds) for name, holds in found.items()}
    print(f"\n{write_record(record, options.out)}\n{plot(record, options.out / 'serve_experts.png')}\n")
    return tell(found)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of training (default: 60)")
    parser.add_argument("--steps", type=at_least(1), default=10**9, metavar="N", help="at most (default: no limit)")
    parser.add_argument("--askers", type=at_least(0), default=6, metavar="N", help="threads that ask (default: 6)")
    parser.add_argument("--coroutines", type=at_least(0), default=8, metavar="N", help="that ask (default: 8)")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.004,
        metavar="S",
        help="between an answer and the next question (default: 4 ms)",
    )
    parser.add_argument("--rows", type=at_least(1), default=256, metavar="N", help="of a training batch (default: 256)")
    parser.add_argument("--width", type=at_least(2), default=64, metavar="H", help="of the experts (default: 64)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, metavar="LR", help="of the model (default: 3e-3)")
    parser.add_argument(
        "--expert-learning-rate", type=float, default=3e-3, metavar="LR", help="of the served experts (default: 3e-3)"
    )
    parser.add_argument("--text", default="", metavar="FILE", help="to learn (default: the Python manual)")
    parser.add_argument("--threads", type=at_least(1), default=1, metavar="N", help="of torch (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/serve_experts"), metavar="DIR", help="for the results")
    parser.add_argument("--plain", action="store_true", help="no live view")
    parser.add_argument(
        "--no-monitor", dest="monitor", action="store_false", help="do not let other terminals look at the pools"
    )
    return parser.parse_args(argv)


def view(runtime: Runtime, plain: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context that shows the pools' statistics: twice a second in a terminal, every 10 s elsewhere."""
    if plain:
        return contextlib.nullcontext()
    return top.live(runtime, interval=0.5 if sys.stdout.isatty() else 10.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
