"""Fixtures of the whole suite."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def run_sanitized():
    """Runs tests/sanitized/driver.py on an operator library built with the address and UB sanitizers."""
    path = Path(__file__).parent / "sanitized" / "build.py"
    spec = importlib.util.spec_from_file_location("pymoe_sanitized_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build()
    return module.run
