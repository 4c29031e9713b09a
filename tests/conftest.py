"""Defines fixtures of the whole suite, and selects the tests to run and their devices.

Without an option pytest runs the same tests as ``make test``: representative cases of every test that is not slow.
``--level=deep`` runs the tests and cases that are then left out (``make test-deep``), ``--level=exhaustive`` every case
and longer stress (``make test-all``), and ``--level=quick`` one case of every test (``make check``). Tests that are
selected by name, such as ``test_x.py::test_y``, run with all their cases.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules that tests share: limits.py, specs/ and others

import devices
import limits
import selection
import torch
from specs import WITHOUT_CUDA

# Processes that tests start find these modules, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))

MARKERS = (
    "only_on(*devices): concerns these alone, of 'cpu', 'cuda' and 'pretended'",
    "slow: takes more than a few seconds; left to --level=deep",
    "exhaustive: says what other cases say too, or for longer; runs with --level=exhaustive alone",
    "thinned(usual=, deep=): how many cases of a grid the usual run has, and it and --level=deep together",
    "build: builds or installs the package (needs network access to the package registry)",
)


@pytest.fixture(scope="session")
def sanitized():
    """Return the module tests/sanitized/build.py, which runs Python with a sanitized operator library."""
    path = Path(__file__).parent / "sanitized" / "build.py"
    spec = importlib.util.spec_from_file_location("pymoe_sanitized_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_sanitized(sanitized):
    """Return a function that runs tests/sanitized/driver.py on an operator library built with the address and UB
    sanitizers.
    """
    sanitized.build()
    return sanitized.run


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        action="append",
        choices=sorted(devices.DEVICES),
        help="run operators and layers on this device (may be repeated; default: on all that torch sees)",
    )

    parser.addoption("--level", choices=selection.LEVELS, default="usual", help="see tests/selection.py")


def pytest_configure(config):
    if config.getoption("level") == "exhaustive":
        limits.EXHAUSTIVE = True
        os.environ["PYMOE_EXHAUSTIVE"] = "1"  # for limits.py in the processes that tests start
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    # Background commands of a shell without job control, and their children, ignore Ctrl-C; tests of interrupts would
    # then wait forever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Run a backward pass before any test compiles or exports. After that torch's CUDA build claims to have a GPU, and a
    # first backward pass would then make it refuse backward passes in forked children. With the pretended device,
    # however, autograd must not count devices before the device exists.
    pretends = "pretended" in wanted_devices(config) or config.pluginmanager.hasplugin("emulated_ops")
    if torch.version.cuda is not None and not torch.cuda.is_available() and not pretends:
        torch.ones((), requires_grad=True).exp().backward()


def wanted_devices(config):
    return config.getoption("device") or devices.seen()


def pytest_generate_tests(metafunc):
    """Add a test for each further device. With only the CPU nothing is added, and tests keep their names."""
    item = metafunc.definition
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    names = [name for name in wanted_devices(metafunc.config) if folder in devices.FOLDERS and concerns(item, name)]
    if names not in (["cpu"], []):
        metafunc.parametrize("device", names, indirect=True)


def pytest_collection_modifyitems(config, items):
    """Skip tests that concern none of the requested devices, and tests meant for longer runs."""
    level = config.getoption("level")
    named = level == "usual" and all("::" in argument for argument in config.args)
    left_out = set() if named else set(items) - set(selection.chosen(items, level))
    for item in items:
        name = item.callspec.params.get("device", "cpu") if hasattr(item, "callspec") else "cpu"
        if name not in wanted_devices(config) or not concerns(item, name):
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def concerns(item, name):
    """Return whether a test, or one of its cases, runs on the device called ``name``."""
    if name == "cuda" and hasattr(item, "callspec"):  # an operator's name, or a raw call of an operator
        subjects = (item.callspec.params.get(key) for key in ("name", "call"))
        if any(getattr(subject, "operator", subject) in WITHOUT_CUDA for subject in subjects):
            return False
    return all(name in marker.args for marker in item.iter_markers("only_on"))


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """Return the device that holds a test's tensors: the CPU, or a GPU (see devices.py)."""
    name = getattr(request, "param", "cpu")
    if name != "cpu":
        for module, attribute, value in list(devices.replacements(request.module, devices.DEVICES[name])):
            monkeypatch.setattr(module, attribute, value)
    with devices.PREPARED[name]():
        yield devices.DEVICES[name]
