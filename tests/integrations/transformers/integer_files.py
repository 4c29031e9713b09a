"""Small checkpoints of GPTQ, AWQ and compressed-tensors, written from their published rules one code at a time.

The packers are those of AutoGPTQ (``qlinear_cuda_old.py``), AutoAWQ (``gemm.py``) and compressed-tensors
(``pack_quantized.py``), transcribed to loops over places in a word. They share nothing with what reads the files.
"""

import json

import numpy
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FILE = "model.safetensors"


def words(values, bits):
    """Pack the columns (rows, C) of unsigned codes into words of 32 bits, the first column in the lowest bits."""
    in_word = 32 // bits
    padded = numpy.zeros((values.shape[0], -(-values.shape[1] // in_word) * in_word), dtype=numpy.uint32)
    padded[:, : values.shape[1]] = values
    packed = numpy.zeros((values.shape[0], padded.shape[1] // in_word), dtype=numpy.uint32)
    for place in range(in_word):
        packed |= padded[:, place::in_word] << numpy.uint32(bits * place)
    return packed.view(numpy.int32)


def tensor(array):
    return torch.from_numpy(numpy.ascontiguousarray(array))


def gptq(q, z, s, bits, group, less=1):
    columns = numpy.arange(q.shape[1]) // (q.shape[1] if group == -1 else group)
    return {
        "qweight": tensor(words(q, bits).T),
        "qzeros": tensor(words(z.T - less, bits)),
        "scales": s.T.contiguous(),
        "g_idx": tensor(columns.astype(numpy.int32)),
    }


def gptq_v2(q, z, s, bits, group):
    return gptq(q, z, s, bits, group, less=0)


def awq(q, z, s, bits, group):
    def ordered(values):
        swapped = values.copy()
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            swapped[:, place::8] = values[:, output::8]
        return tensor(words(swapped, bits))

    return {"qweight": ordered(q.T), "qzeros": ordered(z.T), "scales": s.T.contiguous()}


def compressed(q, z, s, bits, group, symmetric=False):
    found = {
        "weight_packed": tensor(words(q, bits)),
        "weight_scale": s,
        "weight_shape": torch.tensor(q.shape, dtype=torch.int64),
    }
    return found if symmetric else found | {"weight_zero_point": tensor(words(z.T, bits).T)}


def compressed_symmetric(q, z, s, bits, group):
    assert (z == 1 << bits - 1).all()
    return compressed(q, z, s, bits, group, symmetric=True)


PACKERS = {
    "gptq": gptq,
    "gptq_v2": gptq_v2,
    "awq": awq,
    "compressed": compressed,
    "compressed_symmetric": compressed_symmetric,
}


def configuration(kind, bits, group):
    """Return the entries of config.json that such programs write."""
    if kind.startswith("gptq"):
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": False,
            "sym": False,
            "checkpoint_format": kind,
        }
    if kind == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": group, "zero_point": True, "version": "gemm"}
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": kind == "compressed_symmetric",
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def random_weight(generator, outputs, inputs, kind, bits, group, dtype=torch.float16):
    """Return codes, zero points and scales of a weight, and what they stand for: (q - z) * s in float32."""
    groups = 1 if group == -1 else -(-inputs // group)
    largest = 2**bits - 1
    q = torch.randint(largest + 1, (outputs, inputs), generator=generator)
    z = torch.randint(1 if kind == "gptq" else 0, largest + 1, (outputs, groups), generator=generator)
    if kind == "compressed_symmetric":
        z.fill_(1 << bits - 1)
    s = ((0.5 + torch.rand(outputs, groups, generator=generator)) * 2.0 ** (-3 - bits)).to(dtype)
    return q.numpy(), z.numpy(), s, dequantised(q, z, s, inputs if group == -1 else group)


def dequantised(q, z, s, group):
    wide = (torch.as_tensor(end).repeat_interleave(group, 1)[:, : q.shape[1]] for end in (z, s.float()))
    z, s = wide
    return (torch.as_tensor(q) - z).float() * s


def is_stored(name):
    return name.endswith(("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def write(folder, config, kind, bits, group):
    """Write a model with random weights twice: into ``published``, and with its weights in float32 into ``plain``."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    plain, published = folder / "plain", folder / "published"
    AutoModelForCausalLM.from_config(config).save_pretrained(plain)
    stored = load_file(plain / FILE)
    wide = dict(stored)
    for name in [name for name in stored if is_stored(name)]:
        q, z, s, wide[name] = random_weight(generator, *stored.pop(name).shape, kind, bits, group)
        parts = PACKERS[kind](q, z, s, bits, group)
        stored.update({f"{name.removesuffix('.weight')}.{part}": one for part, one in parts.items()})
    for name in [name for name in stored if name.endswith(".bias")]:
        stored[name] = torch.randn(stored[name].shape, generator=generator).half()
        wide[name] = stored[name].float()
    published.mkdir()
    save_file(stored, published / FILE, metadata={"format": "pt"})
    save_file(wide, plain / FILE, metadata={"format": "pt"})
    entries = json.loads((plain / "config.json").read_text())
    (published / "config.json").write_text(
        json.dumps({**entries, "quantization_config": configuration(kind, bits, group)})
    )
    return published, plain
