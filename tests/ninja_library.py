"""Builds libraries for tests that replace a native module of pymoe: the same sources, compiled with other flags."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[1]
# The flags of setup.py that affect results.
FLAGS = " ".join(
    [
        "-std=c++20 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -w",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
    ]
)


def compiler() -> str:
    return os.environ.get("CXX", "g++")


@cache
def stamp(of_compiler: str) -> str:
    """Return a hash of the compiler's and torch's versions.

    A new version must rebuild everything, but ninja only notices changed commands and changed headers of pymoe.
    """
    said = subprocess.run([*shlex.split(of_compiler), "--version"], capture_output=True, text=True, check=True).stdout
    return hashlib.sha256(f"{said}\0{torch.__version__}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Source:
    """A file, and flags for only this file. With a ``compiler`` other than the C++ compiler, these are its only
    flags.
    """

    file: Path
    flags: str = ""
    compiler: str = ""


def sources(*patterns: str) -> list[Path]:
    return [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]


def merged(name: str, files: Sequence[Path]) -> Source:
    """Return one source that includes ``files``, since their headers take longer to compile than their own code."""
    path = ROOT / "build" / "merged" / "tests" / name
    text = "".join(f'#include "{file.relative_to(ROOT / "csrc")}"\n' for file in files)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")  # another test process may be compiling the file
        part.write_text(text)
        part.replace(path)
    return Source(path)


def kernel_sources() -> list[Source]:
    """Return the sources of the CPU kernels."""
    return [Source(file) for file in sources("csrc/kernels/*.cpp", "csrc/kernels/cpu/*.cpp")]


def operator_sources() -> list[Source]:
    """Return the operators' sources; those that include torch's headers are merged into one, as in setup.py."""
    operators = sources("csrc/ops/*.cpp")
    with_torch = [file for file in operators if "<torch/csrc/stable/" in file.read_text()]
    return [merged("with_torch.cpp", with_torch), *(Source(file) for file in operators if file not in with_torch)]


def runtime_sources() -> list[Source]:
    """Return the sources from which setup.py builds ``pymoe._runtime``."""
    bindings = sources("csrc/bindings/*.cpp")
    kernels = (ROOT / "csrc/kernels/gather_batch_cpu.cpp", ROOT / "csrc/kernels/cpu/parallel.cpp")
    return [
        merged("bindings_1.cpp", bindings[::2]),
        merged("bindings_2.cpp", bindings[1::2]),
        *(Source(file) for file in (*sources("csrc/runtime/*.cpp"), *kernels)),
    ]


def build_library(
    folder: Path, flags: str, sources: Sequence[Source], link_flags: str = "", name: str = "_ops",
    objects: Sequence[Path] = (),
) -> Path:  # fmt: skip
    """Compile the changed files and link ``folder/name.so``, with ``objects`` that are compiled already.

    Raise RuntimeError with the compiler's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # several test processes may build at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_recipe(folder, f"{FLAGS} {flags}", sources, link_flags, name, objects)
        ninja = Path(sys.executable).parent / "ninja"
        command = [str(ninja) if ninja.exists() else "ninja", "-C", str(folder), f"-j{os.environ.get('MAX_JOBS', 2)}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the build in {folder} failed:\n{result.stdout[-6000:]}{result.stderr[-2000:]}")
    return folder / f"{name}.so"


def write_recipe(
    folder: Path, flags: str, sources: Sequence[Source], link_flags: str, name: str, others: Sequence[Path]
) -> None:
    """Write build.ninja, unless the file already has the same text."""
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = cpp_extension.library_paths()
    objects = {source: f"{source.file.parent.name}_{source.file.stem}.o" for source in sources}
    lines = [
        f"flags = {flags} " + " ".join(f"-isystem {path}" for path in includes) + f" -I{ROOT / 'csrc'}",
        "rule compile",
        f"  command = {compiler()} -MMD -MF $out.d $flags $own -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule compile_otherwise",
        f"  command = $compiler -MMD -MF $out.d $own -I{ROOT / 'csrc'} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler()} -shared {link_flags} $in -o $out "
        + " ".join(f"-L{path} -Wl,-rpath,{path}" for path in libraries)
        + " -lc10 -ltorch -ltorch_cpu",
    ]
    for source, target in objects.items():
        rule = "compile_otherwise" if source.compiler else "compile"
        own = f"-DPYMOE_COMPILED_BY={stamp(source.compiler or compiler())} {source.flags}"
        lines += [f"build {target}: {rule} {source.file}", f"  own = {own}", f"  compiler = {source.compiler}"]
    lines += [f"build {name}.so: link " + " ".join(map(str, [*objects.values(), *others])), ""]
    recipe = folder / "build.ninja"
    text = "\n".join(lines)
    if not recipe.exists() or recipe.read_text() != text:
        recipe.write_text(text)
