"""A pytest plugin that replaces ``pymoe._ops`` by the library that runs the CUDA kernels on the emulator."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from import_as import import_as
from library import build

import_as("pymoe._ops", build())
