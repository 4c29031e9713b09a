"""Tests that the benchmark's command line prints complete results and reports wrong ones. No time is asserted."""

from __future__ import annotations

import builtins
import copy
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from limits import ISAS

from pymoe.bench import cli, correctness, environment
from pymoe.bench.calls import BenchCase, Operator, Sample, Target
from pymoe.bench.compare import compare
from pymoe.bench.floor import Floor, Rates
from pymoe.bench.layer import (
    Shape,
    candidates_of,
    forward_candidates_of,
    inputs_of,
    layer_lines,
    layer_of,
    training_step,
    verdict_of,
    with_torch_alone,
)
from pymoe.bench.report import seconds
from pymoe.bench.timing import Timing

COLUMNS = {
    "operator",
    "case",
    "dtype",
    "direction",
    "native",
    "reference",
    "baseline",
    "floor",
    "over_reference",
    "over_baseline",
    "share_of_floor",
    "native_in_graph",
    "baseline_in_graph",
    "floor_in_graph",
    "not_in_graph",
    "over_baseline_in_graph",
    "share_of_copy",
    "correctness",
    "target",
    "bytes",
    "flops",
    "source",
}


def scale(x, factor=2.0):
    return x * factor


def wrong_scale(x, factor=2.0):
    result = x * factor
    result.view(-1)[3] += 0.125
    return result


def wrong_gradient(x, factor=2.0):
    return x.detach() * factor + (x - x.detach()) * 3


def failing(x, factor=2.0):
    raise RuntimeError("no luck today")


def operator_of(native, *, exact=True, backward=False, **options):
    """Return an operator that doubles 1,000 numbers."""
    case = BenchCase(
        "N1000",
        torch.float32,
        lambda generator: Sample("", (torch.randn(1000, generator=generator).requires_grad_(backward),)),
        bytes=8000,
        backward=backward,
        source="this test",
        **options,
    )
    tolerances = {torch.float32: (1e-6, 1e-6)}
    return Operator("scale", native, scale, exact=(exact,), tolerances=tolerances, bench_cases=(case,))


def only(patch, *operators):
    """Make ``operators`` the only ones that the command line knows."""
    patch.setattr(cli, "OPERATORS", dict(enumerate(operators)))
    patch.setattr(cli, "layer_lines", lambda: iter(()))


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Return a function that runs the command line over given operators and returns exit status, JSON result and
    output.
    """

    def runner(*operators):
        only(monkeypatch, *operators)
        file = tmp_path / "result.json"
        status = cli.main(["run", "--quick", "--budget", "0.01", "--json", str(file)])
        return status, json.loads(file.read_text()), capsys.readouterr().out

    return runner


def test_a_real_line_has_every_column(tmp_path, capsys):
    smallest = min((line for line in cli.all_lines() if line.operator == "build_routing"), key=lambda line: line.bytes)
    file = tmp_path / "deeper" / "result.json"
    status = cli.main(["run", "--quick", "--budget", "0.01", "--filter", f"^{smallest.name}$", "--json", str(file)])
    result = json.loads(file.read_text())
    (record,) = result["lines"]
    assert status == 0
    assert set(record) == COLUMNS
    assert record["correctness"] == {"verdict": "exact", "max_error": 0.0, "detail": ""}
    for name in ("native", "reference", "floor"):
        assert record[name]["low"] <= record[name]["median"] <= record[name]["high"]
        assert record[name]["rounds"] >= 3
    assert record["floor"]["kind"] == "copy_"
    assert result["environment"]["torch"] == torch.__version__
    assert {"cpu", "cores", "memory_gib", "threads", "date", "load"} <= set(result["environment"])
    assert result["rates"]["copy_bytes_per_second"] > 0
    assert set(result["rates"]["mm_flops_per_second"]) == {"float32"}
    assert smallest.case in capsys.readouterr().out


def test_facts_name_no_host_and_no_path(run):
    import platform

    _, result, _ = run(operator_of(scale))
    facts = json.dumps(result["environment"])
    assert "/" not in facts.replace("not installed (imported from a source tree)", "")
    assert platform.node() not in facts


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("backward", [False, True])
def test_a_right_operator_is_exact(run, backward):
    status, result, out = run(operator_of(scale, backward=backward, baseline=lambda x: x + x))
    assert status == 0
    assert result["lines"][0]["correctness"]["verdict"] == "exact"
    assert result["lines"][0]["over_baseline"]["median"] > 0
    assert "WRONG" not in out.replace("WRONG, ERROR", "")


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("exact", [False, True])
def test_a_wrong_operator_is_called_wrong(run, exact):
    status, result, out = run(operator_of(wrong_scale, exact=exact))
    found = result["lines"][0]["correctness"]
    assert status == 1
    assert found["verdict"] == "WRONG"
    assert found["max_error"] == pytest.approx(0.125, abs=1e-3)
    assert "[3]" in found["detail"]
    assert "WRONG" in out.splitlines()[3]


def test_a_wrong_gradient_is_called_wrong(run):
    assert run(operator_of(wrong_gradient, backward=False))[0] == 0
    status, result, _ = run(operator_of(wrong_gradient, backward=True))
    assert status == 1
    assert result["lines"][0]["correctness"]["detail"].startswith("gradient 0")


def repeat(x):
    """Repeat ``x``; a 16-bit gradient is rounded at each of 15 additions."""
    return torch.stack([x] * 16)


def repeat_and_round_once(x):
    return torch.stack([x.float()] * 16).to(x.dtype)


def repeat_and_lose_one(x):
    return torch.stack([*[x.float()] * 15, x.detach().float()]).to(x.dtype)


@pytest.mark.parametrize(("native", "verdict"), [(repeat_and_round_once, "exact"), (repeat_and_lose_one, "WRONG")])
def test_gradients_of_16_bits_are_compared_with_those_of_float32(native, verdict):
    values = torch.linspace(-2, 2, 100).bfloat16().requires_grad_()
    case = BenchCase("N100", torch.bfloat16, lambda generator: Sample("", (values,)), bytes=800, backward=True)
    spec = replace(operator_of(native), reference=repeat, tolerances={torch.bfloat16: (0.008, 1e-5)})
    assert correctness.verify(spec, case, case.make(torch.Generator())).verdict == verdict


def test_a_small_error_within_the_tolerance_is_shown(run):
    status, result, out = run(operator_of(lambda x: x * 2.0000005, exact=False))
    found = result["lines"][0]["correctness"]
    assert (status, found["verdict"]) == (0, "close")
    assert 0 < found["max_error"] < 1e-5
    assert "close" in out


def test_one_failing_operator_does_not_end_the_run(run):
    status, result, out = run(operator_of(failing), operator_of(scale))
    assert status == 1
    assert [record["correctness"]["verdict"] for record in result["lines"]] == ["ERROR", "exact"]
    assert set(result["lines"][0]) == COLUMNS
    assert "RuntimeError: no luck today" in out


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize(("ratio", "reached"), [(1e-9, True), (1e9, False)])
@pytest.mark.parametrize("over", ["reference", "baseline", "floor"])
def test_targets_are_shown_beside_what_was_reached(run, over, ratio, reached):
    _, result, out = run(operator_of(scale, baseline=scale, target=Target(over, ratio)))
    assert result["lines"][0]["target"] == {"over": over, "ratio": ratio, "reached": reached}
    assert ("reached" if reached else "missed") in out.splitlines()[3]
    assert f"{int(reached)} of 1 targets reached" in out


def test_share_of_the_floor_compares_rates():
    floor = Floor("copy_", lambda: None, work=100.0, needed=50.0)
    shares = floor.share(Timing((1.0, 2.0), 1), Timing((1.0, 1.0), 1))
    assert shares == (0.5, 1.0)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Return the result that a run of one line wrote."""
    file = tmp_path_factory.mktemp("bench") / "result.json"
    with pytest.MonkeyPatch.context() as patch:
        only(patch, operator_of(scale))
        assert cli.main(["run", "--quick", "--budget", "0.01", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    for record in written["lines"]:  # a spread that does not depend on how busy the machine is
        record["native"] |= {"low": 0.95e-6, "median": 1e-6, "high": 1.1e-6}
    return written


def doctored(result, factor, names=("native",)):
    """Return the same result with some times multiplied."""
    changed = copy.deepcopy(result)
    for record in changed["lines"]:
        for name in names:
            for key in ("low", "median", "high"):
                record[name][key] *= factor
    return changed


@pytest.mark.parametrize(("factor", "marker"), [(50.0, "slower"), (0.02, "faster"), (1.0, "")])
def test_compare_marks_what_left_the_spread(result, factor, marker):
    (change,), alone = compare(result, doctored(result, factor))
    assert change.marker == marker
    assert change.ratio == pytest.approx(factor)
    assert alone == []


def test_compare_does_not_blame_a_slower_machine(result):
    (change,), _ = compare(result, doctored(result, 50.0, names=("native", "floor")))
    assert change.marker == ""
    assert change.machine == pytest.approx(50.0)


def test_compare_marks_a_result_that_became_wrong(result):
    worse = copy.deepcopy(result)
    worse["lines"][0]["correctness"]["verdict"] = "WRONG"
    assert compare(result, worse)[0][0].marker == "now WRONG"
    assert compare(worse, worse)[0][0].marker == ""


def test_compare_names_a_line_that_cannot_be_computed_any_more(result):
    failed = copy.deepcopy(result)
    failed["lines"][0] |= {"native": None, "correctness": {"verdict": "ERROR"}}
    changes, names = compare(result, failed)
    assert changes == []
    assert [name.endswith(" (now ERROR)") for name in names] == [True]
    assert not compare(failed, failed)[1][0].endswith(")")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.25e-3, "1.25 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (9.996e-7, "1 us"),
        (9.994e-7, "999 ns"),
        (61.0, "61 s"),
    ],
)
def test_times_have_three_digits_and_the_unit_that_fits(value, text):
    assert seconds(value) == text


def test_compare_names_lines_of_one_run_alone(result):
    other = copy.deepcopy(result)
    other["lines"][0]["case"] = "N2000"
    changes, alone = compare(result, other)
    assert changes == []
    assert [name.split()[1] for name in alone] == ["N1000", "N2000"]


def test_compare_prints_a_table_and_succeeds(result, tmp_path, capsys):
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    files[0].write_text(json.dumps(result))
    files[1].write_text(json.dumps(doctored(result, 50.0)))
    assert cli.main(["compare", *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert "50.00x" in out
    assert "slower" in out
    assert "1 outside the spread" in out


def test_plot_draws_two_pictures(result, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result))
    assert cli.main(["plot", str(file), "--output", str(tmp_path / "pictures")]) == 0
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [one.name for one in pictures] == ["floor.png", "speedup.png"]
    assert all(one.read_bytes().startswith(b"\x89PNG") for one in pictures)


@pytest.fixture
def missing(monkeypatch):
    """Make imports of a package fail."""
    original = builtins.__import__

    def without(package):
        def importing(name, *rest, **options):
            if name.split(".")[0] == package:
                raise ImportError(f"No module named {name!r}")
            return original(name, *rest, **options)

        monkeypatch.setattr(builtins, "__import__", importing)

    return without


def test_without_matplotlib_plot_says_what_to_install(result, tmp_path, capsys, missing):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result))
    missing("matplotlib")
    assert cli.main(["plot", str(file), "--output", str(tmp_path)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_without_rich_the_table_is_plain_text(run, missing):
    missing("rich")
    status, _, out = run(operator_of(scale))
    assert status == 0
    heading = next(line for line in out.splitlines() if line.startswith("operator"))
    row = next(line for line in out.splitlines() if line.startswith("scale"))
    assert heading.index("correct") == row.index("exact")


def test_wrong_calls_are_told_apart_from_wrong_results(tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert cli.main(["compare", str(file), str(file)]) == 2
    assert cli.main(["plot", str(tmp_path / "absent.json")]) == 2
    assert cli.main(["run", "--filter", "no such operator"]) == 2
    assert cli.main(["list", "--filter", "("]) == 2
    assert cli.main(["run", "--cpu-time", "--threads", "2"]) == 2
    assert capsys.readouterr().err.count("pymoe.bench: ") == 5


def test_env_runs_as_a_module():
    process = subprocess.run(
        [sys.executable, "-m", "pymoe.bench", "env", "--json"], capture_output=True, text=True, check=True
    )
    facts = json.loads(process.stdout)
    assert facts["torch"] == torch.__version__
    assert facts["cpu_isa"] in ISAS


@pytest.mark.parametrize(
    ("cuda", "facts", "nvcc", "told"),
    [
        ("13.0", {}, None, True),
        (None, {}, None, False),
        ("13.0", {"gpu": "a GPU"}, None, False),
        ("13.0", {"cuda_kernels": True}, None, False),
        ("13.0", {}, "/somewhere/nvcc", False),
    ],
)
def test_env_hints_at_the_cpu_build_of_torch(cuda, facts, nvcc, told, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(environment.shutil, "which", lambda name: nvcc)
    monkeypatch.setattr(environment.Path, "exists", lambda path: False)
    monkeypatch.setattr(cli, "environment", lambda: {"gpu": None, "cuda_kernels": False, **facts})
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().err
    assert ("is a CUDA build" in text and "--index-url https://download.pytorch.org/whl/cpu" in text) == told
    assert text == "" or told


def test_the_layer_agrees_with_its_reference_and_has_a_floor():
    shape = Shape("tiny", 24, 16, 8, 4, 2)
    cpu = torch.device("cpu")
    candidates = candidates_of(shape, torch.float32, cpu, Rates(1.0, {torch.float32: 1.0}))
    assert candidates.verify().verdict == "close"
    assert candidates.floor.needed == candidates.floor.work == shape.flops
    assert {"MoE"} == {line.operator for line in layer_lines()}
    layer, (x, grad) = layer_of(shape, torch.float32, cpu), inputs_of(shape, torch.float32, cpu)
    alone = training_step(layer, x, grad, with_torch_alone(layer))()
    names = ("output", "gradient of x", *(name for name, _ in layer.named_parameters()))
    assert verdict_of(alone, candidates.calls["native"](), names, 1e-5).verdict == "close"


def test_a_forward_of_few_tokens_agrees_with_its_reference_and_reads_the_chosen_experts():
    rates, cpu = Rates(1e9, {torch.float32: 1e9}), torch.device("cpu")
    shape = Shape("few", 4, 64, 48, 8, 2)
    candidates = forward_candidates_of(shape, torch.float32, cpu, rates)
    assert candidates.verify().verdict == "close"
    native, baseline = (candidates.calls[name]() for name in ("native", "baseline"))  # of the first of several inputs
    assert not native.requires_grad
    torch.testing.assert_close(baseline, native)
    one = replace(shape, tokens=1)
    assert one.bytes_moved(torch.float32) == 4 * (2 * 3 * 48 * 64 + 2 * 64)  # two experts, a token and a row
    assert replace(shape, tokens=1000).bytes_moved(torch.bfloat16) == 2 * (8 * 3 * 48 * 64 + 2000 * 64)  # all experts


def test_the_layer_is_called_wrong_when_a_gradient_is():
    results = (torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))
    worse = (torch.ones(3), torch.tensor([1.0, 2.0, 3.1]))
    assert verdict_of(results, results, ("output", "gradient"), 1e-5).verdict == "close"
    found = verdict_of(worse, results, ("output", "gradient"), 1e-5)
    assert found.verdict == "WRONG"
    assert found.detail.startswith("gradient: off by 0.1")
    assert verdict_of((torch.tensor([float("nan")]),), (torch.ones(1),), ("output",), 1.0).verdict == "WRONG"


def test_16_bit_products_are_held_to_the_faster_of_both_dtypes():
    rates = Rates(1.0, {torch.float32: 2.0, torch.bfloat16: 1.0, torch.float64: 1.0})
    assert rates.fastest_mm(torch.bfloat16) == torch.float32
    assert rates.fastest_mm(torch.float64) == torch.float64
    assert Rates(1.0, {torch.float32: 1.0, torch.bfloat16: 2.0}).fastest_mm(torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize(
    ("option", "value"),
    [("--threads", "0"), ("--threads", "-1"), ("--threads", "two"), ("--budget", "0"), ("--budget", "nan")],
)
def test_an_option_that_makes_no_sense_is_named(option, value, capsys):
    with pytest.raises(SystemExit) as status:
        cli.main(["run", option, value])
    assert status.value.code == 2
    assert f"argument {option}: expected" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "", "[1]"])
def test_a_file_that_is_no_result_is_named(text, tmp_path, capsys):
    file = tmp_path / "bad.json"
    file.write_text(text)
    for command in (["compare", str(file), str(file)], ["plot", str(file)]):
        assert cli.main(command) == 2
        assert str(file) in capsys.readouterr().err


def test_flags_of_the_processor_are_read_as_linux_names_them(monkeypatch):
    text = "processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n"
    monkeypatch.setattr(environment.Path, "read_text", lambda path: text)
    assert environment.cpu_flags() == ["fpu", "avx2", "avx512_bf16"]
    monkeypatch.setattr(environment.Path, "read_text", lambda path: "processor\t: 0\n")
    assert environment.cpu_flags() == []
