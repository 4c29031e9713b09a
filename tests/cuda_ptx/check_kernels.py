"""Tests that the kernels' PTX computes the same as the CPU twins, and that faults in it are noticed. Run with the
plugin ``ptx_ops``.

The cases are those of the emulated kernels (tests/cuda_on_cpu/test_*.cpp), each compared with the CPU twin, as exactly
as the operator promises. Faults are planted in the PTX, in the sources or in the flags that it is compiled with.
"""

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from architectures import code_of, others, shipped, texts, with_names_of, without_target
from limits import EXHAUSTIVE
from machine_code import find_nvcc
from ptx_library import ARCHITECTURE, FLAGS, ROOT
from ptx_ops import architecture, module_of, replacements, runtime

sys.path.insert(0, str(ROOT / "tests" / "mutants"))
from faults_ptx import FAULTS as FAULTS_IN_SOURCES
from faults_ptx import OUTSIDE

FILES = sorted(path.stem for path in ROOT.glob("tests/cuda_on_cpu/test_*.cpp") if "__global__" not in path.read_text())
# The share of the emulator's cases that run here: enough to launch every kernel, and fewer of the slow ones.
SCALES = {"test_grouped_linear": 0.4, "test_expert_activation": 4, "test_combine": 2, "test_gate_topk": 1.5}

DESIGN = re.findall(r'^TEST_CASE\("(design: [^"]*)"', (Path(__file__).parent / "design_shapes.cpp").read_text(), re.M)
FAR = re.findall(r'^TEST_CASE\("(far: [^"]*)"', (Path(__file__).parent / "far_shapes.cpp").read_text(), re.M)
own_ptx = pytest.mark.skipif(architecture != ARCHITECTURE, reason="about the PTX that the library was compiled with")


def run_cases(*options, scale=0.3):
    """Return whether the cases selected by doctest's ``options`` pass; print doctest's output."""
    os.environ["PYMOE_EMULATED_SCALE"] = str(scale)
    words = [word.encode() for word in ("cases", *options)]
    return runtime.pymoe_ptx_cases(len(words), (ctypes.c_char_p * len(words))(*words)) == 0


@pytest.mark.parametrize("file", FILES)
def test_kernels_equal_their_cpu_twins(file):
    before = runtime.pymoe_ptx_launches(b"")
    scale = SCALES.get(file, 1) * (3 if EXHAUSTIVE else 1)
    assert run_cases(f"--source-file=*{file}.cpp", scale=scale)
    assert runtime.pymoe_ptx_launches(b"") > before


@pytest.fixture
def plant():
    """Yield a function that replaces one module by another; undo the replacement afterwards."""
    planted = []

    def put(text, other):
        assert text != other, "nothing was planted"
        runtime.pymoe_ptx_replace(text.encode(), other.encode())
        planted.append((text, other))

    yield put
    for text, other in reversed(planted):
        runtime.pymoe_ptx_replace(other.encode(), text.encode())


@own_ptx
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("other", others())
def test_the_ptx_of_other_architectures_does_the_same(other, file, plant):
    """A few cases of each file run. nvcc optimises differently for Blackwell, so the texts have little in common."""
    for text, replacement in replacements(other):
        assert f".target sm_{other}" in replacement
        plant(text, replacement)
    assert run_cases(f"--source-file=*{file}.cpp", scale=SCALES.get(file, 1) / 4)


@own_ptx
def test_machine_code_is_made_of_ptx_that_runs():
    """The text of every architecture that ships is one of those that run, except for the line that names the target."""
    run = [{without_target(code_of(module_of(f"_{file}_cu_"))) for file in texts(ARCHITECTURE)}]
    run += [{without_target(other) for _, other in replacements(name)} for name in others()]
    for name in shipped():
        own = {without_target(text) for _, text in replacements(name)}
        assert own in run, f"sm_{name} has PTX of its own, which must run, too: add it to OTHERS"


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", DESIGN)
def test_shapes_of_the_design(case, record_property):
    start, before = time.monotonic(), runtime.pymoe_ptx_executed()
    assert run_cases(f"--test-case={case.replace(',', '?')}")  # a comma would part two names
    executed, seconds = runtime.pymoe_ptx_executed() - before, time.monotonic() - start
    assert executed > 0
    said = f"{executed / 1e6:.1f} million instructions of warps, {seconds:.0f} s"
    record_property("speed", said)
    print(f"\n{case}: {said}")


@pytest.mark.parametrize("case", FAR)
def test_shapes_of_more_than_31_bits(case):
    assert run_cases(f"--test-case={case}")


def entries(text):
    """Return the module's kernels by name."""
    parts = re.split(r"^(?=(?:\.visible )?\.entry )", text, flags=re.MULTILINE)
    return {re.search(r"\.entry (\S+)\(", part)[1]: part for part in parts[1:]}


def edited(text, kernel, pattern, replacement, which=0):
    """Return the module with one match of ``pattern`` replaced in every kernel whose name contains ``kernel``."""
    for name, body in entries(text).items():
        found = list(re.finditer(pattern, body, re.MULTILINE))
        if kernel in name and len(found) > which % max(len(found), 1):
            match = found[which % len(found)]
            text = text.replace(body, body[: match.start()] + match.expand(replacement) + body[match.end() :])
    return text


NOTHING = r"membar.cta;"
# The load of a pack, or of its first word.
LOAD = r"(ld\.global\.nc[\w.]*\.u32\s+[^\[]*\[%rd\d+)\]"
# For each fault: the kernel, the pattern to replace in it, the replacement, the cases that must fail, and the messages
# that they must give.
FAULTS = {
    "a barrier is gone (routing)": (
        "place_kernel", r"\bbar\.sync\s+0;", NOTHING, "build_routing: one launch equals*", "last barrier|never written",
    ),
    "a barrier is gone (products)": (
        "linear", r"\bbar\.sync\s+0;", NOTHING, "grouped_linear: the emulated kernels equal*",
        "last barrier|never written",
    ),
    "a barrier of a warp is gone (gate)": (
        "gate_topk", r"\bbar\.warp\.sync\s+-1;", NOTHING, "gate_topk: the emulated kernel equals*",
        "last barrier|never written|NOT correct",
    ),
    "a store is gone": (
        "combine_kernel", r"st\.global[\w.]* *\t*\[[^;]*;", NOTHING, "combine: the emulated kernel gives*",
        "NOT correct",
    ),
    "a store writes less": (
        "dispatch", r"st\.(\S+?)\.v4\.u32\s+\[([^\]]*)\], \{([^,]*), ([^,]*), [^;]*;", r"st.\1.v2.u32 [\2], {\3, \4};",
        "dispatch: *", "NOT correct",
    ),
    "a load is an element off": (
        "combine_kernel", LOAD, r"\1+2]",
        "combine: the emulated kernel gives*", "is not a multiple of",
    ),
    "a load is a vector off": (
        "combine_kernel", LOAD, r"\1+16]",
        "combine: the emulated kernel gives*", "is in no tensor|NOT correct",
    ),
    "shared memory is read unwritten": (
        "linear", r"st\.shared\.v4\.u32\s+\[[^;]*;|cp\.async\.c[ag]\.shared\.global[^;]*;", NOTHING,
        "grouped_linear: the emulated kernels equal*", "never written",
    ),
    "a lane stays away from a shuffle": (
        "gate_topk", r"(shfl\.sync\.bfly[^;]*;)",
        r"{\n.reg .pred %stay;\n.reg .b32 %me;\nmov.u32 %me, %laneid;\nsetp.ne.u32 %stay, %me, 5;\n@%stay \1\n}",
        "gate_topk: the emulated kernel equals*", "do not come|ended before|takes no part|NOT correct",
    ),
}  # fmt: skip


@own_ptx
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_noticed(name, plant, capfd):
    kernel, pattern, replacement, cases, message = FAULTS[name]
    text = module_of(kernel)
    plant(text, edited(text, kernel, pattern, replacement))
    assert not run_cases(f"--test-case={cases}")
    assert re.search(message, capfd.readouterr().out)


READ_ONLY = r"\bld\.global\.([fsu]\d+)", r"ld.global.nc.\1"
NARROW = r"(?:mul|mad)\.lo\.s64\s+(%rd\d+),[^;]*;", r"\g<0>\nshl.b64 \1, \1, 32;\nshr.s64 \1, \1, 32;"
# The same, for every match of the pattern in the module.
FAULTS_EVERYWHERE = {
    "the read-only cache for what the launch writes (routing)": (
        "build_routing_cuda", READ_ONLY, "--source-file=*test_build_routing.cpp", "through the read-only cache",
    ),
    "places in 32 bits (gate, backward)": ("gate_topk_backward", NARROW, "--test-case=far: gate_topk*", OUTSIDE),
}  # fmt: skip


@own_ptx
@pytest.mark.parametrize("name", FAULTS_EVERYWHERE)
def test_faults_planted_everywhere_are_noticed(name, plant, capfd):
    kernel, (pattern, replacement), cases, message = FAULTS_EVERYWHERE[name]
    text = module_of(kernel)
    plant(text, re.sub(pattern, replacement, text))
    assert not run_cases(cases)
    assert re.search(message, capfd.readouterr().out)


def ptx_of(file, folder, flags=FLAGS):
    """Return the PTX of a file of kernels, of which ``folder`` may hold a changed copy, or changed headers; with the
    names of the library.
    """
    source = folder / file if (folder / file).exists() else ROOT / file
    code = f"-gencode=arch=compute_{architecture},code=compute_{architecture}"
    include = [f"-I{folder / 'csrc'}", f"-I{ROOT / 'csrc'}"]
    command = [find_nvcc(), *flags, code, "-ptx", *include, str(source), "-o", str(folder / "kernels.ptx")]
    subprocess.run(command, check=True)
    return with_names_of((folder / "kernels.ptx").read_text(), module_of(f"_{source.stem}_cu_"))


@own_ptx
@pytest.mark.parametrize("fault", FAULTS_IN_SOURCES, ids=lambda fault: fault.name)
def test_faults_planted_in_sources_are_noticed(fault, plant, capfd, tmp_path):
    """None of these faults gives a wrong value in cases of usual sizes and numbers, in any order of the threads."""
    changed = tmp_path / fault.file
    changed.parent.mkdir(parents=True)
    changed.write_text(fault.planted())
    plant(module_of(f"_{fault.source}_cu_"), ptx_of(f"csrc/kernels/{fault.source}.cu", tmp_path))
    assert not run_cases(f"--test-case={fault.cases}")
    assert re.search(fault.said, capfd.readouterr().out)


@own_ptx
def test_sources_without_a_fault_pass(plant, tmp_path):
    plant(module_of("combine_kernel"), ptx_of("csrc/kernels/combine_cuda.cu", tmp_path) + "\n")
    assert run_cases("--test-case=combine: the emulated kernel gives*")


@own_ptx
def test_a_build_without_fmad_false_is_noticed(plant, capfd, tmp_path):
    """Fused products give different bits; a product that the assembler may fuse later is refused even before."""
    flags = [flag for flag in FLAGS if flag != "--fmad=false"]
    assert len(flags) == len(FLAGS) - 1
    text = module_of("combine_kernel")
    fused = ptx_of("csrc/kernels/combine_cuda.cu", tmp_path, flags)
    assert "fma.rn.f32" in fused
    assert "fma.rn.f32" not in text
    plant(text, fused)
    assert not run_cases("--test-case=combine: the emulated kernel gives*")
    assert "unknown instruction: mul.f32" in capfd.readouterr().out or "mul.f32" not in fused
    # The same with each instruction rounded by itself, as if the assembler fused nothing more: the bits are already
    # wrong.
    rounded = re.sub(r"\b(add|sub|mul)\.(f32|f64)\b", r"\1.rn.\2", fused)
    if rounded != fused:
        plant(fused, rounded)
    assert not run_cases("--test-case=combine: the emulated kernel gives*")
    assert "same_values" in capfd.readouterr().out


def test_launches_come_from_the_library():
    """The replacement of the CUDA runtime makes no launches itself: grids and arguments come from the host code."""
    source = (Path(__file__).parent / "runtime.cpp").read_text()
    assert not re.search(r"<<<|combine|dispatch|gate_topk", source)
