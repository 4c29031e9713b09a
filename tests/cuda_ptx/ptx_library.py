"""Builds the interpreter, and an operator library whose CPU operators run the kernels' PTX on it.

    python tests/cuda_ptx/ptx_library.py     # writes build/cuda_ptx; compiles only what changed
    python tests/cuda_ptx/ptx_library.py --on-devices    # the operators' own path to the GPU: cuda_ops.py

nvcc compiles the ``.cu`` files as the build does (``csrc/nvcc_flags.py``), host code included, and includes the PTX of
one architecture. ``runtime.cpp`` is linked in place of the CUDA runtime: host code launches kernels as on a GPU, and
the interpreter runs them. The pytest plugin ``ptx_ops`` replaces ``pymoe._ops`` by the library:

    PYTHONPATH=tests/cuda_ptx:tests python -m pytest -p ptx_ops tests/ops/test_native_equals_reference.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from machine_code import FLAGS, find_nvcc  # noqa: E402
from ninja_library import Source, build_library, kernel_sources, operator_sources  # noqa: E402

HERE = ROOT / "tests" / "cuda_ptx"
FOLDER = ROOT / "build" / "cuda_ptx"
ARCHITECTURE = "90"
# Files that need CUDA's headers, torch or the kernels; all other files are the interpreter.
AROUND = ("runtime", "streams", "torch_memory", "control_api", "cases", "design_shapes", "far_shapes", "cuda_device")
# Compile with -O2 and without fusing: results are compared with the interpreter's own arithmetic.
INTERPRETER = f"-O2 -g0 -fvisibility=default -I{ROOT / 'tests'}"


def build_interpreter() -> Path:
    """Build only the interpreter, with the functions of ``api.cpp``; this needs no nvcc."""
    sources = [Source(file) for file in sorted(HERE.glob("*.cpp")) if file.stem not in AROUND]
    return build_library(FOLDER / "interpreter", INTERPRETER, sources, name="libptx")


def nvcc_options() -> str:
    """Return the build's flags, with which host code and PTX are compiled."""
    code = f"arch=compute_{ARCHITECTURE},code=compute_{ARCHITECTURE}"
    # The PTX stays uncompressed, so that the runtime can read it. Host code is compiled for a library, without
    # warnings, which the build itself reports.
    return " ".join([*FLAGS, "-Xcompiler=-fPIC,-w", "-Xfatbin=--compress=false", f"-gencode={code}"])


def build() -> Path:
    """Build the operator library; raise RuntimeError with the compiler's output if that fails, and also if there is no
    nvcc.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("there is no nvcc, whose PTX could be run")
    interpreter = build_interpreter()
    around = "-DPYMOE_WATCHED_MEMORY"
    # Files with their own kernels test the emulator.
    cases = [file for file in sorted(ROOT.glob("tests/cuda_on_cpu/test_*.cpp")) if "__global__" not in file.read_text()]
    sources = [
        # What takes longest is begun first.
        *(Source(file, nvcc_options(), nvcc) for file in sorted(ROOT.glob("csrc/kernels/*.cu"), reverse=True)),
        *operator_sources(),
        # nvcc knows where CUDA's headers are, and passes C++ code to the host's compiler.
        Source(HERE / "runtime.cpp", f"-std=c++20 -O1 -Xcompiler=-fPIC -I{ROOT / 'tests'}", nvcc),
        # torch's allocators are no part of its stable ABI.
        Source(HERE / "torch_memory.cpp", "-UTORCH_TARGET_VERSION"),
        *(
            Source(HERE / f"{name}.cpp", around)
            for name in ("streams", "control_api", "cases", "design_shapes", "far_shapes")
        ),
        *(Source(file, around) for file in cases),
        *(Source(one.file, "-O1") for one in kernel_sources()),
    ]
    flags = f"-O1 -g0 -I{ROOT / 'tests'} -DPYMOE_WITH_CUDA=1 -DPYMOE_CUDA_ON_CPU=1"
    # torch's CUDA build loads the real runtime, whose functions would be called instead of this library's own.
    link = f"-Wl,-Bsymbolic-functions -Wl,--no-as-needed {interpreter} -Wl,-rpath,{interpreter.parent}"
    return build_library(FOLDER / f"compute_{ARCHITECTURE}", flags, sources, link)


def build_on_devices() -> tuple[Path, Path]:
    """Build the operators as they ship for CUDA, with the same kernels, and the devices (``cuda_device.cpp``)."""
    built, interpreter = build().parent, build_interpreter()
    names = ("kernels_*.o", "cpu_*.o", "cuda_ptx_runtime.o", "cuda_ptx_streams.o", "cuda_ptx_control_api.o")
    objects = [path for name in names for path in sorted(built.glob(name))]
    flags, link = f"-O1 -g0 -I{ROOT / 'tests'}", f"-Wl,--no-as-needed {interpreter} -Wl,-rpath,{interpreter.parent}"
    own_first = f"-Wl,-Bsymbolic-functions {link}"
    folder = FOLDER / "on_devices"
    operators = build_library(folder, f"{flags} -DPYMOE_WITH_CUDA=1", operator_sources(), own_first, objects=objects)
    devices = [Source(HERE / "cuda_device.cpp", "-UTORCH_TARGET_VERSION")]
    return operators, build_library(FOLDER / "device", flags, devices, link, name="cuda_device")


if __name__ == "__main__":
    print(*(build_on_devices() if "--on-devices" in sys.argv else [build()]), sep="\n")
