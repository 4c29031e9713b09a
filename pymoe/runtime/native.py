"""Loads the native runtime, or says why it cannot be loaded and what to run."""

from pymoe._native import load_runtime

load_runtime()
