"""The registers of a warp and the operands that instructions name: 32 lanes of 32 bits, predicates, constants."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

LANES = 32
U32 = np.uint32
Lanes = np.ndarray
REGISTER = re.compile(r"^(U?)R(\d+|Z)(?:\.(H0_H0|H1_H1|U32|64))?$")
PREDICATE = re.compile(r"^(!?)(U?)P(\d|T)$")
CONSTANT = re.compile(r"^c\[0x([0-9a-f]+)\]\[0x([0-9a-f]+)\]$")
INDEXED = re.compile(r"^c\[0x([0-9a-f]+)\]\[(R\d+|RZ)(?:\+(0x[0-9a-f]+))?\]$")
INTEGER = re.compile(r"^-?0x[0-9a-f]+$")
FLOATS = {"+INF": np.inf, "-INF": -np.inf, "+QNAN": np.nan, "-QNAN": np.nan}


class UnknownInstruction(Exception):
    """An instruction, or a form of one, whose effect this executor does not know."""


class Registers:
    """What a warp holds: registers, predicates, and the constants that it was launched with."""

    def __init__(self, constants: dict[int, bytes]) -> None:
        self.vector = np.zeros((256, LANES), U32)
        self.uniform = np.zeros((64, LANES), U32)
        self.predicates = np.zeros((8, LANES), bool)
        self.uniform_predicates = np.zeros((8, LANES), bool)
        self.predicates[7] = self.uniform_predicates[7] = True
        self.constants = constants
        self.active = np.ones(LANES, bool)  # the lanes in which the present instruction takes effect

    def constant(self, bank: int, offset: int, size: int = 4) -> int:
        """Read a constant; bank 0 holds the launch's shape and the kernel's arguments."""
        if bank not in self.constants or offset + size > len(self.constants[bank]):
            raise UnknownInstruction(f"c[{bank:#x}][{offset:#x}] is not among the constants of the launch")
        return int.from_bytes(self.constants[bank][offset : offset + size], "little")

    def file(self, name: str) -> tuple[Lanes, int]:
        """Return the file of registers that a name means, and the number in it."""
        found = REGISTER.match(name)
        if not found:
            raise UnknownInstruction(f"expected a register, got {name!r}")
        if found[1]:
            return self.uniform, 63 if found[2] == "Z" else int(found[2])
        return self.vector, 255 if found[2] == "Z" else int(found[2])

    def write(self, name: str, value: Lanes, mask: Lanes, high: Lanes | None = None) -> None:
        """Write a register in the lanes of ``mask``, and ``high`` to the one after it."""
        file, number = self.file(name)
        zero = len(file) - 1
        for at, word in ((number, value), (number + 1, high)):
            if number != zero and word is not None:
                np.copyto(file[at], word.astype(U32, copy=False), where=mask)

    def predicate(self, name: str) -> Lanes:
        """Read a predicate such as ``!P0`` or ``UP1``."""
        found = PREDICATE.match(name)
        if not found:
            raise UnknownInstruction(f"expected a predicate, got {name!r}")
        file = self.uniform_predicates if found[2] else self.predicates
        value = file[7 if found[3] == "T" else int(found[3])]
        return ~value if found[1] else value

    def write_predicate(self, name: str, value: Lanes, mask: Lanes) -> None:
        """Write a predicate in the lanes of ``mask``; PT takes nothing."""
        found = PREDICATE.match(name)
        if not found:
            raise UnknownInstruction(f"expected a predicate, got {name!r}")
        if found[3] != "T":
            file = self.uniform_predicates if found[2] else self.predicates
            np.copyto(file[int(found[3])], value, where=mask)

    def raw(self, name: str, high: bool = False) -> Lanes:
        """Read the 32 bits of a register, constant or integer; ``high`` reads the word after it."""
        if found := REGISTER.match(name):
            file, number = self.file(name)
            last = number == len(file) - 1
            value = file[number if last or not high else number + 1]
            if found[3] in ("H0_H0", "H1_H1"):
                half = value >> U32(16) if found[3] == "H1_H1" else value & U32(0xFFFF)
                return half.astype(U32)
            return value
        if found := CONSTANT.match(name):
            word = self.constant(int(found[1], 16), int(found[2], 16) + 4 * high)
            return np.full(LANES, word, U32)
        if found := INDEXED.match(name):
            bank, offset = int(found[1], 16), int(found[3] or "0", 16) + 4 * high
            read = np.zeros(LANES, U32)
            for lane in np.flatnonzero(self.active):  # what the others would read may be nowhere
                read[lane] = self.constant(bank, int(self.raw(found[2])[lane]) + offset)
            return read
        if INTEGER.match(name):
            number = int(name, 16)
            return np.full(LANES, (number >> 32 if high else number) & 0xFFFFFFFF, U32)
        raise UnknownInstruction(f"operand {name!r}")

    def integer(self, name: str) -> Lanes:
        """Read an operand as an unsigned number in 64 bits; negation makes 2^32 less it of it, so that sums carry."""
        if name[0] == "-" and not INTEGER.match(name):
            return np.int64(1 << 32) - self.raw(name[1:]).astype(np.int64)
        if name[0] == "~":
            return (~self.raw(name[1:])).astype(np.int64)
        if name[0] == "|":
            return np.abs(self.raw(name.strip("|")).view(np.int32).astype(np.int64))
        return self.raw(name).astype(np.int64)

    def word(self, name: str) -> Lanes:
        """Read an operand's 32 bits after negation."""
        return (self.integer(name) & 0xFFFFFFFF).astype(U32)

    def wide(self, name: str) -> list[int]:
        """Read an operand of 64 bits, as Python's numbers."""
        negative = name[0] == "-" and not INTEGER.match(name)
        bare = name[1:] if negative else name
        low, high = self.raw(bare).tolist(), self.raw(bare, high=True).tolist()
        sign = -1 if negative else 1
        return [sign * (above << 32 | below) for below, above in zip(low, high, strict=True)]

    def floating(self, name: str) -> Lanes:
        """Read an operand as float32."""
        return self._number(name, np.float32, lambda bare: self.raw(bare).view(np.float32))

    def double(self, name: str) -> Lanes:
        """Read an operand as float64."""
        return self._number(name, np.float64, lambda bare: np.array(self.wide(bare), np.uint64).view(np.float64))

    def _number(self, name: str, dtype: type[np.floating], stored: Callable[[str], Lanes]) -> Lanes:
        sign = 1.0
        if name[0] == "-" and name not in FLOATS:
            sign, name = -1.0, name[1:]
        absolute = name[0] == "|"
        name = name.strip("|")
        if name in FLOATS:
            value = np.full(LANES, FLOATS[name], dtype)
        elif REGISTER.match(name) or CONSTANT.match(name):
            value = stored(name)
        else:
            value = np.full(LANES, float(name), dtype)
        return dtype(sign) * (np.abs(value) if absolute else value)


def half_pair(high: str, low: str) -> int:
    """Return the word of two immediates of 16 bits, of which nvdisasm prints the upper one first."""
    return int.from_bytes(struct.pack("<ee", float(low), float(high)), "little")


Effect = Callable[["Registers", list[str], frozenset[str], Lanes], None]
