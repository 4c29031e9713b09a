"""Forward functions that run on pymoe's operators, for experts that do not use transformers' experts interface.

Each replaces the forward of the class under whose name it is in :data:`FORWARDS`, with the same arguments and results;
the module keeps its parameters and its router.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pymoe import ops
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import gated_activation, place
from pymoe.integrations.transformers.experts import as_operand, run_experts
from pymoe.nn.apply_experts import activate, apply_networks
from pymoe.nn.plain_calls import are_called_plainly, is_of_its_source
from pymoe.nn.quantized_experts import handlers


def llama4_moe(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``Llama4TextMoe``, whose own code computes every expert for every token.

    The score of a choice multiplies the expert's input, not its output. So the scores are applied before the experts,
    and every output has the weight 1.
    """
    x_TH = hidden_states.reshape(-1, self.hidden_dim)
    scores_TE, logits_TE = self.router(x_TH)
    # The router does not return its choice, so repeat it. Other experts have the score 0 and would add only zeros.
    index_TK = torch.topk(logits_TE, self.router.top_k, dim=1).indices
    scaled_TKH = x_TH[:, None] * scores_TE.gather(1, index_TK)[..., None]
    w_in, w_out, activation = self.experts.gate_up_proj, self.experts.down_proj, gated_activation(self.experts.act_fn)
    # Every choice is treated as a separate token with the weight 1.
    index_S1 = index_TK.reshape(-1, 1)
    ones_S1 = torch.ones_like(index_S1, dtype=torch.float32)
    rows_SH = run_experts(scaled_TKH.flatten(0, 1), index_S1, ones_S1, w_in, w_out, activation, transposed=True)
    return self.shared_expert(x_TH) + rows_SH.view(scaled_TKH.shape).sum(dim=1), logits_TE


def step3p7_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute ``Step3p7Experts``, which in some layers clamps both factors of the gated product."""
    plain = self.limit == float("inf") and not interface.has_replaced_gate(self)
    activation = gated_activation(self.act_fn) if plain else self._apply_gate
    return run_experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, activation)


def longcat_flash_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute ``LongcatFlashExperts``, where experts from ``num_routed_experts`` on return their input unchanged."""
    computed = self.num_routed_experts
    passed = torch.where(top_k_index < computed, 0, top_k_weights).sum(dim=1, keepdim=True)
    y = (hidden_states * passed).to(hidden_states.dtype)
    if computed == 0:
        return y
    w_in, activation = self.gate_up_proj[:computed], gated_activation(self.act_fn)
    return y + run_experts(
        hidden_states, top_k_index, top_k_weights, w_in, self.down_proj, activation, foreign_experts=True
    )


def dbrx_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute ``DbrxExperts``, which stores the matrices of all experts concatenated, with gate and up in separate
    weights.
    """
    mlp = self.mlp
    gate_EFH, up_EFH, down_EFH = (
        weight.view(self.num_experts, self.ffn_hidden_size, self.hidden_size) for weight in (mlp.w1, mlp.v1, mlp.w2)
    )
    x_TH = as_operand(hidden_states.reshape(-1, self.hidden_size), gate_EFH)

    def networks(rows_SH: Tensor, offsets: Tensor) -> Tensor:
        gate, up = (ops.grouped_linear(rows_SH, weight, offsets) for weight in (gate_EFH, up_EFH))
        inner = activate(torch.cat([gate, up], dim=1), gated_activation(mlp.activation_fn))
        return ops.grouped_linear(as_operand(inner, down_EFH), down_EFH.transpose(1, 2), offsets)

    y_TH = apply_networks(x_TH, top_k_index, top_k_weights, self.num_experts, networks)
    return y_TH.to(hidden_states.dtype).view(hidden_states.shape[0], -1, self.hidden_size)


def jetmoe_parallel_experts(self: Any, inputs: Tensor, expert_size: list[int]) -> Tensor:
    """Compute ``JetMoeParallelExperts``: a linear layer per expert, applied to ``expert_size[e]`` rows for expert e.

    JetMoe uses it for experts and for attention.
    """
    offsets = torch.tensor([0, *accumulate(expert_size)], dtype=torch.int32, device=inputs.device)
    return ops.grouped_linear(as_operand(inputs, self.weight), self.weight, offsets)


FORWARDS: dict[tuple[str, str], Callable[..., Any]] = {
    ("transformers.models.dbrx.modeling_dbrx", "DbrxExperts"): dbrx_experts,
    ("transformers.models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts"): jetmoe_parallel_experts,
    ("transformers.models.llama4.modeling_llama4", "Llama4TextMoe"): llama4_moe,
    ("transformers.models.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"): longcat_flash_experts,
    ("transformers.models.step3p7.modeling_step3p7", "Step3p7Experts"): step3p7_experts,
}
"""The forward on pymoe for each class of experts, by the module and name of the class."""

PARTS: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("transformers.models.dbrx.modeling_dbrx", "DbrxExperts"): {
        "mlp": ("transformers.models.dbrx.modeling_dbrx", "DbrxExpertGLU")
    },
    ("transformers.models.llama4.modeling_llama4", "Llama4TextMoe"): {
        "experts": ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts")
    },
    ("transformers.models.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"): {
        "identity_expert": ("torch.nn.modules.linear", "Identity")
    },
}
"""Submodules, by name, that a forward of :data:`FORWARDS` does not call, because it does their work itself, each with
the class that the forward expects."""

CALLED: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("transformers.models.llama4.modeling_llama4", "Llama4TextMoe"): {
        "router": ("transformers.models.llama4.modeling_llama4", "Llama4Router")
    },
}
"""Submodules that a forward calls, relying on details of their code (such as a router's rule of choice), in the form of
:data:`PARTS`."""


def may_do_work_of_parts(module: Any, cls: type) -> bool:
    """Return whether pymoe's forward for ``cls`` gives the same result as the original forward of ``module``.

    The result may differ if ``cls`` has a patched ``forward``. It may also differ if a submodule in :data:`PARTS`,
    which pymoe's forward bypasses, has hooks, another class or another ``forward``. The same is true of submodules in
    :data:`CALLED`: pymoe's forward calls them, but expects what the original class returns. These may have the hooks
    with which transformers records outputs, because those hooks change no results.
    """
    if not is_of_its_source(cls, "forward"):
        return False
    for known, harmless in ((PARTS, None), (CALLED, interface.records_outputs)):
        for name, expected in known.get(place(cls), {}).items():
            part = getattr(module, name)
            if place(type(part)) != expected or not are_called_plainly((part, type(part)), harmless=harmless):
                return False
    return True


REFUSED: dict[tuple[str, str], str] = {
    ("transformers.models.nllb_moe.modeling_nllb_moe", "NllbMoeExperts"): (
        "transformers computes other experts there than the router chooses"
    ),
    ("transformers.models.switch_transformers.modeling_switch_transformers", "SwitchTransformersExperts"): (
        "every expert is a module of its own, so that stacking the weights would copy them"
    ),
    ("transformers.models.doge.modeling_doge", "DogeCDMoE"): "its experts are rows of an embedding",
    ("transformers.models.vitpose_backbone.modeling_vitpose_backbone", "VitPoseNaiveMoe"): (
        "a whole image goes to one expert, a single linear layer"
    ),
}
"""Classes of experts that are not replaced, with the reason."""


def register() -> None:
    """Make :func:`pymoe.nn.quantize_experts` raise for experts outside of the interface, with an error that names them.

    Further calls change nothing.
    """
    if refuse_to_quantize not in handlers:
        handlers.append(refuse_to_quantize)


def refuse_to_quantize(module: nn.Module) -> None:
    """Raise ValueError if a module has experts outside of transformers' interface: their weights cannot be packed."""
    known = place(type(module))
    if known in FORWARDS or known in REFUSED:
        advice = "; enable(model) runs them with the weights that they have" if known in FORWARDS else ""
        raise ValueError(
            f"quantize_experts: model must have experts behind transformers' interface, got those of "
            f"{type(module).__name__}, which are outside of it{advice}"
        )
