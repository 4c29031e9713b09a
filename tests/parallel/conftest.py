"""Put this folder on the path, because its test files share modules in it."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def watched():
    """Return the module tests/sanitized/build_runtime.py, which runs Python with a runtime that ThreadSanitizer
    watches.
    """
    path = HERE.parent / "sanitized" / "build_runtime.py"
    spec = importlib.util.spec_from_file_location("pymoe_sanitized_build_runtime", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
