"""Runs KTransformers' CPU experts (kt-kernel on PyPI): bf16, swiglu, inference only.

The extension is loaded by its path, since importing the package requires more than its kernels need. It repacks the
weights, and so holds copies of them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.layers.blocks import Built
from benchmarks.peers import LeftOut
from pymoe.bench.environment import cpu_flags

MOST_TOKENS = 4096
VARIANTS = {
    "amx": ({"amx_tile", "amx_bf16"}, "AMXBF16_MOE"),
    "avx512_bf16": ({"avx512_bf16"}, "AMXBF16_MOE"),
    "avx2": ({"avx2"}, "AVX2BF16_MOE"),
}
"""Builds of the extension, preferred first: the processor flags that each needs, and its class for bf16 experts."""


class KtExperts:
    """The experts of a block, run by kt-kernel on as many threads as torch uses.

    Raises:
        ImportError: the wheel is not installed, or has no build for this processor.
        LeftOut: kt-kernel does not support the block.
    """

    def __init__(self, one: Built) -> None:
        block = one.block
        plain = not one.experts.has_bias and not one.experts.is_transposed
        if one.dtype != torch.bfloat16 or not plain:
            raise LeftOut("computes bf16 blocks with a plain swiglu")
        extension, variant = load()
        w_in, w_out = (weight.detach() for weight in one.touched)
        gate, up = (half.contiguous() for half in w_in.chunk(2, dim=1))
        pool = extension.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map = 1, [0]
        pool.subpool_thread_count = [torch.get_num_threads()]
        self.cpu = extension.CPUInfer(pool)
        config = extension.moe.MOEConfig(block.experts, block.choices, block.hidden, block.ffn, 0)
        config.max_len = MOST_TOKENS
        config.gate_proj, config.up_proj, config.down_proj = gate.data_ptr(), up.data_ptr(), w_out.data_ptr()
        config.gate_scale = config.up_scale = config.down_scale = 0
        config.pool = self.cpu.backend_
        self.moe: Any = getattr(extension.moe, VARIANTS[variant][1])(config)
        self.choices = block.choices
        places = torch.arange(block.experts, dtype=torch.int64)
        self.cpu.submit(self.moe.load_weights_task(places.data_ptr()))
        self.cpu.sync()

    def __call__(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the experts' output, (T, H)."""
        index, weights = index_TK.long().contiguous(), weights_TK.float().contiguous()
        output = torch.empty_like(x_TH)
        count = torch.tensor([len(x_TH)], dtype=torch.int32)
        pointers = (tensor.data_ptr() for tensor in (index, weights, x_TH, output))
        self.cpu.submit(self.moe.forward_task(count.data_ptr(), self.choices, *pointers, False))
        self.cpu.sync()
        return output


@cache
def load() -> tuple[ModuleType, str]:
    """Return the extension for this processor and the name of its build."""
    spec = importlib.util.find_spec("kt_kernel")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("not installed: pip install --no-deps kt-kernel")
    folder = Path(next(iter(spec.submodule_search_locations)))
    have = set(cpu_flags())
    for variant, (needed, _) in VARIANTS.items():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            file = folder / f"_kt_kernel_ext_{variant}{suffix}"
            if needed <= have and file.exists():
                found = importlib.util.spec_from_file_location("kt_kernel_ext", file)
                assert found is not None
                assert found.loader is not None
                module = importlib.util.module_from_spec(found)
                found.loader.exec_module(module)
                return module, variant
    raise ImportError("kt-kernel has no build for this processor")
