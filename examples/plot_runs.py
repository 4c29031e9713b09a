"""Draws the curves of several runs of train_lm.py in one picture and prints them side by side.

    python examples/plot_runs.py runs/moe-native runs/dense --output runs/moe-dense.png

A run is its folder or its record.json. Where two runs differ in the backend alone, the distance of their loss curves
is printed as well.
"""

from __future__ import annotations

from common import require

require(["matplotlib"])

import argparse
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

from common import read_record
from lm.plots import describe, plot_comparison

SPANS = (10, 30, 100)  # steps over which two curves are compared, besides all of them


def main(argv: list[str] | None = None) -> int:
    head, _, tail = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=tail, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its record.json")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/comparison.png"),
        metavar="FILE",
        help="picture to write (default: %(default)s)",
    )
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="names of the runs (default: what they trained)")
    parser.add_argument(
        "--over",
        choices=("steps", "seconds"),
        default="steps",
        help="what the curves are drawn over (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    try:
        records = [read_record(run) for run in arguments.runs]
    except (OSError, ValueError) as error:
        print(f"error: no record of a finished run: {error}", file=sys.stderr)
        return 2
    labels = arguments.labels or [describe(record) for record in records]
    if len(labels) != len(records):
        parser.error(f"--labels: {len(labels)} names for {len(records)} runs")
    print_table(records, labels)
    for (first, first_label), (second, second_label) in combinations(zip(records, labels, strict=True), 2):
        if differ_in_backend_alone(first["config"], second["config"]):
            print_distance(first, second, f"{first_label} and {second_label}")
    print(f"picture: {plot_comparison(records, arguments.output, labels=labels, over=arguments.over)}")
    return 0


def print_table(records: list[dict[str, Any]], labels: list[str]) -> None:
    width = max(len(label) for label in labels)
    print(f"{'run':<{width}}  {'parameters':>11}  {'train':>6}  {'held back':>9}  {'tokens/s':>9}  {'training':>9}")
    for record, label in zip(records, labels, strict=True):
        final = record["final"]
        print(
            f"{label:<{width}}  {record['parameters']['total']:>11,}  {final['train_bits_per_byte']:>6.3f}  "
            f"{final['validation_bits_per_byte']:>9.3f}  {final['tokens_per_second']:>9,.0f}  "
            f"{record['timings']['training_seconds']:>7.0f} s"
        )
    print("(train and held back in bits per byte)")


def differ_in_backend_alone(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return [name for name in first if first[name] != second[name]] == ["backend"]


def print_distance(first: dict[str, Any], second: dict[str, Any], names: str) -> None:
    distance = [abs(a - b) for a, b in zip(first["loss"], second["loss"], strict=False)]
    spans = [span for span in SPANS if span < len(distance)] + [len(distance)]
    parts = ", ".join(f"{max(distance[:span]):.1e} over the first {span}" for span in spans)
    print(f"{names}: largest difference of the losses (nats per byte), steps: {parts}")


if __name__ == "__main__":
    sys.exit(main())
