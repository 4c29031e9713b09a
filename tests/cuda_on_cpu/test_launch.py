"""Tests of kernels/cuda/launch.h, compiled by nvcc, with a stub of the CUDA runtime (pretended_runtime.h)."""

import subprocess
from pathlib import Path

import pytest
from machine_code import find_nvcc

HERE = Path(__file__).parent


def test_launches_do_not_disturb_one_another(tmp_path):
    """A launch with 60 KiB of shared memory lowered the kernel's limit while another thread launched with 90 KiB, so
    that launch was refused. The error was also reported again by the next successful launch.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.xfail("there is no nvcc to compile with")
    program = tmp_path / "launch_check"
    command = [nvcc, "-std=c++20", "-cudart=none", "-arch=sm_80", f"-I{HERE.parents[1] / 'csrc'}", "-o", str(program)]
    refusal = HERE.parents[1] / "csrc" / "kernels" / "refuse_launch.cpp"
    files = [str(HERE / "launch_check.cu"), str(HERE / "pretended_runtime.cpp"), str(refusal)]
    subprocess.run([*command, *files], check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "beside a smaller launch: started",
        "launches: 2",
        "refused: kernel: refused",
        "after it: started",
        "after a refused clear: started",
    ]
