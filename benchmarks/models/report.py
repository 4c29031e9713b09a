"""Tables of ``python -m benchmarks.whole_models``, from its record."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.common.run import as_report, measured, spread_of
from benchmarks.models.contenders import CONTENDERS
from pymoe.bench.report import Table
from pymoe.bench.timing import Quartiles

Record = dict[str, Any]
FAILED = "failed"
TOLERANCE = 0.05
"""Largest relative error of logits, the median over tokens, compared with the same weights in transformers' eager
experts.
"""
SAME = 0.75
"""The same for llama.cpp, whose weights are rounded differently. A larger error would mean another model."""
RIVALS = {one.name: one.rival for one in CONTENDERS}
ABOUT = """\
Weights are random, and all contenders decode and prefill the same random tokens, in processes of their own that take \
turns (contenders that run on the same weights share a process). Times are medians with \
quartiles. Decoding adds a token to each of some sequences after prompts of 32 tokens, and its time is that of the \
whole call; prefill computes a prompt and the logits of its last token. `int8` and `int4` are experts in that many \
bits, `dense 8` and `dense 4` attention, shared experts, dense networks and the head. `compiled` decodes with one \
graph of `torch.compile` over a static cache of 128 positions and transformers' attention `eager`; the others have a \
growing cache and `sdpa`. llama.cpp's files are written by \
`gguf` and quantised by llama.cpp, with the head in the type of the other dense layers. The floor of decoding is the \
time to read the weights of the head and of the layers, as far as a call needs them, at the bandwidth of the fastest \
of torch's reductions; keys and values are not counted."""


def wrong(model: Record) -> list[str]:
    """Return the contenders whose logits do not fit their weights."""
    return [name for name, one in model["contenders"].items() if "errors" in one and verdict(one) == "WRONG"]


def verdict(one: Record) -> str:
    """Return "close" or "WRONG"; an error of NaN is wrong. Return "-" if there was nothing to compare with."""
    exact = one["exact"]
    if not one["errors"]:
        return "-"
    error, tolerance = (one["errors"][exact], TOLERANCE) if exact else (one["errors"]["whole"], SAME)
    return "close" if error[0] <= tolerance else "WRONG"


def spread(one: Record, mode: str, tokens: int, layers: int, clock: str = "wall") -> Record | None:
    """Return median and quartiles of a cell's seconds; None if it was not measured."""
    for cell in one["cells"]:
        if (cell["mode"], cell["tokens"], cell["layers"]) == (mode, tokens, layers):
            return asdict(Quartiles.of(cell["samples"][clock]))
    return None


def split(model: Record, one: Record, mode: str, tokens: int) -> tuple[float, float, float] | None:
    """Return the seconds of everything except layers, of one layer, and of the published number of layers. The last
    figure is extrapolated from the difference between two numbers of layers; None if only one was measured.
    """
    found = [spread(one, mode, tokens, model[key]) for key in ("layers", "fewer")]
    if found[0] is None or found[1] is None:
        return None
    more, fewer = (one["median"] for one in found if one)
    layer = (more - fewer) / (model["layers"] - model["fewer"])
    return more - model["layers"] * layer, layer, more + (model["of"] - model["layers"]) * layer


def floor(result: Record, model: Record, one: Record, tokens: int) -> tuple[float, float]:
    """Return the bytes of weights that a call decoding ``tokens`` tokens reads, and the seconds that reading them
    takes.
    """
    sizes = one["loaded"]["sizes"]
    size = sizes["rest"] + sizes["experts"] * model["touched"][str(tokens)]
    return size, size / result["bandwidth"]


def columns(model: Record) -> list[tuple[str, int]]:
    """Return modes and tokens that were measured."""
    cells = (cell for one in model["contenders"].values() for cell in one["cells"])
    return list(dict.fromkeys((cell["mode"], cell["tokens"]) for cell in cells))


def sections(result: Record) -> list[tuple[str, Table]]:
    """Return the tables of every model with their headings."""
    found = []
    for model in result["models"]:
        title = f"{model['title']}, {model['layers']} of {model['of']} layers"
        found += [
            (f"{title}: milliseconds of a call, wall clock", times(model, "wall")),
            (f"{title}: milliseconds of processor time of a call", times(model, "processor")),
            (f"{title}: decoding and the floor", floors(result, model)),
            (f"{title}: weights and memory", memory(model)),
        ]
        if model["fewer"]:
            found.insert(-2, (f"{title}: extrapolated to {model['of']} layers", whole(model)))
    return found


def times(model: Record, clock: str) -> Table:
    """Return a table with one row per contender: its times, and its speed relative to the llama.cpp contender with
    about as many bytes.
    """
    rows = []
    for name, one in model["contenders"].items():
        cells = []
        rival = model["contenders"].get(RIVALS[name])
        for mode, tokens in columns(model):
            mine = spread(one, mode, tokens, model["layers"], clock)
            theirs = spread(rival, mode, tokens, model["layers"], clock) if rival else None
            faster = f" ({theirs['median'] / mine['median']:.2f}x)" if mine and theirs else ""
            cells.append(spread_of(mine, "{:.1f}", 1e3) + faster if mine else "-")
        rows.append([name, RIVALS[name].removeprefix("llama.cpp ") or "-", *cells])
    heading = ["contender", "(x): speed over llama.cpp", *(f"{mode} {tokens}" for mode, tokens in columns(model))]
    return Table(heading, rows, frozenset({"contender", "(x): speed over llama.cpp"}))


def floors(result: Record, model: Record) -> Table:
    """Return a table of tokens per second, bytes and shares of the floor in decoding."""
    decoded = [tokens for mode, tokens in columns(model) if mode == "decode"]
    heading = ["contender"]
    for tokens in decoded:
        heading += [f"batch {tokens}: tokens/s", "MB read", "floor, ms", "of floor"]
    rows = []
    for name, one in model["contenders"].items():
        row = [name]
        for tokens in decoded:
            mine = spread(one, "decode", tokens, model["layers"])
            if mine is None:
                row += ["-"] * 4
                continue
            size, least = floor(result, model, one, tokens)
            row += [f"{tokens / mine['median']:.1f}", f"{size / 1e6:,.0f}", f"{least * 1e3:.1f}"]
            row.append(f"{100 * least / mine['median']:.0f} %")
        rows.append(row)
    return Table(heading, rows, frozenset({"contender"}))


def whole(model: Record) -> Table:
    """Return a table of the time without layers, the time of a layer, and the tokens per second with all layers."""
    rows = []
    for name, one in model["contenders"].items():
        row = [name]
        for mode, tokens in columns(model):
            parts = split(model, one, mode, tokens)
            row.append(
                f"{parts[0] * 1e3:.1f} + {parts[1] * 1e3:.2f} a layer: {tokens / parts[2]:.1f} tokens/s"
                if parts
                else "-"
            )
        rows.append(row)
    return Table(
        ["contender", *(f"{mode} {tokens}" for mode, tokens in columns(model))], rows, frozenset({"contender"})
    )


def memory(model: Record) -> Table:
    """Return a table of sizes, loading times and errors of logits."""
    rows = []
    for name, one in model["contenders"].items():
        if "errors" not in one:
            continue
        loaded, errors = one["loaded"], one["errors"]
        exact = errors.get(one["exact"])
        rows.append(
            [
                name,
                f"{loaded['sizes']['experts'] / 1e6:,.0f}",
                f"{loaded['sizes']['rest'] / 1e6:,.0f}",
                f"{loaded['seconds']:.1f}",
                f"{loaded['peak'] / 1e6:,.0f}",
                f"{loaded['stays'] / 1e6:,.0f}",
                *("{:.1e} ({:.1e})".format(*pair) if pair else "-" for pair in (errors.get("whole"), exact)),
                verdict(one),
            ]
        )
    heading = [
        "contender",
        "experts, MB",
        "rest, MB",
        "load, s",
        "peak, MB",
        "stays, MB",
        "against bf16",
        "same weights",
    ]
    return Table([*heading, "verdict"], rows, frozenset({"contender", "verdict"}), frozenset({"WRONG"}))


def markdown(result: Record) -> str:
    """Return everything as Markdown."""
    settings = result["settings"]
    versions = next((model["llama"] for model in result["models"] if "llama" in model), "no llama.cpp")
    rounds = statistics.median(
        len(cell["samples"]["wall"])
        for model in result["models"]
        for one in model["contenders"].values()
        for cell in one["cells"]
    )
    about = (
        f"{ABOUT} Memory was read with {result['bandwidth'] / 1e9:.1f} GB/s. A median stands for {rounds:.0f} calls "
        f"(the median number). `load` is from warm files; `peak` and `stays` are anonymous memory, which mapped files "
        f"are not. Errors are relative, of the logits of a token: the median over 64 tokens, and the largest in "
        f"brackets. `against bf16` compares with transformers' eager experts, `same weights` with these on the "
        f"dequantised weights. {versions}."
    )
    lines = [measured(result, about, f"{settings['threads']} threads each")]
    for model in result["models"]:
        lines += ["", *(f"- {model['title']}: {name} {reason}" for name, reason in model["absent"].items())]
        alone = "; ".join(", ".join(names) for names in model["waves"])
        lines.append(f"- {model['title']}: in memory together, in turns: {alone}")
    return as_report(lines, sections(result))
