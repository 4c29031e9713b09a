"""Builds the operator library with AddressSanitizer and UndefinedBehaviorSanitizer, and runs Python with it.

    python tests/sanitized/build.py        # writes build/sanitized/_ops.so; only what changed is compiled again

The library holds the CPU kernels, the operators and probe.cpp. In the child process that :func:`run` starts, it takes
the place of ``pymoe._ops`` (see driver.py).
"""

import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "sanitized"
LIBRARY = FOLDER / "_ops.so"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer"
# The flags of setup.py that decide results, with debug facts instead of the last bit of speed.
FLAGS = (
    f"-std=c++20 -O1 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -w {SANITIZE} "
    "-DTORCH_TARGET_VERSION=0x020b000000000000 -DPYMOE_WITH_CUDA=0"
)


def compiler():
    return os.environ.get("CXX", "g++")


def build():
    """Compile and link what changed; raises with the compiler's output when that fails."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:  # several test processes may ask at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build()


def _build():
    sources = [
        *sorted(ROOT.glob("csrc/kernels/*.cpp")),
        *sorted(ROOT.glob("csrc/kernels/cpu/*.cpp")),
        *sorted(ROOT.glob("csrc/ops/*.cpp")),
        ROOT / "tests/sanitized/probe.cpp",
    ]
    includes = [ROOT / "csrc", *cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = cpp_extension.library_paths()
    objects = {source: f"{source.parent.name}_{source.stem}.o" for source in sources}
    lines = [
        f"flags = {FLAGS} " + " ".join(f"-isystem {path}" for path in includes[1:]) + f" -I{includes[0]}",
        "rule compile",
        f"  command = {compiler()} -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler()} -shared {SANITIZE} $in -o $out "
        + " ".join(f"-L{path} -Wl,-rpath,{path}" for path in libraries)
        + " -lc10 -ltorch -ltorch_cpu",
        *(f"build {target}: compile {source}" for source, target in objects.items()),
        f"build {LIBRARY.name}: link " + " ".join(objects.values()),
        "",
    ]
    recipe = FOLDER / "build.ninja"
    text = "\n".join(lines)
    if not recipe.exists() or recipe.read_text() != text:
        recipe.write_text(text)
    ninja = Path(sys.executable).parent / "ninja"
    command = [str(ninja) if ninja.exists() else "ninja", "-C", str(FOLDER), f"-j{os.environ.get('MAX_JOBS', 2)}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the sanitized build failed:\n{result.stdout[-6000:]}{result.stderr[-2000:]}")
    return LIBRARY


def runtime_library(name):
    command = [compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(*arguments, **environment):
    """``python tests/sanitized/driver.py *arguments`` with the sanitized library; returns the finished process."""
    variables = {
        **os.environ,
        # libstdc++ too: the sanitizer looks for __cxa_throw when it starts, before Python would load it.
        "LD_PRELOAD": f"{runtime_library('libasan.so')} {runtime_library('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:exitcode=66",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=67",
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    command = [sys.executable, str(ROOT / "tests/sanitized/driver.py"), str(LIBRARY), *arguments]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    print(build(), f"(torch {torch.__version__})")
