"""Tests that every Python block of README and docs runs and prints what the page says, and that every command of a
shell block exists.

The blocks of a page run in order, in a separate process. A block is skipped if the line above it gives a reason:
``<!-- not run: it needs two processes -->``. A block of the language ``output`` holds what the Python block before it
prints; ``...`` stands for any text there.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from docs_pages import PAGES, ROOT, Block, agrees, blocks, name, printed_outputs

PYTHON_PAGES = [page for page in PAGES if any(block.language == "python" for block in blocks(page.read_text()))]
MOST_NOT_RUN = 8
MARK = "----- a block of the page -----"
SHELLS = {"sh", "shell", "bash", "console"}
MAKE_TARGETS = set(re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())
# Commands that pages use and that need not be installed for the tests.
COMMON_COMMANDS = {
    *("pip", "sudo", "pytest", "torchrun", "cmake", "cd", "git", "python", "curl", "openssl", "docker", "kubectl"),
    *("export", "nvcc", "nvidia-smi"),
}


def as_program(page: Path) -> str:
    """Return the page's Python blocks, placed on the same lines as in the page, so that tracebacks name these."""
    lines = [""] * (len(page.read_text().splitlines()) + 1)
    for block in blocks(page.read_text()):
        if block.language == "python" and not block.not_run:
            for number, line in enumerate(block.text.splitlines()):
                lines[block.line - 1 + number] = line
    for block, _ in printed_outputs(page.read_text()):
        length = block.text.count("\n")
        for index in (block.line - 2, block.line - 1 + length):  # the lines of the fences
            lines[index] = f"print({MARK!r}, flush=True)"
    return "\n".join(lines)


def differences(page: Path, said: str) -> str:
    """Return how the outputs on a page differ from what its program printed; an empty string if they agree."""
    parts = said.split(f"{MARK}\n")
    found = []
    for number, (_, output) in enumerate(printed_outputs(page.read_text())):
        printed = parts[2 * number + 1]
        if not agrees(output.text, printed):
            found.append(f"{name(page)}:{output.line}: expected\n{output.text}got\n{printed}")
    return "\n".join(found)


# Reads names of programs, runs each in its own child and answers with its exit status: importing torch takes longer
# than most pages. What they print goes to the files "printed" and "errors" in the same folder.
FORKS = """
import os, runpy, signal, sys
import torch, pymoe.nn, pymoe.pipe, pymoe.runtime
for line in sys.stdin:
    file = line.rstrip("\\n")
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(os.path.dirname(file))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT), 1), os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), 2)
sys.argv = [file]
signal.alarm(600)
runpy.run_path(file, run_name="__main__")
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str, Path], tuple[int, str]]]:
    """Yield a function that runs a program as the file of a given name, and returns its exit status and output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None

        def run_as(program: str, file: Path) -> tuple[int, str]:
            file.write_text(program)
            print(file, file=forks.stdin, flush=True)
            status = int(forks.stdout.readline())
            return status, "".join((file.parent / name).read_text() for name in ("printed", "errors"))

        yield run_as


@pytest.mark.thinned(usual=9)
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, run: Callable[[str, Path], tuple[int, str]]) -> None:
    status, said = run(as_program(page), tmp_path / "page.py")
    assert status == 0, f"{name(page)}\n{said}"
    assert not (wrong := differences(page, said)), wrong


@pytest.mark.parametrize(
    ("output", "agrees"), [("4\n", True), ("5\n", False), ("...\n", True), ("4\n4\n", False), ("...5\n", False)]
)
def test_an_output_that_differs_is_noticed(
    tmp_path: Path,
    run: Callable[[str, Path], tuple[int, str]],
    output: str,
    agrees: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("docs_pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"```python\nprint(3)\n```\n\n```python\nprint(2 + 2)\n```\n\n```output\n{output}```\n")
    status, said = run(as_program(page), tmp_path / "page.py")
    assert status == 0, said
    assert bool(differences(page, said)) != agrees


def test_every_output_follows_the_block_that_prints_it() -> None:
    for page in PAGES:
        outputs = [block for block in blocks(page.read_text()) if block.language == "output"]
        assert outputs == [output for _, output in printed_outputs(page.read_text())], name(page)


def test_a_block_that_fails_is_noticed_with_its_line(
    tmp_path: Path, run: Callable[[str, Path], tuple[int, str]]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\nNow\n\n```python\nassert x == 2\n```\n")
    status, said = run(as_program(page), tmp_path / "page.py")
    assert status == 1
    assert 'page.py", line 10' in said


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [(name(page), block) for page in PAGES for block in blocks(page.read_text()) if block.not_run]
    assert len(left_out) <= MOST_NOT_RUN, left_out
    assert all(len(block.not_run) > 10 for _, block in left_out)


def commands(block: Block) -> list[list[str]]:
    """Return the commands of a shell block, as lists of words."""
    text = block.text.replace("\\\n", " ")
    lines = [line.removeprefix("$ ").split(" #")[0].strip() for line in text.splitlines()]
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


def fault(words: list[str]) -> str:
    """Return the fault in a command; an empty string if there is none."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    command, *rest = words
    files = [word for word in rest if re.search(r"\.(py|sh|cpp|txt)$", word) and "*" not in word]
    files += [word for word in rest if re.match(r"(tests|examples|benchmarks|docs|pymoe)/", word)]
    for file in files:
        if not (ROOT / file).exists() and "X" not in file:
            return f"there is no {file}"
    if command == "make":
        missing = [word for word in rest if "=" not in word and word not in MAKE_TARGETS]
        return f"no target {missing[0]} in the Makefile" if missing else ""
    if command in ("python", "torchrun") and "-m" in rest:
        module = rest[rest.index("-m") + 1]
        path = ROOT / module.replace(".", "/")
        if module.split(".")[0] in ("pymoe", "benchmarks") and not (
            path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        ):
            return f"no module {module} to run"
    elif command == "bash":
        return "" if files else "no script to run"
    if command.startswith("build/"):
        return ""
    return "" if command in {*COMMON_COMMANDS, "bash"} else f"unknown command {command}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    faults = [
        f"{name(page)}:{block.line}: {shlex.join(words)}: {wrong}"
        for block in blocks(page.read_text())
        if block.language in SHELLS
        for words in commands(block)
        if (wrong := fault(words))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "line",
    ["make nothing", "python examples/absent.py", "python -m pymoe.absent", "bash tests/absent.sh", "frobnicate --now"],
)
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    assert fault(shlex.split(line))
