"""Tests that the reference lists all public names, commands with options, environment variables and metrics."""

import importlib
import json
import pickle
import re
import subprocess
import sys

import pytest
from docs_pages import ROOT

REFERENCE = ROOT / "docs" / "reference"
# Programs must not import these modules, which may change at any time.
INTERNAL = re.compile(
    r"pymoe\.(autograd|bench|testing|pipe\.(capture|traced|execution|split_backward)|runtime\.monitoring)\b"
)
ENVIRONMENT_READ = re.compile(r"(?:environ(?:\.get|\.setdefault)?[\[(]|getenv\(|VARIABLE = )\s*\"([A-Z_]+)\"")
COMMANDS = {
    "pymoe.bench": ["", "env", "list", "run", "compare", "plot"],
    "pymoe.ep": ["", "simulate"],
    "pymoe.pipe.schedules": [""],
    "pymoe.quantize": [""],
    "pymoe.remote": ["", "serve", "info", "drain", "top"],
    "pymoe.runtime.top": [""],
}


def public_packages() -> list[str]:
    """Return every non-internal package of pymoe whose ``__init__`` has an ``__all__``."""
    inits = sorted((ROOT / "pymoe").rglob("__init__.py"))
    names = [".".join(path.parent.relative_to(ROOT).parts) for path in inits if "__all__" in path.read_text()]
    return [name for name in names if not INTERNAL.match(name)]


def test_no_docstring_describes_an_argument_by_a_letter_alone() -> None:
    """``hidden_size: H.`` would be shown as an empty list whose number is H."""
    alone = re.compile(r"^\s+[\w*, ]+: [A-Za-z]\.$", re.MULTILINE)
    assert alone.search("    hidden_size: H.\n")
    found = [(path.name, one) for path in (ROOT / "pymoe").rglob("*.py") for one in alone.findall(path.read_text())]
    assert not found


@pytest.fixture(scope="session")
def documented(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of Python objects that have an entry, from a build that writes no pages: ``make docs`` writes
    them.
    """
    pytest.importorskip("sphinx", reason="the documentation is built with sphinx (requirements-dev.txt)")
    folder = tmp_path_factory.mktemp("docs")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "dummy",
        "-d",
        folder / "doctrees",
        "docs",
        folder / "pages",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    python = pickle.loads((folder / "doctrees" / "environment.pickle").read_bytes()).domaindata["py"]
    return {*python["objects"], *python["modules"]}


@pytest.mark.slow
def test_every_public_name_has_an_entry(documented: set[str]) -> None:
    packages = public_packages()
    assert {"pymoe", "pymoe.ops", "pymoe.runtime", "pymoe.pipe.schedules"} <= set(packages)
    entries = {id(entry): name for name in documented if (entry := found(name)) is not None}
    missing = []
    for package in packages:
        module = importlib.import_module(package)
        for name in module.__all__:
            if f"{package}.{name}" not in documented and id(getattr(module, name)) not in entries:
                missing.append(f"{package}.{name}")
    assert not missing


def found(name: str) -> object:
    """Return the object of a documented name, or None for a member of a class or a parameter."""
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        pass
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


@pytest.fixture(scope="module")
def help_of() -> dict[str, str]:
    """Return every command's help text, from one process that imports torch once."""
    done = subprocess.run(
        [sys.executable, "-c", ASK_FOR_HELP, json.dumps(COMMANDS)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    texts: dict[str, str] = json.loads(done.stdout)
    return texts


ASK_FOR_HELP = """
import contextlib, io, json, runpy, sys
texts = {}
for module, commands in json.loads(sys.argv[1]).items():
    for command in commands:
        sys.argv = [module, *filter(None, [command]), "--help"]
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        texts[f"{module} {command}"] = said.getvalue()
print(json.dumps(texts))
"""


@pytest.mark.thinned(usual=8)
@pytest.mark.parametrize(("module", "command"), [(module, one) for module in COMMANDS for one in COMMANDS[module]])
def test_every_option_of_a_command_is_described(module: str, command: str, help_of: dict[str, str]) -> None:
    text = help_of[f"{module} {command}"]
    assert "--help" in text
    page = (REFERENCE / "commands.md").read_text()
    assert f"python -m {module}" in page
    options = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help"}
    assert not [option for option in options if f"`{option}" not in page]


def test_the_package_lists_its_commands() -> None:
    """``python -m pymoe`` said "No module named pymoe.__main__"."""
    done = subprocess.run([sys.executable, "-m", "pymoe"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "pymoe").rglob("__main__.py")]
    named = {file.removesuffix(".__main__") for file in files} - {"pymoe"}
    listed = set(re.findall(r"^python -m (\S+) +\S", done.stdout, re.MULTILINE))
    assert named < listed == set(COMMANDS)


def test_every_target_of_make_is_described() -> None:
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    page = (REFERENCE / "commands.md").read_text()
    assert not [target for target in targets if f"`make {target}`" not in page]


def test_every_environment_variable_is_described() -> None:
    files = [*(ROOT / "pymoe").rglob("*.py"), ROOT / "setup.py", ROOT / "tests" / "limits.py"]
    files += [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    read = {name for path in files for name in ENVIRONMENT_READ.findall(path.read_text())}
    assert {"PYMOE_CPU_ISA", "PYMOE_CHECK_INDICES", "PYMOE_MONITOR", "PYMOE_CUDA", "PYMOE_TEST_TIME_SCALE"} <= read
    page = (REFERENCE / "environment.md").read_text()
    assert not [name for name in sorted(read) if f"`{name}" not in page]


def test_every_metric_is_described() -> None:
    source = (ROOT / "pymoe" / "integrations" / "prometheus.py").read_text()
    metrics = set(re.findall(r'"(pymoe_[a-z_]+)"', source))
    assert len(metrics) > 8
    page = (REFERENCE / "metrics.md").read_text()
    assert not [metric for metric in sorted(metrics) if metric not in page]
