"""Count how much of pymoe's Python one call of a layer runs: functions entered, and the files that contain them.

    python -m benchmarks.walks [--budget S]

A walk is one call with 16 tokens, 8 experts and 2 choices per token, after two calls that warm up. ``sys.setprofile``
counts, on the calling thread: frames (functions entered), functions, files, and turns (changes from one file to
another). Two more walks cross processes or threads: a layer whose experts are on two ranks, counted on the first, and
an expert that a server in this process serves over loopback, counted on the threads of client and server together. How
often these wake differs from call to call, so the call with the median number of frames counts. The host's time for one
token is one thread's processor time, as a ratio to the same call without gradients: candidates take turns, and the
fastest run of each counts. Prints two Markdown tables. A walk is left out where its package is not installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pymoe
from pymoe import ep
from pymoe.nn import MoE, quantize_experts

PACKAGE = str(Path(pymoe.__file__).parent)
TOKENS, HIDDEN, FFN, EXPERTS, CHOICES = 16, 32, 64, 8, 2
ROW, FEWEST_ROUNDS = 100, 15
RANKS = 2
CALLS = 11
PAUSE_S = 0.05
"""Seconds after a remote call in which threads end what they do for it."""

Calls = dict[str, Callable[[], object]]
"""Calls of a layer by the way in which it is called; the times of the others are compared with the first."""

Entered = list[tuple[str, CodeType]]
"""Functions in the order in which they were entered: the name of the module, and the code."""


class Walk(NamedTuple):
    """The amount of the package's Python that one call ran."""

    frames: int
    functions: int
    files: int
    turns: int


def recorder(found: Entered) -> Callable[[FrameType, str, Any], None]:
    """Return a function for ``setprofile`` that adds every Python function that is entered to ``found``."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.append((frame.f_globals.get("__name__", ""), frame.f_code))

    return note


def entered(call: Callable[[], object]) -> Entered:
    """Return the module and code of every Python function that a call runs on this thread, in order."""
    found: Entered = []
    before = sys.getprofile()
    sys.setprofile(recorder(found))
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def walk(call: Callable[[], object]) -> Walk:
    """Return the counts of the third call of ``call``."""
    for _ in range(2):
        call()
    return counts_of(entered(call))


def counts_of(functions: Entered) -> Walk:
    """Return the counts of a call that entered these functions."""
    found = [(code.co_filename, code.co_qualname) for _, code in functions if code.co_filename.startswith(PACKAGE)]
    files = [file for file, _ in found]
    return Walk(len(found), len(set(found)), len(set(files)), sum(a != b for a, b in pairwise(files)))


def calls_of(layer: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Calls:
    """Return the ways to call a layer with parameters; calls with gradients also ask for the gradient of ``x``."""
    leaf = x.clone().requires_grad_()
    return {
        "no gradients": torch.no_grad()(lambda: layer(x, *others)),
        "forward": lambda: layer(leaf, *others),
        "forward + backward": lambda: layer(leaf, *others).sum().backward(),
    }


def layers(tokens: int) -> dict[str, Calls]:
    """Return the calls of every layer with the given number of tokens."""
    torch.manual_seed(0)
    x = torch.randn(tokens, HIDDEN)
    plain, quantized = (MoE(HIDDEN, FFN, EXPERTS, CHOICES) for _ in range(2))
    quantize_experts(quantized.eval(), 8)
    found = {"MoE": calls_of(plain, x), "MoE, int8 experts": {"no gradients": calls_of(quantized, x)["no gradients"]}}
    experts = experts_of_transformers()
    if experts is not None:
        chosen = torch.rand(tokens, EXPERTS).argsort(dim=1)[:, :CHOICES]
        found["experts of transformers"] = calls_of(experts, x, chosen, torch.rand(tokens, CHOICES))
    return found


def experts_of_transformers() -> Callable[..., Tensor] | None:
    """Return the experts of a small Mixtral on pymoe's operators; None without transformers."""
    try:
        from transformers import MixtralConfig, MixtralForCausalLM
    except ImportError:
        return None
    import pymoe.integrations.transformers  # noqa: F401  # registers the implementation

    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": EXPERTS, "vocab_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    model.set_experts_implementation("pymoe")
    return next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")


def sharded_walks() -> dict[str, Walk]:
    """Return the counts of a layer's call on the first of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_walk_on_a_rank, args=(folder,), nprocs=RANKS)
        return {way: Walk(*counts) for way, counts in torch.load(Path(folder) / "walks.pt").items()}


def _walk_on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layer = ep.shard(MoE(HIDDEN, FFN, EXPERTS, CHOICES), dist.group.WORLD)
    found = {way: tuple(walk(call)) for way, call in calls_of(layer, torch.randn(TOKENS, HIDDEN)).items()}
    if rank == 0:
        torch.save(found, Path(folder) / "walks.pt")
    dist.destroy_process_group()


def remote_walks() -> dict[str, Walk]:
    """Return the counts of calls of a served expert, on all threads of client and server; nothing without grpc."""
    try:
        from pymoe import remote
    except ImportError:
        return {}
    found: Entered = []

    def counts(call: Callable[[], object]) -> Walk:
        walks = []
        for _ in range(CALLS):
            found.clear()
            call()
            time.sleep(PAUSE_S)
            walks.append(counts_of(found))
        return statistics.median_low(walks[2:])

    expert = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.ReLU(), nn.Linear(FFN, HIDDEN))
    optimizer = torch.optim.SGD(expert.parameters(), 1e-3)
    backend = pymoe.ExpertBackend("expert", expert, optimizer, args_schema=[pymoe.BatchTensorProto(HIDDEN)])
    before = sys.getprofile()
    threading.setprofile(recorder(found))
    sys.setprofile(recorder(found))
    try:
        with remote.ExpertServer([backend], "127.0.0.1:0") as server, remote.connect(server.address) as connection:
            client = pymoe.runtime.ExpertClient(connection.backends()[0])
            calls = calls_of(client, torch.randn(TOKENS, HIDDEN))
            return {way: counts(call) for way, call in calls.items()}
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


def times(calls: Calls, budget: float) -> dict[str, float]:
    """Return each call's fastest time, in microseconds of one thread; calls take turns for ``budget`` seconds."""
    best = dict.fromkeys(calls, float("inf"))
    rounds, start = 0, time.perf_counter()
    while rounds < FEWEST_ROUNDS or time.perf_counter() - start < budget:
        rounds += 1
        for way, call in calls.items():
            begin = time.thread_time()
            for _ in range(ROW):
                call()
            best[way] = min(best[way], (time.thread_time() - begin) / ROW * 1e6)
    return best


def main() -> None:
    """Run the measurements that the command line asks for."""
    parser = argparse.ArgumentParser(prog="benchmarks.walks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of timing for each layer")
    budget = parser.parse_args().budget
    torch.set_num_threads(1)
    print("| walk | " + " | ".join(Walk._fields) + " |\n|---|--:|--:|--:|--:|")
    for layer, calls in layers(TOKENS).items():
        for way, call in calls.items():
            print(f"| {layer}, {way} | " + " | ".join(map(str, walk(call))) + " |")
    for name, walks in {"MoE on two ranks": sharded_walks(), "remote expert": remote_walks()}.items():
        for way, counts in walks.items():
            print(f"| {name}, {way} | " + " | ".join(map(str, counts)) + " |")
    print("\n| one token | µs | ratio |\n|---|--:|--:|")
    for layer, calls in layers(1).items():
        found = times(calls, budget)
        unit = next(iter(found.values()))
        for way, microseconds in found.items():
            print(f"| {layer}, {way} | {microseconds:.1f} | {microseconds / unit:.2f} |")


if __name__ == "__main__":
    main()
