"""Tests of CUDA's rules for memory, barriers, registers and launches. For each rule there is one program that breaks
it, and one that keeps it.

Most of these programs give the right values in every order. The errors report that CUDA does not promise them.
"""

import numpy as np
import pytest
from ptx_text import PtxError, aligned, run_kernel, unwritten

SHARED = ".shared .align 16 .b8 tile[512];\n"
GLOBAL = "mov.u32 %r1, %tid.x;\nmul.wide.u32 %d1, %r1, 4;\nadd.s64 %d2, %q0, %d1;\n"
PLACE = SHARED + "mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 2;\nmov.u32 %r3, tile;\nadd.s32 %r4, %r3, %r2;\n"
BLOCK = "mov.u32 %r7, %ctaid.x;\nsetp.eq.u32 %p1, %r7, 0;\n"
STORE = "st.global.u32 [%d2], 7;\n"
OF_OTHER = "xor.b32 %r5, %r1, {};\nmul.wide.u32 %d3, %r5, 4;\nadd.s64 %d4, %q0, %d3;\n"
LOAD_OTHER = "ld.global.u32 %r6, [%d4];\n"
MINE = "st.shared.u32 [%r4], %r1;\n"
OF_HALF = "setp.lt.u32 %p1, %r1, 16;\n@!%p1 bra B;\nbar.warp.sync 65535;\nbra C;\nB:\nbar.warp.sync 4294901760;\nC:\n"
ACROSS = "xor.b32 %r5, %r2, {};\nadd.s32 %r5, %r3, %r5;\nld.shared.u32 %r6, [%r5];\n"
SOME = "setp.lt.u32 %p1, %r1, 16;\n@%p1 mov.u32 %r6, 1;\n"
NOT_SET = "a register that the thread has not set"
UNORDERED = "global memory that another thread has (read or )?written since the last barrier"
IN_SHARED = "shared memory that another thread has (read or )?written since the last barrier"
CONSTANT = "the same launch has (read through the read-only cache|written)"

# For each rule: the error message, the program that breaks the rule, the program that keeps it, and the launch options
# of both.
RULES = {
    "the read-only cache: a word that the thread has stored": (
        CONSTANT,
        GLOBAL + STORE + "ld.global.nc.u32 %r6, [%d2];",
        GLOBAL + STORE + "ld.global.u32 %r6, [%d2];",
        {},
    ),
    "the read-only cache: a word that a barrier orders after its store": (
        CONSTANT,
        GLOBAL + OF_OTHER.format(32) + STORE + "bar.sync 0;\nld.global.nc.u32 %r6, [%d4];",
        GLOBAL + OF_OTHER.format(32) + STORE + "bar.sync 0;\nld.global.u32 %r6, [%d4];",
        {"threads": 64},
    ),
    "the read-only cache: a word that another block stores": (
        CONSTANT,
        GLOBAL + BLOCK + "@%p1 ld.global.nc.u32 %r6, [%d2];\n@!%p1 st.global.u32 [%d2], 7;",
        GLOBAL + BLOCK + "@%p1 ld.global.nc.u32 %r6, [%d2];\n@!%p1 st.global.u32 [%d2+128], 7;",
        {"blocks": 2},
    ),
    "the read-only cache: a word that counts": (
        CONSTANT,
        GLOBAL + "ld.global.nc.u32 %r6, [%q0];\nred.global.add.u32 [%q0], 1;",
        GLOBAL + "ld.global.nc.u32 %r6, [%q0];\nred.global.add.u32 [%q0+4], 1;",
        {},
    ),
    "global memory: a word of another warp": (
        UNORDERED,
        GLOBAL + OF_OTHER.format(32) + STORE + "bar.warp.sync -1;\n" + LOAD_OTHER,
        GLOBAL + OF_OTHER.format(32) + STORE + "bar.sync 0;\n" + LOAD_OTHER,
        {"threads": 64},
    ),
    "global memory: a word of another lane": (
        UNORDERED,
        GLOBAL + OF_OTHER.format(1) + STORE + LOAD_OTHER,
        GLOBAL + OF_OTHER.format(1) + STORE + "bar.warp.sync -1;\n" + LOAD_OTHER,
        {},
    ),
    "global memory: a word that others still read": (
        UNORDERED,
        GLOBAL + OF_OTHER.format(32) + LOAD_OTHER + STORE,
        GLOBAL + OF_OTHER.format(32) + LOAD_OTHER + "bar.sync 0;\n" + STORE,
        {"threads": 64},
    ),
    "global memory: a word of another block, with barriers": (
        "global memory that another block has read or written",
        GLOBAL + BLOCK + "@%p1 st.global.u32 [%d2], 7;\nbar.sync 0;\n@!%p1 ld.global.u32 %r6, [%d2];",
        GLOBAL + BLOCK + "@%p1 st.global.u32 [%d2], 7;\nbar.sync 0;\n@!%p1 ld.global.u32 %r6, [%d2+128];",
        {"blocks": 2},
    ),
    "global memory: the same half of a word by two blocks": (
        "a write to global memory that another block has read or written",
        BLOCK + "@%p1 st.global.u16 [%q0], %r7;\n@!%p1 st.global.u16 [%q0], %r7;",
        BLOCK + "@%p1 st.global.u16 [%q0], %r7;\n@!%p1 st.global.u16 [%q0+2], %r7;",
        {"blocks": 2, "threads": 1},
    ),
    "global memory: plain reads beside atomic additions": (
        "global memory that another thread has (read or )?written",
        GLOBAL + "red.global.add.u32 [%q0], 1;\nld.global.u32 %r6, [%q0];",
        GLOBAL + "red.global.add.u32 [%q0], 1;\nbar.sync 0;\nld.global.u32 %r6, [%q0];",
        {"threads": 64},
    ),
    "global memory: plain reads beside atomic additions of another block": (
        "global memory that another block has (read or )?written",
        GLOBAL + BLOCK + "@%p1 red.global.add.u32 [%q0], 1;\n@!%p1 ld.global.u32 %r6, [%q0];",
        GLOBAL + BLOCK + "@%p1 red.global.add.u32 [%q0], 1;\n@!%p1 atom.global.add.u32 %r6, [%q0], 0;",
        {"blocks": 2},
    ),
    "shared memory: one byte that all lanes store": (
        f"a write to {IN_SHARED}, at byte 0",
        PLACE + "st.shared.u8 [%r3], %r1;",
        PLACE + "add.s32 %r5, %r3, %r1;\nst.shared.u8 [%r5], %r1;",
        {},
    ),
    "shared memory: a byte of a word that another lane has stored": (
        f"a (write to|read of) {IN_SHARED}",
        PLACE + MINE + "xor.b32 %r5, %r4, 4;\nld.shared.u8 %r6, [%r5+3];",
        PLACE + MINE + "xor.b32 %r5, %r4, 4;\nbar.warp.sync -1;\nld.shared.u8 %r6, [%r5+3];",
        {},
    ),
    "barriers: one of half a warp orders that half alone": (
        IN_SHARED,
        PLACE + MINE + OF_HALF + ACROSS.format(64),
        PLACE + MINE + OF_HALF + ACROSS.format(32),
        {},
    ),
    "registers: one that nobody has set": (
        NOT_SET,
        GLOBAL + "add.s32 %r6, %r40, 1;",
        GLOBAL + "mov.u32 %r40, 2;\nadd.s32 %r6, %r40, 1;",
        {},
    ),
    "registers: one that other lanes alone have set": (
        NOT_SET + ".*thread 16",
        GLOBAL + SOME + "st.global.u32 [%d2], %r6;",
        GLOBAL + SOME + "@!%p1 mov.u32 %r6, 2;\nst.global.u32 [%d2], %r6;",
        {},
    ),
    "registers: a guard": (
        NOT_SET,
        GLOBAL + "@%p3 st.global.u32 [%d2], 1;",
        GLOBAL + "setp.eq.u32 %p3, %r1, 3;\n@%p3 st.global.u32 [%d2], 1;",
        {},
    ),
    "registers: what a lane brings to a shuffle": (
        NOT_SET,
        GLOBAL + SOME + "shfl.sync.bfly.b32 %r8|%p2, %r6, 1, 31, -1;",
        GLOBAL + SOME + "@!%p1 mov.u32 %r6, 2;\nshfl.sync.bfly.b32 %r8|%p2, %r6, 1, 31, -1;",
        {},
    ),
    "registers: the lower half of a pair": (
        NOT_SET,
        GLOBAL + "mov.u16 %h1, 1;\nmov.b32 %r6, {%h1, %h2};\nshl.b32 %r8, %r6, 15;",
        GLOBAL + "mov.u16 %h1, 1;\nmov.b32 %r6, {%h1, %h2};\nshl.b32 %r8, %r6, 16;",
        {},
    ),
    "registers: the upper half of a pair": (
        NOT_SET,
        GLOBAL + "mov.u16 %h1, 1;\nmov.b32 %r6, {%h2, %h1};\nshl.b32 %r8, %r6, 16;",
        GLOBAL + "mov.u16 %h1, 1;\nmov.b32 %r6, {%h2, %h1};\nand.b32 %r8, %r6, -65536;",
        {},
    ),
    "unwritten: the other half of eight bytes": (
        "global memory that was never written, at byte 4 of 128",
        "st.global.u32 [%q1], 7;\nld.global.u32 %r6, [%q1+4];",
        "st.global.u32 [%q1], 7;\nld.global.u32 %r6, [%q1];",
        {"threads": 1},
    ),
    "unwritten: the other half of four bytes": (
        "global memory that was never written, at byte 2 of 128",
        "mov.u32 %r1, 7;\nst.global.u16 [%q1], %r1;\nld.global.u16 %r6, [%q1+2];",
        "mov.u32 %r1, 7;\nst.global.u16 [%q1], %r1;\nld.global.u16 %r6, [%q1];",
        {"threads": 1},
    ),
}


def refuses(said, program, arrays=(), **how):
    with pytest.raises(PtxError, match=said):
        run_kernel(program, arrays, **how)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_a_broken_rule_is_reported_in_every_order(rule, seed):
    said, broken, kept, how = RULES[rule]
    for program in (broken, kept):
        arrays = [aligned(np.arange(64, dtype=np.uint32)), unwritten(32, np.uint32)]
        if program is broken:
            refuses(said, program, arrays, seed=seed, **how)
        else:
            run_kernel(program, arrays, seed=seed, **how)


def test_barriers_of_parts_that_share_lanes_order_what_went_before():
    """Lanes 0 to 15 meet, then lanes 8 to 23. After that, earlier accesses of lane 1 are ordered for lane 20, but not
    for lane 30.
    """
    meet = (
        "setp.ge.u32 %p1, %r1, 16;\n@%p1 bra A;\nbar.warp.sync 65535;\nA:\n"
        "setp.lt.u32 %p2, %r1, 8;\n@%p2 bra B;\nsetp.ge.u32 %p3, %r1, 24;\n@%p3 bra B;\nbar.warp.sync 16776960;\nB:\n"
    )
    read = "setp.eq.u32 %p4, %r1, {};\n@%p4 ld.shared.u32 %r6, [tile+4];"
    for seed in range(4):
        run_kernel(PLACE + MINE + meet + read.format(20), [], seed=seed)
        refuses(IN_SHARED, PLACE + MINE + meet + read.format(30), seed=seed)


def test_accesses_that_order_others_are_unknown():
    """The interpreter knows only the order of barriers. Code that needs more is refused, and not treated as
    harmless.
    """
    array = aligned(np.arange(32, dtype=np.uint32))
    for opcode in ("ld.acquire.gpu.global.u32", "ld.relaxed.gpu.global.u32", "ld.volatile.global.u32"):
        refuses("unknown instruction", opcode + " %r1, [%q0];", [array])
    refuses("unknown instruction", "st.release.gpu.global.u32 [%q0], 1;", [array])


def test_static_and_dynamic_shared_memory_share_one_limit():
    """The limit is 48 KiB, or 99 KiB if the kernel's attribute allows more."""
    static, dynamic = "mov.u32 %r1, tile;\nmov.u32 %r2, more;", "mov.u32 %r1, more;"
    for allowed, most in ((False, 48 << 10), (True, 99 << 10)):
        how = {"outside": ".extern .shared .align 16 .b8 more[];", "more_shared": allowed, "threads": 1}
        run_kernel(SHARED + static, [], shared=most - 512, **how)
        refuses(
            f"{most + 16} bytes of shared memory, of which 512 are static", SHARED + static, shared=most - 496, **how
        )
        run_kernel(dynamic, [], shared=most, **how)
        refuses("of which 0 are static", dynamic, shared=most + 16, **how)
