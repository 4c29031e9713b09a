"""What the instructions that compute do to a warp's registers.

Integers, predicates and moves are exact: addresses and branches come from them. Floats are numpy's, which round some
results differently (a GPU's reciprocal is an approximation); nothing is read from them but integers after a correction
that the code itself makes, and comparisons of logits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from registers import LANES, PREDICATE, U32, Effect, Lanes, Registers, UnknownInstruction, half_pair

EFFECTS: dict[str, Effect] = {}
M32 = 0xFFFFFFFF


def effect(*kinds: str) -> Callable[[Effect], Effect]:
    """Register what instructions do; a uniform one (``UIADD3``) does the same to uniform registers."""

    def register(function: Effect) -> Effect:
        EFFECTS.update({kind: function for kind in kinds})
        return function

    return register


def take_predicates(operands: list[str]) -> tuple[list[str], list[str]]:
    """Split the predicates off the front of a list of operands."""
    count = 0
    while count < len(operands) and PREDICATE.match(operands[count]):
        count += 1
    return operands[:count], operands[count:]


def signed(word: Lanes) -> Lanes:
    """Return 32 bits as a signed number in 64 bits."""
    return word.astype(U32).view(np.int32).astype(np.int64)


def words(numbers: list[int]) -> tuple[Lanes, Lanes]:
    """Return the low and the high words of numbers of any size."""
    return np.array([n & M32 for n in numbers], U32), np.array([n >> 32 & M32 for n in numbers], U32)


@effect("IADD3", "UIADD3", "VIADD", "IADD")
def add(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    carries, rest = take_predicates(operands[1:])
    sources = [name for name in rest if not PREDICATE.match(name)]
    total = sum((r.integer(name) for name in sources), np.zeros(LANES, np.int64))
    if "X" in modifiers:
        for name in rest[len(sources) :]:
            total = total + r.predicate(name)
    r.write(operands[0], (total & M32).astype(U32), mask)
    for count, name in enumerate(carries):
        r.write_predicate(name, (total >> 32) > count, mask)


@effect("IMAD", "UIMAD")
def multiply_add(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    target, (carry, sources) = operands[0], take_predicates(operands[1:])
    a, b, c = sources[:3]
    if "WIDE" in modifiers or "HI" in modifiers:
        x, y = r.word(a), r.word(b)
        if "U32" not in modifiers:
            x, y = signed(x), signed(y)
        total = [m * n + more for m, n, more in zip(x.tolist(), y.tolist(), r.wide(c), strict=True)]
        low, high = words(total)
        if "X" in modifiers:
            raise UnknownInstruction("IMAD.WIDE.X")
        for name in carry:
            r.write_predicate(name, np.array([n >> 64 != 0 for n in total]), mask)
        if "HI" in modifiers:
            r.write(target, high, mask)
        else:
            r.write(target, low, mask, high)
        return
    product = r.word(a).astype(np.uint64) * r.word(b).astype(np.uint64)
    total = (product & np.uint64(M32)).astype(np.int64) + r.integer(c)
    if "X" in modifiers:
        total = total + r.predicate(sources[3])
    r.write(target, (total & M32).astype(U32), mask)


@effect("LEA", "ULEA")
def shift_add(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    target, (carry, sources) = operands[0], take_predicates(operands[1:])
    values = [name for name in sources if not PREDICATE.match(name)]
    a, b = r.word(values[0]).astype(np.uint64), r.integer(values[1])
    shift = np.uint64(int(values[-1], 16))
    if "HI" in modifiers:
        if "SX32" in modifiers:
            above = (signed(a.astype(U32)) >> 31).astype(U32).astype(np.uint64)
        else:
            above = r.word(values[2]).astype(np.uint64)
        part = ((above << np.uint64(32) | a) << shift) >> np.uint64(32)
    else:
        part = (a << shift) & np.uint64(M32)
    total = part.astype(np.int64) + b
    if "X" in modifiers:
        total = total + r.predicate(sources[-1])
    r.write(target, (total & M32).astype(U32), mask)
    for name in carry:
        r.write_predicate(name, total >> 32 > 0, mask)


@effect("LOP3", "ULOP3")
def logic(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    outcome, (target, a, b, c, table, *_) = take_predicates(operands)
    x, y, z = r.word(a), r.word(b), r.word(c)
    result = np.zeros(LANES, U32)
    for bit in range(8):
        if int(table, 16) >> bit & 1:
            result |= (x if bit & 4 else ~x) & (y if bit & 2 else ~y) & (z if bit & 1 else ~z)
    r.write(target, result, mask)
    for name in outcome:
        r.write_predicate(name, result != 0, mask)


@effect("PLOP3", "UPLOP3")
def predicate_logic(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    index = sum(r.predicate(name).astype(int) << place for name, place in zip(operands[2:5], (2, 1, 0), strict=True))
    for target, table in zip(operands[:2], operands[5:7], strict=True):
        r.write_predicate(target, (int(table, 16) >> index & 1).astype(bool), mask)


@effect("SHF", "USHF")
def shift(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    target, low, by, high = operands
    steps = [n & 31 if "W" in modifiers else min(n, 63) for n in r.word(by).tolist()]
    bits = 32 if {"U32", "S32"} & modifiers and "L" in modifiers else 64
    halves = zip(r.word(low).tolist(), r.word(high).tolist(), strict=True)
    both = [below if bits == 32 else above << 32 | below for below, above in halves]
    if {"S32", "S64"} & modifiers and "R" in modifiers:
        both = [n - (1 << 64) if n >> 63 else n for n in both]
    moved = [n << s if "L" in modifiers else n >> s for n, s in zip(both, steps, strict=True)]
    r.write(target, words(moved)[1 if "HI" in modifiers else 0], mask)


@effect("MOV", "UMOV", "R2UR")
def move(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    source = r.word(operands[-1])
    if operands[0].startswith("U") and not operands[-1].startswith("U"):  # of the first lane that takes part
        source = np.full(LANES, source[int(np.argmax(mask))], U32)
    r.write(operands[0], source, mask if not operands[0].startswith("U") else np.ones(LANES, bool))


@effect("SEL", "USEL", "FSEL")
def select(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    target, a, b, which = operands
    try:
        x, y = r.word(a), r.word(b)
    except UnknownInstruction:  # immediates of FSEL are written as numbers
        x, y = r.floating(a).view(U32), r.floating(b).view(U32)
    r.write(target, np.where(r.predicate(which), x, y), mask)


@effect("VIMNMX", "VIMNMX3", "IMNMX", "UIMNMX")
def least(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    read = (lambda name: r.word(name).astype(np.int64)) if "U32" in modifiers else (lambda name: signed(r.word(name)))
    values = [read(name) for name in operands[1:-1]]
    low, high = np.minimum.reduce(values), np.maximum.reduce(values)
    r.write(operands[0], np.where(r.predicate(operands[-1]), low, high).astype(np.int64).astype(U32), mask)


@effect("VIADDMNMX")
def least_of_sum(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    target, a, b, bound, which = operands
    total = signed((r.integer(a) + r.integer(b) & M32).astype(U32))
    other = signed(r.word(bound))
    found = np.where(r.predicate(which), np.minimum(total, other), np.maximum(total, other))
    r.write(target, (np.maximum(found, 0) if "RELU" in modifiers else found).astype(U32), mask)


@effect("IABS")
def absolute(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    r.write(operands[0], np.abs(signed(r.word(operands[1]))).astype(U32), mask)


@effect("POPC", "UPOPC")
def count_bits(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    r.write(operands[0], np.array([int(n).bit_count() for n in r.word(operands[1])], U32), mask)


@effect("FLO", "UFLO")
def find_leading_one(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    found = [int(n).bit_length() - 1 for n in r.word(operands[1])]
    if "SH" in modifiers:
        found = [31 - n if n >= 0 else n for n in found]
    r.write(operands[0], np.array([n & M32 for n in found], U32), mask)


@effect("BREV", "UBREV")
def reverse_bits(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    r.write(operands[0], np.array([int(f"{int(n):032b}"[::-1], 2) for n in r.word(operands[1])], U32), mask)


@effect("PRMT", "UPRMT")
def permute_bytes(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    target, low, selector, high = operands
    both = r.word(high).astype(np.uint64) << np.uint64(32) | r.word(low).astype(np.uint64)
    choice = r.word(selector).astype(np.uint64)
    result = np.zeros(LANES, np.uint64)
    for place in range(4):
        nibble = choice >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        result |= np.where(nibble >> np.uint64(3), sign, byte) << np.uint64(8 * place)
    r.write(target, result.astype(U32), mask)


COMPARE = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip
JOIN = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}


@effect("ISETP", "UISETP")
def compare(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    first, second, a, b, joined, *low = operands
    order = next(name for name in COMPARE if name in modifiers)
    x, y = r.word(a), r.word(b)
    if "U32" not in modifiers:
        x, y = signed(x), signed(y)
    held = COMPARE[order](x, y)
    if "EX" in modifiers:  # of 64 bits, whose low words were compared before
        below = r.predicate(low[0])
        strict = {"GE": "GT", "LE": "LT"}.get(order, order)
        held = {"NE": (x != y) | below, "EQ": (x == y) & below}.get(order, COMPARE[strict](x, y) | ((x == y) & below))
    write_outcome(r, (first, second), held, joined, modifiers, mask)


def write_outcome(
    r: Registers, targets: tuple[str, str], held: Lanes, joined: str, modifiers: frozenset[str], mask: Lanes
) -> None:
    """Write the outcome of a comparison and its contrary, each joined with another predicate."""
    join = JOIN[next(name for name in JOIN if name in modifiers)]
    other = r.predicate(joined)
    outcomes = [join(held, other), join(~held, other)]
    for target, outcome in zip(targets, outcomes, strict=True):
        r.write_predicate(target, outcome, mask)


@effect("FSETP", "HSETP2")
def compare_floats(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    compare_numbers(r, operands, modifiers, mask, r.floating)


@effect("DSETP")
def compare_doubles(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    compare_numbers(r, operands, modifiers, mask, r.double)


def compare_numbers(
    r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes, read: Callable[[str], Lanes]
) -> None:
    """Compare two floats; those that are no numbers are neither less nor greater, but unordered."""
    first, second, a, b, joined = operands
    x, y = read(a), read(b)
    unordered = np.isnan(x) | np.isnan(y)
    if "NAN" in modifiers:
        held = unordered
    elif "NUM" in modifiers:
        held = ~unordered
    else:
        order = next(name for name in COMPARE if name in modifiers or name + "U" in modifiers)
        ordered = COMPARE[order](x, y) & ~unordered
        held = ordered | unordered if order + "U" in modifiers else ordered
    write_outcome(r, (first, second), held, joined, modifiers, mask)


def float_effect(kind: str, compute: Callable[..., Lanes]) -> None:
    """Register an instruction on floats."""

    def run(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
        with np.errstate(all="ignore"):
            value = compute(*(r.floating(name) for name in operands[1:] if not PREDICATE.match(name)))
        r.write(operands[0], value.astype(np.float32).view(U32), mask)

    EFFECTS[kind] = run


float_effect("FADD", lambda a, b: a + b)
float_effect("FMUL", lambda a, b: a * b)
float_effect("FFMA", lambda a, b, c: a.astype(np.float64) * b + c)


def write_double(r: Registers, name: str, value: Lanes, mask: Lanes) -> None:
    """Write a pair of registers."""
    low, high = words(value.astype(np.float64).view(np.uint64).tolist())
    r.write(name, low, mask, high)


def double_effect(kind: str, compute: Callable[..., Lanes]) -> None:
    """Register an instruction on floats of 64 bits."""

    def run(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
        with np.errstate(all="ignore"):
            value = compute(*(r.double(name) for name in operands[1:] if not PREDICATE.match(name)))
        write_double(r, operands[0], value, mask)

    EFFECTS[kind] = run


double_effect("DADD", lambda a, b: a + b)
double_effect("DMUL", lambda a, b: a * b)
double_effect("DFMA", lambda a, b, c: a * b + c)


@effect("FMNMX")
def least_float(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    target, a, b, which = operands
    low, high = (np.minimum, np.maximum) if "NAN" in modifiers else (np.fmin, np.fmax)
    x, y = r.floating(a), r.floating(b)
    r.write(target, np.where(r.predicate(which), low(x, y), high(x, y)).astype(np.float32).view(U32), mask)


SPECIAL = {
    "RCP": lambda x: 1 / x, "RSQ": lambda x: 1 / np.sqrt(x), "SQRT": np.sqrt, "EX2": np.exp2, "LG2": np.log2,
    "TANH": np.tanh, "SIN": np.sin, "COS": np.cos,
}  # fmt: skip


@effect("MUFU")
def special_function(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    if {"RCP64H", "RSQ64H"} & modifiers:  # the upper words of a double and of what is nearly the function of it
        double = np.array([int(n) << 32 for n in r.word(operands[1])], np.uint64).view(np.float64)
        with np.errstate(all="ignore"):
            found = 1 / double if "RCP64H" in modifiers else 1 / np.sqrt(double)
        r.write(operands[0], words(found.view(np.uint64).tolist())[1], mask)
        return
    with np.errstate(all="ignore"):
        value = SPECIAL[next(iter(modifiers & set(SPECIAL)))](r.floating(operands[1]))
    r.write(operands[0], value.astype(np.float32).view(U32), mask)


@effect("FCHK")
def division_needs_care(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    """Say that a division is an ordinary one: the way that almost all take."""
    r.write_predicate(operands[0], np.zeros(LANES, bool), mask)


@effect("I2F", "I2FP")
def to_float(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    if {"U64", "S64"} & modifiers:
        whole = np.array(r.wide(operands[1]), np.uint64)
        exact = (whole if "U64" in modifiers else whole.view(np.int64)).astype(np.float64)
    else:
        word = r.word(operands[1])
        exact = (word if "U32" in modifiers else signed(word)).astype(np.float64)
    if "F64" in modifiers:
        write_double(r, operands[0], exact, mask)
        return
    value = exact.astype(np.float32)
    if "RP" in modifiers:
        value = np.where(value < exact, np.nextafter(value, np.float32(np.inf)), value)
    r.write(operands[0], value.astype(np.float32).view(U32), mask)


@effect("F2I")
def to_integer(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    value = r.double(operands[1]) if "F64" in modifiers else r.floating(operands[1]).astype(np.float64)
    number = np.nan_to_num(value)
    whole = np.trunc(number) if "TRUNC" in modifiers else np.rint(number)
    if {"U64", "S64"} & modifiers:
        low, high = (0, (1 << 64) - 1) if "U64" in modifiers else (-(1 << 63), (1 << 63) - 1)
        below, above = words([max(low, min(high, int(one))) for one in whole])
        r.write(operands[0], below, mask, above)
        return
    low, high = (0, M32) if "U32" in modifiers else (-(1 << 31), (1 << 31) - 1)
    r.write(operands[0], (np.clip(whole, low, high).astype(np.int64) & M32).astype(U32), mask)


@effect("F2F")
def change_width(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    """Round a number of 64 bits to float32."""
    if modifiers != {"F32", "F64"}:
        raise UnknownInstruction("between these widths")
    with np.errstate(all="ignore"):
        r.write(operands[0], r.double(operands[1]).astype(np.float32).view(U32), mask)


@effect("F2F.F64")
def widen(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    write_double(r, operands[0], r.floating(operands[1]).astype(np.float64), mask)


@effect("F2FP")
def pack_floats(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    """Round two floats to 16 bits; toward zero, since no address depends on it."""
    high, low = (r.floating(name).view(U32) >> U32(16) for name in operands[1:3])
    r.write(operands[0], high << U32(16) | low, mask)


@effect("HADD2", "HMUL2", "HFMA2")
def half_pairs(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    if "F32" in modifiers:  # widens a half
        half = r.raw(operands[-1].lstrip("-")).astype(np.uint16).view(np.float16)
        r.write(operands[0], half.astype(np.float32).view(U32), mask)
    elif operands[1:3] == ["-RZ", "RZ"]:  # a constant
        r.write(operands[0], np.full(LANES, half_pair(*operands[3:5]), U32), mask)
    else:
        raise UnknownInstruction("arithmetic on pairs of halves")


@effect("P2R")
def predicates_to_register(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    packed = np.zeros(LANES, U32)
    for bit in range(7):
        if int(operands[3], 16) >> bit & 1:
            packed |= r.predicates[bit].astype(U32) << U32(bit)
    r.write(operands[0], packed | r.word(operands[2]), mask)


@effect("R2P")
def register_to_predicates(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    word = r.word(operands[1])
    for bit in range(7):
        if int(operands[2], 16) >> bit & 1:
            r.write_predicate(f"P{bit}", (word >> U32(bit) & U32(1)).astype(bool), mask)


@effect("CS2R")
def special_register_pair(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    if operands[1] != "SRZ":
        raise UnknownInstruction(operands[1])
    zero = np.zeros(LANES, U32)
    r.write(operands[0], zero, mask, None if "32" in modifiers else zero)


@effect("LDC", "ULDC")
def load_constant(r: Registers, operands: list[str], modifiers: frozenset[str], mask: Lanes) -> None:
    value = r.raw(operands[1])
    if "U8" in modifiers:
        value = value & U32(0xFF)
    r.write(operands[0], value, mask, r.raw(operands[1], high=True) if "64" in modifiers else None)
