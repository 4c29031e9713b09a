"""Tests of the interpreter's arithmetic: each instruction is compared with its definition in whole numbers and
fractions.
"""

import math
import random
from fractions import Fraction

import pytest
from exact_numbers import BFLOAT, DOUBLE, HALF, SINGLE
from ptx_text import lanewise

COUNT = 1500


def signed(bits, width):
    return bits - (1 << width) if bits >> (width - 1) else bits


def integers(width, seed):
    """Return integers of a width, including the ends of its range and small ones."""
    source = random.Random(seed)
    special = [0, 1, 2, 3, 31, 32, 33, 63, 64, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
    return [
        source.choice(special) if source.random() < 0.4 else source.getrandbits(source.randint(1, width))
        for _ in range(COUNT)
    ]


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul.lo": lambda a, b, w: a * b,
    "mul.hi": lambda a, b, w: a * b >> w,
    "min": lambda a, b, w: min(a, b),
    "max": lambda a, b, w: max(a, b),
    "div": lambda a, b, w: quotient(a, b) if b else -1,
    "rem": lambda a, b, w: a - quotient(a, b) * b if b else a,
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", BINARY)
def test_integer_arithmetic(name, kind):
    width = int(kind[1:])
    a, b = integers(width, 1), integers(width, 2)
    mean = (lambda x: signed(x % (1 << width), width)) if kind[0] == "s" else (lambda x: x % (1 << width))
    got = lanewise(f"{name}.{kind} {{d}}, {{0}}, {{1}};", kind, [(kind, a), (kind, b)])
    expected = [BINARY[name](mean(x), mean(y), width) % (1 << width) for x, y in zip(a, b, strict=True)]
    assert got == expected


@pytest.mark.parametrize("kind", ["s32", "u32", "s16", "u16"])
def test_products_of_twice_the_width(kind):
    width = int(kind[1:])
    wide = f"{kind[0]}{2 * width}"
    a, b, c = integers(width, 3), integers(width, 4), integers(2 * width, 5)
    mean = (lambda x: signed(x % (1 << width), width)) if kind[0] == "s" else (lambda x: x % (1 << width))
    got = lanewise(f"mad.wide.{kind} {{d}}, {{0}}, {{1}}, {{2}};", wide, [(kind, a), (kind, b), (wide, c)])
    assert got == [(mean(x) * mean(y) + z) % (1 << 2 * width) for x, y, z in zip(a, b, c, strict=True)]


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64", "b32", "b64"])
@pytest.mark.parametrize("name", ["shl", "shr"])
def test_shifts_past_the_width(name, kind):
    if name == "shl" and kind[0] != "b":
        return  # there is none
    width = int(kind[1:])
    a, n = integers(width, 6), [random.Random(i).choice([0, 1, 5, 31, 32, 33, 64, 200]) for i in range(COUNT)]
    got = lanewise(f"{name}.{kind} {{d}}, {{0}}, {{1}};", kind, [(kind, a), ("u32", n)])
    mean = (lambda x: signed(x % (1 << width), width)) if kind[0] == "s" else (lambda x: x % (1 << width))
    shift = (lambda x, k: x << k) if name == "shl" else (lambda x, k: x >> k)
    assert got == [shift(mean(x), k) % (1 << width) for x, k in zip(a, n, strict=True)]


def permuted(a, b, selector):
    data = (b << 32 | a).to_bytes(8, "little")
    chosen = []
    for place in range(4):
        digit = selector >> 4 * place & 15
        byte = data[digit & 7]
        chosen.append((255 if byte & 128 else 0) if digit & 8 else byte)
    return int.from_bytes(bytes(chosen), "little")


def inserted(a, b, begin, length):
    text = list(f"{b:032b}"[::-1])
    for i, bit in enumerate(f"{a:032b}"[::-1][:length]):
        if begin + i < 32:
            text[begin + i] = bit
    return int("".join(text)[::-1], 2)


def extracted(a, begin, length, is_signed):
    text = f"{a:032b}"[::-1]
    sign = text[min(begin + length - 1, 31)] if is_signed and length else "0"
    field = [text[begin + i] if begin + i < 32 else sign for i in range(min(length, 32))]
    return int("".join((field + [sign] * 32)[:32])[::-1], 2)


def test_bit_fields_and_bytes():
    a, b, c = (integers(32, seed) for seed in (7, 8, 9))
    small = [value % 40 for value in c]
    length = [value % 36 for value in a]
    three = [("u32", a), ("u32", b), ("u32", c)]
    assert lanewise("prmt.b32 {d}, {0}, {1}, {2};", "b32", three) == [
        permuted(*one) for one in zip(*(values for _, values in three), strict=True)
    ]
    got = lanewise("bfi.b32 {d}, {0}, {1}, {2}, {3};", "b32", [*three[:2], ("u32", small), ("u32", length)])
    assert got == [inserted(*one) for one in zip(a, b, small, length, strict=True)]
    for kind in ("u32", "s32"):
        got = lanewise(f"bfe.{kind} {{d}}, {{0}}, {{1}}, {{2}};", kind, [("u32", b), ("u32", small), ("u32", length)])
        assert got == [extracted(*one, kind == "s32") for one in zip(b, small, length, strict=True)]
    assert lanewise("popc.b32 {d}, {0};", "u32", [("u32", a)]) == [value.bit_count() for value in a]
    assert lanewise("clz.b32 {d}, {0};", "u32", [("u32", a)]) == [32 - value.bit_length() for value in a]
    table = 0b11010010
    got = lanewise(f"lop3.b32 {{d}}, {{0}}, {{1}}, {{2}}, {table};", "b32", three)
    assert got == [
        sum((table >> ((x >> i & 1) * 4 + (y >> i & 1) * 2 + (z >> i & 1)) & 1) << i for i in range(32))
        for x, y, z in zip(a, b, c, strict=True)
    ]


def numbers(form, seed):
    """Return bits of a format: arbitrary ones, and many with close exponents, so that rounding and cancellation
    happen.
    """
    source = random.Random(seed)
    width = form.exponent + form.fraction + 1
    special = [0, form.sign, form.infinity, form.infinity | form.sign, form.infinity + 1, 1, form.sign | 1]
    found = []
    for _ in range(COUNT):
        kind = source.random()
        if kind < 0.15:
            found.append(source.choice(special))
        elif kind < 0.4:
            found.append(source.getrandbits(width))
        else:
            exponent = form.bias + source.randint(-3, 3)
            few = source.getrandbits(form.fraction) & ~((1 << source.randint(0, form.fraction)) - 1)
            found.append(source.getrandbits(1) * form.sign | exponent << form.fraction | few)
    return found


def is_negative(form, bits):
    return bool(bits & form.sign)


def expected_sum(form, a, b):
    x, y = form.value(a), form.value(b)
    if isinstance(x, float) or isinstance(y, float):
        return float(x if isinstance(x, float) else 0) + float(y if isinstance(y, float) else 0)
    return form.round(x + y, is_negative(form, a) and is_negative(form, b))


def expected_product(form, a, b):
    x, y = form.value(a), form.value(b)
    if isinstance(x, float) or isinstance(y, float):
        return float(math.copysign(1, x) if x else 0) * float(y) if isinstance(x, float) is False else x * sign_of(y)
    return form.round(x * y, is_negative(form, a) != is_negative(form, b))


def sign_of(x):
    return float((x > 0) - (x < 0)) if not isinstance(x, float) else x


def agrees(form, got, expected):
    """Return whether ``got`` equals ``expected``, which is bits, an infinity or NaN."""
    if isinstance(expected, float):
        return form.is_nan(got) if math.isnan(expected) else form.value(got) == expected
    return got == expected


FORMATS = {"f32": SINGLE, "f64": DOUBLE}


@pytest.mark.parametrize("kind", FORMATS)
def test_sums_and_products_are_rounded_once(kind):
    form = FORMATS[kind]
    a, b = numbers(form, 11), numbers(form, 12)
    for name, expected in (("add.rn", expected_sum), ("mul.rn", expected_product)):
        got = lanewise(f"{name}.{kind} {{d}}, {{0}}, {{1}};", kind, [(kind, a), (kind, b)])
        wrong = [x for x in zip(a, b, got, strict=True) if not agrees(form, x[2], expected(form, x[0], x[1]))]
        assert not wrong
    got = lanewise(f"sub.rn.{kind} {{d}}, {{0}}, {{1}};", kind, [(kind, a), (kind, b)])
    assert all(agrees(form, g, expected_sum(form, x, y ^ form.sign)) for x, y, g in zip(a, b, got, strict=True)
               if not form.is_nan(y))  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_quotients_and_roots_are_rounded_once(kind):
    form = FORMATS[kind]
    a, b = numbers(form, 13), numbers(form, 14)
    got = lanewise(f"div.rn.{kind} {{d}}, {{0}}, {{1}};", kind, [(kind, a), (kind, b)])
    inverse = lanewise(f"rcp.rn.{kind} {{d}}, {{0}};", kind, [(kind, b)])
    roots = lanewise(f"sqrt.rn.{kind} {{d}}, {{0}};", kind, [(kind, a)])
    for x, y, quotient_bits, inverse_bits, root in zip(a, b, got, inverse, roots, strict=True):
        p, q = form.value(x), form.value(y)
        if not isinstance(q, float) and q != 0:
            assert inverse_bits == form.round(1 / q)
            if not isinstance(p, float):
                assert quotient_bits == form.round(p / q, is_negative(form, x) != is_negative(form, y))
        if not isinstance(p, float) and p > 0:
            # Check that the root lies within half a unit in the last place: between the squares of the two midpoints.
            at = form.value(root)
            low, high = (at + form.value(root - 1)) / 2, (at + form.value(root + 1)) / 2
            assert low * low <= p <= high * high


@pytest.mark.parametrize("kind", FORMATS)
def test_a_fused_product_is_rounded_once(kind):
    form = FORMATS[kind]
    a, b, c = numbers(form, 15), numbers(form, 16), numbers(form, 17)
    # The sum x * y - round(x * y) depends on every bit of the product.
    c = [
        form.round(-form.value(x) * form.value(y)) if i % 3 == 0 and finite(form, x, y) else z
        for i, (x, y, z) in enumerate(zip(a, b, c, strict=True))
    ]
    got = lanewise(f"fma.rn.{kind} {{d}}, {{0}}, {{1}}, {{2}};", kind, [(kind, a), (kind, b), (kind, c)])
    checked = 0
    for x, y, z, bits in zip(a, b, c, got, strict=True):
        if finite(form, x, y, z):
            checked += 1
            exact = form.value(x) * form.value(y) + form.value(z)
            below_zero = (is_negative(form, x) != is_negative(form, y)) and is_negative(form, z)
            assert bits == form.round(exact, below_zero)
    assert checked > COUNT / 3


def finite(form, *bits):
    return all(not isinstance(form.value(one), float) for one in bits)


@pytest.mark.parametrize("kind", FORMATS)
def test_comparisons_know_what_is_no_number(kind):
    form = FORMATS[kind]
    a, b = numbers(form, 18), numbers(form, 19)
    b = [x if i % 4 == 0 else y for i, (x, y) in enumerate(zip(a, b, strict=True))]
    compare = {
        "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y, "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
    }  # fmt: skip
    for name, function in compare.items():
        for suffix, of_nan in (("", False), ("u", True)):
            got = lanewise(f"setp.{name}{suffix}.{kind} {{d}}, {{0}}, {{1}};", "pred", [(kind, a), (kind, b)])
            for x, y, bit in zip(a, b, got, strict=True):
                nan = form.is_nan(x) or form.is_nan(y)
                assert bit == (of_nan if nan else function(form.value(x), form.value(y)))
    for name in ("min", "max"):
        got = lanewise(f"{name}.{kind} {{d}}, {{0}}, {{1}};", kind, [(kind, a), (kind, b)])
        for x, y, bits in zip(a, b, got, strict=True):
            numbers_only = [one for one in (x, y) if not form.is_nan(one)]
            if not numbers_only:
                assert form.is_nan(bits)
            else:  # by value, -0 below +0
                key = {one: (form.value(one), not is_negative(form, one)) for one in numbers_only}
                best = min if name == "min" else max
                assert bits == best(numbers_only, key=key.__getitem__)


@pytest.mark.parametrize(("kind", "form"), [("f16", HALF), ("bf16", BFLOAT)])
def test_sixteen_bit_formats(kind, form):
    every = list(range(1 << 16))
    wide = lanewise(f"cvt.f32.{kind} {{d}}, {{0}};", "f32", [(kind, every)])
    for bits, found in zip(every, wide, strict=True):
        value = form.value(bits)
        assert SINGLE.is_nan(found) if form.is_nan(bits) else SINGLE.value(found) == value
        assert is_negative(SINGLE, found) == is_negative(form, bits) or form.is_nan(bits)
    # Each number, the midpoints to the next numbers, and the values just beside the midpoints.
    halves = [one for one in wide[:: 1 if form is HALF else 5] if not SINGLE.is_nan(one)]
    step = 1 << (22 - form.fraction)
    near = [
        min(one + delta, SINGLE.sign - 1 | one) for one in halves[::3] for delta in (0, 1, step - 1, step, step + 1)
    ]
    near = [one for one in near + numbers(SINGLE, 20) if not SINGLE.is_nan(one)]
    got = lanewise(f"cvt.rn.{kind}.f32 {{d}}, {{0}};", kind, [("f32", near)])
    for bits, found in zip(near, got, strict=True):
        value = SINGLE.value(bits)
        assert agrees(form, found, value if isinstance(value, float) else form.round(value, is_negative(SINGLE, bits)))
    low = numbers(SINGLE, 21)[: len(near)]
    pairs = lanewise(f"cvt.rn.{kind}x2.f32 {{d}}, {{0}}, {{1}};", "b32", [("f32", near[: len(low)]), ("f32", low)])
    alone = lanewise(f"cvt.rn.{kind}.f32 {{d}}, {{0}};", kind, [("f32", low)])
    assert pairs == [high << 16 | one for high, one in zip(got, alone, strict=False)]


@pytest.mark.parametrize("real", FORMATS)
@pytest.mark.parametrize("whole", ["s32", "u32", "s64", "u64"])
def test_conversions_of_integers(real, whole):
    form, width = FORMATS[real], int(whole[1:])
    a = integers(width, 22)
    mean = (lambda x: signed(x % (1 << width), width)) if whole[0] == "s" else (lambda x: x % (1 << width))
    got = lanewise(f"cvt.rn.{real}.{whole} {{d}}, {{0}};", real, [(whole, a)])
    assert got == [form.round(Fraction(mean(x))) for x in a]
    b = numbers(form, 23) + [form.round(Fraction(mean(x))) for x in a] + [form.round(Fraction(x, 2)) for x in a[:99]]
    least, most = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if whole[0] == "s" else (0, (1 << width) - 1)
    directions = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for name, function in directions.items():
        got = lanewise(f"cvt.{name}.{whole}.{real} {{d}}, {{0}};", whole, [(real, b)])
        for x, found in zip(b, got, strict=True):
            value = form.value(x)
            if form.is_nan(x):
                assert found == (0 if real == "f32" and width == 32 else 1 << (width - 1))
            elif isinstance(value, float):
                assert found == (most if value > 0 else least) % (1 << width)
            else:
                assert found == min(max(function(value), least), most) % (1 << width)


def test_the_first_guess_of_a_reciprocal():
    b = [one for one in numbers(DOUBLE, 25) if finite(DOUBLE, one) and 2**-900 < abs(DOUBLE.value(one)) < 2**900]
    got = lanewise("rcp.approx.ftz.f64 {d}, {0};", "f64", [("f64", b)])
    assert all(
        abs(DOUBLE.value(found) * DOUBLE.value(x) - 1) < Fraction(1, 1 << 20) for x, found in zip(b, got, strict=True)
    )
