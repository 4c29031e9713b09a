"""Tests of the rules and limits for machine code, without a compiler."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import check
from counters import Statics
from machine_code import Kernel, demangle

BARS = json.loads(check.BARS.read_text())


def test_every_bar_is_for_a_figure_and_every_loose_one_has_a_reason():
    figures = {*check.AT_MOST, *check.AT_LEAST}
    for case, bars in BARS.items():
        loose = [name for name, ideal in check.IDEAL.items() if bars[name] > ideal]
        assert set(bars) == figures | ({"why"} if loose else set()), case
        assert not loose or len(bars["why"]) > 20, case


def test_a_figure_that_is_worse_than_its_bar_is_an_error():
    bars = {"combine": {"registers": 70, "16-byte loads together": 8}}
    assert not check.bar_complaints({"combine": {"registers": 70, "16-byte loads together": 8}}, bars)
    assert not check.bar_complaints({"combine": {"registers": 60, "16-byte loads together": 9}}, bars)
    assert check.bar_complaints({"combine": {"registers": 71, "16-byte loads together": 1.5}}, bars) == [
        "combine: registers is 71, and may be 70 at most",
        "combine: 16-byte loads together is 1.5, and must be 8 at least",
    ]
    assert check.bar_complaints({"combine": {"memsets": 0}}, bars) == ["combine: no bar for memsets (it is 0)"]
    assert "was not recorded" in check.bar_complaints({}, bars)[0]


@pytest.mark.parametrize(
    ("name", "spilled", "narrow", "fused", "others", "said"),
    [
        ("gate_topk_kernel<float, 8, 16, true>", 72, 0, 0, (), "spills 72 bytes"),
        ("combine_kernel<BFloat16, 16, 8, false>", 0, 4, 0, (), "stores 4 bytes in 4 places"),
        ("expert_activation_kernel<(Activation)0, BFloat16>", 0, 4, 0, (), "stores 4 bytes in 4 places"),
        ("combine_backward_kernel<float, 16, 8>", 0, 0, 3, (), "3 fused multiply-adds"),
        ("count_kernel<int, true>", 0, 0, 0, ("MEMBAR.SC.GPU",), "communicates between blocks: MEMBAR.SC.GPU"),
    ],
)
def test_what_must_not_stand_in_code_is_an_error(name, spilled, narrow, fused, others, said):
    kernel = Kernel("x.cu", name, "sm_120", 80, 0, 0, spilled)
    (complaint,) = check.static_complaints([Statics(kernel, name, narrow, fused, others)])
    assert said in complaint
    assert "sm_120" in complaint
    clean = Statics(Kernel("x.cu", name, "sm_120", 80, 0, 0, 0), name, 0, 0, ())
    assert not check.static_complaints([clean])


def test_a_rule_for_kernels_that_are_called_otherwise_is_an_error():
    names = [
        "dispatch_kernel<uint4, true>", "combine_kernel<float, 16, 8, false>", "combine_backward_kernel<float, 16, 8>",
        "expert_activation_kernel<(Activation)0, Float16>", "expert_activation_backward_kernel<(Activation)2, Float16>",
    ]  # fmt: skip
    found = [Statics(Kernel("x.cu", name, "sm_90", 80, 0, 0, 0), name, 0, 0, ()) for name in names]
    assert not check.forgotten(found)
    assert [len(check.forgotten(found[:i] + found[i + 1 :])) for i in range(len(found))] == [2, 2, 1, 1, 1]


@pytest.mark.parametrize(("nvcc", "status", "said"), [(None, 0, "no nvcc"), ("nvcc", 1, "pip install")])
def test_nvcc_without_nvdisasm_is_an_error(monkeypatch, capsys, nvcc, status, said):
    """The check used to exit with status 0 although it had checked nothing."""
    monkeypatch.setattr(check, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(check.sass, "find_nvdisasm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["check.py"])
    assert check.main() == status
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.startswith("error: ") == (status == 1)


@pytest.mark.parametrize(("nvcc", "error"), [(None, LookupError), ("nvcc", RuntimeError)])
def test_faults_that_cannot_be_judged_for_want_of_nvdisasm_are_no_success(monkeypatch, nvcc, error):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "mutants")
    import static

    monkeypatch.setattr(static.machine_code, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(static.sass, "find_nvdisasm", lambda: None)
    with pytest.raises(error, match="no nvcc" if nvcc is None else "pip install"):
        static.prepare([])


def test_names_keep_the_arguments_of_their_templates():
    if shutil.which("c++filt") is None:
        pytest.xfail("there is no c++filt")
    # The mangled name of expert_activation_kernel<Activation(1), BFloat16>(BFloat16*); nvcc numbers unnamed namespaces.
    unnamed = "_GLOBAL__N__1234abcd_25_expert_activation_cuda_cu_5678abcd"
    name = f"_ZN5pymoe4cuda{len(unnamed)}{unnamed}24expert_activation_kernelILNS_10ActivationE1ENS_8BFloat16EEEvPKT0_"
    assert demangle([name]) == ["expert_activation_kernel<(Activation)1, BFloat16>"]
