"""Builds pymoe's two native modules against the PyTorch that is installed.

``pymoe._ops``      operators on the libtorch stable ABI and Python's limited API: one file serves every torch >= 2.11
                    and every CPython >= 3.10. CUDA kernels are compiled in wherever a CUDA toolkit is present, also
                    when torch is a CPU build and no GPU exists.
``pymoe._runtime``  the thread-pool runtime, bound with pybind11; it does not know of torch. A wheel may hold one for
                    each of several CPythons: only what binds it to Python is compiled again.

What is missing is said in words before anything is compiled. All sources are compiled with the same flags by one call
of ninja, so that both modules share objects and no processor waits between them.

CUDA kernels are compiled for the GPUs that torch sees, as torch's own extensions are, and for every supported
generation where it sees none.

No path of the machine that compiles gets into the modules, and neither needs a newer glibc or libstdc++ than torch's
own wheels do.

Environment: PYMOE_CUDA=auto|0|1 (default auto: build CUDA kernels if nvcc is found; 1: the version says so, such as
0.1.0+cu130), CUDA_HOME, TORCH_CUDA_ARCH_LIST (for which GPUs), PYMOE_PYTHONS (for which other Pythons a wheel gets a
runtime, such as "python3.12 python3.13"), CXX (the C++ compiler), MAX_JOBS.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent.resolve()
sys.path.append(str(ROOT / "csrc"))
import nvcc_flags  # noqa: E402

# The oldest libtorch whose stable ABI the operators may use.
TORCH_TARGET_VERSION = "0x020b000000000000"

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"

HOW_TO_INSTALL = """
pymoe is compiled against the PyTorch that you use, so PyTorch has to be there first, and pip must not build in an
isolated environment, where it would not be seen. Two commands:

    pip install "torch>=2.11" numpy setuptools wheel pybind11 ninja
    pip install --no-build-isolation {what}

On Linux the first fetches torch's CUDA build, some 5 GB. Without a GPU take the CPU build, 200 MB, before it:

    pip install "torch>=2.11" --index-url {cpu_builds}

(missing in this environment: {missing})
"""

HOW_TO_GET_A_COMPILER = """
pymoe is compiled when it is installed, with a C++20 compiler: g++ 11 or newer, or clang++ 15 or newer. {problem}.
Install one, or name one by the environment variable CXX, and try again. On Debian and Ubuntu:

    sudo apt-get install g++ python3-dev
"""

# What the sources need of the language and its library. A compiler that is too old fails here, in one line.
PROBE = """
#include <bit>
#include <concepts>
#include <span>
static_assert(__cplusplus > 201703L);
template <std::integral T> constexpr int width(std::span<const T> of) { return std::bit_width(of.size()); }
constexpr int three[] = {1, 2, 3};
static_assert(width(std::span<const int>(three)) == 2);
"""


def require_linux():
    if sys.platform != "linux":
        sys.exit(f"pymoe is built only on Linux (this is {sys.platform}): use a container, or WSL 2 on Windows.")


def what_to_install():
    """Pip's argument: this source tree, or, where it was unpacked from an archive into a temporary folder, that."""
    return "PATH_OF_THE_ARCHIVE" if (ROOT / "PKG-INFO").exists() else f'-e "{ROOT}"'


def require_build_packages():
    """Stops where torch is missing or too old. Does not import it: that takes seconds, and pip asks several times."""

    def stop(missing):
        sys.exit(HOW_TO_INSTALL.format(what=what_to_install(), cpu_builds=CPU_BUILDS, missing=missing))

    if importlib.util.find_spec("torch") is None:
        stop("torch")
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:  # on the path without having been installed
        import torch

        version = torch.__version__
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < (2, 11):
        stop(f"torch>=2.11, found {version}")


def pybind11_include():
    """The folder of pybind11's headers: the package's own, or the copy that torch brings along."""
    try:
        import pybind11

        return pybind11.get_include()
    except ImportError:
        from torch.utils import cpp_extension

        for path in cpp_extension.include_paths():
            if Path(path, "pybind11", "pybind11.h").exists():
                return path
        sys.exit(HOW_TO_INSTALL.format(what=what_to_install(), cpu_builds=CPU_BUILDS, missing="pybind11"))


def require_compiler():
    """Stops where no C++20 compiler is found, or no Python.h. Has compiling and linking use the same compiler."""
    named = os.environ.get("CXX", "").strip()
    names = [named] if named else ["c++", "g++", "clang++"]
    found = next((name for name in names if shutil.which(shlex.split(name)[0])), None)
    problem = None
    if found is None:
        problem = f"None was found (looked for {', '.join(names)})"
    else:
        os.environ["CXX"] = found
        command = [*shlex.split(found), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
        done = subprocess.run(command, input=PROBE, capture_output=True, text=True)
        if done.returncode != 0:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
            problem = f"{found} is not one ({reason})"
        elif not Path(sysconfig.get_paths()["include"], "Python.h").exists():
            problem = "There is one, but Python.h is missing"
    if problem:
        sys.exit(HOW_TO_GET_A_COMPILER.format(problem=problem))


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
    return nvcc_flags.toolkit_version(f"{cuda_home}/bin/nvcc")


def version_tag():
    """Return what the version has behind it: the toolkit, if CUDA kernels were asked for by name."""
    if os.environ.get("PYMOE_CUDA") != "1":
        return ""
    return "+cu" + nvcc_version(find_cuda_home()).replace(".", "")


def reason_to_leave_out(cuda_home):
    """Why the toolkit that was found by itself does not serve: such a build goes on without CUDA, and says so."""
    import torch

    found = nvcc_version(cuda_home)
    if int(found.split(".")[0]) < 12:
        return f"CUDA {found} is too old for C++20: 12.0 is the oldest"
    if torch.version.cuda and torch.version.cuda.split(".")[0] != found.split(".")[0]:
        return f"CUDA {found} does not fit a torch built with {torch.version.cuda}"
    return None


def hint_at_the_cpu_build(cuda_home):
    """One line for who has torch's CUDA build and nothing that it could serve; None for all others."""
    import torch

    wish = os.environ.get("PYMOE_CUDA", "auto")
    if wish != "auto" or cuda_home or torch.version.cuda is None or torch.cuda.is_available():
        return None
    version = torch.__version__.split("+")[0]
    return (
        f"pymoe: torch {torch.__version__} is a CUDA build, but there is neither a GPU nor nvcc; the CPU build does "
        f'the same here: pip install --force-reinstall --no-deps "torch=={version}" --index-url {CPU_BUILDS}'
    )


def sources(*patterns):
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def merged(name, files):
    """Make one source that includes ``files``, whose headers take longer than the code after them; returns its path."""
    path = ROOT / "build" / "merged" / name
    text = "".join(f'#include "{file.removeprefix("csrc/")}"\n' for file in files)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(path.relative_to(ROOT))


def split(files, sign):
    """Return those of ``files`` that contain ``sign``, and the others."""
    found = [file for file in files if sign in (ROOT / file).read_text()]
    return found, [file for file in files if file not in found]


# The glibc that torch's own wheels need, and which functions it has in other libraries: 2.34 moved them to libc.so.6.
OLDEST_GLIBC = (2, 28)
MOVED = {
    "libpthread.so.0": "pthread|sem|thrd|mtx|cnd|tss|call_once",
    "libdl.so.2": "dl",
    "librt.so.1": "aio|lio|mq|shm|timer",
}


@cache
def glibc_flags():
    """Return flags that link to functions as the oldest glibc has them; csrc/core/older_systems.cpp does the rest.

    There are none where that cannot be done, such as without binutils. ``make wheel`` refuses modules that then need a
    newer glibc.
    """
    try:
        return [str(library) for library in libraries_of_oldest_glibc()]
    except (OSError, subprocess.CalledProcessError):
        return []


def libraries_of_oldest_glibc():
    """Make libraries with the names of glibc's functions, for the linker, and return their paths.

    A linker takes a function's default version, such as ``dlopen@GLIBC_2.34``, although the same library still has
    ``dlopen@GLIBC_2.2.5`` for programs that were linked on older systems. So it is handed libraries in place of glibc's
    own that list the same names, each in the version and the library in which the oldest glibc has it. The library
    counts: an older loader looks for a version in the one that is named with it, and no further.
    """

    def run(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def numbers(version):
        return tuple(int(number) for number in version.split("."))

    compiler = shlex.split(os.environ["CXX"])
    listed = {}
    for library in ("libc.so.6", "libm.so.6"):
        path = run(*compiler, f"-print-file-name={library}").strip()
        if not Path(path).is_absolute():  # another C library
            return []
        symbols = run("readelf", "--dyn-syms", "--wide", path)
        row = r" (\w+) +\w+ +DEFAULT +\d+ (\w+)(@@?)GLIBC_([\d.]+)$"
        versions, usual = {}, {}
        for kind, name, at, version in re.findall(row, symbols, re.MULTILINE):
            if numbers(version) <= OLDEST_GLIBC:
                versions.setdefault(name, []).append(version)
            if at == "@@":  # what new programs use
                usual[name] = version, "object" if kind == "OBJECT" else "function"
        for name, (version, kind) in usual.items():
            home = library
            if name in versions and numbers(version) > OLDEST_GLIBC:
                if library == "libc.so.6":
                    home = next((old for old, names in MOVED.items() if re.match(f"_*({names})", name)), None)
                version = max(versions[name], key=numbers) if home else version
            listed.setdefault(home or library, []).append((name, kind, version))
    folder = ROOT / "build" / "glibc"
    folder.mkdir(parents=True, exist_ok=True)
    for library, rows in listed.items():
        text = "".join(f".globl {n}; .type {n}, %{kind}; {n}: .symver {n}, {n}@@@GLIBC_{v}\n" for n, kind, v in rows)
        (folder / "symbols.s").write_text(text)
        used = sorted({version for *_, version in rows})
        (folder / "versions").write_text("".join(f"GLIBC_{version} {{}};\n" for version in used))
        flags = [f"-Wl,-soname={library},--version-script={folder / 'versions'}", "-o", folder / library]
        run(*compiler, "-shared", "-nostdlib", folder / "symbols.s", *flags)
    return [folder / library for library in listed]


def operator_extension(cuda_home):
    from torch.utils import cpp_extension

    registrations, others = split(sources("csrc/ops/*.cpp"), "<torch/csrc/stable/")
    files = [*others, *sources("csrc/kernels/*.cpp", "csrc/kernels/cpu/*.cpp"), merged("with_torch.cpp", registrations)]
    files += sources("csrc/core/*.cpp")
    options = {}
    if cuda_home:
        # A CPU build of torch leaves CUDA_HOME unset and CUDAExtension would link torch_cuda, which it lacks.
        # The kernels need neither: they take raw pointers, and the runtime is linked in.
        cpp_extension.CUDA_HOME = cuda_home
        files += sources("csrc/kernels/*.cu")
        library_dirs = [f"{cuda_home}/{name}" for name in ("lib64", "lib") if Path(cuda_home, name).exists()]
        options = {"library_dirs": library_dirs, "libraries": ["cudart_static", "rt", "dl", "pthread"]}
    return cpp_extension.CppExtension(
        "pymoe._ops",
        files,
        # A free-threaded CPython has no limited API to load.
        py_limited_api=not sysconfig.get_config_var("Py_GIL_DISABLED"),
        extra_link_args=[*LINK_FLAGS, *TORCH_LINK_FLAGS, *glibc_flags()],
        **options,
    )


def runtime_extension():
    bindings = sources("csrc/bindings/*.cpp")
    return Extension(
        "pymoe._runtime",
        [
            # Two halves, for two compilers at a time.
            merged("bindings_1.cpp", bindings[::2]),
            merged("bindings_2.cpp", bindings[1::2]),
            *sources("csrc/core/*.cpp", "csrc/runtime/*.cpp"),
            *sources("csrc/kernels/gather_batch_cpu.cpp", "csrc/kernels/cpu/parallel.cpp"),
        ],
        extra_link_args=[*LINK_FLAGS, "-pthread", *glibc_flags()],
        language="c++",
    )


WHICH_PYTHON = """
import json, sys, sysconfig
tag = "cp" + sysconfig.get_config_var("py_version_nodot") + getattr(sys, "abiflags", "")
print(json.dumps({"tag": tag, "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
                  "include": sysconfig.get_paths()["include"]}))
"""


@cache
def pythons():
    """Return the Pythons that a wheel serves, by tags such as ``cp311``: this one, and those of PYMOE_PYTHONS.

    Each is a dictionary with its ``include`` folder and the ``suffix`` of its modules. A free-threaded Python is
    refused, because it cannot load the operators of another: its wheel is built by itself.
    """
    named = os.environ.get("PYMOE_PYTHONS", "").split()
    found = {}
    for name in [sys.executable, *named]:
        try:
            answer = subprocess.run([name, "-c", WHICH_PYTHON], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"PYMOE_PYTHONS must name Pythons, got {name}: {getattr(error, 'stderr', None) or error}")
        python = json.loads(answer)
        tag = python.pop("tag")
        if named and not tag.removeprefix("cp").isdigit():
            sys.exit(f"PYMOE_PYTHONS must name Pythons with a GIL, got {name} ({tag})")
        if not Path(python["include"], "Python.h").exists():
            sys.exit(f"PYMOE_PYTHONS must name Pythons with headers, got {name}, without {python['include']}/Python.h")
        found.setdefault(tag, python)
    return found


def wheel_command():
    """Make a bdist_wheel that names its wheel by the tags of all Pythons that it serves."""
    from setuptools.command.bdist_wheel import bdist_wheel

    class Wheel(bdist_wheel):
        def get_tag(self):
            own, abi, platform = super().get_tag()
            if len(pythons()) == 1:
                return own, abi, platform
            tags = ".".join(sorted(pythons()))
            return tags, tags, platform

    return Wheel


def seen_capabilities():
    """Return the compute capabilities of the GPUs that torch sees, such as ``{(9, 0)}``."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return set()
    return {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}


def compile_options(cuda_home):
    """Folders and flags of every source of both modules."""
    import torch
    from torch.utils import cpp_extension

    defines = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        f'-DPYMOE_BUILT_WITH_TORCH="{torch.__version__}"',
        f"-DPYMOE_WITH_CUDA={int(bool(cuda_home))}",
    ]
    # Messages name source files: by paths that are the same wherever this is compiled. Not for nvcc: torch takes a path
    # with "arch" in it, such as "research", for the architectures and leaves its own out.
    folders = (ROOT, sysconfig.get_paths()["purelib"])
    without_paths = [f"-ffile-prefix-map={folder}/=" for folder in folders]
    flags_of_nvcc = list(NVCC_FLAGS)
    if cuda_home:
        flags_of_nvcc += nvcc_flags.without_path(f"{cuda_home}/bin/nvcc")
        toolkit = nvcc_version(cuda_home)
        wanted = nvcc_flags.arch_list_of(seen_capabilities(), toolkit)
        arch_list = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", wanted)
        defines.append(f'-DPYMOE_CUDA_VERSION="{toolkit}"')
        defines.append(f'-DPYMOE_CUDA_ARCHITECTURES="{arch_list}"')
    return {
        # pybind11 of its own package comes before the copy among torch's headers.
        "include_dirs": [str(ROOT / "csrc"), pybind11_include(), *cpp_extension.include_paths()],
        "extra_postargs": {"cxx": [*CXX_FLAGS, *without_paths, *defines], "nvcc": flags_of_nvcc},
    }


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
NVCC_FLAGS = [*nvcc_flags.FLAGS, "-Xcompiler=-fvisibility=hidden"]
LINK_FLAGS = ["-s"]
# libtorch.so is empty, so linkers that keep only what is used leave it out. But in a CUDA build of torch it is what
# brings libtorch_cuda.so into the operators' reach: without it the weak symbol of ops/twins.h is never found.
TORCH_LINK_FLAGS = ["-Wl,--push-state,--no-as-needed", "-ltorch", "-Wl,--pop-state"]
# What takes longest is begun first, so that all processors end together.
LONGEST = ("with_pybind11.cpp", "gate_topk_cuda.cu", "grouped_linear_cpu.cpp", "grouped_linear_cuda.cu")


def rank(source):
    """Where a source comes among those to compile: the longest first, kernels before what binds them to Python."""
    return Path(source).name not in LONGEST, not source.endswith(".cu"), "kernels" not in source, source


def build_command(options):
    """Make a build_ext like torch's that compiles the sources of all extensions at once, then links them."""
    import torch
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, use_ninja=shutil.which("ninja") is not None, **kwargs)
            self.objects = None
            self.compile = None

        def initialize_options(self):
            super().initialize_options()
            # One folder for objects, whatever pip builds for: `pip install -e .` after `pip install .` compiles none.
            self.build_temp = "build/objects"

        def build_extension(self, extension):
            if self.objects is None:
                self.compile = self.compiler.compile
                self.objects = self.compile_all()
                self.compiler.compile = lambda sources, **_: [self.objects[source] for source in sources]
            super().build_extension(extension)
            if extension.name == "pymoe._runtime":
                for tag, python in list(pythons().items())[1:]:
                    self.build_for_another(extension, tag, python)

        def build_for_another(self, extension, tag, python):
            """Build ``extension`` for another Python: compile the bindings with its headers, take the rest as it is."""
            bindings = [source for source in extension.sources if Path(source).name.startswith("bindings_")]
            headers = {**options, "include_dirs": [python["include"], *options["include_dirs"]]}
            compiled = self.compile(bindings, output_dir=f"{self.build_temp}/{tag}", **headers)
            others = [self.objects[source] for source in extension.sources if source not in bindings]
            own = self.get_ext_fullpath(extension.name)
            self.compiler.link_shared_object(
                [*compiled, *others],
                own.removesuffix(sysconfig.get_config_var("EXT_SUFFIX")) + python["suffix"],
                extra_postargs=extension.extra_link_args,
                target_lang="c++",
            )

        def compile_all(self):
            everything = {source for extension in self.extensions for source in extension.sources}
            order = sorted(everything, key=rank)
            if torch.version.cuda is None:
                self.forget_stale_kernels()
            return dict(zip(order, self.compiler.compile(order, output_dir=self.build_temp, **options), strict=True))

        def forget_stale_kernels(self):
            """With a CPU build of torch, its ninja file does not know which headers a .cu file includes."""
            headers = [path for folder in ("core", "kernels") for path in (ROOT / "csrc" / folder).rglob("*.h")]
            newest = max(path.stat().st_mtime for path in headers)
            for compiled in Path(self.build_temp).rglob("*_cuda.o"):
                if compiled.stat().st_mtime < newest:
                    compiled.unlink()

    return Build


require_linux()
require_build_packages()
command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
version = {"options": {"egg_info": {"tag_build": version_tag()}}}
if command in ("egg_info", "dist_info", "sdist"):  # pip's first questions; nothing is compiled
    setup(**version)
else:
    cuda_home = find_cuda_home()
    misfit = reason_to_leave_out(cuda_home) if cuda_home and os.environ.get("PYMOE_CUDA", "auto") == "auto" else None
    hint = hint_at_the_cpu_build(cuda_home)
    if misfit:
        cuda_home = None
    left_out = misfit or "no CUDA toolkit, or PYMOE_CUDA=0"
    print(f"pymoe: CUDA kernels {'with ' + cuda_home if cuda_home else f'left out ({left_out})'}")
    if hint:
        print(hint)
    require_compiler()
    setup(
        ext_modules=[operator_extension(cuda_home), runtime_extension()],
        cmdclass={"build_ext": build_command(compile_options(cuda_home)), "bdist_wheel": wheel_command()},
        **version,
    )
