"""Plants faults that change only the machine code or its speed, which tests/cuda_static must detect.

A fault (faults_static.py) is compiled for sm_90 and one more architecture, and compared with the limits in bars.json.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults_static import FAULTS
from planting import ROOT, Kind, StaticFault

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cuda_static")]
import check  # noqa: E402
import machine_code  # noqa: E402
import sass  # noqa: E402


def prepare(faults: Sequence[Any]) -> tuple[str, dict[str, machine_code.Compiled]]:
    """Compile the sources without a fault, which must satisfy their limits."""
    nvcc = machine_code.find_nvcc()
    if nvcc is None:
        raise LookupError("no nvcc: the machine code was not read (checks passed: none)")
    if sass.find_nvdisasm() is None:
        raise RuntimeError(sass.HOW_TO_GET_NVDISASM)
    compiled = machine_code.compile_all(nvcc)
    for one in compiled:
        if one.complaint:
            raise RuntimeError(one.complaint)
    for source in sorted({fault.source for fault in faults}):
        complaints, *_ = check.judge(nvcc, compiled, [], only=source)
        if complaints:
            raise RuntimeError("the unharmed kernels are worse than their bars:\n" + "\n".join(complaints))
    return nvcc, {one.source.name: one for one in compiled}


def judge(fault: StaticFault, shared: tuple[str, dict[str, machine_code.Compiled]]) -> tuple[bool, str]:
    """Compile the source that contains or includes the fault, and look for the complaint ``said``."""
    nvcc, unharmed = shared
    with tempfile.TemporaryDirectory() as place:
        overlay = Path(place)
        changed = overlay / fault.file
        changed.parent.mkdir(parents=True)
        changed.write_text(fault.planted())
        source = overlay / "csrc" / "kernels" / fault.source
        if not source.exists():
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text((ROOT / "csrc" / "kernels" / fault.source).read_text())
        flags = machine_code.FLAGS
        if fault.file.endswith("nvcc_flags.py"):
            text: dict[str, Any] = {}
            exec(compile(changed.read_text(), fault.file, "exec"), text)
            flags = text["FLAGS"]
        command = [
            nvcc, *flags, *machine_code.STRICT, *machine_code.gencode(fault.architectures),
            f"-I{overlay / 'csrc'}", f"-I{ROOT / 'csrc'}",
        ]  # fmt: skip
        harmed = machine_code.compile_one(command, source, overlay, overlay / "built")
        if harmed.complaint:
            raise RuntimeError(harmed.complaint[-2000:])
        everything = [harmed, *(one for name, one in unharmed.items() if name != fault.source)]
        architectures = [f"sm_{one.replace('.', '')}" for one in fault.architectures.split(";")]
        complaints, *_ = check.judge(nvcc, everything, architectures, folder=overlay / "built", only=fault.source)
    noticed = [one for one in complaints if fault.said in one]
    return bool(noticed), noticed[0] if noticed else f"nothing with {fault.said!r} in {complaints}"


KIND = Kind("static", FAULTS, prepare, judge)
