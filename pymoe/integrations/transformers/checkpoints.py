"""Converts sparse blocks of transformers to :class:`pymoe.nn.MoE` and back; weights keep their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pymoe._common import checks
from pymoe._common.types import ActivationKind
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import dense_activation, fused_activation, gated_activation
from pymoe.integrations.transformers.blocks import DIFFERENT, PLANS, Plan
from pymoe.nn import MoE
from pymoe.nn.plain_calls import attached_to


def from_transformers(block: nn.Module, *, bias_update_rate: float = 0.001) -> MoE:
    """Return a :class:`pymoe.nn.MoE` that computes what a sparse block of transformers computes.

    This works for blocks of Mixtral, OLMoE, Qwen2-MoE to Qwen3.5-MoE, GPT-OSS, Llama 4, Granite, Jamba, DeepSeek-V2 and
    -V3, GLM-4, Ernie 4.5, Nemotron-H and others with routing that the layer supports: a softmax or a sigmoid over all
    experts, groups, biases of the logits and of the choice, a scale of the weights, weights applied before or after the
    experts, and shared experts with or without a gate. The weights are copied and keep their bits, dtypes, devices and
    ``requires_grad``. In float32, outputs agree within rounding. In bfloat16, some of transformers' routers round their
    logits, while ``MoE`` computes them in float32, so some tokens may choose another expert.

    The layer returns only its output, in the shape of the tokens. Blocks of GPT-OSS and Llama 4 return a pair, so the
    layer cannot replace them inside the model.

    Args:
        block: the sparse feed-forward module of a model's layer, such as ``model.model.layers[0].mlp``.
        bias_update_rate: the layer's ``bias_update_rate`` if the block has a bias for the choice, otherwise unused. It
            must be greater than 0, and has no effect until :func:`pymoe.nn.update_expert_biases` is called.

    Returns:
        A layer in the mode (training or evaluation) of ``block``, without auxiliary losses.

    Raises:
        TypeError: the weights of its experts are quantised.
        ValueError: the block's class or one of its options is not supported; ``bias_update_rate`` is not greater than 0
            and the block has a bias for the choice; or something would be lost: a module in the block has hooks, a
            patched ``forward``, a class from neither transformers nor torch, an adapter or a parametrization.

    Example:
        >>> from pymoe.integrations.transformers import from_transformers
        >>> from transformers import OlmoeConfig, OlmoeForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, eos_token_id=0)
        >>> model = OlmoeForCausalLM(OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
        >>> moe = from_transformers(model.model.layers[0].mlp)
        >>> x = torch.randn(1, 3, 32)
        >>> torch.allclose(moe(x), model.model.layers[0].mlp(x), atol=1e-6)
        True
    """
    name = "from_transformers"
    plan = _plan(name, type(block))
    _check_plain(name, block, _OF_BLOCKS)
    for weight in _weights(block, plan):
        checks.floating(f"{name} ({type(block).__name__})", f"experts.{weight}", getattr(block.experts, weight))
    parts = _parts(block, plan)
    keys = [key for one in parts for key in one.block_keys]
    _check_weights(name, block, keys)
    if lost := [key for key in block.state_dict() if key not in keys]:
        raise ValueError(f"{name}: expected a {type(block).__name__} with known weights alone, got {lost[0]!r}")
    options = _options(name, block, plan)
    if plan.bias is not None and not bias_update_rate > 0:
        raise ValueError(
            f"{name}: bias_update_rate must be greater than 0 for a block whose choice has a bias, "
            f"got {bias_update_rate}"
        )
    moe = MoE(**options, bias_update_rate=bias_update_rate if plan.bias else 0.0, device="meta")
    state, shapes = block.state_dict(), _shapes(moe)
    moe.load_state_dict({one.layer_key: one.joined(state, shapes) for one in parts}, assign=True)
    for one in parts:
        _set_requires_grad(moe, [one.layer_key], _requires_grad(block, one.block_keys))
    return moe.train(block.training)


def to_transformers(moe: MoE, block_class: Callable[..., nn.Module], config: Any) -> Any:
    """Return a sparse block of transformers that computes what a :class:`pymoe.nn.MoE` computes.

    This is the inverse of :func:`from_transformers`: the weights are copied and keep their bits. If the class has a
    bias for the choice and the layer has none, the bias becomes zero. A block has no auxiliary losses and no update
    rate of the bias: they are dropped.

    Args:
        moe: the layer, with the options of such a block and without a capacity.
        block_class: a class of blocks that :func:`from_transformers` takes.
        config: the configuration of the model that the block is for.

    Returns:
        An instance of ``block_class`` in the mode (training or evaluation) of ``moe``.

    Raises:
        TypeError: ``moe`` is not a :class:`pymoe.nn.MoE`, or its experts are quantised.
        ValueError: the class is not supported, the configuration describes a layer other than ``moe``, or something
            would be lost, as for :func:`from_transformers`.

    Example:
        >>> from pymoe.integrations.transformers import to_transformers
        >>> from transformers import OlmoeConfig
        >>> from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
        >>> config = OlmoeConfig(hidden_size=32, intermediate_size=64, num_experts=4, num_experts_per_tok=2)
        >>> moe = pymoe.nn.MoE(32, 64, num_experts=4, top_k=2, renormalize=False)
        >>> block = to_transformers(moe, OlmoeSparseMoeBlock, config)
        >>> x = torch.randn(1, 3, 32)
        >>> torch.allclose(block(x), moe(x), atol=1e-6)
        True
    """
    name = "to_transformers"
    if not isinstance(moe, MoE):
        raise TypeError(f"{name}: moe must be a pymoe.nn.MoE, got {type(moe).__name__}")
    _check_plain(name, moe, _OF_LAYERS)
    for weight in ("w_in", "w_out"):
        checks.floating(f"{name} (MoE)", f"experts.{weight}", getattr(moe.experts, weight))
    plan = _plan(name, block_class)
    with torch.device("meta"):
        block = block_class(config)
    for option, expected in {**_options(name, block, plan), "capacity_factor": None}.items():
        if (seen := _option(moe, option)) != expected:
            raise ValueError(
                f"{name}: expected a layer with {option}={expected!r}, as {block_class.__name__} has it, got {seen!r}"
            )
    if plan.bias is None and moe.router.expert_bias is not None:
        raise ValueError(f"{name}: expected a layer without expert bias, which {block_class.__name__} lacks")
    parts = _parts(block, plan)
    _check_weights(name, moe, [one.layer_key for one in parts if one.layer_key != "router.expert_bias"])
    state, shapes = moe.state_dict(), _shapes(block)
    if plan.bias is not None:
        state.setdefault("router.expert_bias", torch.zeros(moe.num_experts, device=moe.router.weight.device))
    block.load_state_dict({key: tensor for one in parts for key, tensor in one.split(state, shapes)}, assign=True)
    for one in parts:
        _set_requires_grad(block, one.block_keys, _requires_grad(moe, [one.layer_key]))
    return block.train(moe.training)


class _Part(NamedTuple):
    """A tensor of the layer that is the concatenation of tensors of the block."""

    layer_key: str
    block_keys: tuple[str, ...]
    transposed: bool = False

    def joined(self, state: dict[str, Tensor], shapes: dict[str, torch.Size]) -> Tensor:
        """Return the tensor of the layer, made from ``state``, the state of the block; ``shapes`` are the layer's
        shapes, by key.
        """
        tensor = torch.cat([state[key] for key in self.block_keys])
        return (tensor.transpose(1, 2).contiguous() if self.transposed else tensor).reshape(shapes[self.layer_key])

    def split(self, state: dict[str, Tensor], shapes: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
        """Yield the keys and tensors of the block, made from ``state``, the state of the layer.

        ``shapes`` are the block's shapes, by key.
        """
        tensor = state[self.layer_key]
        pieces = (tensor.transpose(1, 2) if self.transposed else tensor).chunk(len(self.block_keys))
        for key, piece in zip(self.block_keys, pieces, strict=True):
            yield key, piece.clone(memory_format=torch.contiguous_format).reshape(shapes[key])


def _flags(block: Any, plan: Plan) -> interface.Flags:
    return plan.outside or interface.flags(block.experts)


def _weights(block: Any, plan: Plan) -> tuple[str, str]:
    """Return the names of the two stacked weights of the block's experts."""
    return ("gate_up_proj" if _flags(block, plan).gated else "up_proj"), "down_proj"


def _parts(block: Any, plan: Plan) -> list[_Part]:
    flags = _flags(block, plan)
    w_in, w_out = (f"experts.{name}" for name in _weights(block, plan))
    parts = [
        _Part("router.weight", (f"{plan.router}.{plan.weight}",)),
        _Part("experts.w_in", (w_in,), flags.transposed),
        _Part("experts.w_out", (w_out,), flags.transposed),
    ]
    if flags.biased:
        parts += [_Part("experts.b_in", (f"{w_in}_bias",)), _Part("experts.b_out", (f"{w_out}_bias",))]
    if plan.router_bias is not None:
        parts.append(_Part("router.bias", (plan.router_bias,)))
    if plan.bias is not None:
        parts.append(_Part("router.expert_bias", (plan.bias,)))
    if (shared := _shared(block, plan)) is not None:
        names = [name for name in ("gate_up_proj", "gate_proj", "up_proj") if hasattr(shared, name)]
        parts.append(_Part("shared.w_in", tuple(f"{plan.shared}.{name}.weight" for name in names)))
        parts.append(_Part("shared.w_out", (f"{plan.shared}.down_proj.weight",)))
        if plan.shared_gate is not None:
            parts.append(_Part("shared.w_gate", (plan.shared_gate,)))
    return parts


_OF_LAYERS = ("pymoe.nn.",)
_OF_BLOCKS = ("transformers.", "torch.nn.modules.", *_OF_LAYERS)
"""Prefixes of the Python modules whose classes may occur in a layer or block."""


def _check_plain(name: str, module: nn.Module, known: tuple[str, ...]) -> None:
    """Raise ValueError if ``module`` or a submodule has hooks, a patched forward, or a class from a Python
    module whose name does not begin with one of ``known``.

    A conversion copies only weights and options, so these would be lost. The hooks with which transformers records
    outputs are allowed.
    """
    for path, part in module.named_modules():
        lost = attached_to(part, interface.records_outputs)
        if not lost and not type(part).__module__.startswith(known):
            lost = "a class of its own"
        if lost:
            raise ValueError(
                f"{name}: expected a {type(module).__name__} that nothing was attached to, got "
                f"{repr(path) if path else 'it'} ({type(part).__name__}) with {lost}, which would be lost; remove it "
                f"first (an adapter of PEFT by merge_and_unload())"
            )


def _check_weights(name: str, module: nn.Module, keys: list[str]) -> None:
    """Raise ValueError unless the state dict of a module has these keys."""
    state = module.state_dict()
    if missing := [key for key in keys if key not in state]:
        raise ValueError(
            f"{name}: expected a {type(module).__name__} with weights of its own, got none called {missing[0]!r}, as "
            f"a parametrization leaves it; remove that first"
        )


def _plan(name: str, block_class: Any) -> Plan:
    kind = block_class.__name__
    if kind in PLANS and not block_class.__module__.startswith(_OF_BLOCKS):
        raise ValueError(f"{name}: expected the {kind} of transformers, got that of {block_class.__module__}")
    if kind not in PLANS:
        why = f": {DIFFERENT[kind]}" if kind in DIFFERENT else f"; known are {', '.join(PLANS)}"
        raise ValueError(f"{name}: expected a block that pymoe.nn.MoE can be, got {kind}{why}")
    return PLANS[kind]


def _options(name: str, block: Any, plan: Plan) -> dict[str, Any]:
    """Return the arguments of :class:`MoE` that describe the block, except ``bias_update_rate``.

    Raises:
        ValueError: no arguments describe the block.
    """
    kind, flags = type(block).__name__, _flags(block, plan)
    assumed = plan.only if _shared(block, plan) is None else plan.only | plan.only_shared
    for attribute, expected in assumed.items():
        if (seen := attrgetter(attribute)(block)) != expected:
            raise ValueError(f"{name}: expected a {kind} with {attribute}={expected!r}, got {seen!r}")
    activation = gated_activation(block.experts.act_fn) if plan.outside else fused_activation(block.experts)
    if activation is None or callable(activation):
        seen = type(getattr(block.experts, "act_fn", None)).__name__
        raise ValueError(f"{name}: expected a {kind} whose experts compute one of pymoe's activations, got {seen}")
    router = attrgetter(plan.router)(block)
    down = block.experts.down_proj
    num_experts, hidden_size, ffn_size = down.transpose(1, 2).shape if flags.transposed else down.shape
    routed = attrgetter(plan.weight)(router).shape[0]
    if routed != num_experts:
        raise ValueError(
            f"{name}: expected a {kind} with all experts that its router knows ({routed}), got {num_experts}, as "
            "expert parallelism leaves on a rank"
        )
    return {
        "hidden_size": hidden_size,
        "ffn_size": ffn_size,
        "num_experts": num_experts,
        "top_k": router.top_k,
        "activation": activation,
        "bias": flags.biased,
        "score": plan.score(block) if callable(plan.score) else plan.score,
        "renormalize": bool(_value(block, plan.renormalize)),
        "scale": 1.0 if plan.scale is None else float(_value(block, plan.scale)),
        "router_bias": plan.router_bias is not None,
        "score_before_experts": plan.score_before_experts,
        "num_groups": router.num_group if plan.groups else None,
        "topk_groups": router.topk_group if plan.groups else None,
        "num_shared_experts": _num_shared_experts(name, block, plan, activation, ffn_size),
        "shared_gate": plan.shared_gate is not None,
    }


def _value(block: Any, where: Any) -> Any:
    """Return the value that ``block`` has for a field of its plan.

    Args:
        block: the block.
        where: the field: the path of an attribute of the block, a function of the block, or the value itself.
    """
    if isinstance(where, str):
        return attrgetter(where)(block)
    return where(block) if callable(where) else where


def _shared(block: Any, plan: Plan) -> Any:
    return None if plan.shared is None else getattr(block, plan.shared, None)


def _num_shared_experts(name: str, block: Any, plan: Plan, activation: ActivationKind, ffn_size: int) -> int:
    shared, kind = _shared(block, plan), type(block).__name__
    if shared is None:
        return 0
    biased = any(isinstance(layer, nn.Linear) and layer.bias is not None for layer in shared.children())
    if dense_activation(shared) != activation or biased:
        raise ValueError(
            f"{name}: expected a {kind} whose shared experts compute {activation!r}, as the others do, without biases, "
            f"got {shared}"
        )
    number, rest = divmod(shared.down_proj.weight.shape[1], ffn_size)
    if rest:
        raise ValueError(
            f"{name}: expected a {kind} whose shared experts have a multiple of the {ffn_size} inner features of an "
            f"expert, got {shared.down_proj.weight.shape[1]}"
        )
    return number


def _option(moe: MoE, option: str) -> Any:
    """Return the value of the argument ``option`` with which ``moe`` was constructed."""
    if option == "bias":
        return moe.experts.b_in is not None
    if option == "router_bias":
        return moe.router.bias is not None
    if option == "num_shared_experts":
        return 0 if moe.shared is None else moe.shared.ffn_size // moe.experts.ffn_size
    if option == "shared_gate":
        return moe.shared is not None and moe.shared.gate
    part = next(part for part in (moe, moe.router, moe.experts) if hasattr(part, option))
    return getattr(part, option)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in module.state_dict().items()}


def _requires_grad(module: nn.Module, keys: Iterable[str]) -> bool:
    """Return whether one of the parameters ``keys`` requires a gradient. Keys of buffers are skipped."""
    parameters = dict(module.named_parameters())
    return any(parameters[key].requires_grad for key in keys if key in parameters)


def _set_requires_grad(module: nn.Module, keys: Iterable[str], value: bool) -> None:
    parameters = dict(module.named_parameters())
    for key in keys:
        if key in parameters:
            parameters[key].requires_grad_(value)
