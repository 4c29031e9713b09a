"""Tests of the counts on kernels that nvcc compiles for these tests, with and without each fault."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sass
from counters import BETWEEN_BLOCKS, FUSED, STORE, loads_together
from machine_code import FLAGS, STRICT, compile_one, find_nvcc, gencode, parse

SOURCE = """
#include <cstdint>
__global__ void together(const uint4* x, uint4* out) {
  const uint4 a = x[threadIdx.x], b = x[threadIdx.x + 32];
  out[threadIdx.x] = make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}
__global__ void one_by_one(const uint4* x, uint4* out) {
  const uint4 a = x[threadIdx.x];
  uint4 b = {};
  if (a.x != 1) b = x[threadIdx.x + 32];
  out[threadIdx.x] = make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}
__global__ void split_store(const uint4* x, uint32_t* out) {
  const uint4 a = x[threadIdx.x];
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = i == 0 ? a.x : i == 1 ? a.y : i == 2 ? a.z : a.w;
}
__global__ void split_load(const uint32_t* x, uint4* out) {
  const uint32_t* const at = x + threadIdx.x * 4;
  out[threadIdx.x] = make_uint4(at[0], at[1], at[2], at[3]);
}
__global__ void sums(const float* x, float* out) { out[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x + 32] + 1.5f; }
__global__ void waits(const uint4*, uint32_t* out) {
  while (atomicCAS(out, 0u, 1u) != 0u) {}
  __threadfence();
}
__global__ void __launch_bounds__(1024, 2) spills(const float* x, float* out) {
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = x[i * 1024 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 96; ++i) out[threadIdx.x + i] = values[95 - i] * values[(i * 7) % 96];
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return the counts for the test kernels, and a function that compiles the kernels with other flags."""
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.xfail("there is no nvcc to compile with")
    assert sass.find_nvdisasm(), sass.HOW_TO_GET_NVDISASM
    root = tmp_path_factory.mktemp("planted")
    source = root / "planted_cuda.cu"
    source.write_text(SOURCE)

    def compile_with(flags):
        one = compile_one([nvcc, *flags, *STRICT, *gencode("9.0")], source, root, root / "built")
        assert not one.complaint
        return one, {name: of for name, of in sass.disassemble(one.cubin("sm_90")).items()}

    (root / "built").mkdir()
    return (*compile_with(FLAGS), compile_with)


def named(functions, name):
    (function,) = (one for mangled, one in functions.items() if f"{len(name)}{name}" in mangled)
    return function


def test_a_load_that_waits_is_seen(compiled):
    _, functions, _ = compiled
    assert loads_together(named(functions, "together").instructions) == 2
    assert loads_together(named(functions, "one_by_one").instructions) == 1


def test_loads_that_were_taken_apart_are_seen(compiled):
    _, functions, _ = compiled
    assert loads_together(named(functions, "split_load").instructions) == 0


def test_a_store_that_was_taken_apart_is_seen(compiled):
    _, functions, _ = compiled
    assert not [one for one in named(functions, "together").opcodes if STORE.match(one)]
    assert [one for one in named(functions, "split_store").opcodes if STORE.match(one)]


def test_a_spill_is_seen(compiled):
    one, _, _ = compiled
    spilled = {kernel.name: kernel.spilled for kernel in parse(one.report, "planted_cuda.cu")}
    assert [name for name, count in spilled.items() if count] == [name for name in spilled if "spills" in name]


def test_code_in_which_blocks_wait_for_others_is_seen(compiled):
    _, functions, _ = compiled
    assert [one for one in named(functions, "waits").opcodes if BETWEEN_BLOCKS.match(one)]
    for name in ("together", "sums", "spills"):
        assert not [one for one in named(functions, name).opcodes if BETWEEN_BLOCKS.match(one)]


def test_a_flag_that_was_dropped_is_seen(compiled):
    _, functions, compile_with = compiled
    assert not {one.split(".")[0] for one in named(functions, "sums").opcodes} & set(FUSED)
    _, fused = compile_with([flag for flag in FLAGS if flag != "--fmad=false"])
    assert {one.split(".")[0] for one in named(fused, "sums").opcodes} & set(FUSED)
