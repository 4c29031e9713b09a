"""Functions that the ranks run for test_adapters.py: LoRA of PEFT on experts that are on ranks."""

import copy
import warnings

import peft
import torch
import torch.distributed as dist
from experts_modules import TOKENS, backward_of_both, built, differing, inputs, loss_of, text, tiny
from failures import WRONG, told
from loaded_parts import apart, from_folder, written
from rank_setup import full, groups, mesh_of
from safetensors.torch import load_file

from pymoe import ep
from pymoe.nn import quantize_experts

NAMES = ("gate_up_proj", "down_proj")


def adapt(model, seed=1, names=NAMES, **options):
    """Return a model with adapters, of which both factors are random numbers."""
    torch.manual_seed(seed)
    targets = [f"experts.{name}" for name in names]
    config = {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": targets, "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # plain modules have no configuration
        return peft.get_peft_model(model, peft.LoraConfig(**(config | options)))


class Holder(torch.nn.Module):
    """Experts in a module that PEFT takes for a model."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, *given):
        return self.experts(*given)


def trained_adapters(model):
    return {name: one for name, one in model.named_parameters() if "lora_" in name}


def outcome(model, x, index, weights, directions):
    """Return the output, gradients of inputs, and of adapters by name."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = model(x, index, weights)
    y.backward(directions)
    found = {"y": y.detach(), "dx": x.grad, "dweights": weights.grad}
    return found | {name: one.grad for name, one in trained_adapters(model).items()}


def one(rank, world, name, over, dtype="float32", bits=None, several=False, **way):
    """Return what differs on this rank from one process: bits of outputs, and of gradients summed over ranks."""
    group = groups()[over]
    if rank >= over:
        return None
    whole = Holder(built(name, dtype)).eval()
    parts = inputs(whole.experts, over)
    if bits:
        quantize_experts(whole, bits)
    spread = ep.shard(copy.deepcopy(whole), group, **way)
    whole, spread = adapt(whole), adapt(spread)
    if several:
        for model in (whole, spread):
            torch.manual_seed(2)
            model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
            model.base_model.set_adapter(["default", "second"])
    expected = outcome(whole, *map(torch.cat, zip(*parts, strict=True)))
    found = outcome(spread, *parts[rank])
    for own in ("y", "dx", "dweights"):
        expected[own] = expected[own].split(TOKENS[:over])[rank]
    for key in trained_adapters(spread):
        dist.all_reduce(found[key], group=group)
    assert all(value.abs().sum() > 0 for key, value in expected.items() if "lora_" in key)
    return differing(found, expected)


def trained(rank, world, name, folder, kind):
    """Train adapters of experts and attention on four ranks.

    Returns:
        The largest differences of losses and adapters from one process, the number of tensors in the files that this
        process reads, and the difference of outputs of a whole model with these files.
    """
    mesh = mesh_of(world)
    whole, spread = tiny(name), ep.shard(tiny(name), mesh)
    names = [f"mlp.experts.{one}" for one in NAMES]
    options = {"target_modules": ["o_proj"], "target_parameters": names}
    seed = 1 + rank * (kind == "ddp")  # DDP makes adapters equal
    whole, spread = adapt(whole, **options), adapt(spread, seed=seed, **options)
    parallel = ep.data_parallel(spread, mesh, kind=kind)
    optimizers = [
        torch.optim.AdamW([part for part in one.parameters() if part.requires_grad], 0.003, foreach=False)
        for one in (whole, spread)
    ]
    losses = []
    for tokens in text(world, 3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(backward_of_both(whole, parallel, tokens, rank, world))
        for optimizer in optimizers:
            optimizer.step()
    loss, theirs = torch.tensor(losses).max().item(), trained_adapters(whole)  # NaN is the largest
    of_each = [(full(one) - theirs[key]).abs().max() for key, one in trained_adapters(spread).items()]
    adapters = torch.stack(of_each).max().item()
    if kind == "fsdp":  # PEFT's files need whole tensors
        return loss, adapters
    if rank == 0:
        spread.save_pretrained(folder)
    dist.barrier()
    again = peft.PeftModel.from_pretrained(tiny(name), folder)
    tokens = text(world)[0, rank]
    y, z = again(input_ids=tokens).logits, spread(input_ids=tokens).logits
    return (
        loss,
        adapters,
        len(load_file(f"{folder}/adapter_model.safetensors")),
        ((y - z).abs().max() / z.abs().max()).item(),
    )


def quantised_step(rank, world):
    """Return the largest relative difference from one process of gradients of adapters over quantised experts."""
    mesh, models = mesh_of(world), []
    for _ in range(2):
        model = tiny("mixtral", torch.float32).eval()
        quantize_experts(model, 4)
        models.append(model)
    whole, spread = models
    options = {"target_modules": ["o_proj"], "target_parameters": [f"mlp.experts.{one}" for one in NAMES]}
    whole, spread = adapt(whole, **options), adapt(ep.shard(spread, mesh), **options)
    parallel, tokens = ep.data_parallel(spread, mesh), text(world)[0]
    loss_of(whole, tokens.flatten(0, 1)).backward()
    loss_of(parallel, tokens[rank]).backward()
    theirs = trained_adapters(whole)
    of_each = [
        (one.grad - theirs[key].grad).abs().max() / theirs[key].grad.abs().max()
        for key, one in trained_adapters(spread).items()
    ]
    return torch.stack(of_each).max().item()


def read(rank, world, folder):
    """Return how far outputs are from one process, of a model that is read by parts with an adapter of its experts."""
    cls = written(f"{folder}/model", "mixtral")
    names = [f"mlp.experts.{one}" for one in NAMES]
    whole = adapt(from_folder(cls, f"{folder}/model"), target_modules=["o_proj"], target_parameters=names).eval()
    if rank == 0:
        whole.save_pretrained(f"{folder}/adapter")
    dist.barrier()
    spread = from_folder(cls, f"{folder}/adapter", dist.group.WORLD)
    return apart(spread, whole, rank, world), len(trained_adapters(spread))


def refused(rank, world, what):
    """Return the error of adapters that experts on ranks do not take."""
    holder = Holder(built("MixtralExperts")).eval()
    given = inputs(holder.experts, world)[rank][:3]
    model = adapt(ep.shard(holder, dist.group.WORLD, clones=int(what == "clones")))
    if what == "merge":
        return told(model.merge_adapter)
    if what == "one rank frozen":
        for one in trained_adapters(model).values():
            one.requires_grad_(rank != WRONG)
    if what == "one rank without":
        model.base_model.set_adapter([] if rank == WRONG else "default")
    return told(model, *given)
