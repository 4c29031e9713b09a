"""Records which experts the tokens of a small language model choose in training, for simulations of expert parallelism.

    python examples/record_loads.py loads.npz
    python -m pymoe.ep simulate --hidden 128 --ffn 256 --experts 16 --choices 4 --tokens 256 --ranks 4 --load loads.npz

The model is a small version of the one in train_lm.py, trained on the same text. The last steps are recorded. Then the
program prints the balance and the rows sent on 2, 4 and 8 ranks under these choices, and the placement of experts that
balances 4 ranks. ``pymoe.ep.redistribute(model, placements, optimizer)`` moves the experts of a model to such a
placement between two steps, as expert_parallel_lm.py does.
"""

from __future__ import annotations

import sys

from common import require

require(("pymoe",))

from contextlib import nullcontext
from pathlib import Path

import torch
from byte_lm import Config, LanguageModel, make_optimizer, train_step
from common import Batches, at_least, load_text, parser_of

from pymoe.ep.placement import Placement, place
from pymoe.ep.simulate import Block, LoadRecorder, recorded, simulate


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="where the loads are written (.npz)")
    parser.add_argument("--steps", type=at_least(1), default=300, metavar="N", help="optimizer steps (default: 300)")
    parser.add_argument("--record", type=at_least(1), default=4, metavar="N", help="the last of them (default: 4)")
    parser.add_argument("--experts", type=at_least(1), default=16, metavar="E", help="in a layer (default: 16)")
    parser.add_argument("--choices", type=at_least(1), default=4, metavar="K", help="experts per byte (default: 4)")
    options = parser.parse_args()
    config = Config(
        layers=2, num_experts=options.experts, top_k=options.choices, steps=options.steps, ffn_size=64, width=64
    )
    torch.manual_seed(config.seed)
    model = LanguageModel(config)
    optimizer = make_optimizer(model, config)
    batches = Batches(load_text("", config.context).train, config.context, config.batch_size, config.seed)
    recorder = LoadRecorder(model)
    for step in range(options.steps):
        is_recorded = step >= options.steps - options.record
        with recorder if is_recorded else nullcontext():
            loss = train_step(model, optimizer, config, step, *batches.batch(step))
        if is_recorded or step % 50 == 0:
            print(f"step {step:3d}  loss {loss:.3f}{'  recorded' * is_recorded}")
    recorder.save(options.file)

    block = Block("byte-level language model", config.width, config.ffn_size, options.experts, options.choices)
    load = recorded(block, options.file)
    print(f"{options.file}: {load.title}")
    for ranks in (2, 4, 8):
        found = simulate(block, ranks, load.tokens // ranks, load, chunks=(1,), min_rows_to_clone=1)
        balances = ", ".join(f"{one.name} {one.imbalance:.2f}" for one in found.balances)
        rows = " or ".join(f"{one.rows:.2f}" for one in found.traffic)
        print(f"{ranks} ranks: fullest rank over the mean: {balances}; rows a token, each or once a rank: {rows}")
    for name, placement in placements(recorder, 4).items():
        print(f"{name}: experts of 4 ranks: {', '.join(map(str, map(list, placement.held)))}")
    return 0


def placements(recorder: LoadRecorder, ranks: int) -> dict[str, Placement]:
    """Return a placement for every layer, computed from the load of the last recorded step."""
    choices = dict(zip(recorder.layers, recorder.steps[-1], strict=True))
    loads = {name: torch.bincount(one.flatten(), minlength=recorder.experts) for name, one in choices.items()}
    return {name: place(load, ranks) for name, load in loads.items()}


if __name__ == "__main__":
    sys.exit(main())
