"""Tests of the built operator library: its exported symbols, its dependencies, and the oldest supported torch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from pymoe import _native

LIBRARY = Path(str(_native.load_operators().__file__))
ROOT = Path(__file__).parents[2]


def dynamic_symbols(library: Path = LIBRARY) -> list[list[str]]:
    """Return the fields of ``readelf``: number, value, size, type, binding, visibility, section, name."""
    command = ["readelf", "--dyn-syms", "--wide", library]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split()[:8] for line in text.splitlines()]
    return [row for row in rows if len(row) == 8 and row[0].rstrip(":").isdigit()]


@pytest.fixture(scope="module")
def target_version() -> str:
    found = re.search(r'TORCH_TARGET_VERSION = "(0x[0-9a-f]+)"', (ROOT / "setup.py").read_text())
    assert found is not None
    return found[1]


def test_it_is_built_for_the_limited_api() -> None:
    assert LIBRARY.name == "_ops.abi3.so"


def test_it_exports_its_init_function_alone() -> None:
    defined = [row for row in dynamic_symbols() if row[6] != "UND"]
    assert [row[7] for row in defined if row[3] == "FUNC" and row[4] == "GLOBAL"] == ["PyInit__ops"]
    assert [row[7] for row in defined if "pymoe" in row[7]] == []


def test_it_needs_neither_torchs_python_nor_cuda_libraries() -> None:
    text = subprocess.run(["readelf", "--dynamic", LIBRARY], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", text)
    assert any(name.startswith("libtorch_cpu") for name in needed)
    assert [name for name in needed if re.match(r"libtorch_python|libtorch_cuda|libcudart|libcuda", name)] == []


def test_it_needs_the_library_that_brings_torchs_cuda_library_along() -> None:
    """A weak symbol is looked up in the libraries that a library needs: the current stream's symbol is in
    libtorch_cuda.so, which libtorch.so needs in a CUDA build of torch. Without it every operator fails on a GPU.
    """
    text = subprocess.run(["readelf", "--dynamic", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "libtorch.so" in re.findall(r"NEEDED.*\[(.*)\]", text)


@pytest.mark.parametrize("module", ["operators", "runtime"])
def test_it_can_be_loaded_wherever_torchs_wheels_can(module: str) -> None:
    """Debian 12's gcc binds dlopen to glibc 2.34, log to 2.29, and reference counts to a libstdc++ of gcc 11 or newer.
    With these a wheel could not be installed on all systems that torch's wheels serve, such as RHEL 8 with glibc 2.28.
    """
    library = LIBRARY if module == "operators" else Path(str(_native.load_runtime().__file__))
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # of manylinux_2_28
    needs = [row[7].split("@") for row in dynamic_symbols(library) if row[6] == "UND" and "@" in row[7]]
    assert len(needs) > 20
    found = [(name, *version.split("_")) for name, version in needs]
    assert [row for row in found if tuple(int(number) for number in row[2].split(".")) > newest[row[1]]] == []
    if module == "runtime":  # glibc 2.28 looks for these functions in no other library
        text = subprocess.run(["readelf", "--dynamic", library], capture_output=True, text=True, check=True).stdout
        assert {"libdl.so.2", "libpthread.so.0"} <= set(re.findall(r"NEEDED.*\[(.*)\]", text))
    # Where libstdc++ is old, streams come from libc10.so, from which torch's other libraries take them, too.
    of_torch = {
        row[7] for row in dynamic_symbols(Path(cpp_extension.library_paths()[0], "libc10.so")) if row[6] != "UND"
    }
    others = {
        row[7] for row in dynamic_symbols(library) if row[6] == "UND" and row[7].startswith("_Z") and "@" not in row[7]
    }
    assert others <= (of_torch if module == "operators" else set())


def test_it_uses_no_cplusplus_symbol_of_torch() -> None:
    """C++ symbols of torch change from release to release; its C interface does not."""
    undefined = [row[7] for row in dynamic_symbols() if row[6] == "UND"]
    assert [name for name in undefined if re.search(r"2at\d|3c106|5torch", name)] == []
    assert [name for name in undefined if name.startswith("aoti_torch_")] != []


def test_every_symbol_of_torch_was_there_in_the_oldest_release_served(target_version: str, tmp_path: Path) -> None:
    source = tmp_path / "shims.cpp"
    source.write_text(
        "#include <torch/csrc/stable/c/shim.h>\n"
        "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n"
        "#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>\n"  # called by torch/csrc/stable/ops.h
        'extern "C" int aoti_torch_get_current_cuda_stream(int, void**);\n'  # weak in ops/twins.h, since torch 2.0
    )
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    command = ["g++", "-std=c++20", "-E", "-P", f"-DTORCH_TARGET_VERSION={target_version}", *includes, str(source)]
    declared = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {row[7].split("@")[0] for row in dynamic_symbols() if row[6] == "UND"}
    of_torch = {name for name in used if name.startswith(("aoti_torch_", "torch_"))}
    assert len(of_torch) > 20
    assert {name for name in of_torch if not re.search(rf"\b{name}\b", declared)} == set()
