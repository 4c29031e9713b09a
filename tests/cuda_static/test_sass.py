"""Tests of the parser of machine code, on handwritten listings."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import recorded
import sass
from counters import loads_together


def encoded(*, releases=7, waits=()):
    """Return the upper half of an instruction's encoding with the given scoreboards."""
    control = 1 | releases << 5 | 7 << 8 | sum(1 << board for board in waits) << 11
    return control << 41


def listing(*lines, name="kernel"):
    """Return a listing as nvdisasm prints it; each line is an instruction's text with its encoding, or a label."""
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


def together(*lines):
    """Return the number of loads in flight together in a kernel of these lines."""
    return loads_together(sass.parse(listing(*lines, ("EXIT", {})))["kernel"].instructions)


def test_the_orders_to_the_scheduler_are_read():
    code = listing(
        ("@!P0 LDG.E.128 R4, desc[UR4][R2.64+0x10]", {"releases": 2, "waits": (0, 5)}), ".L_x_0", ("EXIT", {})
    )
    function = sass.parse(code)["kernel"]
    load, end = function.instructions
    assert (load.opcode, load.releases, load.waits) == ("LDG.E.128", 2, frozenset({0, 5}))
    assert (end.opcode, end.releases, end.waits) == ("EXIT", None, frozenset())
    assert function.opcodes == ["LDG.E.128", "EXIT"]


def test_the_orders_are_those_that_ptxas_wrote():
    """The lines are copied from a listing for sm_90; the sixth instruction after LDC waits for its result."""
    text = (
        ".text.k:\n        /*0000*/                   LDC R13, c[0x0][0x250] ;     /* 0x00009400ff0d7b82 */\n"
        "          /* 0x000e220000000800 */\n"
        "        /*0010*/                   I2F.U32.RP R4, R13 ;   /* 0x0000000d00047306 */\n"
        "          /* 0x001e220000209000 */\n"
    )
    first, second = sass.parse(text)["k"].instructions
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


FIRST = ("LDG.E.128 R8, desc[UR4][R4.64]", {"releases": 2})


def test_loads_that_wait_for_nothing_are_under_way_together():
    second = ("LDG.E.128 R12, desc[UR4][R4.64+0x200]", {"releases": 3})
    assert together(FIRST, second, ("FADD R8, R8, R12", {"waits": (2, 3)})) == 2


def test_loads_that_share_a_scoreboard_are_under_way_together():
    assert together(FIRST, FIRST, FIRST, ("FADD R8, R8, R12", {"waits": (2,)})) == 3


def test_a_load_that_waits_for_another_is_not_under_way_with_it():
    assert together(FIRST, ("LDG.E.128 R12, desc[UR4][R4.64]", {"releases": 3, "waits": (2,)})) == 1


def test_so_is_one_that_comes_after_an_instruction_that_waited():
    second = ("LDG.E.128.CONSTANT R12, desc[UR4][R4.64]", {"releases": 3})
    lines = ("FSETP.NEU.AND P0, PT, R8, 1, PT", {"waits": (2,)}), ("@P0 BRA `(.L_x_0)", {}), second, ".L_x_0", FIRST
    assert together(FIRST, *lines) == 1.5


def test_a_load_that_waits_for_an_index_or_a_weight_is_under_way_with_others():
    index = ("LDG.E R2, desc[UR4][R4.64]", {"releases": 0})
    copy = ("LDGSTS.E.BYPASS.128 [R0], desc[UR4][R4.64]", {"releases": 5})
    after = ("LDG.E.128 R12, desc[UR4][R2.64]", {"releases": 3, "waits": (0, 5)})
    assert together(index, copy, FIRST, index, after) == 2
    assert together(index, copy) == 0


def test_recorded_calls_are_read():
    cases = recorded.read("case a, b\nmemset\nlaunch kernel\nlaunch other\ncase c\nlaunch kernel\n")
    assert cases == {"a, b": recorded.Case(["kernel", "other"], 1), "c": recorded.Case(["kernel"], 0)}
    with pytest.raises(ValueError, match="not understood"):
        recorded.read("buffer x")
