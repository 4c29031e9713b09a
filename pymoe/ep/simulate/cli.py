"""``python -m pymoe.ep``: expert parallelism on paper."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pymoe.ep.simulate.balance import BALANCES
from pymoe.ep.simulate.block import DTYPES, PRESETS, Block, described
from pymoe.ep.simulate.gates import load_of
from pymoe.ep.simulate.machine import MACHINES, NETWORKS, Machine, Network
from pymoe.ep.simulate.picture import draw
from pymoe.ep.simulate.report import text
from pymoe.ep.simulate.simulation import Simulation, simulate

SIZES = ("hidden", "ffn", "experts", "choices", "layers", "shared_ffn", "groups", "kept_groups", "dtype")
Preset = TypeVar("Preset", Machine, Network)
OWN = ("hidden", "ffn", "experts", "choices")
"""Options that a model without a preset must have."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, or 2 if the call was wrong."""
    options = parser().parse_args(arguments)
    try:
        found = simulation_of(options)
        print(text(found))
        if options.json:
            options.json.write_text(json.dumps(found.as_dict(), indent=1) + "\n")
        if options.png:
            print(f"\n{draw(options.png, found)}")
    except (ValueError, ImportError, OSError) as error:
        print(f"pymoe.ep: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the commands and their options."""
    top = argparse.ArgumentParser(prog="python -m pymoe.ep", description="Expert parallelism on paper.")
    commands = top.add_subparsers(dest="command", required=True)
    own = commands.add_parser(
        "simulate",
        help="bytes, times, balance and memory of expert parallelism",
        description="Simulate a mixture-of-experts layer whose experts are spread over ranks.",
        epilog="models:\n  " + "\n  ".join(described()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = own.add_argument_group("the model: a published one, or own numbers, which replace its own")
    model.add_argument("--model", choices=PRESETS, metavar="NAME", help="of the models below")
    for name, meaning in (
        ("hidden", "size of a token's row"),
        ("ffn", "inner size of an expert"),
        ("experts", "in a layer"),
        ("choices", "experts per token"),
        ("layers", "mixture layers (default: 1)"),
        ("shared-ffn", "inner size of the shared experts together (default: 0)"),
        ("groups", "of experts (default: 1)"),
        ("kept-groups", "groups that a router takes experts from (default: 1)"),
    ):
        model.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    model.add_argument("--dtype", choices=DTYPES, help="of weights and rows (default: bfloat16)")
    add_ranks(own)
    add_load(own)
    output = own.add_argument_group("the output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    output.add_argument("--png", type=Path, metavar="FILE", help="draw into FILE (needs matplotlib)")
    return top


def add_ranks(command: argparse.ArgumentParser) -> None:
    """Add the options of ranks, machine and network."""
    group = command.add_argument_group("the ranks")
    group.add_argument("--ranks", type=int, default=8, metavar="R", help="that share the experts (default: 8)")
    group.add_argument("--tokens", type=int, default=4096, metavar="T", help="of a rank and step (default: 4096)")
    group.add_argument("--machine", choices=MACHINES, default="h100", help="a rank (default: h100)")
    group.add_argument("--flops", type=float, metavar="X", help="operations a second, instead of the machine's")
    group.add_argument("--memory-bandwidth", type=float, metavar="X", help="bytes a second, instead of the machine's")
    group.add_argument("--network", choices=NETWORKS, default="nvlink", help="between ranks (default: nvlink)")
    group.add_argument("--latency", type=float, metavar="S", help="seconds of an exchange, instead of the network's")
    group.add_argument(
        "--bandwidth", type=float, metavar="X", help="bytes a second of a rank, in place of the network's"
    )
    group.add_argument("--ranks-per-node", type=int, metavar="N", help="instead of the network's")
    group.add_argument("--local-bandwidth", type=float, metavar="X", help="within a node, instead of the network's")
    group.add_argument("--chunks", type=numbers, default=(1, 2, 4), metavar="N,...", help="default: 1,2,4")
    group.add_argument(
        "--optimizer-bytes", type=float, metavar="N", help="of states and master weights a parameter (default: AdamW's)"
    )
    group.add_argument(
        "--recompute", action="store_true", help="forwards run again in the backward; changes the memory"
    )


def add_load(command: argparse.ArgumentParser) -> None:
    """Add the options of the load."""
    group = command.add_argument_group("the load")
    group.add_argument(
        "--load",
        default="uniform",
        metavar="LOAD",
        help="uniform, zipf:EXPONENT, or a recorded file (default: uniform)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of a load that is drawn (default: 0)")
    group.add_argument(
        "--spread", choices=BALANCES, default=BALANCES[0], help="of experts, for bytes, times and memory (as it is)"
    )
    group.add_argument("--worth", type=int, metavar="ROWS", help="fewest rows of a clone (default: what pays off)")


def simulation_of(options: argparse.Namespace) -> Simulation:
    """Return the simulation that the options describe."""
    block = block_of(options)
    machine = own_numbers(MACHINES[options.machine], options, ("flops", "memory_bandwidth"))
    of_network = ("latency", "bandwidth", "ranks_per_node", "local_bandwidth")
    network = own_numbers(NETWORKS[options.network], options, of_network)
    load = load_of(options.load, block, max(1, options.tokens * options.ranks), seed=options.seed)
    return simulate(
        block,
        options.ranks,
        options.tokens,
        load,
        machine,
        network,
        chunks=options.chunks,
        spread=options.spread,
        worth=options.worth,
        optimizer_bytes=options.optimizer_bytes,
        recompute=options.recompute,
    )


def block_of(options: argparse.Namespace) -> Block:
    """Return the model: a preset changed by the given sizes, or a model of given sizes only."""
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    if options.model is not None:
        return replace(PRESETS[options.model], **given)
    missing = [name for name in OWN if name not in given]
    if len(missing) == len(OWN):
        return replace(PRESETS["qwen3-30b-a3b"], **given)
    if missing:
        raise ValueError(f"expected --model, or all of {_flags(OWN)}, got no {_flags(missing)}")
    return Block("own numbers", **given)


def own_numbers(preset: Preset, options: argparse.Namespace, names: Sequence[str]) -> Preset:
    """Return the preset with the given numbers in place of its own."""
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return replace(preset, title="own numbers" if given.keys() >= {*names[:2]} else preset.title, **given)


def numbers(argument: str) -> tuple[int, ...]:
    """Return ``1,2,4`` as numbers."""
    try:
        return tuple(map(int, argument.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, got {argument!r}") from None


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
