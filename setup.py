"""Builds pymoe's two native modules against the PyTorch that is installed.

``pymoe._ops``      operators on the libtorch stable ABI and Python's limited API: one file serves every torch >= 2.11
                    and every CPython >= 3.10. CUDA kernels are compiled in wherever a CUDA toolkit is present, also
                    when torch is a CPU build and no GPU exists.
``pymoe._runtime``  the thread-pool runtime, bound with pybind11; it does not know of torch.

Environment: PYMOE_CUDA=auto|0|1 (default auto: build CUDA kernels if nvcc is found), CUDA_HOME, TORCH_CUDA_ARCH_LIST.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent.resolve()
# The oldest libtorch whose stable ABI the operators may use.
TORCH_TARGET_VERSION = "0x020b000000000000"
# Machine code for sm_80 runs on every 8.x and for sm_90 on every Hopper; PTX serves what comes after.
DEFAULT_ARCH_LIST = "8.0;9.0+PTX"

HOW_TO_INSTALL = """
pymoe is compiled against the PyTorch that you use, so PyTorch has to be there first, and pip must not build in an
isolated environment, where it would not be seen. Two commands:

    pip install "torch>=2.11" numpy setuptools wheel pybind11 ninja
    pip install --no-build-isolation {source}

(missing in this environment: {missing})
"""


def pybind11_include():
    """The folder of pybind11's headers: the package's own, or the copy that torch brings along; None without both."""
    try:
        import pybind11

        return pybind11.get_include()
    except ImportError:
        from torch.utils import cpp_extension

        paths = cpp_extension.include_paths()
        return next((path for path in paths if Path(path, "pybind11", "pybind11.h").exists()), None)


def require_build_packages():
    try:
        import torch
    except ImportError:
        sys.exit(HOW_TO_INSTALL.format(source="pymoe   # or the path of this source tree", missing="torch"))
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < (2, 11):
        sys.exit(HOW_TO_INSTALL.format(source="pymoe", missing=f"torch>=2.11, found {torch.__version__}"))
    if not pybind11_include():
        sys.exit(HOW_TO_INSTALL.format(source="pymoe", missing="pybind11"))


def find_cuda_home():
    """The CUDA toolkit's folder, or None. Decided by the toolkit's presence, never by a visible GPU."""
    wish = os.environ.get("PYMOE_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        sys.exit(f"PYMOE_CUDA must be auto, 0 or 1, got {wish!r}")
    if wish == "0":
        return None
    # A folder that was named is not silently replaced by another.
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        candidates = [named]
    else:
        nvcc = shutil.which("nvcc")
        candidates = [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
        candidates.append("/usr/local/cuda")
    for candidate in candidates:
        if (Path(candidate) / "bin" / "nvcc").exists() and (Path(candidate) / "include" / "cuda_runtime.h").exists():
            return candidate
    if wish == "1":
        sys.exit(
            "PYMOE_CUDA=1, but no CUDA toolkit was found: set CUDA_HOME to a folder with bin/nvcc and "
            f"include/cuda_runtime.h (looked in {', '.join(candidates)})"
        )
    return None


def nvcc_version(cuda_home):
    text = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return text.split("release ")[1].split(",")[0]


def reason_to_leave_out(cuda_home):
    """Why the toolkit that was found by itself does not serve: such a build goes on without CUDA, and says so."""
    import torch

    found = nvcc_version(cuda_home)
    if int(found.split(".")[0]) < 12:
        return f"CUDA {found} is too old for C++20: 12.0 is the oldest"
    if torch.version.cuda and torch.version.cuda.split(".")[0] != found.split(".")[0]:
        return f"CUDA {found} does not fit a torch built with {torch.version.cuda}"
    return None


def sources(*patterns):
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def operator_extension(cuda_home):
    import torch
    from torch.utils import cpp_extension

    defines = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        f'-DPYMOE_BUILT_WITH_TORCH="{torch.__version__}"',
    ]
    files = sources("csrc/kernels/*.cpp", "csrc/kernels/cpu/*.cpp", "csrc/ops/*.cpp")
    options = {}
    if cuda_home:
        # A CPU build of torch leaves CUDA_HOME unset and CUDAExtension would link torch_cuda, which it lacks.
        # The kernels need neither: they take raw pointers, and the runtime is linked in.
        cpp_extension.CUDA_HOME = cuda_home
        arch_list = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCH_LIST)
        defines += [
            "-DPYMOE_WITH_CUDA=1",
            f'-DPYMOE_CUDA_VERSION="{nvcc_version(cuda_home)}"',
            f'-DPYMOE_CUDA_ARCHITECTURES="{arch_list}"',
        ]
        files += sources("csrc/kernels/*.cu")
        library_dirs = [f"{cuda_home}/{name}" for name in ("lib64", "lib") if Path(cuda_home, name).exists()]
        options = {"library_dirs": library_dirs, "libraries": ["cudart_static", "rt", "dl", "pthread"]}
    else:
        defines.append("-DPYMOE_WITH_CUDA=0")
    return cpp_extension.CppExtension(
        "pymoe._ops",
        files,
        include_dirs=[str(ROOT / "csrc")],
        # A free-threaded CPython has no limited API to load.
        py_limited_api=not sysconfig.get_config_var("Py_GIL_DISABLED"),
        extra_compile_args={
            "cxx": [*CXX_FLAGS, *defines],
            # --fmad=false: host and device share the arithmetic that decides results.
            "nvcc": [
                "-O3",
                "-std=c++20",
                "--fmad=false",
                "--expt-relaxed-constexpr",
                "-Xcompiler=-fvisibility=hidden",
            ],
        },
        extra_link_args=[*LINK_FLAGS, *TORCH_LINK_FLAGS],
        **options,
    )


def runtime_extension():
    return Extension(
        "pymoe._runtime",
        sources(
            "csrc/runtime/*.cpp",
            "csrc/bindings/*.cpp",
            "csrc/kernels/gather_batch_cpu.cpp",
            "csrc/kernels/cpu/parallel.cpp",
        ),
        include_dirs=[str(ROOT / "csrc"), pybind11_include()],
        # A dict, because torch's build_ext takes it so for every extension it builds.
        extra_compile_args={"cxx": CXX_FLAGS},
        extra_link_args=[*LINK_FLAGS, "-pthread"],
        language="c++",
    )


CXX_FLAGS = [
    "-O3",
    "-g0",  # Python's own flags ask for debug information: a fifth of the compile time, stripped again below
    "-std=c++20",
    "-fvisibility=hidden",
    # The compiler must not fuse a*b+c on its own, or results would depend on the instruction set.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",  # torch's own headers
]
ON_LINUX = sysconfig.get_platform().startswith("linux")
LINK_FLAGS = ["-s"] if ON_LINUX else []
# libtorch.so is empty, so linkers that keep only what is used leave it out. But in a CUDA build of torch it is what
# brings libtorch_cuda.so into the operators' reach: without it the weak symbol of ops/stream.h is never found.
TORCH_LINK_FLAGS = ["-Wl,--push-state,--no-as-needed", "-ltorch", "-Wl,--pop-state"] if ON_LINUX else []

require_build_packages()
from torch.utils.cpp_extension import BuildExtension  # noqa: E402

cuda_home = find_cuda_home()
misfit = reason_to_leave_out(cuda_home) if cuda_home and os.environ.get("PYMOE_CUDA", "auto") == "auto" else None
if misfit:
    cuda_home = None
left_out = misfit or "no CUDA toolkit, or PYMOE_CUDA=0"
print(f"pymoe: CUDA kernels {'with ' + cuda_home if cuda_home else f'left out ({left_out})'}")
setup(
    ext_modules=[operator_extension(cuda_home), runtime_extension()],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=shutil.which("ninja") is not None)},
)
