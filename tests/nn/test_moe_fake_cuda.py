"""Tests the layer's forward and backward on CUDA tensors without values, on machines without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from limits import LONG
from moe_layers import OPTIONS
from ninja_library import Source, build_library

FOLDER = Path(__file__).parent


if not torch.cuda.is_available():  # with a GPU the other tests of this folder check more

    @pytest.mark.slow
    @pytest.mark.only_on("cpu")
    def test_the_layer_reads_nothing_on_the_host_and_keeps_to_its_device():
        source = Source(FOLDER / "fake_cuda.cpp", "-UTORCH_TARGET_VERSION")
        library = build_library(FOLDER.parents[1] / "build" / "fake_cuda", "-O0", [source])
        command = [sys.executable, str(FOLDER / "trace_on_fake_cuda.py"), str(library)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LONG, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"traced {len(OPTIONS)} kinds of layer on cuda:0" in result.stdout
