"""Functions that the ranks run for test_loading.py: checkpoints that each rank reads its part of."""

import contextlib
import ctypes
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from experts_modules import differing, loss_of, text, tiny
from failures import WRONG, told
from rank_setup import full, groups
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "transformers"))

import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import configuration

from benchmarks.layers.checkpoints import AnonymousMemory, write_gpt_oss
from pymoe import ep
from pymoe.integrations.transformers import PymoeConfig
from pymoe.nn import prefetch_experts


@contextlib.contextmanager
def in_float32():
    """Let transformers make buffers as in one process; the ranks' own default is float64."""
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float64)


def written(folder, name, stacked=False):
    """Write a tiny model in files as the hub has them, or with stacked experts, on the first rank; return its class."""
    model = tiny(name, torch.float32).eval()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, max_shard_size="100KB", save_original_format=not stacked)
    dist.barrier()
    return type(model)


def from_folder(cls, folder, group=None, **options):
    """Return a model from a folder: whole, or with this rank's experts alone."""
    spread = contextlib.nullcontext() if group is None else ep.shard_on_load(group, **options)
    with in_float32(), spread:
        return cls.from_pretrained(folder, experts_implementation="pymoe")


def read(rank, world, name, folder, over, stacked=False):
    """Return what differs from a model that one process has read, and how many experts' parameters were compared."""
    cls, group = written(folder, name, stacked), groups()[over]
    if rank >= over:
        return None
    whole, spread = from_folder(cls, folder), from_folder(cls, folder, group)
    assert not spread.training
    expected = everything(whole)
    experts = [one for one in spread.modules() if isinstance(one, ep.ShardedModule)]
    for module in experts:
        own = len(module.sharding.own_experts)
        assert all(one.to_local().shape == (own, *one.shape[1:]) for one in module.parameters())
    found = {key: full(value) for key, value in everything(spread).items()}
    wrong = differing(found, expected)
    return [*wrong, *([] if apart(spread, whole, rank, over) <= 1e-4 else ["output"])], len(experts)


def apart(spread, whole, rank, over):
    """Return how far this rank's outputs are from those of one process, as a share of the largest; NaN if any is."""
    tokens = text(over)[0]
    y, z = outputs(spread, tokens[rank]), outputs(whole, tokens.flatten(0, 1)).split(2)[rank]
    return ((y - z).abs().max() / z.abs().max()).item()


def everything(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def outputs(model, tokens):
    found = model(input_ids=tokens, use_cache=False)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def read_packed(rank, world, folder, over, config):
    """Return what differs from quantised experts that one process has read, and the number of this rank's experts."""
    group = groups()[over]
    if rank >= over:
        return None
    options = {} if config is None else {"quantization_config": PymoeConfig(**config)}
    cls = transformers.AutoModelForCausalLM
    with in_float32():
        whole = cls.from_pretrained(folder, **options)
        with ep.shard_on_load(group, chunks=2):
            spread = cls.from_pretrained(folder, **options)
    expected = everything(whole)
    packed = [name for name in expected if name.endswith("proj.packed") and ".experts." in name]
    experts = [one for one in spread.modules() if isinstance(one, ep.ShardedModule)]
    own = experts[0].sharding.own_experts
    for name in packed:
        part = everything(spread)[name].to_local()
        assert part.shape == (len(own), *expected[name].shape[1:])
        assert part.untyped_storage().nbytes() == part.nbytes or config is None  # the files' own bytes stay mapped
    found = {key: full(value) for key, value in everything(spread).items()}
    wrong = differing(found, expected)
    return [*wrong, *([] if apart(spread, whole, rank, over) <= 1e-4 else ["output"])], len(packed)


def few_experts(rank, world, folder, name):
    """Return what differs on four ranks from one process, with two experts, and the number of this rank's experts."""
    kind = {"mixtral": transformers.MixtralConfig, "gpt_oss": transformers.GptOssConfig}[name]
    config = configuration(kind, {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 2})
    if rank == 0:
        with in_float32():
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    cls = transformers.AutoModelForCausalLM
    whole, spread = from_folder(cls, folder), from_folder(cls, folder, dist.group.WORLD)
    assert not any(one.is_meta for one in everything(spread).values())
    found = {key: full(value) for key, value in everything(spread).items()}
    loss_of(spread, text(world)[0, rank]).backward()
    own = [one.grad for one in spread.parameters() if isinstance(one, DTensor)]
    assert all(one is not None for one in own)
    return differing(found, everything(whole)), len(spread.model.layers[0].mlp.experts.sharding.own_experts)


def saved_again(rank, world, name, folder, again):
    """Read a model on three ranks and save it; return the names of tensors that differ between the files."""
    cls, group = written(folder, name), groups()[3]
    if rank < 3:
        model = from_folder(cls, folder, group)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if rank == 0:
            model.save_pretrained(again, state_dict=state)
    dist.barrier()
    return differing(in_files(again), in_files(folder))


def packed_again(rank, world, folder, again):
    """Read a packed model on three ranks and save it; return what differs in the files, and in a DCP loaded on two."""
    cls, three, two = transformers.AutoModelForCausalLM, groups()[3], groups()[2]
    if rank < 3:
        with in_float32(), ep.shard_on_load(three):
            model = cls.from_pretrained(folder)
        with pytest.raises(ValueError, match="must have whole experts, got some that"):
            prefetch_experts(model)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            model.save_pretrained(again, state_dict=state)
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{again}/dcp", process_group=three)
    dist.barrier()
    wrong = differing(in_files(again), in_files(folder))
    if rank < 2:
        with in_float32():
            whole, fresh = cls.from_pretrained(folder), cls.from_pretrained(folder)
        ep.shard(fresh, two)
        for tensor in everything(fresh).values():
            tensor.detach().zero_()
        state = get_model_state_dict(fresh)
        dcp.load(state, checkpoint_id=f"{again}/dcp", process_group=two)
        set_model_state_dict(fresh, state)
        found = {key: full(value) for key, value in fresh.state_dict().items()}
        wrong += differing(found, whole.state_dict())
        for tensor in everything(fresh).values():
            tensor.detach().zero_()
        fresh.load_state_dict(whole.state_dict())
        wrong += differing({key: full(value) for key, value in fresh.state_dict().items()}, whole.state_dict())
    return wrong


def in_files(folder):
    """Return the tensors of a folder's files by name."""
    found = {}
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


def memory(rank, world, folder, dtype):
    """Return the peak of this rank's anonymous memory while it reads its part, the bytes of that, and the peak with a
    whole model.
    """
    group = groups()[3]
    if rank >= 3:
        return None
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD: what is freed goes back to the system
    dist.barrier(group)
    cls = transformers.AutoModelForCausalLM
    with in_float32(), ep.shard_on_load(group), AnonymousMemory() as used:
        model = cls.from_pretrained(folder, experts_implementation="pymoe", dtype=dtype)
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    own = sum(part.nbytes for part in parts)
    del model, parts
    dist.barrier(group)
    with in_float32(), AnonymousMemory() as whole:
        cls.from_pretrained(folder, experts_implementation="pymoe", dtype=dtype)
    return used.peak, own, whole.peak


def refused(rank, world, folder, what):
    """Return the error of a load that fails."""
    cls, group = written(folder, "mixtral"), dist.group.WORLD
    folder = Path(folder)
    if what == "another checkpoint":
        model = cls.from_pretrained(folder)
        with torch.no_grad():
            model.model.norm.weight[3] += 1
        model.save_pretrained(folder / "other")  # transformers writes on the first rank alone
        folder = folder / "other" if rank == WRONG else folder
    elif what == "quantised":
        folder = folder / "mxfp4"
        if rank == 0:
            write_gpt_oss(folder, layers=1, hidden=128, ffn=128, experts=4, vocabulary=128)
    elif what == "no folder" and rank == WRONG:
        folder = folder / "none"
    elif what == "damaged experts" and rank == 0:
        tensors = in_files(folder)
        for path in folder.glob("model*"):
            path.unlink()
        key = next(one for one in tensors if "experts.6." in one)  # of the last rank
        del tensors[key]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    dist.barrier()

    def load():
        with in_float32(), ep.shard_on_load(group):
            if what == "nothing":
                return
            options = {} if what == "eager" else {"experts_implementation": "pymoe"}
            if what == "wrong sizes":
                options |= {"num_local_experts": 7, "ignore_mismatched_sizes": True}
            transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
            if what == "two":
                cls.from_pretrained(folder, **options)

    return told(load)
