"""Tests of the dependencies between files: the sources are parsed, and only the following directions are permitted.

C++     core -> kernels -> ops;  core, kernels -> runtime -> bindings  (right may use left); no torch and no Python
        below ops and bindings.
Python  _common -> reference -> ops -> nn -> ep;  autograd -> {parallel, runtime, pipe};  {runtime, ops, nn} ->
        mixture;  all of these except ep -> integrations;  nn -> bench;  runtime -> remote. All packages may use
        _common; _common and reference import nothing except torch. At import time the package imports only torch and
        numpy; remote imports its further dependencies itself. In pipe, only context.py uses nn, to weight losses that
        layers inject; in ep, only the folder simulate/ uses bench, to print tables. There are no import circles.
"""

import inspect
import re
import sys
from pathlib import Path

import pytest
from imports import circles, import_graph, imports, module_of
from specs import all_specs

import pymoe

ROOT = Path(__file__).parents[1]
LONGEST_FILE, LONG_FILE = 700, 400
SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".cu"}

CPP_MAY_USE = {
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "ops": {"core", "kernels", "ops"},
    "runtime": {"core", "kernels", "runtime"},
    "bindings": {"core", "kernels", "runtime", "bindings"},
}
# Headers that get from nvcc what the tests' emulator provides for other compilers.
FACES_OF_CUDA = {"kernels/cuda/platform.h", "kernels/cuda/mma.h"}
TORCH_HEADERS = re.compile(r"(torch|ATen|c10|caffe2)/")
STABLE_TORCH_HEADERS = re.compile(r"torch/(csrc/stable|headeronly)/|torch/csrc/inductor/aoti_torch/c/shim\.h$")
PYTHON_HEADERS = re.compile(r"Python\.h$|pybind11/")

PYTHON_MAY_USE = {
    "_common": {"_common"},
    "reference": {"_common", "reference"},
    "_native": {"_native", "_ops", "_runtime"},
    "_errors": set(),
    "_torch_private": set(),
    "_torch_canaries": {"_torch_private"},
    "_torch_versions": set(),
    "_gloo_at_exit": set(),
    "_ranks": set(),
    "_transforms": {"_common", "_torch_canaries", "_torch_private"},
    "ops": {"_common", "reference", "ops", "_native", "_ops", "_torch_canaries", "_torch_private", "_transforms"},
    "nn": {"_common", "reference", "ops", "nn", "_torch_canaries", "_torch_private", "_transforms"},
    "nn/quantized_files": {"_common", "nn"},
    "nn/load_picture": set(),
    "ep": {
        "_common",
        "reference",
        "ops",
        "nn",
        "ep",
        "_errors",
        "_gloo_at_exit",
        "_ranks",
        "_torch_canaries",
        "_torch_private",
        "_transforms",
    },
    "autograd": {"autograd", "_errors", "_native", "_runtime", "_torch_canaries", "_torch_private", "_transforms"},
    "parallel": {"autograd", "parallel", "_errors", "_native", "_runtime", "_torch_private", "_transforms"},
    # runtime re-exports names of parallel and mixture, where users of other libraries look for them.
    "runtime/__init__": {"parallel", "mixture", "runtime", "autograd", "_errors", "_native", "_runtime"},
    "runtime": {"_common", "autograd", "runtime", "_errors", "_native", "_runtime", "_torch_private"},
    "mixture": {
        "_common",
        "autograd",
        "reference",
        "ops",
        "nn",
        "runtime",
        "mixture",
        "_errors",
        "_native",
        "_runtime",
    },
    "pipe": {
        "_common",
        "autograd",
        "pipe",
        "_errors",
        "_gloo_at_exit",
        "_native",
        "_ranks",
        "_runtime",
        "_torch_canaries",
        "_torch_private",
        "_transforms",
    },
    "pipe/context": {"autograd", "nn", "pipe"},
    "remote": {"_common", "runtime", "remote", "_errors"},
    "remote/cli": {"_common", "runtime", "remote", "integrations"},  # metrics for Prometheus, on request
    "integrations": {
        "_common",
        "reference",
        "ops",
        "nn",
        "parallel",
        "runtime",
        "mixture",
        "pipe",
        "remote",
        "integrations",
    },
    "quantize": {"_common", "integrations"},
    "ep/simulate": {"_common", "reference", "ops", "nn", "ep", "bench"},
    "bench": {"_common", "reference", "ops", "nn", "bench"},
}
ALWAYS_INSTALLED = {"torch", "numpy", "pymoe"}
INSTALLED_WITH = {"remote": {"grpc", "msgspec"}}
MAY_IMPORT_LAZILY = {
    "bench",
    "ep",
    "integrations",
    "mixture",
    "nn/load_picture",
    "nn/quantized_files",
    "pipe",
    "quantize",
    "remote",
    "runtime",
}


def cpp_faults(file, text):
    """Yield every include in csrc/``file`` that the directions forbid."""
    layer = file.split("/")[0]
    for quoted, system in re.findall(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', text, re.MULTILINE):
        header = quoted or system
        if file.startswith("kernels/cuda/") and header.startswith("cuda_on_cpu/"):
            continue  # the tests' emulator, which replaces nvcc
        folder = header.split("/")[0]
        if folder == "cuda_on_cpu" and file in FACES_OF_CUDA:
            continue
        if quoted and "/" in header and folder not in CPP_MAY_USE[layer]:
            yield f"csrc/{file} includes {header}: {layer} may use {sorted(CPP_MAY_USE[layer])}"
        if TORCH_HEADERS.match(header) and not (layer == "ops" and STABLE_TORCH_HEADERS.match(header)):
            yield f"csrc/{file} includes {header}: torch belongs to ops, its stable ABI alone"
        if PYTHON_HEADERS.match(header) and layer != "bindings" and file != "ops/module.cpp":
            yield f"csrc/{file} includes {header}: Python belongs to bindings"
        if header.startswith("cuda") and layer == "ops":
            yield f"csrc/{file} includes {header}: CUDA belongs to kernels"


def python_faults(file, text):
    """Yield every import in the file pymoe/... that the directions forbid."""
    parts = Path(file).with_suffix("").parts
    layer = "/".join(parts[1:3]) if "/".join(parts[1:3]) in PYTHON_MAY_USE else parts[1]
    if layer == "__init__":
        return
    for module, at_import_time in imports(file, text):
        root, *rest = module.split(".")
        if root == "pymoe":
            used = rest[0] if rest else ""
            if used in PYTHON_MAY_USE and used not in PYTHON_MAY_USE[layer]:
                yield f"{file} imports {module}: {layer} may use {sorted(PYTHON_MAY_USE[layer])}"
        elif root not in sys.stdlib_module_names:
            if layer in ("_common", "reference") and root != "torch":
                yield f"{file} imports {module}: the reference imports torch alone"
            elif root in INSTALLED_WITH.get(parts[1], ()):
                continue
            elif root not in ALWAYS_INSTALLED and (at_import_time or layer not in MAY_IMPORT_LAZILY):
                yield f"{file} imports {module}: not among the package's requirements"


def files(*folders):
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES and "build" not in path.relative_to(ROOT).parts:
                yield path


def test_includes_follow_the_directions():
    seen = list(files("csrc"))
    assert len(seen) > 20
    faults = [
        fault for path in seen for fault in cpp_faults(path.relative_to(ROOT / "csrc").as_posix(), path.read_text())
    ]
    assert not faults, "\n".join(faults)


def test_imports_follow_the_directions():
    seen = [path for path in files("pymoe") if path.suffix == ".py"]
    assert len(seen) > 20
    faults = [fault for path in seen for fault in python_faults(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not faults, "\n".join(faults)


def modules():
    """Yield the name and file of every Python module of the package."""
    for path in files("pymoe"):
        if path.suffix == ".py":
            yield module_of(path.relative_to(ROOT)), path


def test_no_modules_import_each_other():
    sources = {name: (path.relative_to(ROOT).as_posix(), path.read_text()) for name, path in modules()}
    assert len(sources) > 100
    assert not circles(import_graph(sources))


def test_a_planted_circle_is_found():
    sources = {
        "pymoe.a": ("pymoe/a.py", "def f():\n    from pymoe import b\n"),
        "pymoe.b": ("pymoe/b.py", "import pymoe.c\n"),
        "pymoe.c": ("pymoe/c.py", "from pymoe.a import f\n"),
        "pymoe.d": ("pymoe/d.py", "from pymoe.a import f\n"),
    }
    assert circles(import_graph(sources)) == [("pymoe.a", "pymoe.b", "pymoe.c")]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/dtype.h", '#include "kernels/dispatch.h"'),
        ("kernels/dispatch_cpu.cpp", '#include "ops/check.h"'),
        ("kernels/dispatch_cpu.cpp", "#include <torch/csrc/stable/tensor.h>"),
        ("kernels/dispatch_cpu.cpp", "  #  include <Python.h>"),
        ("kernels/dispatch_cuda.cu", '#include "cuda_on_cpu/device.h"'),
        ("kernels/cpu/parallel.h", "#include <ATen/Parallel.h>"),
        ("runtime/pool.h", '#include "ops/allocate.h"'),
        ("runtime/pool.h", "#include <pybind11/pybind11.h>"),
        ("runtime/pool.h", '#include "bindings/runtime.h"'),
        ("ops/dispatch.cpp", "#include <torch/extension.h>"),
        ("ops/dispatch.cpp", "#include <c10/core/Device.h>"),
        ("ops/dispatch.cpp", "#include <Python.h>"),
        ("ops/dispatch.cpp", "#include <cuda_runtime.h>"),
        ("bindings/task_pool.cpp", "#include <torch/csrc/stable/tensor.h>"),
        ("bindings/task_pool.cpp", '#include "ops/check.h"'),
    ],
)
def test_a_planted_include_is_found(file, line):
    assert list(cpp_faults(file, f"// text\n#include <vector>\n{line}\n"))
    assert not list(cpp_faults(file, '// text\n#include <vector>\n#include "core/macros.h"\n'))


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("pymoe/reference/gate.py", "from pymoe.ops import dispatch"),
        ("pymoe/reference/gate.py", "from pymoe import ops"),
        ("pymoe/reference/gate.py", "def f():\n    import numpy"),
        ("pymoe/reference/gate.py", "from ..ops.dispatch import dispatch"),
        ("pymoe/ops/gate.py", "from pymoe.nn import MoE"),
        ("pymoe/ops/gate.py", "def f():\n    from pymoe.bench import compare"),
        ("pymoe/ops/gate.py", "import triton"),
        ("pymoe/nn/moe.py", "from pymoe.integrations import transformers"),
        ("pymoe/nn/moe.py", "def f():\n    import_module('pymoe.ep').shard()"),
        ("pymoe/nn/moe.py", "importlib.import_module('pymoe.ep.shard')"),
        ("pymoe/runtime/top.py", "def f():\n    for name in ('pymoe.remote.cli',):\n        import_module(name)"),
        ("pymoe/nn/moe.py", "def f():\n    import transformers"),
        ("pymoe/nn/moe.py", "from pymoe.ep import shard"),
        ("pymoe/ep/shard.py", "from pymoe.pipe import Pipe"),
        ("pymoe/ep/placement.py", "from pymoe.bench.report import Table"),
        ("pymoe/ep/simulate/simulation.py", "import matplotlib"),
        ("pymoe/bench/calls.py", "from pymoe.pipe import Pipe"),
        ("pymoe/bench/calls.py", "import hypothesis"),
        ("pymoe/runtime/pool.py", "import grpc"),
        ("pymoe/runtime/pool.py", "from pymoe.remote import connect"),
        ("pymoe/remote/server.py", "from pymoe.mixture import MixtureOfExpertBackends"),
        ("pymoe/remote/server.py", "import ray"),
        ("pymoe/runtime/pool.py", "from pymoe.pipe import Pipe"),
        ("pymoe/runtime/pool.py", "from pymoe.ops import dispatch"),
        ("pymoe/mixture/routing.py", "from pymoe.pipe import Pipe"),
        ("pymoe/runtime/pool.py", "from pymoe.pipe.schedules import build"),
        ("pymoe/pipe/schedules/schedule.py", "from pymoe.nn import MoE"),
        ("pymoe/pipe/schedules/record.py", "from matplotlib.figure import Figure"),
        ("pymoe/bench/plot.py", "import matplotlib.pyplot as plt"),
        ("pymoe/bench/plot.py", "try:\n    import rich\nexcept ImportError:\n    rich = None"),
    ],
)
def test_a_planted_import_is_found(file, line):
    assert list(python_faults(file, f"import torch\n{line}\n"))
    assert not list(python_faults(file, "import math\nfrom collections.abc import Iterator\nimport torch\n"))


def test_an_optional_package_may_be_imported_where_it_is_used():
    lazily = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rich\ndef f():\n    import rich\n"
    assert not list(python_faults("pymoe/bench/table.py", lazily))


# Patterns that a CUDA kernel file must not contain, with the reasons.
FORBIDDEN_IN_KERNELS = {
    r"cuda(Device|Stream|Event)Synchronize|cudaMemcpy\b|cudaMalloc|cudaFree": "waits for the GPU, or allocates",
    r"atomicAdd\((?:static_cast<|\()?\s*(?:float|double|__half|__nv_bfloat16)": "a float atomic: order decides results",
    r"<<<": "kernels/cuda/launch.h launches",
    r"\bprintf\b": "prints",
    r"<cuda_\w+\.h>|<cub/|<thrust/|<cooperative_groups": "kernels/cuda/platform.h is the door to CUDA",
    r"\b__shared__\b": "PYMOE_SHARED of kernels/cuda/platform.h",
    r"\basm\b": "instructions by hand live in a header of kernels/cuda, beside their twin for the emulator",
}


# Blocks of a launch may run in any order and not all at the same time, so no block may wait for another or read its
# results. The kernels then do not depend on a GPU's memory model. tests/cuda_static checks the same in the machine
# code.
BETWEEN_BLOCKS = {
    r"__threadfence(?!_block\b)|__nv_atomic_thread_fence|atomic_thread_fence": "a fence that reaches beyond the block",
    r"atomicCAS|__nv_atomic_compare_exchange": "a lock, or a loop until another thread has written",
    r"(?<!asm )\bvolatile\b|__nanosleep|cuda::(atomic|barrier|latch|semaphore)": "waits for what others write",
    r"cudaLaunchCooperativeKernel|cudaLaunchAttributeCooperative|grid\.sync|this_grid": "a barrier of the whole grid",
    r"(?i)cluster": "blocks of a cluster, which may reach into each other's shared memory",
}
MAY_USE_CLUSTERS: dict[str, str] = {}
"""Files whose blocks may communicate, with what they communicate."""


def communication_faults(name, text):
    """Yield a message for each construct in csrc/kernels/``name`` by which blocks could communicate."""
    code = re.sub(r"//.*", "", text)
    for pattern, why in BETWEEN_BLOCKS.items():
        if re.search(pattern, code) and not ("cluster" in pattern and name in MAY_USE_CLUSTERS):
            yield f"csrc/kernels/{name}: {why}"


def test_blocks_do_not_communicate():
    kernels = ROOT / "csrc" / "kernels"
    seen = [*kernels.glob("*.cu"), *(kernels / "cuda").rglob("*.h")]
    assert len(seen) > 15
    names = {path: path.relative_to(kernels).as_posix() for path in seen}
    faults = [fault for path in seen for fault in communication_faults(names[path], path.read_text())]
    assert not faults, "\n".join(faults)
    assert set(MAY_USE_CLUSTERS) <= set(names.values())


@pytest.mark.parametrize(
    "line",
    [
        "__threadfence();",
        "__threadfence_system();",
        "while (atomicCAS(lock, 0, 1) != 0) {}",
        "volatile int* flag = flags;",
        "cudaLaunchCooperativeKernel(kernel, 1, 1, nullptr);",
        "__cluster_dims__(8)",
        "cuda::atomic_ref<int> ready(*flag);",
    ],
)
def test_planted_communication_is_found(line):
    assert list(communication_faults("combine_cuda.cu", f"void f() {{\n  {line}\n}}\n"))
    assert not list(communication_faults("combine_cuda.cu", f'// {line}\n__threadfence_block(); asm volatile("");\n'))


def kernel_faults(text):
    """Return the reasons for which a CUDA kernel file is refused."""
    code = re.sub(r"//.*", "", text)
    return [why for pattern, why in FORBIDDEN_IN_KERNELS.items() if re.search(pattern, code)]


def test_cuda_kernels_hold_nothing_forbidden():
    seen = sorted((ROOT / "csrc" / "kernels").glob("*.cu"))
    assert seen
    assert not {path.name: kernel_faults(path.read_text()) for path in seen if kernel_faults(path.read_text())}


@pytest.mark.parametrize(
    "line",
    [
        "cudaStreamSynchronize(stream);",
        "cudaMemcpy(a, b, 4, cudaMemcpyDeviceToHost);",
        "atomicAdd(static_cast<float*>(a.out), 1.0f);",
        "kernel<<<1, 32>>>(a);",
        "#include <cuda_runtime.h>",
        "__shared__ float tile[32];",
        'asm("trap;");',
    ],
)
def test_a_planted_line_is_found_in_a_kernel(line):
    assert kernel_faults(f"// text\n{line}\n")
    assert not kernel_faults(f"// {line}\natomicAdd(counter, 1);\n")


def test_no_file_is_too_long():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in files("csrc", "pymoe", "tests", "benchmarks", "examples")
    }
    for file, length in sorted(lengths.items(), key=lambda item: -item[1]):
        if length > LONG_FILE:
            print(f"{length:5} lines: {file}")
    assert not {file: length for file, length in lengths.items() if length > LONGEST_FILE}


PUBLIC = {name: getattr(pymoe.ops, name) for name in pymoe.ops.__all__ if inspect.isfunction(getattr(pymoe.ops, name))}


# Modules of operators without a CUDA kernel.
OF_THE_CPU_ALONE = {"quantized_linear", "quantized_weight"}


def test_there_are_operators():
    assert {"build_routing", "combine", "dispatch"} <= PUBLIC.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_operator_has_a_reference_of_the_same_signature(name):
    twin = getattr(pymoe.reference, name)
    assert inspect.signature(PUBLIC[name]) == inspect.signature(twin)
    assert inspect.getdoc(PUBLIC[name]) == inspect.getdoc(twin), "the docstring is the contract of both"
    assert len(inspect.getdoc(twin).splitlines()) >= 5


@pytest.mark.parametrize("name", PUBLIC)
def test_operator_has_a_specification(name):
    spec = {spec.name: spec for spec in all_specs()}[name]
    assert spec.native is PUBLIC[name]
    assert spec.reference is getattr(pymoe.reference, name)


@pytest.mark.parametrize("name", PUBLIC)
def test_operator_has_its_files(name):
    module = PUBLIC[name].__module__.rsplit(".", 1)[1]
    for file in (
        f"pymoe/reference/{module}.py",
        f"pymoe/ops/{module}.py",
        f"tests/specs/{module}.py",
        f"csrc/kernels/{module}.h",
        f"csrc/kernels/{module}_cpu.cpp",
        *([f"csrc/kernels/{module}_cuda.cu"] if module not in OF_THE_CPU_ALONE else []),
        f"csrc/ops/{module}.cpp",
    ):
        assert (ROOT / file).exists(), f"{name}: {file} is missing"


def test_every_reference_function_is_an_operator():
    functions = {name for name in pymoe.reference.__all__ if inspect.isfunction(getattr(pymoe.reference, name))}
    assert functions == PUBLIC.keys()
