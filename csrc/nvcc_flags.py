"""The flags and architectures with which nvcc compiles the kernels.

``setup.py`` builds with them, and so do the tests that read the compiler's output, so that they test what ships. This
file imports only the standard library, because ``setup.py`` runs before anything is installed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from functools import cache

FLAGS = [
    "-O3",
    "-std=c++20",
    "--fmad=false",  # host and device share the arithmetic that decides results
    "--expt-relaxed-constexpr",
]

OLDEST_FOR_BLACKWELL = (12, 8)
"""The first version of the toolkit that can compile for Blackwell GPUs."""


@cache
def version_text(nvcc: str) -> str:
    """Return what the compiler ``nvcc`` prints as its version."""
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout


def toolkit_version(nvcc: str) -> str:
    """Return the toolkit's release, such as ``"13.0"``."""
    return version_text(nvcc).split("release ")[1].split(",")[0]


def without_path(nvcc: str) -> list[str]:
    """Return flags that keep a source's absolute path out of the names of what is in its anonymous namespaces.

    nvcc puts a checksum of that path there, so machine code would depend on the folder of the build. The file's own
    name is in these names, too, so one path does for all files. These are options of the programs that nvcc runs, and
    undocumented: the list is empty for a toolkit that does not use them.
    """
    option = "--orig_src_path_name"
    steps = subprocess.run([nvcc, "--dryrun", "-c", __file__, "-x", "cu"], capture_output=True, text=True).stderr
    programs = {"cudafe++": "-Xcudafe", "cicc": "-Xcicc"}
    known = [any(name in line and option in line for line in steps.splitlines()) for name in programs]
    return [word for flag in programs.values() for word in (flag, f"{option}=/pymoe")] if all(known) else []


def default_arch_list(toolkit: str) -> str:
    """Return the architectures for a toolkit such as ``"13.0"``, as TORCH_CUDA_ARCH_LIST spells them.

    Machine code for sm_80 runs on every 8.x, for sm_90 on every Hopper, for sm_100 on every 10.x and for sm_120 on
    every 12.x. The PTX is for later GPUs, if the driver is at least as new as the toolkit. It is that of the
    data-center GPU (10.0), because an architecture newer than 12.0 need not have a larger number (11.0 is newer).
    """
    version = tuple(int(part) for part in toolkit.split(".")[:2])
    return "8.0;9.0;10.0+PTX;12.0" if version >= OLDEST_FOR_BLACKWELL else "8.0;9.0+PTX"


def arch_list_of(seen: Collection[tuple[int, int]], toolkit: str) -> str:
    """Return the architectures to build for GPUs with the compute capabilities ``seen``.

    These are the architectures of the default list whose code runs on these GPUs, and PTX of the newest one. If
    ``seen`` is empty, or the list has no code for one of the GPUs (so that its driver compiles PTX), this is the whole
    list.
    """
    majors = {str(major) for major, _ in seen}
    default = default_arch_list(toolkit)
    needed = [entry.removesuffix("+PTX") for entry in default.split(";") if entry.split(".")[0] in majors]
    return ";".join(needed) + "+PTX" if needed and len(needed) == len(majors) else default


def gencode(arch_list: str) -> list[str]:
    """Return nvcc's options for a list of architectures such as ``"8.0;9.0+PTX"``."""
    options = []
    for architecture in arch_list.split(";"):
        number = architecture.removesuffix("+PTX").replace(".", "")
        options.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if architecture.endswith("+PTX"):
            options.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return options
