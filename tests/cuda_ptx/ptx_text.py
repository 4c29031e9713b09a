"""Small PTX kernels for the tests of the interpreter itself, run through ``api.cpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
from ptx_library import build_interpreter

HEAD = ".version 9.0\n.target sm_90\n.address_size 64\n"
POISON = 0xA5


class PtxError(Exception):
    """What the interpreter says of a kernel."""


@cache
def interpreter() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_interpreter()))
    library.ptx_add_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.ptx_remove_memory.argtypes = [ctypes.c_void_p]
    library.ptx_run.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool,
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int64,
    ]  # fmt: skip
    return library


def unwritten(count: int, dtype: object) -> np.ndarray:
    """Return an array that the interpreter treats as never written."""
    raw = np.full(count * np.dtype(dtype).itemsize + 16, POISON, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def aligned(values: np.ndarray) -> np.ndarray:
    copy = unwritten(values.size, values.dtype)
    copy[:] = values.reshape(-1)
    return copy


def run_kernel(
    body: str, arrays: Sequence[np.ndarray], *, blocks: int = 1, threads: int = 32, shared: int = 0, cluster: int = 1,
    more_shared: bool = False, seed: int = 1, outside: str = "", types: Sequence[str] = (),
) -> None:  # fmt: skip
    """Run a kernel whose parameters ``p0``, ``p1``, ... are the arrays' addresses, held by ``%q0``, ``%q1``, ...

    ``more_shared``: whether a block may have more than 48 KiB of shared memory. ``types``: the declared types of the
    parameters; by default all are ``.u64``.
    """
    parameters = ", ".join(f".param {kind} p{i}" for i, kind in enumerate(types or [".u64"] * len(arrays)))
    loads = "".join(f"ld.param.u64 %q{i}, [p{i}];\n" for i in range(len(arrays)))
    registers = (
        ".reg .pred %p<20>;\n.reg .b16 %h<20>;\n.reg .b32 %r<60>;\n.reg .f32 %f<20>;\n"
        ".reg .b64 %d<40>;\n.reg .b64 %q<10>;\n"
    )
    text = f"{HEAD}{outside}\n.visible .entry kernel({parameters})\n{{\n{registers}{loads}{body}\nret;\n}}\n"
    library = interpreter()
    for array in arrays:
        library.ptx_add_memory(array.ctypes.data, array.nbytes)
    arguments = np.array([array.ctypes.data for array in arrays], np.uint64)
    error = ctypes.create_string_buffer(2000)
    try:
        failed = library.ptx_run(
            text.encode(), b"kernel", blocks, threads, shared, cluster, more_shared, arguments.ctypes.data,
            arguments.nbytes, seed, error, len(error),
        )  # fmt: skip
    finally:
        for array in arrays:
            library.ptx_remove_memory(array.ctypes.data)
    if failed:
        raise PtxError(error.value.decode())


BITS = {"u8": 1, "s8": 1, "u16": 2, "s16": 2, "b16": 2, "f16": 2, "bf16": 2, "pred": 4}


def size_of(kind: str) -> int:
    return BITS.get(kind) or int(kind[-2:]) // 8


def lanewise(instruction: str, result: str, operands: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """Return the bits that ``instruction`` computes from the operands' bits, one lane each.

    ``instruction`` names its operands ``{d}``, ``{0}``, ``{1}``, ...; a result of kind ``pred`` comes as 0 or 1.
    """
    count = len(operands[0][1])
    padded = -(-count // 32) * 32
    letters = {2: "%h", 4: "%r", 8: "%d"}
    lines = ["mov.u32 %r50, %tid.x;", "mov.u32 %r51, %ctaid.x;", "mad.lo.s32 %r50, %r51, 32, %r50;"]
    arrays, names = [], []
    for i, (kind, values) in enumerate(operands):
        size = size_of(kind)
        array = np.array([value % (1 << 8 * size) for value in values], f"u{size}")
        arrays.append(aligned(np.concatenate([array, array[:1].repeat(padded - count)])))
        name = "%p" + str(i + 1) if kind == "pred" else letters[size] + str(i)
        load = "%r" + str(i) if kind == "pred" else name
        lines += [f"mad.wide.u32 %d{30 + i}, %r50, {size}, %q{i};", f"ld.global.b{8 * size} {load}, [%d{30 + i}];"]
        if kind == "pred":
            lines.append(f"setp.ne.u32 {name}, {load}, 0;")
        names.append(name)
    size = size_of(result)
    target = "%p10" if result == "pred" else letters[size] + "19"
    lines.append(instruction.format(*names, d=target))
    if result == "pred":
        lines.append("selp.u32 %r19, 1, 0, %p10;")
        target = "%r19"
    arrays.append(unwritten(padded, f"u{size}"))
    lines += [f"mad.wide.u32 %d39, %r50, {size}, %q{len(operands)};", f"st.global.b{8 * size} [%d39], {target};"]
    run_kernel("\n".join(lines), arrays, blocks=padded // 32)
    return [int(value) for value in arrays[-1][:count]]
