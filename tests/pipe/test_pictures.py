"""Pictures of records as text, as files and from the command line; schedules need no other package."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
from any_schedule import examples, schedules, times
from hypothesis import given
from hypothesis import strategies as st

from pymoe.pipe import schedules as package
from pymoe.pipe.schedules import Times, as_run, build, names, png, simulate, text
from pymoe.pipe.schedules.__main__ import main

ROOT = Path(__file__).parents[2]


def test_the_text_of_a_plan():
    assert text(simulate(build("zero-bubble", 2, 3))).splitlines() == [
        "worker 0  |F0F1  B0--F2B1--B2--|",
        "worker 1  |  F0I0F1I1W0F2I2W1W2|",
    ]


def test_the_text_of_virtual_stages():
    assert text(simulate(build("interleaved-1f1b", 4, 2))).splitlines() == [
        "worker 0  |F0aF1aF0bF1b      B0b---   B1b---B0a---B1a---|",
        "worker 1  |   F0aF1aF0bB0b---F1bB1b---B0a---B1a---      |",
    ]


def test_what_is_too_short_for_its_label_shows_its_letter():
    record = simulate(build("1f1b", 1, 12), Times(1, 2, 2))
    assert text(record, width=60 + 12) == "worker 0  |FB0--FB1--FB2--FB3--FB4--FB5--FB6--FB7--FB8--FB9--FB10-FB11-|"
    assert text(record, width=24 + 12) == "worker 0  |B0B1B2B3B4B5B6B7B8B9B-B-|"
    assert text(record, width=12) == "worker 0  ||"


@examples(60)
@given(schedules(), st.integers(0, 2**20), st.integers(20, 300))
def test_a_picture_has_a_line_a_worker_and_stays_in_its_width(schedule, seed, width):
    lines = text(simulate(schedule, times(schedule, seed)), width).splitlines()
    assert len(lines) == schedule.workers
    assert len(set(map(len, lines))) == 1
    assert len(lines[0]) <= max(width, 15)


@examples(60)
@given(schedules(4, 6))
def test_a_picture_with_room_shows_every_action(schedule):
    drawn = text(simulate(schedule), width=10_000)
    labels = [action.kind.value + str(action.micro_batch) for order in schedule.orders for action in order]
    assert all(drawn.count(label) >= labels.count(label) for label in labels)


def test_the_example_of_the_docstring():
    assert doctest.testmod(package).failed == 0


def test_a_picture_in_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    records = [simulate(build(name, 4, 6)) for name in names()]
    file = png(tmp_path / "schedules.png", *records)
    assert file.read_bytes().startswith(b"\x89PNG")
    drawn = png(tmp_path / "schedules.svg", *records).read_text()
    for words in (*names(), "worker 3", "backward of weights"):
        assert words in drawn, "the titles of an SVG file stand in its comments"
    with pytest.raises(ValueError, match="no record to draw"):
        png(tmp_path / "none.png")


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["1f1b", "--png", str(tmp_path / "x.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("absent", [True, False])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(absent, tmp_path, capsys):
    """The command printed all plans first, and then "No such file or directory"."""
    with pytest.raises(SystemExit) as ended:
        main(["1f1b", "--png", str(tmp_path / "absent/x.png" if absent else tmp_path)])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "argument --png: expected a file in a folder that exists, got " in err
    assert ("but there is no folder" if absent else "which is a folder") in err


def test_the_command_prints_plans_and_numbers(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    assert main(["1f1b", "--stages", "2", "--micro-batches", "3", "--times", "1,2,1", "--png", str(file)]) == 0
    assert file.exists()
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 2 stages on 2 workers, 3 micro-batches",
        "  makespan     16, without bubbles 12; speed-up 1.50",
        "  bubble       25.0%; of the workers: 25.0%  25.0%",
        "  activations  at most 2  1",
        "worker 0  |F0F1      B0----F2B1----  B2----|",
        "worker 1  |  F0B0----F1B1----F2B2----      |",
        "",
        str(file),
    ]


def test_the_command_prints_what_the_documentation_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    command = "$ python -m pymoe.pipe.schedules "
    shown = (ROOT / "docs" / "concepts" / "schedules.md").read_text().split(command)[1].split("```")[0]
    arguments, expected = shown.split("\n", 1)
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out.strip() == expected.strip()


def test_the_command_draws_all_schedules_with_the_options_that_each_has(capsys):
    assert main(["--virtual-stages", "4", "--live-limit", "2", "--communication", "0.5"]) == 0
    out = capsys.readouterr().out
    for name in names():
        assert f"{name}: 4 stages on {1 if 'interleaved' in name else 4} workers, 8 micro-batches" in out
    assert out.count("at most 2  2") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpipe", "--live-limit", "2"], "schedule 'gpipe' has no live_limit"),
        (["1f1b", "--stages", "0"], "stages must be a positive integer"),
        (["1f2b"], "no schedule '1f2b'"),
        (["1f1b", "--communication", "-1"], "must take 0 or longer"),
    ],
)
def test_the_command_refuses_a_wrong_call(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["1,2", "1,2,x", "", "1,-1,1"])
def test_the_command_refuses_wrong_times(argument, capsys):
    with pytest.raises(SystemExit):
        main(["1f1b", "--times", argument])
    assert "three times with commas between them" in capsys.readouterr().err


def test_schedules_import_nothing_but_the_standard_library():
    """Read without the package around them, which needs torch."""
    code = (
        "import sys, types; root = sys.argv[1]\n"
        "for name in ('pymoe', 'pymoe.pipe'):\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    module.__path__ = [root + '/' + name.replace('.', '/')]\n"
        "before = set(sys.modules)\n"
        "import pymoe.pipe.schedules\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout == "['pymoe']\n"


@pytest.mark.parametrize(
    ("records", "unit"),
    [
        (lambda: [simulate(build("1f1b", 2, 3))], "forwards of a stage"),
        (lambda: [simulate(build("1f1b", 2, 3), Times(2, 1, 1))], "in the unit of the given times"),
        (lambda: [as_run(build("gpipe", 1, 1), []), simulate(build("gpipe", 1, 1), Times(2, 1, 1))], "s"),
    ],
)
def test_the_axis_of_time_has_a_unit(records, unit, tmp_path):
    pytest.importorskip("matplotlib")
    png(tmp_path / "plan.svg", *records())
    assert f"<!-- time ({unit}) -->" in (tmp_path / "plan.svg").read_text()
