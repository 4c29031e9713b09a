"""A pytest plugin: ``pymoe._ops`` as it ships for CUDA, and two CUDA devices whose kernels the interpreter runs.

The devices (``cuda_device.cpp``) must be loaded before torch, so a separate process builds both libraries.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["PYMOE_TORCH_GROUPED_MM"] = "0"  # there is no kernel of torch here

built = subprocess.run(
    [sys.executable, str(HERE / "ptx_library.py"), "--on-devices"], capture_output=True, text=True, check=False
)
if built.returncode != 0:
    raise RuntimeError(built.stderr)
OPERATORS, DEVICES = built.stdout.split()
OPERATORS = os.environ.get("PYMOE_OPERATORS_ON_DEVICES", OPERATORS)  # with a planted fault
if "torch" in sys.modules:
    raise RuntimeError("torch was imported before its CUDA devices")
spec = importlib.util.find_spec("torch")
assert spec is not None
assert spec.origin is not None
for name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
devices = ctypes.CDLL(DEVICES, ctypes.RTLD_GLOBAL)

import torch  # noqa: E402, F401
from import_as import import_as  # noqa: E402

devices.take_the_place_of_the_guard()
import_as("pymoe._ops", OPERATORS)
runtime = ctypes.CDLL(OPERATORS)
"""The functions of ``streams.cpp`` and ``control_api.cpp``."""
runtime.pymoe_ptx_record.restype = ctypes.c_char_p
runtime.pymoe_ptx_ask_device(devices.cuda_device_current)
