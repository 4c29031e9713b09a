"""The reader of machine code and the executor, on code made by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sass
from launches import run
from memory import Buffer, Memory, OutsideOfMemory
from recorded import Recorded, lay_out, parameters, read
from registers import UnknownInstruction

LATENCY = {"otherwise": 600}


def encoded(*, stall=1, releases=7, waits=()):
    """The upper half of an instruction with these orders to the scheduler."""
    control = stall | releases << 5 | 7 << 8 | sum(1 << board for board in waits) << 11
    return control << 41


def listing(*lines, name="kernel"):
    """What nvdisasm prints: a line is an instruction's text and its orders, or a label."""
    text, address = [f".text.{name}:"], 0
    for line in lines:
        if isinstance(line, str):
            text.append(f"{line}:")
            continue
        body, orders = line
        text.append(f"        /*{address:04x}*/                   {body} ;  /* 0x0000000000000000 */")
        text.append(f"{'':90}/* 0x{encoded(**orders):016x} */")
        address += 16
    return "\n".join(text) + "\n"


def function(*lines):
    return sass.parse(listing(*lines))["kernel"]


def trace(code, *, size=1 << 20, threads=32, data=None):
    """Run one block of code whose only argument is the address of a buffer ``x``."""
    buffer = Buffer("x", 1 << 40, size, data)
    launch = Recorded("kernel", 1, threads, 0, 1, buffer.base.to_bytes(8, "little"))
    return run(code, launch, [buffer], frozenset({"x"}), [0], LATENCY)


ADDRESS = [
    ("S2R R0, SR_TID.X", {"releases": 0}),
    ("LDC.64 R2, c[0x0][0x210]", {"releases": 1}),
    ("IMAD.WIDE.U32 R4, R0, 0x10, R2", {"waits": (0, 1)}),
]
EXIT = ("EXIT", {})


def test_the_orders_to_the_scheduler_are_read():
    code = function(("@!P0 LDG.E.128 R4, desc[UR4][R2.64+0x10]", {"stall": 4, "releases": 2, "waits": (0, 5)}), EXIT)
    load = code.instructions[0]
    assert (load.kind, load.bytes, load.guard, load.stall) == ("LDG", 16, ("P0", True), 4)
    assert (load.releases, load.waits) == (2, frozenset({0, 5}))
    assert load.operands == ["R4", "desc[UR4][R2.64+0x10]"]
    assert code.instructions[16].releases is None


def test_the_orders_are_those_that_ptxas_wrote():
    """LDC of sm_90, whose result the sixth instruction after it waits for: from a listing of nvdisasm."""
    text = (
        ".text.k:\n        /*0000*/                   LDC R13, c[0x0][0x250] ;     /* 0x00009400ff0d7b82 */\n"
        "          /* 0x000e220000000800 */\n"
        "        /*0010*/                   I2F.U32.RP R4, R13 ;   /* 0x0000000d00047306 */\n"
        "          /* 0x001e220000209000 */\n"
    )
    first, second = sass.parse(text)["k"].instructions.values()
    assert (first.releases, first.waits, second.waits) == (0, frozenset(), frozenset({0}))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no function"),
        (".text.k:\n        /*0000*/   EXIT ;  /* 0x0000000000000000 */\n", "ends within"),
        (".text.k:\n          /* 0x0000000000000000 */\n", "without its first"),
        (".text.k:\n        /*0000*/   something else\n", "not understood"),
    ],
)
def test_a_listing_that_is_not_understood_is_an_error(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        [one.instructions for one in sass.parse(text).values()]


def test_loads_that_wait_for_nothing_are_one_epoch():
    code = function(
        *ADDRESS,
        ("LDG.E.128 R8, desc[UR4][R4.64]", {"releases": 2}),
        ("LDG.E.128 R12, desc[UR4][R4.64+0x200]", {"releases": 3}),
        ("FADD R8, R8, R12", {"waits": (2, 3)}),
        EXIT,
    )
    result = trace(code)
    assert (result.epochs, result.loads_in_epoch) == (1, 2)
    load = result.traffic["load", "x"]
    assert (load.accesses, load.bytes, load.sectors, load.bytes_a_sector) == (2, 1024, 32, 32.0)
    assert 600 < result.cycles < 700


def test_a_load_that_waits_for_another_begins_an_epoch():
    code = function(
        *ADDRESS,
        ("LDG.E.128 R8, desc[UR4][R4.64]", {"releases": 2}),
        ("LDG.E.128 R12, desc[UR4][R4.64+0x200]", {"releases": 3, "waits": (2,)}),
        ("FADD R8, R8, R12", {"waits": (3,)}),
        EXIT,
    )
    result = trace(code)
    assert (result.epochs, result.loads_in_epoch) == (2, 1)
    assert 1200 < result.cycles < 1300


def test_sectors_that_are_not_used_whole_are_seen():
    code = function(
        ("S2R R0, SR_TID.X", {"releases": 0}),
        ("LDC.64 R2, c[0x0][0x210]", {"releases": 1}),
        ("IMAD.WIDE.U32 R4, R0, 0x40, R2", {"waits": (0, 1)}),
        ("LDG.E R8, desc[UR4][R4.64]", {"releases": 2}),
        EXIT,
    )
    assert trace(code).traffic["load", "x"].bytes_a_sector == 4.0


def test_lanes_part_and_meet_again():
    """Odd lanes go another way, whose code comes last; all store together after it, in one access."""
    code = function(
        *ADDRESS,
        ("LOP3.LUT R6, R0, 0x1, RZ, 0xc0, !PT", {}),
        ("ISETP.NE.AND P0, PT, R6, RZ, PT", {}),
        ("IMAD.MOV.U32 R7, RZ, RZ, 0x5", {}),
        ("BSSY B0, `(.L_x_1)", {}),
        ("@P0 BRA `(.L_x_0)", {}),
        ("IMAD.MOV.U32 R7, RZ, RZ, 0x3", {}),
        ".L_x_2",
        ("BSYNC B0", {}),
        ".L_x_1",
        ("STG.E desc[UR4][R4.64], R7", {}),
        EXIT,
        ".L_x_0",
        ("BRA `(.L_x_2)", {}),
    )
    data = np.zeros(512, np.uint8)
    result = trace(code, size=512, data=data)
    assert result.traffic["store", "x"].accesses == 1
    assert data.view(np.uint32)[::4].tolist() == [3, 5] * 16


def test_warps_meet_at_barriers():
    """The second warp stores what the first has left in shared memory."""
    code = function(
        ("S2R R0, SR_TID.X", {"releases": 0}),
        ("LDC.64 R2, c[0x0][0x210]", {"releases": 1}),
        ("IMAD.SHL.U32 R6, R0, 0x4, RZ", {"waits": (0, 1)}),
        ("STS [R6+0x400], R0", {}),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", {}),
        ("LOP3.LUT R8, R6, 0x80, RZ, 0x3c, !PT", {}),
        ("LDS R9, [R8+0x400]", {"releases": 2}),
        ("IMAD.WIDE.U32 R4, R0, 0x4, R2", {}),
        ("STG.E desc[UR4][R4.64], R9", {"waits": (2,)}),
        EXIT,
    )
    data = np.zeros(256, np.uint8)
    trace(code, size=256, threads=64, data=data)
    assert data.view(np.uint32).tolist() == [*range(32, 64), *range(32)]


def test_arithmetic_that_carries():
    """0xffffffff + 1 in 64 bits by IADD3 and its X form; and -1 less 1 by an operand that is negated."""
    code = function(
        *ADDRESS,
        ("IMAD.MOV.U32 R6, RZ, RZ, -0x1", {}),
        ("IADD3 R8, P1, R6, 0x1, RZ", {}),
        ("IADD3.X R9, RZ, RZ, RZ, P1, !PT", {}),
        ("IADD3 R10, P2, -R6, RZ, RZ", {}),
        ("SHF.R.S32.HI R11, RZ, 0x1f, R6", {}),
        ("STG.E.128 desc[UR4][R4.64], R8", {}),
        EXIT,
    )
    data = np.zeros(512, np.uint8)
    trace(code, size=512, data=data)
    assert data.view(np.uint32)[:4].tolist() == [0, 1, 1, 0xFFFFFFFF]


def test_what_is_not_known_is_an_error_that_names_it():
    with pytest.raises(UnknownInstruction, match=r"IMMA\.16832 R4, R4, R6, R8: not known"):
        trace(function(("IMMA.16832 R4, R4, R6, R8", {}), EXIT))
    with pytest.raises(UnknownInstruction, match="SR_CLOCKLO"):
        trace(function(("S2R R4, SR_CLOCKLO", {}), EXIT))


def test_an_access_outside_is_an_error():
    code = function(*ADDRESS, ("LDG.E.128 R8, desc[UR4][R4.64]", {"releases": 2}), EXIT)
    with pytest.raises(OutsideOfMemory, match=r"the buffers are x \["):
        trace(code, size=511)
    with pytest.raises(OutsideOfMemory, match="not aligned to 16"):
        Memory([Buffer("x", 0, 64)]).load(np.array([8]), 16, "LDG")


def test_what_was_recorded_is_read():
    ptx = """.visible .entry kernel(
    .param .u64 .ptr .align 1 kernel_param_0,
    .param .align 8 .b8 kernel_param_1[24],
    .param .u32 kernel_param_2
)"""
    sizes = parameters(ptx)
    assert sizes == {"kernel": [(8, 8), (24, 8), (4, 4)]}
    text = f"case a, b\nbuffer x 4096 16\nmemset 8\nlaunch kernel 2 64 128 1 {'01' * 8} {'02' * 24} 03000000\n"
    (case,) = read(text, sizes).values()
    assert (case.name, case.buffers, case.memsets) == ("a, b", [("x", 4096, 16)], [8])
    (launch,) = case.launches
    assert (launch.blocks, launch.threads, launch.shared_bytes, len(launch.arguments)) == (2, 64, 128, 36)
    assert lay_out([b"\1", b"\2" * 8], [1, 8]) == b"\1" + bytes(7) + b"\2" * 8
    with pytest.raises(ValueError, match="not understood"):
        parameters(".entry k(.param .texref a)")


COPY = ("LDGSTS.E.BYPASS.128.ZFILL [R0+0x400], desc[UR4][R4.64], P0", {})


@pytest.mark.parametrize(("still_on_their_way", "least", "most"), [("0x0", 600, 700), ("0x1", 0, 100)])
def test_copies_arrive_when_their_group_is_waited_for(still_on_their_way, least, most):
    """All lanes write 16 bytes of shared memory; those whose predicate is false write zeros, and read nothing."""
    code = function(
        *ADDRESS,
        ("ISETP.LT.AND P0, PT, R0, 0x8, PT", {}),
        COPY,
        ("LDGDEPBAR", {}),
        (f"DEPBAR.LE SB0, {still_on_their_way}", {}),
        EXIT,
    )
    result = trace(code)
    assert result.traffic["load", "x"].bytes == 8 * 16
    assert result.warps[0].shared_bytes == 32 * 16
    assert least < result.cycles < most


def test_what_matrices_take_of_shared_memory():
    code = function(
        ("LDSM.16.M88.4 R4, [R0]", {}), ("LDSM.16.MT88.2 R8, [R0]", {}), ("HMMA.16816.F32 R4, R4, R8, R4", {}), EXIT
    )
    result = trace(code)
    assert result.warps[0].shared_bytes == 512 + 256
    assert result.issued["HMMA"] == 1


def stored(*lines, words=1):
    """Run code that leaves words from R8 on, and return them of each lane."""
    data = np.zeros(128 * words, np.uint8)
    width = {1: "", 2: ".64", 4: ".128"}[words]
    place = ADDRESS[2][0].replace("0x10", hex(4 * words))
    trace(
        function(*ADDRESS[:2], (place, ADDRESS[2][1]), *lines, (f"STG.E{width} desc[UR4][R4.64], R8", {}), EXIT),
        size=128 * words,
        data=data,
    )
    return data


def test_a_pair_of_halves_is_written_with_the_upper_one_first():
    found = stored(("HFMA2.MMA R8, -RZ, RZ, 1, 5.9604644775390625e-08", {})).view(np.uint32)
    assert set(found.tolist()) == {0x3C000001}


def test_numbers_of_64_bits():
    """-3 * 0.5 + 10 by DFMA, then back to an integer of 64 bits, rounded toward zero, and narrowed to float32."""
    to_double = [
        ("IMAD.MOV.U32 R6, RZ, RZ, -0x3", {}),
        ("I2F.F64 R12, R6", {}),
        ("DMUL R12, R12, 0.5", {}),
        ("DADD R8, -|R12|, 10", {}),
    ]
    assert set(stored(*to_double, words=2).view(np.float64).tolist()) == {8.5}
    whole = stored(*to_double, ("F2I.S64.F64.TRUNC R8, R8", {}), words=2)
    assert set(whole.view(np.int64).tolist()) == {8}
    narrowed = [("DFMA R8, R8, R12, 0.25", {}), ("F2F.F32.F64 R8, R8", {})]
    assert set(stored(*to_double, *narrowed).view(np.float32).tolist()) == {8.5 * -1.5 + 0.25}
    widened = stored(*to_double, *narrowed, ("F2F.F64.F32 R8, R8", {}), words=2)
    assert set(widened.view(np.float64).tolist()) == {8.5 * -1.5 + 0.25}
    less = stored(*to_double, ("DSETP.LT.AND P0, PT, R12, RZ, PT", {}), ("SEL R8, R6, RZ, P0", {}))
    assert set(less.view(np.int32).tolist()) == {-3}


def test_a_uniform_instruction_whose_predicate_is_false_does_nothing():
    """It once took effect all the same, and an index came out one too large."""
    found = stored(
        ("UMOV UR4, 0x7", {}),
        ("UISETP.GE.U32.AND UP0, UPT, UR4, 0x8, UPT", {}),
        ("@UP0 UIADD3 UR4, UR4, 0x1, URZ", {}),
        ("@!UP0 UIADD3 UR4, UR4, 0x10, URZ", {}),
        ("IMAD.U32 R8, RZ, RZ, UR4", {}),
    ).view(np.uint32)
    assert set(found.tolist()) == {0x17}


def test_the_least_of_a_sum():
    found = stored(("VIADDMNMX.RELU R8, R0, -0x5, 0x8, PT", {})).view(np.int32)
    assert found.tolist() == [min(max(lane - 5, 0), 8) for lane in range(32)]


def test_a_constant_is_read_for_the_lanes_that_take_part():
    """Lane 0 reads the kernel's argument; the others, which do not load, would read past the constants."""
    found = stored(
        ("IMAD R6, R0, 0x10000, RZ", {}),
        ("ISETP.EQ.AND P0, PT, R0, RZ, PT", {}),
        ("@P0 LDC R8, c[0x0][R6+0x210]", {}),
    ).view(np.uint32)
    assert found.tolist() == [(1 << 40) & 0xFFFFFFFF] + [0] * 31
    with pytest.raises(UnknownInstruction, match="not among the constants"):
        stored(("IMAD R6, R0, 0x10000, RZ", {}), ("LDC R8, c[0x0][R6+0x210]", {}))


def test_lanes_that_reach_several_buffers_are_counted_for_each():
    buffers = [Buffer("a", 0, 64, np.arange(64, dtype=np.uint8)), Buffer("b", 4096, 64)]
    memory = Memory(buffers)
    _, read = memory.load(np.array([4, 4096, 8]), 4, "LDG")
    assert read.tolist() == [[4, 5, 6, 7], [0] * 4, [8, 9, 10, 11]]
    assert memory.traffic["load", "a"].accesses == memory.traffic["load", "b"].accesses == 1
    memory.store(np.array([4096, 0]), 4, np.full((2, 4), 7, np.uint8), "STG")
    assert buffers[0].data[:8].tolist() == [7, 7, 7, 7, 4, 5, 6, 7]
    with pytest.raises(OutsideOfMemory):
        memory.load(np.array([4, 2048]), 4, "LDG")
