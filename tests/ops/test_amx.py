"""Tests of bfloat16 products with AMX tiles: the system's permission, and rows that do not depend on other rows.

``tests/cpp/test_amx_gemm.cpp`` checks every element of such products, also on machines without AMX.
"""

import subprocess
import sys

import pytest
import torch
from limits import LONG, rounds
from specs.comparison import assert_same_bits

import pymoe
from pymoe.bench.operators import offsets_of, uniform

pytestmark = [
    pytest.mark.only_on("cpu"),
    pytest.mark.skipif(pymoe.build_info()["cpu_isa"] != "amx", reason="no AMX here, or the system does not grant it"),
]

REFUSED = """
import ctypes, errno, struct

# seccomp: the request for the state of tiles, arch_prctl(ARCH_REQ_XCOMP_PERM), fails; everything else is allowed.
LOAD, JUMP_IF_EQUAL, RETURN, ALLOW, FAIL = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
program = b"".join(
    struct.pack("HBBI", *line)
    for line in (
        (LOAD, 0, 0, 0),                    # the number of the call
        (JUMP_IF_EQUAL, 0, 3, 158),         # arch_prctl
        (LOAD, 0, 0, 16),                   # its first argument
        (JUMP_IF_EQUAL, 0, 1, 0x1023),
        (RETURN, 0, 0, FAIL | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    )
)
lines = ctypes.create_string_buffer(program)
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(lines)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0   # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()   # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

import torch
import pymoe

x, weight = torch.randn(5, 64).bfloat16(), torch.randn(1, 7, 64).bfloat16()
y = pymoe.ops.grouped_linear(x, weight, torch.tensor([0, 5], dtype=torch.int32))
torch.testing.assert_close(y, pymoe.reference.grouped_linear(x, weight, torch.tensor([0, 5], dtype=torch.int32)))
print(pymoe.build_info()["cpu_isa"])
"""


def test_a_system_that_refuses_the_tiles_gets_the_instructions_without_them():
    ran = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=LONG, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["v4_bf16"]


def test_every_row_has_the_bits_that_it_has_alone():
    random = torch.Generator().manual_seed(0)

    def one(low, high):
        return int(torch.randint(low, high + 1, (), generator=random))

    for _ in range(rounds(25, 250)):
        rows, inputs, outputs = one(1, 200), one(1, 300), one(1, 150)
        x = uniform(rows, inputs, dtype=torch.bfloat16, generator=random)
        weight = uniform(1, outputs, inputs, dtype=torch.bfloat16, generator=random)
        bias = uniform(1, outputs, dtype=torch.bfloat16, generator=random)
        y = pymoe.ops.grouped_linear(x, weight, offsets_of([rows]), bias)
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        assert_same_bits(pymoe.ops.grouped_linear(x, turned, offsets_of([rows]), bias), y, "of the other layout")
        for _ in range(4):
            begin = one(0, rows - 1)
            end = one(begin + 1, min(rows, begin + 40))
            some = pymoe.ops.grouped_linear(x[begin:end], weight, offsets_of([end - begin]), bias)
            assert_same_bits(some, y[begin:end], f"rows {begin} to {end} of {rows}")


def test_the_number_of_threads_changes_no_bit():
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(4, 512, 256).bfloat16()
    offsets = offsets_of([16] * 4)
    alone = pymoe.ops.grouped_linear(x, weight, offsets)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same_bits(pymoe.ops.grouped_linear(x, weight, offsets), alone, f"by {threads} threads")
    finally:
        torch.set_num_threads(before)
