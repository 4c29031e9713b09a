"""Bars, stored predictions and the pages that show them, without a compiler; and the model's arithmetic."""

import json
import shutil
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import check
import pages
import products
from cases import WORK, Work
from counters import Statics
from launches import Result
from machine_code import Kernel, demangle
from memory import Traffic
from model import Gpu, Occupancy, Prediction, occupancy, predict
from recorded import Case
from warp import Counts

BARS = json.loads(check.BARS.read_text())


def test_every_shape_has_bars_and_every_loose_bar_a_reason():
    assert set(BARS) == set(WORK)
    for case, bars in BARS.items():
        ideals = check.ideals(case)
        for name, bar in bars.items():
            ((way, value), *rest) = bar.items()
            assert way in ("most", "least"), (case, name)
            ideal = ideals.get(name)
            loose = ideal is not None and (value > ideal if way == "most" else value < ideal)
            assert [key for key, _ in rest] == (["why"] if loose else []), (case, name, bar)
            assert not loose or len(bar["why"]) > 20, (case, name)


def test_a_figure_that_is_worse_than_its_bar_is_an_error():
    bars = {"combine": {"epochs a round": {"most": 1}, "bytes a sector": {"least": 32}}}
    good = {"combine": {"epochs a round": 1.0, "bytes a sector": 32.0}}
    assert not check.bar_complaints(good, bars)
    worse = {"combine": {"epochs a round": 2.0, "bytes a sector": 8.0}}
    assert len(check.bar_complaints(worse, bars)) == 2
    assert "no bar for registers" in check.bar_complaints({"combine": good["combine"] | {"registers": 80}}, bars)[0]
    assert "nothing was traced" in check.bar_complaints({}, bars)[0]


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
    """It once said that no check had passed, and that all was well."""
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
    # One of nvcc's, whose unnamed namespace has a number: expert_activation_kernel<Activation(1), BFloat16>(BFloat16*).
    unnamed = "_GLOBAL__N__1234abcd_25_expert_activation_cuda_cu_5678abcd"
    name = f"_ZN5pymoe4cuda{len(unnamed)}{unnamed}24expert_activation_kernelILNS_10ActivationE1ENS_8BFloat16EEEvPKT0_"
    assert demangle([name]) == ["expert_activation_kernel<(Activation)1, BFloat16>"]


def test_stored_predictions_that_are_not_the_codes_are_an_error():
    stored = json.loads(check.PREDICTIONS.read_text())
    assert not check.drift(stored, stored)
    changed = json.loads(json.dumps(stored))
    changed["combine"]["us"]["H200"] *= 1.2
    assert len(check.drift(stored, changed)) == 1
    assert "nothing was traced" in check.drift(stored, {})[0]


def test_the_page_shows_the_stored_predictions():
    stored = json.loads(check.PREDICTIONS.read_text())
    page = pages.PAGE.read_text()
    for name, table in pages.tables(stored).items():
        assert table in page, f"{name}: python tests/cuda_static/check.py --write"
    assert pages.page_with(page, pages.tables(stored)) == page
    assert set(stored) == set(WORK) == set(json.loads(pages.BEFORE.read_text()))


def test_a_change_is_shown_by_what_was_and_what_is():
    stored = json.loads(check.PREDICTIONS.read_text())
    before = json.loads(json.dumps(stored))
    assert "→" not in pages.changes(before, stored)
    before["combine"]["registers"] = 80
    assert f"| 80 → {stored['combine']['registers']} |" in pages.changes(before, stored)


@pytest.mark.parametrize("one", products.PRODUCTS, ids=lambda one: one.name)
def test_a_product_of_torchs_takes_what_its_multiplications_or_its_bytes_do(one):
    slow, bound = one.us(1e-3)
    quick, _ = one.us(1e9)
    assert bound == "bandwidth"
    assert quick == pytest.approx(1.5 * one.launches + 2 * one.rows * one.depth * one.columns / (0.65 * 989e6))
    assert slow > quick


def test_the_bytes_of_a_product():
    """(2, 3) by (3, 4) in 16 bits; of 5 experts, whose weights or whose gradients of weights are as many."""
    assert products.Product("", 2, 3, 4).bytes == 2 * (6 + 12 + 8)
    assert products.Product("", 2, 3, 4, experts=5).bytes == 2 * (6 + 5 * 12 + 8)
    assert products.Product("", 2, 3, 4, experts=5, depth_is_shared=True).bytes == 2 * (6 + 12 + 5 * 8)


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [(32, 1024, 0, 2), (80, 224, 0, 3), (168, 128, 0, 3), (48, 256, 0, 5), (16, 32, 0, 32), (32, 256, 100 << 10, 2)],
)
def test_what_fits_on_a_multiprocessor(registers, threads, shared, blocks):
    assert occupancy(registers, threads, shared) == Occupancy(blocks, blocks * (threads // 32))


def test_a_launch_takes_as_long_as_its_slowest_part():
    found = Prediction(bandwidth=3.0, issue=5.0, latency=1.0, chain=2.0)
    assert (found.total, found.limit) == (6.5, "issue")
    assert Gpu("a", 1, 1.0, 1.0).multiprocessors == 1


def test_every_part_of_a_prediction():
    """Eight blocks of two warps on two multiprocessors, which hold two blocks each: two waves. One block was run."""
    warp = Counts(Counter({"FADD": 90, "HMMA": 10}), epochs=1, loads_in_epoch=[4], cycles=3000, shared_bytes=1280)
    load, store = Traffic(8, 128, 4096, {16}), Traffic(8, 64, 1024, {4})
    traffic = {("load", "x"): load, ("store", "y"): store, ("atomic", "x"): Traffic(1, 99, 4, {4})}
    result = Result([warp, warp], traffic, 1, Counter({"FADD": 180, "HMMA": 20}))
    case = Case("", [("x", 0, 1 << 20), ("y", 1 << 21, 1 << 20), ("never touched", 1 << 22, 1 << 20)])
    work = Work("", "", 1, frozenset({"x"}), 1)
    found = predict(case, result, 8, 64, Occupancy(2, 4), work, Gpu("a", 2, 1.0, 1.0))
    on_their_way = 4 * 4 * 512  # resident warps, loads of each, bytes of a load
    assert asdict(found) == pytest.approx(
        {
            "bandwidth": 2 * (1 << 20) / 0.9e6,
            "issue": 8 * 100 / 4 / 1e3,  # a multiprocessor has four blocks, eight warps
            "latency": 8 * 4096 / 2 / on_their_way * 0.7,
            "chain": 2 * 3000 / 1e3,
            "l2": 8 * (128 + 64) * 32 / 5.7e6,
            "shared": 8 * 1280 / 128 / 1e3,
            "matrix": 8 * 10 * 6.4 / 4 / 1e3,
        }
    )
    assert (found.limit, found.total) == ("chain", 1.5 + 6.0)


@pytest.mark.parametrize("part", ["bandwidth", "issue", "latency", "chain", "l2", "shared", "matrix"])
def test_the_slowest_part_is_the_limit(part):
    found = Prediction(**{name: 2.0 if name == part else 1.0 for name in asdict(Prediction(0, 0, 0, 0))})
    assert (found.limit, found.total) == ("L2" if part == "l2" else part, 3.5)


def test_the_largest_launch_of_a_call_gives_its_figures():
    """Neither the first, a plan, nor the last, a sum of blocks' sums."""
    small, large = (SimpleNamespace(case="a", figures={"instructions an element": n}) for n in (0.1, 50.0))
    assert check.largest([small, large, small, SimpleNamespace(case="b")], "a") is large
