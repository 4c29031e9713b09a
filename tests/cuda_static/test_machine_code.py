"""Tests of when a source is compiled again, and for which GPUs, without a compiler."""

import subprocess
import sys
from pathlib import Path

import machine_code
import pytest

sys.path.insert(0, str(machine_code.ROOT / "csrc"))
import nvcc_flags


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a source that includes a header of its folder, which includes a header of another folder."""
    monkeypatch.setattr(machine_code, "version_text", lambda nvcc: "release 13.0, V13.0.88")
    files = {
        "csrc/kernels/x_cuda.cu": '#include "near.h"\n#include <cstdint>\n',
        "csrc/kernels/near.h": '  #  include "core/far.h"\n',
        "csrc/core/far.h": '#include "kernels/near.h"\n// a circle ends\n',
        "csrc/core/other.h": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digest(tree, command=("nvcc", "-O3")):
    return machine_code.digest(list(command), tree / "csrc/kernels/x_cuda.cu", tree)


def test_headers_are_found_through_others(tree):
    found = {path.resolve().name for path in machine_code.closure(tree / "csrc/kernels/x_cuda.cu", tree)}
    assert found == {"x_cuda.cu", "near.h", "far.h"}


@pytest.mark.parametrize("name", ["kernels/x_cuda.cu", "kernels/near.h", "core/far.h"])
def test_a_source_is_compiled_again_when_anything_that_it_is_made_of_changes(tree, name):
    before = digest(tree)
    with (tree / "csrc" / name).open("a") as file:
        file.write("// changed\n")
    assert digest(tree) != before


def test_a_source_is_compiled_again_for_other_flags_and_compilers_and_not_otherwise(tree, monkeypatch):
    before = digest(tree)
    (tree / "csrc/core/other.h").write_text("// changed\n")
    assert digest(tree) == before
    assert digest(tree, ["nvcc", "-O3", "--fmad=false"]) != before
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    assert digest(tree) != before
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    monkeypatch.setattr(machine_code, "version_text", lambda nvcc: "release 13.1, V13.1.1")
    assert digest(tree) != before


def test_what_was_compiled_is_fetched_and_what_is_out_of_date_removed(tree, monkeypatch):
    """Compiling an unchanged source again runs no compiler; compiling a changed one removes the old folder."""
    runs = []

    def compiler(command, **_):
        runs.append(command)
        (kept,) = (Path(one.removeprefix("--keep-dir=")) for one in command if one.startswith("--keep-dir="))
        for name in ("x_cuda.compute_90.cubin", "x_cuda.compute_90.ptx", "object.o"):
            (kept / name).write_text(name)
        return subprocess.CompletedProcess(command, 0, "", "the report")

    monkeypatch.setattr(machine_code.subprocess, "run", compiler)
    source, folder = tree / "csrc/kernels/x_cuda.cu", tree / "built"
    command = ["nvcc", *nvcc_flags.gencode("9.0")]
    first = machine_code.compile_one(command, source, tree, folder)
    assert first.report == "the report"
    assert first.cubin("sm_90").read_text() == "x_cuda.compute_90.cubin"
    assert first.ptx("sm_90").read_text() == "x_cuda.compute_90.ptx"
    assert first.object.read_text() == "object.o"
    assert machine_code.compile_one(command, source, tree, folder).folder == first.folder
    assert len(runs) == 1
    source.write_text("// changed\n")
    second = machine_code.compile_one(command, source, tree, folder)
    assert [path.name for path in folder.iterdir()] == [second.folder.name] != [first.folder.name]
    assert len(runs) == 2


@pytest.mark.parametrize(("toolkit", "known"), [("12.0", False), ("12.7", False), ("12.8", True), ("13.0", True)])
def test_blackwells_machine_code_ships_where_the_toolkit_knows_it(toolkit, known):
    assert nvcc_flags.default_arch_list(toolkit) == ("8.0;9.0;10.0+PTX;12.0" if known else "8.0;9.0+PTX")


def test_the_options_of_a_list_of_architectures():
    assert nvcc_flags.gencode("8.0;10.0+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
