"""Tests of the interpreter's errors about memory, order and collectives, with short kernels that break one rule
each.
"""

import sys
from pathlib import Path

import numpy as np
import ptx_library
import pytest
import run_ptx
from ptx_text import PtxError, aligned, run_kernel, unwritten

SHARED = ".shared .align 16 .b8 tile[512];\n"
THREAD = "mov.u32 %r1, %tid.x;\nmul.wide.u32 %d1, %r1, 4;\nshl.b32 %r2, %r1, 2;\nmov.u32 %r3, tile;\n"
MY_PLACE = THREAD + "add.s32 %r4, %r3, %r2;\n"
# The words of thread (tid + 1) % 128 and of lane (lane + 1) % 32.
NEXT_PLACE = "add.s32 %r5, %r1, 1;\nand.b32 %r5, %r5, 127;\nshl.b32 %r5, %r5, 2;\nadd.s32 %r5, %r3, %r5;\n"
NEXT_LANE = "add.s32 %r5, %r1, 1;\nand.b32 %r5, %r5, 31;\nshl.b32 %r5, %r5, 2;\nadd.s32 %r5, %r3, %r5;\n"
OUT = "add.s64 %d2, %q0, %d1;\nst.global.u32 [%d2], %r6;\n"


def words(count):
    return unwritten(count, np.uint32)


def refuses(message, body, arrays=(), **how):
    with pytest.raises(PtxError, match=message):
        run_kernel(body, arrays, **how)


def test_what_it_does_not_know_is_named():
    refuses(r"line \d+: unknown instruction: add\.weird\.s32 %r1, %r2, %r3", "add.weird.s32 %r1, %r2, %r3;")
    refuses("unknown instruction: ex2.approx.f32", "ex2.approx.f32 %f1, %f2;")
    # The assembler may fuse a sum and a product without a rounding qualifier.
    refuses("unknown instruction: mul.f32", "mul.f32 %f1, %f2, %f3;")
    refuses("unknown operand %clock", "mov.u32 %r1, %clock;")
    refuses("expected a register of 4 bytes, got %d1", "add.s32 %d1, %r1, %r2;")


def test_accesses_of_global_memory():
    array = aligned(np.arange(40, dtype=np.uint32))
    load = "ld.global.u32 %r1, [%q0+{}];"
    refuses("is in no tensor", load.format(160), [array])
    refuses("is in no tensor", load.format(-4), [array])
    refuses("is not a multiple of the 4 bytes", load.format(2), [array])
    refuses("is not a multiple of the 16 bytes", "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%q0+8];", [array])
    refuses("is in no tensor", "ld.global.v2.u64 {%d1, %d2}, [%q0+160];", [array])
    refuses("is in no tensor", "st.global.u32 [%q0+160], 1;", [array])
    refuses("never written, at byte 4 of 128", load.format(4), [words(32)])
    write = "mov.u32 %r1, 7;\nst.global.u32 [%q0], %r1;\n"
    refuses("never written", write + "ld.global.u32 %r2, [%q0+8];", [words(32)], threads=1)
    # The error names only the thread that caused it.
    one = "mov.u32 %r1, %tid.x;\nsetp.eq.u32 %p1, %r1, 37;\n@%p1 ld.global.u32 %r2, [%q0+160];"
    refuses(r"block 0, thread 37, line \d+: @%p1 ld.global.u32", one, [array], threads=64)


def test_a_parameter_lies_where_its_own_size_says():
    """``.ptr .align`` describes the memory to which the parameter points. Kernels for Blackwell used to read 4 bytes
    too early.
    """
    array = words(1)
    run_kernel("st.global.u32 [%q1], 7;", [words(1), array], threads=1, types=[".u32", ".u64 .ptr .align 1"])
    assert array[0] == 7


def test_accesses_of_shared_memory():
    body = SHARED + THREAD
    refuses("never written", body + "ld.shared.u32 %r6, [tile];")
    # The gap of a structure that is copied may be unwritten, because nothing uses it.
    copy = "ld.shared.u32 %r6, [tile+12];\nst.shared.u32 [tile+28], %r6;\n"
    run_kernel(body + copy, [], threads=1)
    refuses("never written", body + copy + "add.s32 %r7, %r6, 1;", threads=1)
    refuses("never written", body + "ld.shared.u64 %d6, [tile+8];\nst.shared.u64 [tile+24], %d6;", threads=1)
    refuses("byte 512 of shared memory, of which the block has 512", body + "st.shared.u32 [tile+512], %r1;")
    refuses("byte -1024 of shared memory", "mov.u32 %r1, 0;\nst.shared.u32 [%r1], %r1;")
    refuses("is not a multiple of the 8 bytes", body + "st.shared.u64 [tile+4], %d1;")
    dynamic = ".extern .shared .align 16 .b8 more[];"
    run_kernel("st.shared.u32 [more+60], 1;", [], threads=1, shared=64, outside=dynamic)
    refuses("byte 64", "st.shared.u32 [more+64], 1;", threads=1, shared=64, outside=dynamic)


@pytest.mark.parametrize("seed", range(4))
def test_threads_that_do_not_wait_for_one_another(seed):
    write, read = "st.shared.u32 [%r4], %r1;\n", "ld.shared.u32 %r6, [%r5];\n"
    start = "st.shared.u32 [%r4], 0;\nbar.sync 0;\n"
    body = SHARED + MY_PLACE + NEXT_PLACE + start
    out = words(128)
    run_kernel(body + write + "bar.sync 0;\n" + read + OUT, [out], threads=128, seed=seed)
    assert out.tolist() == [(i + 1) % 128 for i in range(128)]
    refuses("since the last barrier", body + write + read + OUT, [words(128)], threads=128, seed=seed)
    # A barrier of a warp orders its own lanes, and no others.
    of_warp = SHARED + MY_PLACE + NEXT_LANE + start + write + "bar.warp.sync -1;\n" + read + OUT
    run_kernel(of_warp, [words(128)], threads=32, seed=seed)
    refuses("since the last barrier", body + write + "bar.warp.sync -1;\n" + read, threads=128, seed=seed)
    # A shuffle does not order memory accesses.
    shuffle = "shfl.sync.idx.b32 %r7|%p1, %r1, 0, 31, -1;\n"
    refuses("since the last barrier", SHARED + MY_PLACE + NEXT_LANE + start + write + shuffle + read, seed=seed)
    # Writing again before all threads have read is wrong, too.
    twice = body + write + "bar.sync 0;\n" + read + write
    refuses("another thread has read or written", twice, threads=128, seed=seed)


def test_atomics_are_no_conflict_with_one_another():
    body = SHARED + THREAD + "setp.eq.u32 %p1, %r1, 0;\n@%p1 st.shared.u32 [tile], 0;\nbar.sync 0;\n"
    add = "atom.shared.add.u32 %r7, [tile], %r1;\n"
    out = words(128)
    run_kernel(body + add + "bar.sync 0;\nld.shared.u32 %r6, [tile];\n" + OUT, [out], threads=128)
    assert set(out.tolist()) == {128 * 127 // 2}
    refuses("since the last barrier", body + add + "ld.shared.u32 %r6, [tile];\n", threads=128)
    total = aligned(np.zeros(2, np.uint32))
    run_kernel("red.global.add.u32 [%q0], 3;\nred.global.max.u32 [%q0+4], 9;", [total], blocks=7, threads=64)
    assert total.tolist() == [3 * 7 * 64, 9]


def test_barriers_that_not_all_reach():
    some = "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 40;\n"
    refuses("threads wait here for others that do not come|ended before", some + "@%p1 bar.sync 0;", threads=64)
    refuses("ended before", some + "@!%p1 bra $end;\nbar.sync 0;\n$end:\n", threads=64)
    lane = "mov.u32 %r1, %laneid;\nsetp.ne.u32 %p1, %r1, 5;\n"
    refuses("ended before|do not come", lane + "@%p1 shfl.sync.bfly.b32 %r2|%p2, %r1, 1, 31, -1;")
    refuses("its own mask does not name", "bar.warp.sync 1;")
    # Threads at barriers in two places of the code do not meet.
    apart = some + "@%p1 bra $a;\nbar.sync 0;\nbra $b;\n$a:\nbar.sync 0;\n$b:\n"
    refuses("do not come", apart, threads=64)
    wait = "barrier.cluster.wait.aligned;"
    refuses("awaited by threads that had not arrived", wait, blocks=2, cluster=2)


def test_launches_that_no_gpu_would_take():
    refuses("cannot be launched with 1 blocks of 1056 threads", "mov.u32 %r1, 0;", threads=1056)
    refuses("cannot be launched with 3 blocks", "mov.u32 %r1, 0;", blocks=3, cluster=2)
    refuses("cannot be launched with 0 blocks", "mov.u32 %r1, 0;", blocks=0)


def test_parts_of_a_warp_run_apart():
    """Lane 0 sets a flag in global memory that the other lanes read, without any synchronisation."""
    body = (
        "mov.u32 %r1, %tid.x;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 red.global.or.b32 [%q1], 1;\n"
        "atom.global.or.b32 %r6, [%q1], 0;\nmul.wide.u32 %d1, %r1, 4;\n"
    ) + OUT
    seen = set()
    for seed in range(20):
        out, flag = words(32), aligned(np.zeros(1, np.uint32))
        run_kernel(body, [out, flag], seed=seed)
        seen |= set(out.tolist())
    assert seen == {0, 1}


def test_blocks_run_in_any_order():
    body = "mov.u32 %r1, %ctaid.x;\natom.global.add.u32 %r6, [%q1], 1;\nmul.wide.u32 %d1, %r1, 4;\n" + OUT
    orders = set()
    for seed in range(6):
        out, counter = words(9), aligned(np.zeros(1, np.uint32))
        run_kernel(body, [out, counter], blocks=9, threads=1, seed=seed)
        assert sorted(out.tolist()) == list(range(9))
        orders.add(tuple(out.tolist()))
    assert len(orders) > 3


# --- collectives ---


def shuffled(kind, values, b, c):
    """Return the result of shfl.sync according to the ISA's pseudo-code."""
    segment, clamp = c >> 8 & 31, c & 31
    result = []
    for lane in range(32):
        most = (lane & segment) | (clamp & ~segment)
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment)}[kind]
        valid = source >= most if kind == "up" else source <= most
        result.append(values[source if valid else lane] | (1 << 31 if valid else 0))
    return result


@pytest.mark.parametrize("kind", ["up", "down", "bfly", "idx"])
def test_shuffles(kind):
    values = list(range(100, 132))
    for width in (32, 16, 8, 4):
        for b in (0, 1, 3, 7, 16):
            c = (32 - width) << 8 | (0 if kind == "up" else 31)
            body = (
                "mov.u32 %r1, %tid.x;\nadd.u32 %r2, %r1, 100;\nmul.wide.u32 %d1, %r1, 4;\n"
                f"shfl.sync.{kind}.b32 %r6|%p1, %r2, {b}, {c}, -1;\n@%p1 or.b32 %r6, %r6, {1 << 31};\n"
            ) + OUT
            out = words(32)
            run_kernel(body, [out])
            assert out.tolist() == shuffled(kind, values, b, c)


def test_votes_matches_and_reductions():
    start = "mov.u32 %r1, %tid.x;\nmul.wide.u32 %d1, %r1, 4;\nand.b32 %r2, %r1, 3;\nsetp.eq.u32 %p1, %r2, 1;\n"
    bit = "selp.u32 %r6, 1, 0, %p2;\n"
    ones = sum(1 << lane for lane in range(32) if lane % 4 == 1)
    cases = {
        "vote.sync.ballot.b32 %r6, %p1, -1;\n": [ones] * 32,
        "vote.sync.any.pred %p2, %p1, -1;\n" + bit: [1] * 32,
        "vote.sync.all.pred %p2, %p1, -1;\n" + bit: [0] * 32,
        "match.any.sync.b32 %r6, %r2, -1;\n": [ones << (lane % 4) >> 1 for lane in range(32)],
        "redux.sync.max.s32 %r6, %r1, -1;\n": [31] * 32,
        "redux.sync.add.u32 %r6, %r1, -1;\n": [496] * 32,
    }
    for text, expected in cases.items():
        out = words(32)
        run_kernel(start + text + OUT, [out])
        assert out.tolist() == expected


def test_matrices():
    """Fragments are laid out as in the ISA; one launch loads A and B by ldmatrix and multiplies them."""
    source = np.random.default_rng(1)
    a, b = source.integers(-8, 9, (16, 16)), source.integers(-8, 9, (16, 8))
    for kind in ("bf16", "f16"):
        as_bits = (
            (lambda x: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
            if kind == "bf16"
            else (lambda x: x.astype(np.float16).view(np.uint16))
        )
        matrices = [aligned(as_bits(a)), aligned(as_bits(b))]
        out = unwritten(128, np.float32)
        # A's rows are 32 bytes: lane l gives row l % 16, columns 8 (l / 16) and on; B's rows are 16 bytes.
        body = f"""
        .shared .align 16 .b8 tile_a[512];
        .shared .align 16 .b8 tile_b[256];
        mov.u32 %r1, %tid.x;
        mul.wide.u32 %d1, %r1, 16;
        mov.u32 %r2, tile_a;
        mov.u32 %r3, tile_b;
        shl.b32 %r4, %r1, 4;
        add.s32 %r5, %r2, %r4;
        add.s32 %r6, %r3, %r4;
        add.s64 %d2, %q0, %d1;
        ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d2];
        st.shared.v4.u32 [%r5], {{%r10, %r11, %r12, %r13}};
        setp.lt.u32 %p1, %r1, 16;
        add.s64 %d3, %q1, %d1;
        @%p1 ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d3];
        @%p1 st.shared.v4.u32 [%r6], {{%r10, %r11, %r12, %r13}};
        bar.warp.sync -1;
        and.b32 %r7, %r1, 15;
        shl.b32 %r7, %r7, 5;
        shr.u32 %r8, %r1, 4;
        shl.b32 %r8, %r8, 4;
        add.s32 %r7, %r7, %r8;
        add.s32 %r7, %r2, %r7;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r7];
        and.b32 %r9, %r1, 15;
        shl.b32 %r9, %r9, 4;
        add.s32 %r9, %r3, %r9;
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r24, %r25}}, [%r9];
        mov.f32 %f1, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f4, %f5, %f6, %f7}}, {{%r20, %r21, %r22, %r23}}, {{%r24, %r25}}, {{%f1, %f1, %f1, %f1}};
        shr.u32 %r30, %r1, 2;
        and.b32 %r31, %r1, 3;
        mul.wide.u32 %d4, %r30, 32;
        mul.wide.u32 %d5, %r31, 8;
        add.s64 %d6, %q2, %d4;
        add.s64 %d6, %d6, %d5;
        st.global.v2.f32 [%d6], {{%f4, %f5}};
        st.global.v2.f32 [%d6+256], {{%f6, %f7}};
        """  # noqa: E501
        run_kernel(body, [*matrices, out])
        assert (out.reshape(16, 8) == a @ b + 1).all()


# --- asynchronous copies, and clusters ---

COPY = (
    SHARED
    + "mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 4;\nmov.u32 %r3, tile;\nadd.s32 %r4, %r3, %r2;\n"
    + "mul.wide.u32 %d1, %r1, 16;\nadd.s64 %d2, %q1, %d1;\ncp.async.cg.shared.global [%r4], [%d2], 16{};\n"
    + "cp.async.commit_group;\n"
)
TAKE = "ld.shared.u32 %r6, [%r4+4];\nmul.wide.u32 %d1, %r1, 4;\n" + OUT


def test_asynchronous_copies():
    given = aligned(np.arange(128, dtype=np.uint32))
    out = words(32)
    run_kernel(COPY.format("") + "cp.async.wait_group 0;\n" + TAKE, [out, given])
    assert out.tolist() == [4 * i + 1 for i in range(32)]
    out = words(32)
    run_kernel(COPY.format(", 4") + "cp.async.wait_all;\n" + TAKE, [out, given])
    assert out.tolist() == [0] * 32  # what is not read is zero
    refuses("still copying", COPY.format("") + TAKE, [words(32), given])
    refuses("still copying", COPY.format("") + "cp.async.wait_group 1;\n" + TAKE, [words(32), given])
    refuses("still copying", COPY.format("") + "st.shared.u32 [%r4], 1;\n", [words(32), given])
    # Waiting tells the thread alone.
    other = "xor.b32 %r5, %r2, 16;\nadd.s32 %r4, %r3, %r5;\n"
    waited = COPY.format("") + "cp.async.wait_all;\n" + other
    refuses("since the last barrier", waited + TAKE, [words(32), given])
    out = words(32)
    run_kernel(waited + "bar.sync 0;\n" + TAKE, [out, given])
    assert out.tolist() == [4 * (i ^ 1) + 1 for i in range(32)]
    refuses("is in no tensor", COPY.format(""), [words(32), aligned(np.arange(64, dtype=np.uint32))])


def test_clusters():
    """Check that each block reads what its neighbour in the cluster wrote."""
    meet = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    write = SHARED + THREAD + "mov.u32 %r7, %ctaid.x;\nst.shared.u32 [tile], %r7;\n"
    read = (
        "mov.u32 %r8, %cluster_ctarank;\nxor.b32 %r8, %r8, 1;\nmov.u32 %r9, tile;\n"
        "mapa.shared::cluster.u32 %r10, %r9, %r8;\nld.shared::cluster.u32 %r6, [%r10];\nmul.wide.u32 %d1, %r7, 4;\n"
    ) + OUT
    out = words(6)
    run_kernel(write + meet + read + meet, [out], blocks=6, threads=1, cluster=2)
    assert out.tolist() == [1, 0, 3, 2, 5, 4]
    errors = "never written|since the last barrier|a block that has ended"
    refuses(errors, write + read + meet, [words(6)], blocks=6, threads=1, cluster=2)


@pytest.mark.parametrize(
    ("counts", "options", "status"),
    [(b"1 a\n0 b\n", [], 1), (b"1 a\n2 b\n", [], 0), (b"0 b\n", ["-k", "x"], 0)],
)
def test_a_kernel_that_no_test_has_launched_is_an_error(tmp_path, monkeypatch, counts, options, status):
    def pretended(arguments, environment=None):
        if environment is None:
            return "cuda_ops" in arguments
        assert arguments.count("-k") == 1
        Path(environment["PYMOE_PTX_LAUNCHED"], "1.txt").write_bytes(counts)
        return True

    monkeypatch.setattr(run_ptx, "ROOT", tmp_path)
    monkeypatch.setattr(run_ptx, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(run_ptx, "pytest", pretended)
    monkeypatch.setattr(ptx_library, "build", lambda: None)
    monkeypatch.setattr(sys, "argv", ["run_ptx.py", *options])
    assert run_ptx.main() == status


def test_processes_that_do_not_say_what_they_launched_are_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="no process has left"):
        run_ptx.never_launched(tmp_path)
