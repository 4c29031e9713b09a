"""The command line of serve_experts.py, and the run that it asks for."""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
from pathlib import Path

import torch
from lm.command import INTERRUPTED, at_least, parser_of, tell
from lm.data import TextError, load_text
from lm.record import write_record

from pymoe.runtime import ExpertClient, Runtime, top

from .clients import History, Load, Watch, train
from .model import CONTEXT, NextByte, served_experts
from .plots import plot
from .record import checks, make_record


def main(argv: list[str], description: str) -> int:
    """Run; 0 if all checks hold."""
    options = parse(argv, description)
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


def parse(argv: list[str], description: str) -> argparse.Namespace:
    """The options."""
    parser = parser_of(description)
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
    """The pools, drawn while the run goes on: often in a terminal, now and then elsewhere."""
    if plain:
        return contextlib.nullcontext()
    return top.live(runtime, interval=0.5 if sys.stdout.isatty() else 10.0)
