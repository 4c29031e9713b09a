"""Functions that the ranks run for test_transformers.py: experts of transformers on ranks and in one process."""

import copy
import functools
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ep_cases import in_order, shuffled
from failures import WRONG, told
from rank_setup import full, groups, mesh_of, same_bits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "transformers"))

from experts_classes import EXPERTS, experts_classes, hidden_size
from tiny_models import build

from pymoe import ep
from pymoe.integrations.transformers import add_expert_biases  # importing it registers the name "pymoe"
from pymoe.nn import quantize_experts

TOKENS = [13, 5, 0, 9]
CHOICES = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def built(name, dtype="float32"):
    """Return an experts module of a class, the same on every rank, that runs on pymoe."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        one = next(one for one in experts_classes() if one.name == name)
        experts = one.build().to(DTYPES[dtype])
    finally:
        torch.set_default_dtype(torch.float64)
    experts.config._experts_implementation = "pymoe"
    return experts


def inputs(experts, ranks):
    """Return, for every rank, hidden states, choices, weights of the choices, and output gradients."""
    generator = torch.Generator().manual_seed(1)
    dtype = experts.down_proj.dtype

    def drawn(tokens, *size):
        return torch.randn(tokens, *size, generator=generator, dtype=torch.float32)

    hidden, number = hidden_size(experts), experts.down_proj.shape[0]
    return [
        (
            drawn(tokens, hidden).to(dtype),
            drawn(tokens, number).topk(min(CHOICES, number)).indices,
            drawn(tokens, min(CHOICES, number)).sigmoid(),
            drawn(tokens, hidden).to(dtype),
        )
        for tokens in TOKENS[:ranks]
    ]


def results(experts, x, index, weights, directions):
    """Return the output and all gradients, by name."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts(x, index, weights)
    y.backward(directions)
    found = {"y": y.detach(), "dx": x.grad, "dweights": weights.grad}
    return found | {name: full(parameter.grad).clone() for name, parameter in experts.named_parameters()}


def one(rank, world, name, over, dtype="float32", **way):
    """Return what differs on this rank from one process, and how far; None if the rank is not in the group."""
    group = groups()[over]
    if rank >= over:
        return None
    whole = built(name, dtype)
    spread = ep.shard(torch.nn.ModuleDict({"experts": copy.deepcopy(whole)}), group, **way)["experts"]
    parts = inputs(whole, over)
    expected = results(whole, *map(torch.cat, zip(*parts, strict=True)))
    found = results(spread, *parts[rank])
    for own in ("y", "dx", "dweights"):
        expected[own] = expected[own].split(TOKENS[:over])[rank]
    return {
        name: (found[name].double() - expected[name].double()).abs().max().item()
        / expected[name].double().abs().max().item()
        for name in expected
        if not same_bits(found[name], expected[name])
    }


def quantised(rank, world, name, over, bits, format, dtype="float32", **way):
    """Return what differs from one process, with quantised experts, and the number of this rank's experts."""
    group = groups()[over]
    if rank >= over:
        return None
    whole = torch.nn.ModuleDict({"experts": built(name, dtype)}).eval()
    parts = inputs(whole["experts"], over)
    quantize_experts(whole, bits, format)
    spread = ep.shard(copy.deepcopy(whole), group, **way)["experts"]
    whole = whole["experts"]
    expected = results(whole, *map(torch.cat, zip(*parts, strict=True)))
    found = results(spread, *parts[rank])
    for own in ("y", "dx", "dweights"):
        expected[own] = expected[own].split(TOKENS[:over])[rank]
    number = len(spread.sharding.own_experts)
    assert spread.down_proj.packed.to_local().shape[0] == number
    state = {key: full(value) for key, value in spread.state_dict().items()}
    return differing(found, expected) + differing(state, whole.state_dict())


def moved(rank, world, name, over):
    """Return what differs from one process after experts have moved to other ranks; None outside of the group."""
    group = groups()[over]
    if rank >= over:
        return None
    whole = built(name)
    model = ep.shard(torch.nn.ModuleDict({"experts": copy.deepcopy(whole)}), group)
    ep.redistribute(model, shuffled(EXPERTS, over))
    spread = model["experts"]
    assert spread.sharding.order is not None
    parts = inputs(whole, over)
    expected, found = results(whole, *map(torch.cat, zip(*parts, strict=True))), results(spread, *parts[rank])
    for own in ("y", "dx", "dweights"):
        expected[own] = expected[own].split(TOKENS[:over])[rank]
    found |= {own: in_order(spread, found[own]) for own, _ in spread.named_parameters()}
    state = {own: full(value) for own, value in spread.state_dict().items()}
    return differing(found, expected) + differing(state, dict(whole.named_parameters()))


def differing(found, expected):
    """Return the names of tensors that differ."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not same_bits(found[name], expected[name])]


def few_experts(rank, world):
    """Return what differs from one process on four ranks, of which two have no experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=2, num_experts_per_tok=2)
    whole = MixtralExperts(config).float()
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    config._experts_implementation = "pymoe"
    spread = ep.shard(torch.nn.ModuleDict({"experts": copy.deepcopy(whole)}), dist.group.WORLD)["experts"]
    parts = inputs(whole, world)
    expected, found = results(whole, *map(torch.cat, zip(*parts, strict=True))), results(spread, *parts[rank])
    for own in ("y", "dx", "dweights"):
        expected[own] = expected[own].split(TOKENS)[rank]
    return differing(found, expected)


def used(rank, world, how):
    """Return what differs from a plain call of a module that is spread over four ranks."""
    spread = ep.shard(torch.nn.ModuleDict({"experts": built("GptOssExperts")}), dist.group.WORLD)["experts"]
    part = inputs(spread, world)[rank]
    expected = results(spread, *part)
    spread.zero_grad()
    called = spread
    if how == "copied":
        called = copy.deepcopy(spread)
        with torch.no_grad():
            for parameter in spread.parameters():
                parameter.zero_()
    elif how == "by keyword":
        names = "hidden_states", "top_k_index", "top_k_weights"
        found = results(Called(spread, lambda *given: spread(**dict(zip(names, given, strict=True)))), *part)
        return differing(found, expected)
    elif how == "checkpointed":
        called = Called(spread, functools.partial(checkpoint, spread, use_reentrant=False))
    elif how == "compiled":
        called = Called(spread, torch.compile(lambda *given: spread(*given) + 0, backend="eager"))
    elif how == "hooked":
        seen = []
        spread.register_forward_hook(lambda module, given, output: seen.append((given[0], output)))
        spread.register_full_backward_hook(lambda module, inner, outer: seen.append((inner[0], outer[0])))
    found = results(called, *part)
    if how == "hooked":
        assert [one.shape for pair in seen for one in pair] == [part[0].shape] * 4
    return differing(found, expected)


def shared(rank, world):
    """Return what differs from one process if two modules share a parameter, and whether they still share it."""
    whole = torch.nn.ModuleDict({name: built("MixtralExperts") for name in ("first", "second")})
    whole["second"].down_proj = whole["first"].down_proj
    spread = ep.shard(copy.deepcopy(whole), dist.group.WORLD)
    parts = inputs(whole["first"], world)
    expected, found = [
        [results(one, *given) for one in model.values()]
        for model, given in ((whole, map(torch.cat, zip(*parts, strict=True))), (spread, parts[rank]))
        for given in [list(given)]
    ]
    names = "gate_up_proj", "down_proj"
    differ = [name for a, b in zip(found, expected, strict=True) for name in names if not same_bits(a[name], b[name])]
    return differ, spread["second"].down_proj is spread["first"].down_proj


class Called(torch.nn.Module):
    """A module that is called by a function, with the names of its parameters unchanged."""

    def __init__(self, module, function):
        super().__init__()
        self._parameters = module._parameters
        self._function = function

    def forward(self, *given):
        return self._function(*given)


def pickled(rank, world):
    """Return whether a module that is spread over ranks comes back from a pickle as an object of a derived class."""
    spread = ep.shard(torch.nn.ModuleDict({"experts": built("MixtralExperts")}), dist.group.WORLD)["experts"]
    made, state = spread.__reduce_ex__(2)[:2], spread.__dict__
    before = type(built("MixtralExperts"))
    again = pickle.loads(pickle.dumps(made[0]))(*made[1])
    return type(again) is type(spread) and isinstance(spread, before) and "sharding" in state


def autocast(rank, world, name):
    """Return what differs from one process under autocast."""
    whole = built(name)
    spread = ep.shard(torch.nn.ModuleDict({"experts": copy.deepcopy(whole)}), dist.group.WORLD)["experts"]
    parts = inputs(whole, world)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = spread(*parts[rank][:3]), whole(*list(map(torch.cat, zip(*parts, strict=True)))[:3])
    assert y.dtype == torch.float32
    return same_bits(y, expected.split(TOKENS)[rank])


# Whole models.


def tiny(name, dtype=torch.float64):
    """Return a tiny model, the same on every rank, that runs on pymoe."""
    torch.set_default_dtype(torch.float32)
    try:
        model = build(name)
    finally:
        torch.set_default_dtype(torch.float64)
    model.set_experts_implementation("pymoe")
    return model.to(dtype).train()


def text(world, steps=1):
    """Return the tokens of every rank in every step."""
    return torch.randint(3, 100, (steps, world, 2, 12), generator=torch.Generator().manual_seed(5))


def loss_of(model, tokens):
    return model(input_ids=tokens).logits.square().mean()


def backward_of_both(whole, parallel, tokens, rank, world):
    """Run the backward passes of one process and of this rank; return how far the loss is from the ranks' mean."""
    expected, mine = loss_of(whole, tokens.flatten(0, 1)), loss_of(parallel, tokens[rank])
    expected.backward()
    mine.backward()
    mean = mine.detach() / world
    dist.all_reduce(mean)
    return abs(mean - expected).item()


def trained(rank, world, name, shape, kind):
    """Return the largest differences of losses, norms of gradients and parameters from one process, over some steps."""
    mesh = mesh_of(*shape)
    whole, spread = tiny(name), tiny(name)
    ep.shard(spread, mesh if mesh.ndim == 1 else mesh["ep"], chunks=2)
    called = ep.data_parallel(spread, mesh, kind=kind, **({"blocks": spread.model.layers} if kind == "fsdp" else {}))
    optimizers = [torch.optim.AdamW(one.parameters(), 0.003, foreach=False) for one in (whole, spread)]
    apart = []
    for tokens in text(world, 3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = backward_of_both(whole, called, tokens, rank, world)
        norms = [ep.clip_grad_norm_(one.parameters(), 0.5).item() for one in (whole, spread)]
        for optimizer in optimizers:
            optimizer.step()
        apart.append((losses, abs(norms[0] - norms[1])))
    parameters = dict(whole.named_parameters())
    return [
        *map(max, zip(*apart, strict=True)),
        max((full(one) - parameters[own]).abs().max().item() for own, one in spread.named_parameters()),
        sum(one.numel() for one in parameters.values() if one.grad is not None and one.grad.abs().max() > 0),
    ]


def whole_model(rank, world, name):
    """Return the largest relative difference of outputs and of gradients of experts from one process, on two ranks."""
    group = groups()[2]
    if rank >= 2:
        return None
    dtype = torch.float32 if name == "inkling2" else torch.float64  # transformers computes its router in float32 alone
    whole, spread = tiny(name, dtype).eval(), ep.shard(tiny(name, dtype).eval(), group)
    tokens = text(2)[0]

    def output(model, own):
        found = model(input_ids=own)
        y = found.logits if hasattr(found, "logits") else found.last_hidden_state
        y.square().sum().backward()
        return y.detach()

    pairs = [(output(spread, tokens[rank]), output(whole, tokens.flatten(0, 1)).split(2)[rank])]
    gradients = {own: one.grad for own, one in whole.named_parameters()}
    for own, one in spread.named_parameters():
        if isinstance(one, DTensor):
            assert (one.grad is None) == (gradients[own] is None)  # some models do not use all of their layers
            pairs += [] if one.grad is None else [(full(one.grad), gradients[own])]
    assert len(pairs) > 2
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def saved(rank, world, folder, over):
    """Save a model that is spread over some ranks by torch.distributed.checkpoint."""
    group = groups()[over]
    if rank < over:
        model = changed(ep.shard(tiny("gpt_oss"), group))
        dcp.save(get_model_state_dict(model), checkpoint_id=folder, process_group=group)


def loaded(rank, world, folder, over):
    """Return the names of tensors that differ, on another number of ranks, from the model that was saved."""
    group = groups()[over]
    if rank >= over:
        return []
    model = ep.shard(tiny("gpt_oss"), group)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_model_state_dict(model, state)
    found = {name: full(value) for name, value in model.state_dict().items()}
    return differing(found, changed(tiny("gpt_oss")).state_dict())


def changed(model):
    """Change every parameter of a model, element by element, however it is spread."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def takes_whole_state(rank, world):
    """Return the names of tensors that differ after the state dict of a whole model has been loaded."""
    whole, model = changed(tiny("mixtral")), ep.shard(tiny("mixtral"), dist.group.WORLD)
    model.load_state_dict(whole.state_dict())
    return differing({name: full(value) for name, value in model.state_dict().items()}, whole.state_dict())


def pretrained(rank, world, folder):
    """Save a model in transformers' files. Return the error without a whole state dict, and what differs with one."""
    model = changed(ep.shard(tiny("mixtral", torch.float32), dist.group.WORLD))
    said = told(model.save_pretrained, folder)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    again = type(model).from_pretrained(folder)
    return said, differing(again.state_dict(), changed(tiny("mixtral", torch.float32)).state_dict())


def left_to_ddp(rank, world):
    """Return the tensors of experts that DDP does not keep equal, of a model whose experts have biases of balancing."""
    model = tiny("olmoe", torch.float32)
    add_expert_biases(model, 0.01)
    mesh = mesh_of(world)
    parallel = ep.data_parallel(ep.shard(model, mesh), mesh)
    return sorted({name.rpartition("experts.")[2] for name in parallel.parameters_to_ignore if ".experts." in name})


def generated(rank, world):
    """Return whether ranks that stop at different lengths generate the tokens of a model in one process."""
    whole, model = tiny("mixtral").eval(), ep.shard(tiny("mixtral").eval(), dist.group.WORLD)
    prompt, options = text(world)[0, rank], {"max_new_tokens": 2 + rank, "do_sample": False, "pad_token_id": 0}
    return torch.equal(model.generate(prompt, synced_gpus=True, **options), whole.generate(prompt, **options))


# Mistakes.


def refused(rank, world, what):
    """Return the error of ``shard``, or of a call of a model that is spread."""
    options, model = {}, torch.nn.ModuleDict({"experts": built("MixtralExperts")})
    experts = model["experts"]
    if what == "eager":
        experts.config._experts_implementation = "eager"
    elif what == "eager later":
        ep.shard(model, dist.group.WORLD)
        experts.config._experts_implementation = "eager"
        return told(experts, *inputs(experts, world)[rank][:3])
    elif what == "index":
        ep.shard(model, dist.group.WORLD)
        x, index, weights, _ = inputs(experts, world)[0]
        return told(experts, x, index + EXPERTS * (rank == WRONG), weights)
    elif what == "activation":
        ep.shard(model, dist.group.WORLD)
        experts.act_fn = torch.nn.GELU() if rank == WRONG else torch.nn.SiLU()
        return told(experts, *inputs(experts, world)[rank][:3])
    elif what == "width":
        ep.shard(model, dist.group.WORLD)
        x, index, weights, _ = inputs(experts, world)[0]
        return told(experts, x[:, : x.shape[1] - (rank == WRONG)], index, weights)
    elif what == "frozen":
        ep.shard(model, dist.group.WORLD)
        experts.down_proj.requires_grad_(rank != WRONG)
        return told(experts, *inputs(experts, world)[rank][:3])
    elif what == "twice":
        ep.shard(model, dist.group.WORLD)
    elif what == "outside":
        model["experts"] = built_outside()
    elif what == "no experts":
        model = torch.nn.Linear(2, 2)
    elif what == "quantised by others":
        del experts.down_proj
        experts.down_proj = torch.nn.Linear(2, 2)
    elif what == "clones of quantised":
        quantize_experts(model.eval(), 8)
        options["clones"] = 1
    elif what == "quantised ones that move":
        quantize_experts(model.eval(), 8)
        ep.shard(model, dist.group.WORLD)
        return told(ep.redistribute, model, shuffled(EXPERTS, world))
    elif what == "quantised later":
        ep.shard(model, dist.group.WORLD)
        return told(quantize_experts, model, 8)
    elif what == "norm":
        model["experts"] = built("MuseSparkExperts")
    elif what == "transformers' own":
        experts._is_expert_parallel = True
    elif what == "transformers' own model":
        model._tp_size = 2
    elif what == "scope":
        options["scope"] = "group"
    elif what == "forward":
        experts.forward = functools.partial(type(experts).forward, experts)
    elif what == "tied":
        model["other"] = torch.nn.ParameterList([experts.down_proj])
    elif what == "fsdp":
        fully_shard(experts)
    elif what == "parametrized":
        register_parametrization(experts, "down_proj", torch.nn.Identity())
    elif what == "dtypes":
        experts.down_proj.data = experts.down_proj.data.bfloat16()
    elif what == "another model":
        model["experts"] = built("OlmoeExperts" if rank == WRONG else "MixtralExperts")
    elif what == "adapter":
        model = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"base_layer": experts})})
    elif what == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ep.shard(model, dist.group.WORLD)
        return told(optimizer.step)
    return told(functools.partial(ep.shard, model, dist.group.WORLD, **options))


def built_outside():
    """Return experts of Llama 4, which are not behind the interface."""
    return next(one for one in tiny("llama4").modules() if type(one).__name__ == "Llama4TextMoe")
