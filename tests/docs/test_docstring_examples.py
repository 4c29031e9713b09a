"""Tests that the public names that users meet first have an example, and that it prints what the docstring says."""

import doctest
from collections.abc import Iterator

import pytest
import torch
from docstring_examples import FIRST_NAMES, examples, public_names

import pymoe

PACKAGES = {"pymoe.remote": ("grpc", "msgspec", "safetensors"), "pymoe.integrations.transformers": ("transformers",)}


@pytest.fixture
def no_group_remains() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def printed(name: str) -> str:
    """Run the examples of a name; return doctest's report of those that print something else, or an empty string."""
    found = doctest.DocTest(examples(name), {"torch": torch, "pymoe": pymoe}, name, None, None, None)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(found, out=report.append)
    return "".join(report)


def test_the_names_are_sixty_and_differ() -> None:
    assert len(set(FIRST_NAMES)) == len(FIRST_NAMES) == 60


@pytest.mark.thinned(usual=20)
@pytest.mark.usefixtures("no_group_remains")
@pytest.mark.parametrize("name", FIRST_NAMES)
def test_the_example_of_a_name_prints_what_it_says(name: str) -> None:
    for package in PACKAGES.get(name.rpartition(".")[0], ()):
        pytest.importorskip(package)
    torch.manual_seed(0)
    assert any(example.want for example in examples(name))
    assert not printed(name)


def test_an_example_that_prints_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = pymoe.ops.split_batch.__doc__
    assert not printed("pymoe.ops.split_batch")
    monkeypatch.setattr(pymoe.ops.split_batch, "__doc__", text.replace("[2, 3, 4]", "[2, 3, 5]"))
    assert "Expected" in printed("pymoe.ops.split_batch")


def test_the_list_has_every_name_of_the_reference() -> None:
    names = public_names()
    assert set(FIRST_NAMES) <= set(names)
    assert {"pymoe.ops.Routing", "pymoe.pipe.INPUT", "pymoe.pipe.schedules.gpipe"} <= set(names)
    assert not examples("pymoe.pipe.INPUT")
