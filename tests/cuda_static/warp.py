"""Runs machine code of sm_90 a warp at a time, and counts what it issues, waits for and touches.

Lanes that part run one after the other, those at the lowest address first, and meet where the code says so (BSSY,
BSYNC). A warp's clock follows the encoding: an instruction issues when the stall of the one before is over and the
scoreboards that it names are released, so the clock is that of a warp that has its multiprocessor to itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
from arithmetic import EFFECTS
from memory import Buffer, Memory
from registers import LANES, U32, Lanes, Registers, UnknownInstruction
from sass import SCOREBOARDS, Function, Instruction

CYCLES = {
    "LDS": 30, "ATOMS": 60, "SHFL": 25, "MUFU": 20, "I2F": 20, "F2I": 20, "F2F": 20, "LDC": 30, "ULDC": 20, "S2R": 20,
    "S2UR": 20, "VOTE": 10, "MATCH": 25, "REDUX": 20, "POPC": 15, "FLO": 15, "R2UR": 12, "ATOMG": 700, "RED": 20,
}  # fmt: skip
"""From issue to result, where a scoreboard tells of it (rounded; from published measurements of Hopper)."""
CYCLES_OTHERWISE = 20
PARAMETERS = 0x210
"""Where the arguments of a kernel begin in bank 0 on sm_90."""
SHARED_WINDOW = 1 << 24
GENERIC_SHARED = 0x7F00
"""The upper word of addresses that name shared memory where any memory may be named."""
DONE_WITHOUT_EFFECT = {
    "NOP", "YIELD", "WARPSYNC", "ENDCOLLECTIVE", "ERRBAR", "CCTL", "BMOV", "NANOSLEEP", "PREEXIT", "ACQBULK", "HMMA",
}  # fmt: skip
"""What is counted alone. No address depends on a product of matrices, so that leaves its registers as they were."""


@dataclass
class Counts:
    """What one warp did."""

    issued: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    loads_in_epoch: list[int] = field(default_factory=list)
    cycles: int = 0
    shared_bytes: int = 0  # that it moved to and from shared memory

    @property
    def instructions(self) -> int:
        """Instructions that the warp issued."""
        return self.issued.total()


class Warp:
    """One warp of a block. ``payload`` names the buffers whose loads make epochs; others are indices."""

    def __init__(
        self, function: Function, memory: Memory, shared: np.ndarray, constants: bytes, special: dict[str, Lanes],
        payload: frozenset[str], latency: dict[str, int],
    ) -> None:  # fmt: skip
        self.function, self.memory, self.shared, self.special = function, memory, shared, special
        self.payload, self.latency = payload, latency
        self.registers = Registers({0: constants})
        self.at = np.full(LANES, min(function.instructions))
        self.alive = np.ones(LANES, bool)
        self.parked: dict[int, Lanes] = {}
        self.meeting: dict[str, Lanes] = {}
        self.counts = Counts()
        self.released = [0] * SCOREBOARDS
        self.outstanding: list[int] = [0] * SCOREBOARDS
        self.waited = True
        self.copies: list[int] = []  # when each group of asynchronous copies will have arrived
        self.copied_by = 0

    def run(self) -> Generator[None, None, None]:
        """Run to the end; yields at every barrier of the block."""
        while self.alive.any():
            ready = self.alive.copy()
            for parked in self.parked.values():
                ready &= ~parked
            if not ready.any():
                raise RuntimeError(f"{self.function.name}: every lane waits for another")
            address = int(self.at[ready].min())
            active = ready & (self.at == address)
            instruction = self.function.instructions[address]
            mask = active
            if instruction.guard:
                name, negated = instruction.guard
                mask = active & self.registers.predicate("!" + name if negated else name)
            self.issue(instruction)
            if instruction.kind == "BAR":
                self.at[active] += 16
                yield
                continue
            try:
                self.execute(instruction, active, mask)
            except UnknownInstruction as unknown:
                raise UnknownInstruction(f"{instruction.text}: {unknown}") from None

    def issue(self, one: Instruction) -> None:
        """Advance the clock to where the instruction issues, and past it."""
        counts = self.counts
        for board in one.waits:
            counts.cycles = max(counts.cycles, self.released[board])
            if self.outstanding[board]:
                self.waited = True
                self.outstanding[board] = 0
        counts.issued[one.kind] += 1
        for board in (one.releases, one.releases_after_reading):
            if board is not None:
                done = counts.cycles + CYCLES.get(one.kind, CYCLES_OTHERWISE)
                self.released[board] = max(self.released[board], done)
        counts.cycles += max(one.stall, 1)

    def loaded(self, one: Instruction, buffer: Buffer) -> None:
        """Note that a load from a buffer is on its way; the first after a wait for another begins an epoch."""
        issued = self.counts.cycles - max(one.stall, 1)
        if one.releases is not None:
            done = issued + self.latency.get(buffer.name, self.latency["otherwise"])
            self.released[one.releases] = max(self.released[one.releases], done)
        if buffer.name in self.payload:
            if self.waited:
                self.counts.epochs += 1
                self.counts.loads_in_epoch.append(0)
                self.waited = False
            self.counts.loads_in_epoch[-1] += 1
            if one.releases is not None:
                self.outstanding[one.releases] += 1

    def execute(self, one: Instruction, active: Lanes, mask: Lanes) -> None:
        """Do what an instruction does to the lanes of ``mask``; ``active`` go on to the next."""
        handler = getattr(self, f"do_{one.kind.lower()}", None)
        if handler is None:
            kind = one.kind if one.kind in EFFECTS else one.kind.removeprefix("U")
            if kind in EFFECTS:
                everywhere = np.full(LANES, mask.any()) if one.kind.startswith("U") else mask
                self.registers.active = everywhere
                EFFECTS[kind](self.registers, one.operands, one.modifiers, everywhere)
            elif one.kind not in DONE_WITHOUT_EFFECT:
                raise UnknownInstruction("not known to this executor")
            self.at[active] += 16
        elif not handler(one, active, mask):
            self.at[active] += 16

    # Control. These return True where they have moved the lanes themselves.

    def target(self, one: Instruction) -> int:
        """The address of the label that an instruction names."""
        label = one.operands[-1].strip("`()")
        if label not in self.function.labels:
            raise UnknownInstruction(f"a label {label} that is not in the function")
        return self.function.labels[label]

    def do_bra(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        if "DIV" in one.modifiers:
            return False  # taken where lanes have parted, which shuffles of whole warps never see
        for name in one.operands[:-1]:
            if name.startswith(("P", "!P", "UP", "!UP")):
                mask = mask & self.registers.predicate(name)
        self.at[active] += 16
        self.at[mask] = self.target(one)
        return True

    def do_call(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        return self.do_bra(one, active, mask)

    def do_ret(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        self.at[active] += 16
        self.at[mask] = self.registers.raw(one.operands[0].split()[0])[mask]
        return True

    def do_exit(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        for name in one.operands:
            mask = mask & self.registers.predicate(name)
        self.at[active] += 16
        self.alive &= ~mask
        self.meet()
        return True

    def do_bssy(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        self.meeting[one.operands[0]] = active.copy()
        return False

    def do_bsync(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        barrier = one.operands[0]
        waiting = self.parked.setdefault(one.address, np.zeros(LANES, bool))
        waiting |= mask
        self.at[active & ~mask] += 16
        self.meeting.setdefault(barrier, active.copy())
        self.meet()
        return True

    def do_break(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        self.meeting[one.operands[-1]] = self.meeting[one.operands[-1]] & ~mask
        self.meet()
        return False

    def meet(self) -> None:
        """Let go on who waits at a BSYNC that all have reached."""
        for address, waiting in list(self.parked.items()):
            expected = self.meeting[self.function.instructions[address].operands[0]] & self.alive
            if not (expected & ~waiting).any():
                self.at[waiting] = address + 16
                del self.parked[address]

    # What lanes tell each other.

    def do_s2r(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        name = one.operands[1]
        if name not in self.special:
            raise UnknownInstruction(f"the special register {name}")
        everywhere = np.ones(LANES, bool) if one.kind == "S2UR" else mask
        self.registers.write(one.operands[0], self.special[name], everywhere)
        return False

    do_s2ur = do_s2r

    def do_shfl(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        r = self.registers
        inside, target, value, by, clamp = one.operands
        lane = np.arange(LANES)
        step, bounds = r.word(by).astype(np.int64), r.word(clamp).astype(np.int64)
        segment, most = bounds >> 8 & 31, bounds & 31
        last = (lane & segment) | (most & ~segment)
        way = one.opcode.split(".")[1]
        source = {
            "IDX": (lane & segment) | (step & ~segment & 31),
            "UP": lane - step,
            "DOWN": lane + step,
            "BFLY": lane ^ step,
        }[way]
        there = source >= last if way == "UP" else source <= last
        source = np.where(there, source, lane) & 31
        r.write(target, r.word(value)[source], mask)
        r.write_predicate(inside, there, mask)
        return False

    def do_vote(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        r = self.registers
        said = r.predicate(one.operands[-1]) & mask
        held = said.any() if "ANY" in one.modifiers else bool((said | ~mask).all())
        ballot = sum(1 << lane for lane in np.flatnonzero(said).tolist())
        everywhere = np.ones(LANES, bool)
        for name in one.operands[:-1]:
            if name.lstrip("U").startswith("R"):
                r.write(name, np.full(LANES, ballot, U32), everywhere if name.startswith("U") else mask)
            else:
                r.write_predicate(name, np.full(LANES, held), everywhere if name.startswith("U") else mask)
        return False

    do_voteu = do_vote

    def do_match(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        value = self.registers.word(one.operands[-1])
        bits = (U32(1) << np.arange(LANES).astype(U32)) * mask
        found = np.array([int(bits[value == mine].sum()) for mine in value], np.uint64).astype(U32)
        self.registers.write(one.operands[-2], found, mask)
        return False

    def do_redux(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        values = self.registers.word(one.operands[1])[mask].astype(np.int64)
        if "S32" in one.modifiers:
            values = values.astype(U32).view(np.int32).astype(np.int64)
        ways = {"MIN": np.min, "MAX": np.max, "OR": np.bitwise_or.reduce, "AND": np.bitwise_and.reduce}
        way = next((ways[name] for name in ways if name in one.modifiers), np.sum)
        result = np.full(LANES, int(way(values)) & 0xFFFFFFFF, U32)
        self.registers.write(one.operands[0], result, np.ones(LANES, bool))
        return False

    # Memory.

    def addresses(self, operand: str, mask: Lanes) -> Lanes:
        """Return the addresses ``desc[UR4][R2.64+UR6+0x10]`` of the lanes of ``mask``."""
        inside = operand.split("[")[-1].rstrip("]")
        total = np.zeros(LANES, np.int64)
        for part in inside.replace("+-", "+ -").replace(" ", "").split("+"):
            name = part.lstrip("-")
            if "R" in name and not name.startswith("0x"):
                bare, *suffix = name.split(".")
                number = self.registers.wide(bare) if suffix == ["64"] else self.registers.raw(bare).tolist()
                total = total + np.array([n & (1 << 63) - 1 for n in number])
            elif part:
                total = total + int(part, 16)
        return total[mask]

    def do_ldg(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        if mask.any():
            place = next(name for name in reversed(one.operands) if "[" in name)
            buffer, found = self.memory.load(self.addresses(place, mask), one.bytes, one.text)
            self.write_bytes(next(name for name in one.operands if name.startswith("R")), found, mask, one)
            self.loaded(one, buffer)
        return False

    def split(self, operand: str, mask: Lanes) -> tuple[Lanes, Lanes]:
        """Return the lanes of ``mask`` whose addresses are in global memory, and those in shared memory."""
        shared = np.zeros(LANES, bool)
        shared[mask] = self.addresses(operand, mask) >> 32 == GENERIC_SHARED
        return mask & ~shared, mask & shared

    def do_ld(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        place = next(name for name in reversed(one.operands) if "[" in name)
        of_global, of_shared = self.split(place, mask)
        self.do_ldg(one, active, of_global)
        if of_shared.any():
            at = (self.addresses(place, of_shared) % SHARED_WINDOW)[:, None] + np.arange(one.bytes)
            target = next(name for name in one.operands if name.startswith("R"))
            self.write_bytes(target, self.shared[at], of_shared, one)
        return False

    def do_st(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        of_global, of_shared = self.split(one.operands[0], mask)
        self.do_stg(one, active, of_global)
        return self.do_sts(one, active, of_shared)

    def do_stg(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        if mask.any():
            values = self.read_bytes(one.operands[1], one.bytes, mask)
            self.memory.store(self.addresses(one.operands[0], mask), one.bytes, values, one.text)
        return False

    def do_redg(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        if mask.any():
            addresses = self.addresses(one.operands[0], mask)
            buffer = self.memory.buffer_of(addresses, one.bytes, one.text)
            self.memory.note("atomic", buffer, addresses, one.bytes)
            if buffer.data is not None:
                at = (addresses - buffer.base) // 4
                np.add.at(buffer.data.view(U32), at, self.registers.word(one.operands[1])[mask])
        return False

    def do_lds(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        if mask.any():
            at = (self.addresses(one.operands[1], mask) % SHARED_WINDOW)[:, None] + np.arange(one.bytes)
            self.write_bytes(one.operands[0], self.shared[at], mask, one)
            self.counts.shared_bytes += one.bytes * int(mask.sum())
        return False

    def do_sts(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        if mask.any():
            at = (self.addresses(one.operands[0], mask) % SHARED_WINDOW)[:, None] + np.arange(one.bytes)
            self.shared[at] = self.read_bytes(one.operands[1], one.bytes, mask)
            self.counts.shared_bytes += one.bytes * int(mask.sum())
        return False

    def do_ldsm(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        """Count the bytes of matrices of 8 rows of 16 bytes; their elements are read by products alone."""
        self.counts.shared_bytes += 128 * next(int(name) for name in ("4", "2", "1") if name in one.modifiers)
        return False

    def do_ldgsts(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        """Count a copy from global to shared memory, whose predicate says which lanes read; the others write zeros."""
        reads = mask & self.registers.predicate(one.operands[2])
        if reads.any():
            buffer, _ = self.memory.load(self.addresses(one.operands[1], reads), one.bytes, one.text)
            self.copied_by = self.counts.cycles + self.latency.get(buffer.name, self.latency["otherwise"])
        self.counts.shared_bytes += one.bytes * int(mask.sum())
        return False

    def do_ldgdepbar(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        """Make a group of the copies so far."""
        self.copies.append(self.copied_by)
        return False

    def do_depbar(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        """Wait until no more than so many groups of copies are on their way."""
        arrived = self.copies[: max(0, len(self.copies) - int(one.operands[1], 16))]
        self.counts.cycles = max([self.counts.cycles, *arrived[-1:]])
        return False

    def do_atoms(self, one: Instruction, active: Lanes, mask: Lanes) -> bool:
        if not mask.any():
            return False
        target, place = one.operands[:2]
        words = self.shared.view(U32)
        by = self.registers.word(one.operands[2]) if len(one.operands) > 2 else np.ones(LANES, U32)
        if not {"ADD", "INC"} & one.modifiers:
            raise UnknownInstruction("this atomic operation on shared memory")
        lanes = np.flatnonzero(mask)
        before = np.zeros(LANES, U32)
        for lane, address in zip(lanes, self.addresses(place, mask) % SHARED_WINDOW // 4, strict=True):
            before[lane] = words[address]
            words[address] += by[lane]
        self.registers.write(target, before, mask)
        return False

    def write_bytes(self, name: str, found: np.ndarray, mask: Lanes, one: Instruction) -> None:
        """Write what was loaded to as many registers as it fills."""
        width = found.shape[1]
        if width < 4:
            sign = {"S8": np.int8, "S16": np.int16}.get(next(iter({"S8", "S16"} & one.modifiers), ""))
            plain = found.copy().view(sign or {1: np.uint8, 2: np.uint16}[width])[:, 0]
            found = plain.astype(np.int64).astype(U32)[:, None].view(np.uint8)
        file, number = self.registers.file(name)
        for word in range(found.shape[1] // 4):
            if number + word < len(file) - 1:
                file[number + word, mask] = found[:, 4 * word : 4 * word + 4].copy().view(U32)[:, 0]

    def read_bytes(self, name: str, width: int, mask: Lanes) -> np.ndarray:
        """Return the bytes of the registers that a store writes, one row a lane."""
        file, number = self.registers.file(name)
        zero = number == len(file) - 1
        rows = [file[number if zero else number + word][mask] for word in range((width + 3) // 4)]
        return np.stack(rows, 1).copy().view(np.uint8)[:, :width]
