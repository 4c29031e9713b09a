"""The PTX that becomes the machine code of each architecture, as the compile gate keeps it (``machine_code.py``).

The library that runs contains the text of one architecture. The host code is the same for all, so another text can
replace it, with the names that the library's compilation has given.
"""

from __future__ import annotations

import re
from functools import cache

from machine_code import Compiled, architectures, compile_all, find_nvcc

OTHERS = ("100",)
"""Architectures whose PTX is run in addition to that of 90. These suffice: except for the target, sm_80 has the same
text as 90, and sm_120 the same as 100."""


@cache
def kept() -> list[Compiled]:
    """Return every source as the gate compiles it; raise RuntimeError if the compiler complains."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("there is no nvcc, whose PTX could be run")
    compiled = compile_all(nvcc)
    for one in compiled:
        if one.complaint:
            raise RuntimeError(one.complaint)
    return compiled


def shipped() -> list[str]:
    """Return the architectures whose machine code ships with this toolkit, such as ``"80"``."""
    nvcc = find_nvcc()
    return [] if nvcc is None else [name.removeprefix("sm_") for name in architectures(nvcc)]


def others() -> list[str]:
    """Return the members of OTHERS that this toolkit knows."""
    return [name for name in OTHERS if name in shipped()]


def texts(architecture: str) -> dict[str, str]:
    """Return by source, such as ``"combine_cuda"``, the PTX of an architecture without its debug information."""
    return {one.source.stem: code_of(one.ptx(f"sm_{architecture}").read_text()) for one in kept()}


def code_of(text: str) -> str:
    """Return only the kernels: without comments, source lines and their labels, and with uniform white space."""
    code = re.split(r"^\s*\.(?:file|section)\b", text, maxsplit=1, flags=re.MULTILINE)[0]
    code = re.sub(r"//.*|^\s*\.loc\b.*|^\$L__tmp\d+:", "", code, flags=re.MULTILINE)
    return "\n".join(" ".join(line.split()) for line in code.splitlines() if line.strip()) + "\n"


def without_target(text: str) -> str:
    return re.sub(r"^\.target.*\n", "", text, flags=re.MULTILINE)


def with_names_of(text: str, other: str) -> str:
    """Return ``text`` with the symbol names of ``other``: names in unnamed namespaces contain numbers of the
    compilation.
    """
    unnamed = re.compile(r"_GLOBAL__N__\w{8}_\d+_\w+?_cu_\w{8}")
    found = unnamed.search(other)
    assert found is not None
    return unnamed.sub(found[0], text)
