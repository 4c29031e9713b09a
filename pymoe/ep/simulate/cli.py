"""The command ``python -m pymoe.ep``: rows, bytes, balance and memory of expert parallelism without running a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from pymoe._common.command_line import CommandLine, file_to_write
from pymoe.ep.simulate.block import DTYPES, PRESETS, Block
from pymoe.ep.simulate.loads import load_of
from pymoe.ep.simulate.rows import SPREADS
from pymoe.ep.simulate.simulation import Simulation, simulate, text

SIZES = ("hidden", "ffn", "experts", "choices", "layers", "shared_ffn", "groups", "kept_groups", "dtype")
OWN = ("hidden", "ffn", "experts", "choices")
"""Options that must all be given for a model without a preset; without any of them, the preset is qwen3-30b-a3b."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, or 2 if the options do not fit or a file cannot be used.

    If argparse rejects the arguments, it raises SystemExit instead, also with the status 2.
    """
    options = parser().parse_args(arguments)
    try:
        found = simulation_of(options)
        print(text(found))
        if options.json:
            options.json.write_text(json.dumps(found.as_dict(), indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"pymoe.ep: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the commands and their options."""
    top = CommandLine(prog="python -m pymoe.ep", description="Expert parallelism of mixture-of-experts layers.")
    commands = top.add_subparsers(dest="command", required=True)
    own = commands.add_parser(
        "simulate",
        help="rows, bytes, balance and memory of expert parallelism",
        description="Simulate a mixture-of-experts layer whose experts are spread over ranks.",
        epilog="\n  ".join(["models:", *(f"{name:16}  {block}" for name, block in PRESETS.items())]),
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
    ranks = own.add_argument_group("the ranks")
    ranks.add_argument("--ranks", type=int, default=8, metavar="R", help="that share the experts (default: 8)")
    ranks.add_argument("--tokens", type=int, default=4096, metavar="T", help="per rank and step (default: 4096)")
    ranks.add_argument("--chunks", type=numbers, default=(1, 2, 4), metavar="N,...", help="default: 1,2,4")
    ranks.add_argument("--spread", choices=SPREADS, default="contiguous", help="of experts, for bytes and memory")
    ranks.add_argument(
        "--min-rows-to-clone", type=int, metavar="ROWS", help="fewest rows of a clone (default: that of shard)"
    )
    ranks.add_argument(
        "--optimizer-bytes",
        type=float,
        metavar="N",
        help="of states and master weights per parameter (default: AdamW's)",
    )
    ranks.add_argument("--recompute", action="store_true", help="forwards run again in the backward")
    load = own.add_argument_group("the load")
    named = "uniform, zipf:EXPONENT, or a recorded file (default: uniform)"
    load.add_argument("--load", default="uniform", metavar="LOAD", help=named)
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of a load that is drawn (default: 0)")
    own.add_argument("--json", type=file_to_write, metavar="FILE", help="write all figures to FILE")
    return top


def simulation_of(options: argparse.Namespace) -> Simulation:
    """Run the simulation that the options describe, and return it."""
    block = block_of(options)
    load = load_of(options.load, block, max(1, options.tokens * options.ranks), seed=options.seed)
    given = ("chunks", "spread", "min_rows_to_clone", "optimizer_bytes", "recompute")
    return simulate(block, options.ranks, options.tokens, load, **{name: getattr(options, name) for name in given})


def block_of(options: argparse.Namespace) -> Block:
    """Return the block that the options describe: a preset, with given sizes in place of its own, or a new block.

    Without a model, raise ValueError if some, but not all, of the options ``OWN`` are given.
    """
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    if options.model is not None:
        return replace(PRESETS[options.model], **given)
    missing = [name for name in OWN if name not in given]
    if len(missing) == len(OWN):
        return replace(PRESETS["qwen3-30b-a3b"], **given)
    if missing:
        raise ValueError(
            f"expected --model, or all of {_flags(OWN)}, got no {_flags(missing)}: --model qwen3-30b-a3b has the rest"
        )
    return Block("own numbers", **given)


def numbers(argument: str) -> tuple[int, ...]:
    """Return the integers in a text such as ``1,2,4``."""
    try:
        return tuple(map(int, argument.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, got {argument!r}") from None


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
