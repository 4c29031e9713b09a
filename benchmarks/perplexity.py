"""Measure the perplexity of a trained model with weights in every format, of pymoe and of llama.cpp.

    python -m benchmarks.perplexity [--steps N] [--contenders REGEX] [--output DIR]

A small OLMoE is trained on the text of this repository, byte by byte. It is then rounded in several ways, and each
variant's logits for text that it has not seen are compared with the logits of the float32 weights. llama.cpp reads the
model in bfloat16 and rounds it by itself; if it is not available, its rows are left out. ``benchmarks.whole_models``
measures the time that rounding saves.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.run import Run, as_report, measured, parser_of, show_sections
from benchmarks.models import llama_cpp
from benchmarks.models.contenders import LLAMA
from benchmarks.models.gguf_files import write_gguf
from pymoe._common.types import WeightFormat
from pymoe.bench.report import Table
from pymoe.nn import quantize_experts, quantize_linears

Record = dict[str, Any]
EXPERTS: dict[str, tuple[int, WeightFormat]] = {
    "int8": (8, "int"),
    "fp8": (8, "fp"),
    "int4": (4, "int"),
    "mxfp4": (4, "mxfp"),
}
"""The formats of experts, with their bits and names."""
DENSE: dict[str, int | None] = {"": None, ", dense 8": 8, ", dense 4": 4}
"""The formats of the dense layers, with their bits; None leaves the layers as they are."""
BATCH, LENGTH = 8, 128
"""Sequences in a training step, and bytes in a sequence."""


def main() -> int:
    """Measure, write and show the table."""
    parser = parser_of("perplexity", __doc__ or "")
    parser.add_argument("--steps", type=int, default=3000, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--contenders", type=re.compile, default=re.compile(""), metavar="REGEX", help="default: all")
    options = parser.parse_args()
    found = accuracy(options.steps, options.contenders)
    run = Run("perplexity", options.output, {"steps": options.steps}, accuracy=found)
    run.keep(markdown)
    show_sections(sections(run.result))
    return 0


def olmoe(**sizes: int) -> Any:
    """Return an OLMoE with random weights that runs on pymoe, in torch's default dtype."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    import pymoe.integrations.transformers  # noqa: F401

    torch.manual_seed(0)
    config = OlmoeConfig(**sizes, tie_word_embeddings=False, pad_token_id=0, eos_token_id=None)
    config._experts_implementation = "pymoe"
    model = OlmoeForCausalLM(config)
    model.set_experts_implementation("pymoe")
    return model


def accuracy(steps: int, wanted: re.Pattern[str]) -> list[Record]:
    """Return a trained model's loss in float32, then the loss and the error of each wanted way to round the model."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 256}
    model = olmoe(**sizes, max_position_embeddings=LENGTH)
    text = corpus()
    split = len(text) * 9 // 10
    train(model, text[:split], steps)
    unseen = text[split : split + 64 * LENGTH].view(-1, LENGTH)
    expected = logits(model, unseen)
    found = [{"way": "float32", "loss": loss(expected, unseen)}]
    for way, got in (*by_pymoe(model, unseen, wanted), *by_llama_cpp(model, unseen, wanted)):
        divergence = nn.functional.kl_div(
            got.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
        )
        found.append(
            {
                "way": way,
                "loss": loss(got, unseen),
                "error": float((got - expected).norm() / expected.norm()),
                "divergence": float(divergence.sum(-1).mean()),
                "same": float((got.argmax(-1) == expected.argmax(-1)).double().mean()),
            }
        )
    return found


def by_pymoe(model: Any, ids: Tensor, wanted: re.Pattern[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the logits of the model in bfloat16, and of each way in which pymoe rounds it."""
    if wanted.search("bfloat16"):
        yield "bfloat16", logits(copy.deepcopy(model).bfloat16(), ids)
    for experts, (bits, format) in EXPERTS.items():
        for dense, linear_bits in DENSE.items():
            if not wanted.search(experts + dense):
                continue
            rounded = copy.deepcopy(model)
            quantize_experts(rounded, bits, format)
            if linear_bits is not None:
                quantize_linears(rounded, linear_bits)
            yield experts + dense, logits(rounded, ids)


def by_llama_cpp(model: Any, ids: Tensor, wanted: re.Pattern[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the logits of the model in each of llama.cpp's formats, or nothing if llama.cpp is not
    available.
    """
    forms = [form for form in ("BF16", *llama_cpp.TYPES) if wanted.search(f"{LLAMA} {form}")]
    if not forms:
        return
    try:
        library = llama_cpp.LlamaCpp(llama_cpp.install(), torch.get_num_threads())
    except llama_cpp.Missing as error:
        print(f"llama.cpp is left out: {error}")
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        # Shards are small, so that there is an index.
        copy.deepcopy(model).bfloat16().save_pretrained(folder, max_shard_size="1MB")
        whole = Path(place) / "BF16.gguf"
        write_gguf(folder, whole, model.config.num_hidden_layers, llama_cpp.gguf())
        for form in forms:
            file = whole.with_stem(form)
            if form != "BF16":
                library.quantize(whole, file, form)
            context = library.context(library.load(file), 1, LENGTH)
            rows = []
            for one in ids.numpy():
                context.clear()
                context.compute(one[None], 0, range(LENGTH))
                rows.append(np.stack([context.logits(index) for index in range(LENGTH)]))
            yield f"{LLAMA} {form}", torch.from_numpy(np.stack(rows)).double()


def corpus() -> Tensor:
    """Return the bytes of the repository's Python files and documentation, concatenated in a fixed order."""
    root = Path(__file__).parents[1]
    files = sorted(
        file for folder in ("pymoe", "docs") for ending in ("py", "md") for file in (root / folder).rglob(f"*.{ending}")
    )
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.frombuffer(bytearray(b"".join(files[i].read_bytes() for i in order)), dtype=torch.uint8).long()


def train(model: Any, text: Tensor, steps: int) -> None:
    """Train the model on sequences that are cut from the text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 2))
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=random).tolist()
        ids = torch.stack([text[start : start + LENGTH] for start in starts])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of every sequence in float64."""
    return torch.cat([model(one[None], use_cache=False).logits.double() for one in ids])


def loss(found: Tensor, ids: Tensor) -> float:
    """Return the cross entropy of the next bytes."""
    return float(nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def sections(result: Record) -> list[tuple[str, Table]]:
    """Return the table with its heading."""
    changes = [
        [
            one["way"],
            f"{np.exp(one['loss']):.4f}",
            *(
                [f"{one['error']:.4f}", f"{one['divergence']:.2e}", f"{one['same']:.2%}"]
                if "error" in one
                else ["0", "0", "100%"]
            ),
        ]
        for one in result["accuracy"]
    ]
    changed = ["weights", "perplexity", "error of logits", "KL divergence, nats", "same first choice"]
    return [("Change of a trained model", Table(changed, changes, left=frozenset({"weights"})))]


def markdown(result: Record) -> str:
    """Return the report as Markdown."""
    about = (
        f"The trained model is an OLMoE with 4 layers, hidden size 256 and 16 experts of 256, after "
        f"{result['settings']['steps']} steps; its float32 weights are the reference, and the perplexity is that of "
        f"the next byte. `dense 8` and `dense 4` are attention and the head in integers of 8 and 4 bits; without them, "
        f"these layers stay in float32. llama.cpp rounds the model's weights in bfloat16, dense layers included."
    )
    return as_report([measured(result, about, f"{torch.get_num_threads()} torch threads")], sections(result))


if __name__ == "__main__":
    raise SystemExit(main())
