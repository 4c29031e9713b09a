"""The contenders: pymoe behind transformers, transformers' own experts, and llama.cpp, with the weights of each.

A process holds one set of weights. Contenders that run on the same weights share a process, and are switched between
turns: the implementations of experts in bfloat16 (two of transformers, and pymoe), and pymoe with and without
``torch.compile``. Every other contender has a process of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LLAMA = "llama.cpp"
WHOLE = "whole"
"""The weights in bfloat16."""


@dataclass(frozen=True)
class Contender:
    """A way to run a model."""

    name: str
    weights: str
    """Name of the files with its weights; contenders with the same name share a process."""
    rival: str = ""
    """The contender of llama.cpp with about as many bytes per weight."""
    implementation: str = "pymoe"
    """The implementation of experts in transformers; unused for llama.cpp."""
    packing: tuple[str, ...] = ()
    """Options of ``python -m pymoe.quantize`` that make the weights."""
    form: str = ""
    """The weights' format in llama.cpp."""
    mxfp: bool = False
    """True if it runs only models that are published in MXFP4."""
    compiled: bool = False
    """True if it decodes with a graph of torch.compile, using the weights of another contender. Prompts are computed
    without this graph, so no time is measured for them.
    """

    @property
    def exact(self) -> str:
        """Return the name of the logits that the contender's logits must equal up to rounding; empty for llama.cpp,
        which rounds weights by itself.
        """
        return "" if self.form else self.weights


def _llama(form: str, mxfp: bool = False) -> Contender:
    return Contender(f"{LLAMA} {form}", form, form=form, mxfp=mxfp)


def _pymoe(
    rival: str, bits: int, linear_bits: int | None = None, mxfp: bool = False, compiled: bool = False
) -> Contender:
    name = ("mxfp" if mxfp else f"int{bits}") + (f", dense {linear_bits}" if linear_bits else "")
    packing = ["--bits", str(bits), *(["--format", "mxfp"] if mxfp else [])]
    packing += ["--linear-bits", str(linear_bits)] if linear_bits else []
    weights = name.replace(", ", "-").replace(" ", "")
    title = f"pymoe {name}" + (", compiled" if compiled else "")
    return Contender(title, weights, rival, packing=tuple(packing), mxfp=mxfp, compiled=compiled)


CONTENDERS = (
    Contender("transformers eager", WHOLE, f"{LLAMA} BF16", implementation="eager"),
    Contender("transformers grouped_mm", WHOLE, f"{LLAMA} BF16", implementation="grouped_mm"),
    Contender("pymoe bf16", WHOLE, f"{LLAMA} BF16"),
    _llama("BF16"),
    _pymoe(f"{LLAMA} Q8_0", 8),
    _pymoe(f"{LLAMA} Q8_0", 8, 8),
    _llama("Q8_0"),
    _pymoe(f"{LLAMA} Q4_0", 4),
    _pymoe(f"{LLAMA} Q4_0", 4, 8),
    _pymoe(f"{LLAMA} Q4_0", 4, 4),
    _pymoe(f"{LLAMA} Q4_0", 4, 4, compiled=True),
    _llama("Q4_0"),
    _pymoe(f"{LLAMA} MXFP4", 4, 8, mxfp=True),
    _llama("MXFP4", mxfp=True),
)


def waves(needs: Sequence[tuple[str, str, float]], room: float) -> list[list[str]]:
    """Return names in groups; the members of a group fit into ``room`` together.

    Args:
        needs: name, class and need of each, sorted by class. A class stays together if it fits into the room, and a
            name that needs more than the room gets its own group.
        room: the maximum sum of the needs of a group.
    """
    units: list[list[tuple[str, float]]] = []
    for _, members in itertools.groupby(needs, key=lambda one: one[1]):
        unit = [(name, need) for name, _, need in members]
        units += [unit] if sum(need for _, need in unit) <= room else [[one] for one in unit]
    found: list[list[str]] = []
    left = 0.0
    for unit in units:
        need = sum(one for _, one in unit)
        if not found or need > left:
            found.append([])
            left = room
        found[-1] += [name for name, _ in unit]
        left -= need
    return found


def grouped(contenders: Sequence[Contender], key: Callable[[Contender], str]) -> dict[str, list[Contender]]:
    """Return the contenders by key, in their order."""
    found: dict[str, list[Contender]] = {}
    for one in contenders:
        found.setdefault(key(one), []).append(one)
    return found
