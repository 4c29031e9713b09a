"""Tests that the compile gate accepts the kernels, and rejects a warning and a spill."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import compile_gate as gate
import machine_code

REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4quietPf' for 'sm_90'
ptxas info    : Function properties for _Z4quietPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function '_Z4loudPf' for 'sm_80'
ptxas info    : Function properties for _Z4loudPf
    64 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 64 bytes cumulative stack size
"""


def test_the_report_is_read():
    quiet, loud = gate.parse(REPORT, "x.cu")
    assert (quiet.name, quiet.architecture, quiet.registers, quiet.shared, quiet.spilled) == (
        "_Z4quietPf", "sm_90", 18, 1024, 0,
    )  # fmt: skip
    assert (loud.name, loud.architecture, loud.stack, loud.spilled) == ("_Z4loudPf", "sm_80", 64, 32)


def test_a_report_that_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match="not understood"):
        gate.parse("Compiling entry function '_Z1fv' for 'sm_90'\nsomething else\n", "x.cu")


SPILLS = """
__global__ void __launch_bounds__(1024, 2) spills(const float* x, float* out) {
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = x[i * 1024 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 96; ++i) out[threadIdx.x + i] = values[95 - i] * values[(i * 7) % 96];
}
"""
WARNS = """
__global__ void warns(float* out) { int unused; out[0] = 1; }
"""


@pytest.mark.parametrize(("source", "complaint"), [(SPILLS, "spills"), (WARNS, "unused")])
def test_planted_faults_are_found(tmp_path, monkeypatch, capsys, source, complaint):
    if gate.find_nvcc() is None:
        pytest.xfail("there is no nvcc to compile with")
    kernels = tmp_path / "csrc" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "planted_cuda.cu").write_text(source)
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "FOLDER", tmp_path / "build")
    assert gate.main() == 1
    assert complaint in capsys.readouterr().out


@pytest.mark.slow
def test_a_source_is_compiled_again_where_a_header_that_it_includes_has_changed(tmp_path):
    nvcc = gate.find_nvcc()
    if nvcc is None:
        pytest.xfail("there is no nvcc to compile with")
    kernels = tmp_path / "csrc" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "a_cuda.cu").write_text('#include "kernels/first.h"\n__global__ void a(float* x) { *x = kOne; }\n')
    (kernels / "first.h").write_text('#pragma once\n#include "second.h"\n')
    (kernels / "second.h").write_text("#pragma once\nconstexpr float kOne = 1;\n")

    def compiled():
        (one,) = machine_code.compile_all(nvcc, root=tmp_path, folder=tmp_path / "build")
        assert not one.complaint
        return one

    before = compiled()
    assert compiled() == machine_code.Compiled(before.source, before.folder, "", 0.0)
    assert all(before.cubin(name).exists() for name in machine_code.architectures(nvcc))
    (kernels / "second.h").write_text("#pragma once\nconstexpr float kOne = 2;\n")
    assert compiled().folder != before.folder
    assert not before.folder.exists()
