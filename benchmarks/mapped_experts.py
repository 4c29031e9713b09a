"""Measure quantised experts that are mapped from files and do not all fit into memory, with and without prefetching.

    python -m benchmarks.mapped_experts [--layers N] [--shares PERCENT,...] [--tokens N] [--threads N]
                                        [--sizes HIDDEN,FFN] [--files DIR] [--output DIR]

A stack of MoE layers computes one token after another. A share of all experts may stay in memory, those that were used
most recently: after each token the benchmark itself drops the others from memory (``MADV_DONTNEED`` and
``POSIX_FADV_DONTNEED``), because a limit of memory needs rights that few users have. So the disk is read as under a
limit, but the time that the system would take to choose and drop pages is not measured. Every token is computed in both
ways, in turns, from the same state of memory. Choices of experts are random, the worst case for a cache. With a share
of 100 % nothing is dropped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
from bisect import bisect
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.run import Run, as_report, measured, parser_of, show_sections, spread_of
from pymoe.bench.report import Table
from pymoe.bench.timing import Quartiles
from pymoe.nn import MoE, load_quantized, prefetch_experts, quantize_experts, save_quantized
from pymoe.nn.prefetch import mappings

Record = dict[str, Any]
HIDDEN, FFN, EXPERTS, CHOICES, BITS = 2048, 1024, 64, 8, 4
"""Sizes of OLMoE."""
WAYS = {"mapped": False, "prefetched": True}


def main() -> int:
    """Measure, write and show the table; return 1 if the ways differ in a bit."""
    parser = parser_of("mapped_experts", __doc__ or "")
    parser.add_argument("--layers", type=int, default=10, metavar="N", help="227 MB each (default: %(default)s)")
    parser.add_argument("--shares", type=lambda text: [int(one) for one in text.split(",")], default=[25, 50, 75, 100])
    parser.add_argument("--tokens", type=int, default=21, metavar="N", help="for each share (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument(
        "--sizes", type=lambda text: [int(one) for one in text.split(",")], default=[HIDDEN, FFN], help="hidden and FFN"
    )
    parser.add_argument("--files", type=Path, help="folder on the disk that is measured (default: a temporary one)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = {"layers": options.layers, "tokens": options.tokens, "threads": options.threads}
    run = Run("mapped_experts", options.output, settings, shares=[])
    with tempfile.TemporaryDirectory(dir=options.files) as folder:
        layers = Layers(Path(folder), options.layers, *options.sizes)
        run.result["bytes"] = layers.bytes
        settings["read_ahead"] = read_ahead(Path(folder))
        for share in options.shares:
            run.result["shares"].append({"share": share, **layers.measure(share / 100, options.tokens)})
            run.keep(markdown)
    show_sections(sections(run.result))
    return int(not all(one["same"] for one in run.result["shares"]))


class Layers:
    """Layers that are mapped from files, and which of their experts are in memory."""

    def __init__(self, folder: Path, count: int, hidden: int, ffn: int) -> None:
        torch.manual_seed(0)
        layer = MoE(hidden_size=hidden, ffn_size=ffn, num_experts=EXPERTS, top_k=CHOICES).eval()
        quantize_experts(layer, BITS)
        paths = [folder / f"{number}.safetensors" for number in range(count)]
        save_quantized(layer, paths[0])
        for path in paths[1:]:
            shutil.copyfile(paths[0], path)
        self.files = [os.open(path, os.O_RDONLY) for path in paths]
        for file in self.files:
            os.fsync(file)  # only pages that have been written can be dropped
        self.layers = nn.ModuleList([load_quantized(path) for path in paths])
        self.mappings = mappings()
        self.advise = ctypes.CDLL(None).madvise
        self.advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.hidden = hidden
        self.bytes = prefetch_experts(self.layers)
        self.random = torch.Generator().manual_seed(1)
        self.kept: OrderedDict[tuple[int, int], None] = OrderedDict()

    @torch.no_grad()
    def measure(self, share: float, tokens: int) -> Record:
        """Return seconds and bytes read for each token in both ways, and whether results had the same bits."""
        all_of_them = [(layer, expert) for layer in range(len(self.layers)) for expert in range(EXPERTS)]
        order = [all_of_them[i] for i in torch.randperm(len(all_of_them), generator=self.random).tolist()]
        self.kept = OrderedDict()
        self.drop_others()
        for file in self.files:  # written data may lie in larger pieces of memory, which were not dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.kept = OrderedDict.fromkeys(order[: round(share * len(order))])
        for layer, expert in self.kept:
            for weight in self.weights(layer):
                weight[expert].sum()
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        read: dict[str, list[int]] = {way: [] for way in WAYS}
        same = True
        for token in range(tokens + 1):  # the first one is not counted
            x = torch.randn(1, self.hidden, generator=self.random)
            outputs: list[Tensor] = []
            for way in sorted(WAYS, reverse=token % 2 == 1):
                prefetch_experts(self.layers, WAYS[way])
                self.drop_others()
                before, start = bytes_read(), perf_counter()
                y = self.forward(x)
                seconds[way].append(perf_counter() - start)
                read[way].append(bytes_read() - before)
                outputs.append(y)
            same &= torch.equal(*outputs)
            self.keep(self.chosen(x), round(share * len(order)))
        ratios = [a / b for a, b in zip(seconds["mapped"][1:], seconds["prefetched"][1:], strict=True)]
        found = {
            way: {"seconds": asdict(Quartiles.of(seconds[way][1:])), "read": asdict(Quartiles.of(read[way][1:]))}
            for way in WAYS
        }
        return {**found, "ratio": asdict(Quartiles.of(ratios)), "same": same}

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all layers. Each layer also reads the token itself, so that choices stay random."""
        y = x
        for number, layer in enumerate(self.layers):
            y = layer(torch.roll(x, number, 1))
        return y

    def chosen(self, x: Tensor) -> list[tuple[int, int]]:
        """Return the experts, each with its layer, that a token chooses."""
        return [
            (number, expert)
            for number, layer in enumerate(self.layers)
            for expert in layer.router.logits(torch.roll(x, number, 1)).topk(CHOICES).indices[0].tolist()
        ]

    def keep(self, used: list[tuple[int, int]], most: int) -> None:
        """Record which experts were used, and let at most ``most`` experts stay in memory."""
        for expert in used:
            self.kept[expert] = None
            self.kept.move_to_end(expert)
        while len(self.kept) > most:
            self.kept.popitem(last=False)

    def drop_others(self) -> None:
        """Drop from memory all experts that may not stay, including pages of them that were read together with
        others.
        """
        for number, file in enumerate(self.files):
            for weight in self.weights(number):
                for expert in range(EXPERTS):
                    if (number, expert) not in self.kept:
                        self.drop(weight[expert], file)

    def drop(self, weight: Tensor, file: int) -> None:
        """Drop from memory the pages that hold nothing but this weight, which is mapped from a file."""
        begin = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        self.advise(begin, end - begin, mmap.MADV_DONTNEED)
        start = self.mappings[bisect(self.mappings, begin, key=lambda one: one.begin) - 1].begin  # of the whole file
        os.posix_fadvise(file, begin - start, end - begin, os.POSIX_FADV_DONTNEED)

    def weights(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the packed weights of a layer's experts."""
        experts: Any = self.layers[number].experts
        return experts.w_in.packed, experts.w_out.packed


def bytes_read() -> int:
    """Return the number of bytes that the system has read from disks for this process."""
    with open("/proc/self/io") as counters:
        return int(dict(line.split(": ") for line in counters)["read_bytes"])


def read_ahead(folder: Path) -> str:
    """Return the KiB that the system reads around a missing page of a file in this folder."""
    device = folder.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return setting.read_text().strip() if setting.exists() else "an unknown number of"


def sections(result: Record) -> list[tuple[str, Table]]:
    """Return the table with its heading."""
    heading = ["share in memory", *(f"{way}, {what}" for way in WAYS for what in ("tokens/s", "MB read a token"))]
    rows = [
        [
            f"{one['share']} %",
            *(
                cell
                for way in WAYS
                for cell in (rate(one[way]["seconds"]), spread_of(one[way]["read"], "{:.0f}", 1e-6))
            ),
            spread_of(one["ratio"], "{:.2f}") + ("" if one["same"] else ", other bits"),
        ]
        for one in result["shares"]
    ]
    return [("Tokens a second", Table([*heading, "ratio of times"], rows))]


def rate(seconds: Record) -> str:
    """Return tokens a second, with their quartiles."""
    low, median, high = (1 / seconds[key] for key in ("high", "median", "low"))
    return f"{median:.2f} [{low:.2f} - {high:.2f}]"


def markdown(result: Record) -> str:
    """Return the report as Markdown."""
    settings = result["settings"]
    about = (
        f"{settings['layers']} layers of {EXPERTS} experts, {CHOICES} for each token, chosen at random: "
        f"{result['bytes'] / 1e9:.2f} GB of weights in {BITS} bits. The system reads "
        f"{settings['read_ahead']} KiB around a missing page. Medians and quartiles of {settings['tokens']} tokens."
    )
    return as_report([measured(result, about, f"{settings['threads']} torch threads")], sections(result))


if __name__ == "__main__":
    raise SystemExit(main())
