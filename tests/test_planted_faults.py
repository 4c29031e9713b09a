"""Tests that every fault of tests/mutants fits the sources: its text must occur exactly once.

The faults, tests and rules that docs/concepts/proof_without_a_gpu.md names must exist, too.
"""

import fnmatch
import re
import runpy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "mutants"))
from faults_cuda import FAULTS as CUDA
from faults_ptx import FAULTS as PTX
from faults_python import FAULTS as PYTHON
from faults_schedules import FAULTS as SCHEDULES
from faults_static import FAULTS as STATIC
from faults_streams import FAULTS as STREAMS
from planting import Fault, Kind, plant

TESTS = Path(__file__).parent
FAULTS = [*CUDA, *PTX, *PYTHON, *SCHEDULES, *STATIC, *STREAMS]


def test_every_fault_fits_the_sources():
    misfits = []
    for fault in FAULTS:
        try:
            assert fault.planted() != fault.old
        except ValueError as error:
            misfits.append(str(error))
    assert not misfits, "\n".join(misfits)


def test_there_are_many_and_their_names_differ():
    assert min(len(CUDA), len(SCHEDULES)) >= 20
    for faults in (CUDA, PTX, PYTHON, SCHEDULES, STATIC, STREAMS):
        assert len({fault.name for fault in faults}) == len(faults)


def test_a_fault_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="'no such text' is 0 times in Makefile"):
        Fault("a fault", "Makefile", "no such text", "").planted()
    with pytest.raises(ValueError, match="times in Makefile"):
        Fault("a fault", "Makefile", "\n", "").planted()


@pytest.mark.parametrize(("noticed", "passed"), [("ab", True), ("a", False), ("", False)])
def test_one_that_is_not_noticed_fails_the_run(monkeypatch, tmp_path, capsys, noticed, passed):
    monkeypatch.setattr("planting.RESULTS", tmp_path)
    faults = [Fault(name, "Makefile", ".DEFAULT_GOAL", "") for name in "ab"]
    kind = Kind("some", faults, lambda faults: None, lambda fault, _: (fault.name in noticed, "?"))
    assert plant(kind, []) is passed
    assert f"{len(noticed)} of 2 planted faults noticed" in capsys.readouterr().out
    assert f"| a | Makefile | {'yes' if 'a' in noticed else 'NO'} | ? |" in (tmp_path / "some.md").read_text()


def test_a_cuda_fault_is_linked_with_the_emulated_tests_alone(tmp_path):
    """If all targets had been built, main.cpp.o of the plain tests was linked, too, and linking failed."""
    fault = next(fault for fault in CUDA if fault.tests == "combine")
    kernels = ("combine_cuda.cu", "combine_backward_cuda.cu")
    expected = [
        *("pymoe_emulated_tests.dir/main.cpp.o", "pymoe_emulated_tests.dir/test_combine.cpp.o"),
        *(f"pymoe_emulated_kernels.dir/{name}.o" for name in kernels),
        *("pymoe_emulator.dir/emulator.cpp.o", "pymoe_fibers.dir/fiber.cpp.o"),
    ]
    others = ["pymoe_tests.dir/main.cpp.o", "pymoe_emulated_tests.dir/test_dispatch.cpp.o"]
    for name in (*expected, *others):
        path = tmp_path / "CMakeFiles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    # The file is run, not imported, because other packages are called `cuda`, too.
    objects_of = runpy.run_path(str(Path(__file__).parent / "mutants" / "cuda.py"))["objects_of"]
    found = [str(path.relative_to(tmp_path / "CMakeFiles")) for path in objects_of(fault, tmp_path)]
    assert sorted(found) == sorted(expected)


PAGE = (TESTS.parent / "docs" / "concepts" / "proof_without_a_gpu.md").read_text()
ON_PAGE = re.findall(r"^\| ([^|`]+) \| `(\w+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE)


def cases_of(*patterns):
    """Return the names of the test cases of C++ files."""
    files = [path for pattern in patterns for path in TESTS.glob(pattern)]
    return [name for path in files for name in re.findall(r'^TEST_CASE\("([^"]*)"', path.read_text(), re.MULTILINE)]


def names_of_tests(kind, fault):
    """Return the names of the tests of which one must fail with the fault."""
    if kind == "streams":
        names = re.findall(r"^def (test_\w+)", (TESTS / "cuda_ptx" / "check_streams.py").read_text(), re.MULTILINE)
        return [name for name in names if fault.word in name]
    if kind == "cuda":
        return cases_of(f"cuda_on_cpu/test_{fault.tests}.cpp")
    return fnmatch.filter(cases_of("cuda_on_cpu/test_*.cpp", "cuda_ptx/far_shapes.cpp"), fault.cases)


def test_the_page_names_faults_that_are_planted_and_tests_that_run_for_them():
    assert len(ON_PAGE) == 13
    for name, kind, test in ON_PAGE:
        found = [fault for fault in {"cuda": CUDA, "ptx": PTX, "streams": STREAMS}[kind] if fault.name == name]
        assert found, name
        assert test in names_of_tests(kind, found[0]), name
    assert {name for name, kind, _ in ON_PAGE if kind == "ptx"} == {fault.name for fault in PTX}


def test_the_page_lists_every_rule_of_the_interpreter():
    rules = re.findall(
        r'^    "([^:"]+): [^"]+": \($', (TESTS / "cuda_ptx" / "check_rules.py").read_text(), re.MULTILINE
    )
    table = PAGE[PAGE.index("| Rule | Broken by | Kept by |") :].split("\n\n")[0]
    assert re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:] == list(dict.fromkeys(rules))
