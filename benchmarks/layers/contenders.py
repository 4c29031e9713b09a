"""Builds the contenders: transformers' implementations of experts, pymoe's, quantised ones and KTransformers'.

All share the block's weights, except quantised and repacked ones, which hold copies. A contender that is not installed,
needs too much memory or fails becomes an :class:`~benchmarks.peers.Absent` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.layers.blocks import Built, as_moe
from benchmarks.layers.exact import Choice
from benchmarks.layers.ktransformers import KtExperts
from benchmarks.peers import Absent, LeftOut, failure, free_gib
from pymoe import nn as pymoe_nn

TRANSFORMERS = ("transformers eager", "transformers grouped_mm", "transformers batched_mm")
PYMOE = ("pymoe in transformers", "pymoe.nn.MoE")
KT_KERNEL = "kt-kernel"
SHARE_OF_MEMORY = 1 / 3
"""The share of free memory that copies of weights may take."""
MOST_WRITTEN = 24e9
"""Maximum bytes that a training step of eager may write to gradients."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
QUANTISED_TOLERANCE = {8: 0.1, 4: 0.3}


@dataclass(frozen=True)
class Contender:
    """An implementation of the block."""

    name: str
    forward: Callable[[Tensor], Tensor]
    """Maps (T, H) to (T, H)."""
    layer: nn.Module
    """The module whose parameters get gradients in a training step."""
    choice: Choice
    """Returns the experts that this contender chooses."""
    tolerance: float
    """Relative error above which a result counts as wrong."""
    apart: bool = False
    """True if the contender keeps its own threads busy between calls; it is then timed after the others."""


@dataclass(frozen=True)
class Plan:
    """The case that every contender computes."""

    one: Built
    tokens: int
    train: bool
    processor_time: bool = False
    """True to count the processor time of all threads instead of wall time."""
    made: dict[str, Contender] = field(default_factory=dict)
    """Contenders that hold copies of the weights, cached for later calls with the same block."""


Maker = Callable[[], Contender]


def contenders(plan: Plan) -> Iterator[Contender | Absent]:
    """Yield all contenders, in the order of the table."""
    makers: dict[str, Maker] = {name: partial(of_transformers, plan, name) for name in TRANSFORMERS}
    makers[PYMOE[0]] = partial(in_transformers, plan)
    makers[PYMOE[1]] = partial(whole_layer, plan)
    if not plan.train:
        for bits in (8, 4):
            makers[f"pymoe int{bits}"] = partial(quantised, plan, bits)
        makers[KT_KERNEL] = partial(kt_kernel, plan)
    for name, make in makers.items():
        try:
            yield plan.made[name] if name in plan.made else make()
        except Exception as error:
            yield Absent(name, failure(error))


def of_transformers(plan: Plan, name: str) -> Contender:
    """Return a contender for one of transformers' own implementations."""
    one, block = plan.one, plan.one.block
    implementation = name.split()[-1]
    size = one.dtype.itemsize
    if implementation == "batched_mm":
        needed = plan.tokens * block.choices * block.per_expert * size * (2 if plan.train else 1) / 2**30
        if needed > SHARE_OF_MEMORY * free_gib(torch.device("cpu")):
            raise LeftOut(f"copies the weights of every slot, here {needed:.0f} GiB")
    if implementation == "eager" and plan.train:
        written = block.experts**2 * block.per_expert * size
        if written > MOST_WRITTEN:
            raise LeftOut(f"writes the gradient of all experts once for each of them, here {written / 1e9:.0f} GB")
    return Contender(name, one.under(implementation), one.module, one.choice, TOLERANCE[one.dtype])


def in_transformers(plan: Plan) -> Contender:
    """Return the block of transformers, with its own router and pymoe's experts."""
    importlib.import_module("pymoe.integrations.transformers")
    one = plan.one
    return Contender(PYMOE[0], one.under("pymoe"), one.module, one.choice, TOLERANCE[one.dtype])


def whole_layer(plan: Plan) -> Contender:
    """Return :class:`pymoe.nn.MoE`, with its own router, in place of the block."""
    layer = pymoe_layer(plan)
    return Contender(PYMOE[1], layer, layer, choice_of(layer), TOLERANCE[plan.one.dtype])


def quantised(plan: Plan, bits: int) -> Contender:
    """Return the layer with quantised experts or, if no layer is equivalent, the block with quantised experts."""
    name, tolerance = f"pymoe int{bits}", QUANTISED_TOLERANCE[bits]
    layer: nn.Module
    if plan.one.block.options is None:
        importlib.import_module("pymoe.integrations.transformers")
        other = plan.one.sharing()
        forward, layer, choice = other.under("pymoe"), other.module, plan.one.choice
    else:
        layer = pymoe_layer(plan)
        forward, choice = layer, choice_of(layer)
    pymoe_nn.quantize_experts(layer, bits=bits)
    plan.made[name] = Contender(name, forward, layer, choice, tolerance)
    return plan.made[name]


def kt_kernel(plan: Plan) -> Contender:
    """Return the block of transformers, with its own router and KTransformers' experts."""
    if plan.processor_time:
        raise LeftOut("its threads wait by computing, which processor time would count")
    one = plan.one
    experts = KtExperts(one)

    def forward(x_TH: Tensor) -> Tensor:
        output = experts(x_TH, *one.choice(x_TH))
        return output + one.module.shared_experts(x_TH) if one.block.shared else output

    plan.made[KT_KERNEL] = Contender(KT_KERNEL, forward, one.module, one.choice, TOLERANCE[one.dtype], apart=True)
    return plan.made[KT_KERNEL]


def pymoe_layer(plan: Plan) -> pymoe_nn.MoE:
    """Return the equivalent layer, which shares the block's parameters, in the mode to measure."""
    return as_moe(plan.one).train(plan.train)


def choice_of(layer: pymoe_nn.MoE) -> Choice:
    """Return a function that returns the experts and weights that a layer of pymoe chooses."""

    def choice(x_TH: Tensor) -> tuple[Tensor, Tensor]:
        gate, _ = layer.router(x_TH)
        return gate.experts, gate.weights

    return choice
