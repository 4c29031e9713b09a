"""Writes docs/reference/transformers_models.md: every architecture of transformers with experts, and how it runs.

    python tests/integrations/transformers/write_table.py

test_table.py fails where the page and the installed transformers differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from experts_classes import experts_classes, sources

from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import fused_activation
from pymoe.integrations.transformers.blocks import DIFFERENT, PLANS
from pymoe.integrations.transformers.outside import FORWARDS, REFUSED

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "transformers_models.md"

TEXT = """\
# Architectures of transformers

Every model of transformers {version} whose feed-forward layers have experts, and how `pymoe.integrations.transformers`
runs it: [Models of transformers](../tutorials/transformers.md) explains the switch. The tables are written by
`tests/integrations/transformers/write_table.py`.

## Behind the interface

{behind} classes stand behind transformers' interface and run by `experts_implementation="pymoe"`. All of them pass the
tests, which compare every class with its own eager forward: in float32, output and all gradients are within 1e-6 of the
largest value; in bfloat16, they are no farther from the exact result than 1.25 times eager's own distance. There is one
exception: `{wider}` computes in float32 whatever the dtype of its weights, where pymoe (as `grouped_mm`)
computes in that dtype. The tests also build a small whole model of each architecture and compare logits, gradients and,
where the model generates, greedily chosen tokens with dynamic and static caches.

*Between the products* says what an expert computes there: a fused activation of pymoe, or the module's own PyTorch
code. *Layer* names the sparse block that `from_transformers` turns into a `pymoe.nn.MoE`, or says why it refuses it.
It takes {taken} of them; `to_transformers` returns the same block. The tests compare every layer with its block: in
float32 outputs are within 1e-6 and gradients within 1e-5 of the largest value; in bfloat16 outputs are within 2^-6 of
those of the block with the same weights in float32, for tokens that choose the same experts there.

| Model | Class | Weights | Between the products | Layer |
|---|---|---|---|---|
{behind_rows}

## Outside the interface

These have no such interface; `enable(model)` runs them. The tests compare whole models, and all pass.

| Model | Class | Note |
|---|---|---|
{outside_rows}

## Not supported

`enable` refuses these, with the reason.

| Model | Class | Why not |
|---|---|---|
{refused_rows}
"""

NOTES = {
    "DbrxExperts": "gate, up and down are matrices of all experts, one above the other: read in place",
    "JetMoeParallelExperts": "one linear layer for each expert, in the feed-forward and in the attention layers",
    "Llama4TextMoe": "transformers sends every token through every expert; `from_transformers` takes this block",
    "LongcatFlashExperts": "some experts return their input",
    "Step3p7Experts": "some layers clamp what the gate multiplies: these run on their own PyTorch code in between",
}


def layers() -> dict[str, str]:
    """Return the classes of sparse blocks, of those that ``from_transformers`` knows, by their experts' class."""
    found = {}
    texts = dict(sources())
    for one in experts_classes():
        for text in re.split(r"^class ", texts[one.model], flags=re.MULTILINE)[1:]:
            block = re.match(r"\w+", text)[0]
            if f"{one.name}(" in text.removeprefix(block) and block in {**PLANS, **DIFFERENT}:
                found[one.name] = block
    return found


def weights(experts) -> str:
    flags = interface.flags(experts)
    words = {"no gate": not flags.gated, "transposed": flags.transposed, "biases": flags.biased, "norm": flags.normed}
    return ", ".join(word for word, holds in words.items() if holds)


def between(experts) -> str:
    kind = fused_activation(experts)
    if kind is not None:
        return f"`{kind if isinstance(kind, str) else type(kind).__name__}`"
    flags = interface.flags(experts)
    act_fn = getattr(experts, "act_fn", None)
    own = not flags.gated or interface.has_default_gate(type(experts))
    return f"PyTorch: {type(act_fn).__name__}" if own else "PyTorch: a gate of its own"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def behind_rows() -> list[str]:
    blocks = layers()
    rows = []
    for one in experts_classes():
        experts = one.build()
        block = blocks[one.name]
        layer = f"`{block}`" if block in PLANS else f"no: {DIFFERENT[block]}"
        cells = (f"`{one.name}`", weights(experts), between(experts), layer)
        rows.append(row(one.model, *cells))
    return rows


def of_places(places: dict, note) -> list[str]:
    return [row(module.split(".")[2], f"`{name}`", note(module, name)) for module, name in sorted(places)]


def page() -> str:
    rows = behind_rows()
    return TEXT.format(
        version=transformers.__version__,
        behind=len(rows),
        taken=sum(block in PLANS for block in layers().values()),
        wider="OpenAIPrivacyFilterExperts",
        behind_rows="\n".join(rows),
        outside_rows="\n".join(of_places(FORWARDS, lambda module, name: NOTES[name])),
        refused_rows="\n".join(of_places(REFUSED, lambda module, name: REFUSED[module, name])),
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))
