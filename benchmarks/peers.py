"""Define the layers that are compared, all with the same weights, input and gradient.

Each layer computes a swiglu mixture of experts: softmax over all logits, the K best kept, and their weights normalised,
as Qwen3-MoE, Mixtral and OLMoE (with ``norm_topk_prob``) do. A peer that is not installed or cannot run becomes an
:class:`Absent` with the reason, which is printed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch
from torch import Tensor, nn

from pymoe.bench.environment import memory_gib
from pymoe.bench.floor import Floor
from pymoe.bench.layer import Shape, training_step, with_torch_alone
from pymoe.bench.report import in_a_line
from pymoe.nn import MoE

Tensors = tuple[Tensor, ...]
PARTS = ("output", "gradient of x", "of the router", "of w_in", "of w_out")
"""Names of the tensors that a contender's ``parts`` returns, in pymoe's layout."""


@dataclass(frozen=True)
class Contender:
    """A layer that can run."""

    name: str
    version: str
    step: Callable[[], Tensors]
    """Runs forward and backward."""
    parts: Callable[[Tensors], Tensors] | None
    """Puts the result of ``step`` into the order of :data:`PARTS`; None if the contender computes something else."""
    computes_in: torch.dtype
    """The narrowest dtype in which the contender multiplies, which limits its accuracy."""
    note: str = ""


@dataclass(frozen=True)
class Absent:
    """A layer that cannot run here, with the reason."""

    name: str
    reason: str


class LeftOut(Exception):
    """Raised when a contender is left out on purpose. This is no failure, so the message is printed without the
    type.
    """


@dataclass(frozen=True)
class Task:
    """The shape, dtype, weights and inputs that every contender is given."""

    shape: Shape
    dtype: torch.dtype
    layer: MoE
    x: Tensor
    grad: Tensor
    floor: Floor


def contenders(task: Task) -> Iterator[Contender | Absent]:
    """Yield all contenders, in the order of the table."""
    yield floor(task)
    yield pymoe(task, "native")
    yield pymoe(task, "reference")
    yield torch_alone(task)
    yield dense_ffn(task)
    for implementation in ("eager", "grouped_mm", "batched_mm", "sonicmoe"):
        yield made(f"transformers {implementation}", partial(transformers, task, implementation))
    yield made("torchtitan", partial(torchtitan, task))


def made(name: str, make: Callable[[], Contender | Absent]) -> Contender | Absent:
    """Return a peer, or the reason for its absence: another version of the peer may have another interface."""
    try:
        return make()
    except Exception as error:
        return Absent(name, failure(error))


def failure(error: Exception) -> str:
    """Return an exception in one line."""
    if isinstance(error, LeftOut):
        return str(error)
    return in_a_line(error)


def floor(task: Task) -> Contender:
    """Return a contender that runs the same operations in dense ``torch.mm``, into memory allocated beforehand."""
    kind = task.floor.kind.removeprefix("mm ")
    note = "" if kind == name_of(task.dtype) else f"in {kind}, which is faster here than {name_of(task.dtype)}"
    return Contender("torch.mm, dense", torch.__version__, task.floor.run, None, task.dtype, note)


def pymoe(task: Task, backend: str) -> Contender:
    """Return pymoe's layer."""
    layer = task.layer
    if backend != layer.backend:
        shape = task.shape
        sizes = (shape.hidden, shape.ffn, shape.experts, shape.choices)
        layer = MoE(*sizes, backend=backend, device=task.x.device, dtype=task.dtype)
        layer.router.weight, layer.experts.w_in, layer.experts.w_out = parameters_of(task.layer)
    step = training_step(layer, task.x, task.grad)
    return Contender(f"pymoe {backend}", metadata_version("pymoe"), step, in_order(layer, task.layer), task.dtype)


def torch_alone(task: Task) -> Contender:
    """Return the layer as a user would write it in plain torch: sort, index, ``grouped_mm``, ``index_add``."""
    step = training_step(task.layer, task.x, task.grad, with_torch_alone(task.layer))
    return Contender("torch alone", torch.__version__, step, in_order(task.layer, task.layer), task.dtype)


def free_gib(device: torch.device) -> float:
    """Return the available memory in GiB."""
    return (
        torch.cuda.mem_get_info(device)[0] / 2**30 if device.type == "cuda" else memory_gib("MemAvailable") or math.inf
    )


def dense_ffn(task: Task) -> Contender:
    """Return a dense swiglu network with as many operations per token: K times the width, every weight used by
    every token.
    """

    class SwiGLU(nn.Module):
        def forward(self, inner: Tensor) -> Tensor:
            gate, up = inner.chunk(2, dim=-1)
            return nn.functional.silu(gate) * up

    shape = task.shape
    width = shape.choices * shape.ffn
    layer = nn.Sequential(
        nn.Linear(shape.hidden, 2 * width, bias=False), SwiGLU(), nn.Linear(width, shape.hidden, bias=False)
    ).to(task.x.device, task.dtype)
    step = training_step(layer, task.x, task.grad)
    note = f"F{width}, fresh results, autograd; fewer weights"
    return Contender("dense nn.Sequential", torch.__version__, step, None, task.dtype, note)


def transformers(task: Task, implementation: str) -> Contender | Absent:
    """Return the Qwen3-MoE block of transformers with one of its expert implementations."""
    name = f"transformers {implementation}"
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError as error:
        return Absent(name, f"not installed ({error}): pip install -e '.[peers]'")
    shape = task.shape
    if implementation == "batched_mm":
        # This implementation copies the weights of every slot, and keeps the copies and their gradients.
        needed = 2 * shape.slots * 3 * shape.ffn * shape.hidden * task.x.element_size() / 2**30
        if needed > free_gib(task.x.device) / 3:
            return Absent(name, f"copies the weights for every slot, here about {needed:.0f} GiB")
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.experts,
        num_experts_per_tok=shape.choices,
        norm_topk_prob=True,
        hidden_act="silu",
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj = parameters_of(task.layer)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x_TH: Tensor) -> Tensor:
            return self.block(x_TH[None])[0]

    layer = Flat()
    step = training_step(layer, task.x, task.grad)
    return Contender(name, metadata_version("transformers"), step, in_order(layer, task.layer), task.dtype)


def torchtitan(task: Task) -> Contender | Absent:
    """Return the MoE of torchtitan, whose experts multiply in bf16 whatever the dtype of their inputs."""
    name = "torchtitan"
    try:
        from torchtitan.models.common.linear import Linear
        from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
        from torchtitan.models.common.moe import MoE as TitanMoE
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
    except ImportError as error:
        return Absent(name, f"cannot be imported ({error}); see benchmarks/README.md")
    shape = task.shape
    config = TitanMoE.Config(
        num_experts=shape.experts,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=shape.hidden, hidden_dim=shape.ffn, num_experts=shape.experts),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=shape.experts, top_k=shape.choices),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=shape.experts,
            gate=Linear.Config(in_features=shape.hidden, out_features=shape.experts),
            top_k=shape.choices,
            score_func="softmax",
            route_norm=True,
        ),
        load_balance_coeff=None,
    )
    with torch.device("meta"):
        block = config.build()
    block.tokens_per_expert_E = torch.zeros(shape.experts, device=task.x.device)
    experts = block.routed_experts.inner_experts
    router, w_in, w_out = parameters_of(task.layer)
    gate, up = (nn.Parameter(half.contiguous()) for half in w_in.detach().chunk(2, dim=1))
    block.router.gate.weight, experts.w1_EFD, experts.w3_EFD, experts.w2_EDF = router, gate, up, w_out

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x_TH: Tensor) -> Tensor:
            return self.block(x_TH[None])[0]

    layer = Flat()
    names = {id(parameter): i for i, parameter in enumerate(layer.parameters(), 2)}

    def parts(results: Tensors) -> Tensors:
        found = {key: results[names[id(value)]] for key, value in (("r", router), ("g", gate), ("u", up), ("o", w_out))}
        return (*results[:2], found["r"], torch.cat([found["g"], found["u"]], dim=1), found["o"])

    step = training_step(layer, task.x, task.grad)

    def quiet_step() -> Tensors:
        with warnings.catch_warnings():  # torchtitan asks for fp32 autocast, which the CPU lacks
            warnings.simplefilter("ignore", UserWarning)
            return step()

    return Contender(
        name, metadata_version("torchtitan"), quiet_step, parts, torch.bfloat16, "experts always multiply in bf16"
    )


def parameters_of(layer: MoE) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """Return router (E, H), w_in (E, 2F, H) and w_out (E, H, F); the peers share these parameters."""
    return layer.router.weight, layer.experts.w_in, layer.experts.w_out


def in_order(layer: nn.Module, owner: MoE) -> Callable[[Tensors], Tensors]:
    """Return a function that puts a step's results into the order of :data:`PARTS`; ``owner`` holds the parameters."""
    position = {id(parameter): i for i, parameter in enumerate(layer.parameters(), 2)}
    order = [position[id(parameter)] for parameter in parameters_of(owner)]
    return lambda results: (results[0], results[1], *(results[i] for i in order))


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def metadata_version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source tree"
