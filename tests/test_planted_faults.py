"""Tests that every fault of tests/mutants fits the sources: its text must occur exactly once."""

import runpy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "mutants"))
from faults_cuda import FAULTS as CUDA
from faults_python import FAULTS as PYTHON
from faults_schedules import FAULTS as SCHEDULES
from faults_static import FAULTS as STATIC
from planting import Fault, Kind, plant

FAULTS = [*CUDA, *PYTHON, *SCHEDULES, *STATIC]


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
    for faults in (CUDA, PYTHON, SCHEDULES, STATIC):
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
