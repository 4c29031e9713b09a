"""Mistakes of newcomers, each with what must be said: tables of code and a pattern, and how to run them."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

Table = dict[str, tuple[str, str]]
"""For each mistake the code that a newcomer types, and a pattern of the answer, which says what to do."""

IMPORTS = """
import contextlib, socket, threading, time
import pymoe, torch
import torch.nn.functional as F
from torch import nn
from pymoe import BatchTensorProto, ExpertBackend, MixtureOfExpertBackends, MoE, Pipe, Runtime, SplitPoint, TaskPool
from pymoe import ops, pipeline
from pymoe.nn import Experts, Router, quantize_experts, update_expert_biases
from pymoe.runtime import ExpertClient
"""


def cases(table: Table) -> pytest.MarkDecorator:
    """Return the decorator that runs a test with every row of the table."""
    return pytest.mark.parametrize(("code", "answer"), [pytest.param(*row, id=name) for name, row in table.items()])


def read(capfd: pytest.CaptureFixture[str], before: str, code: str, **names: Any) -> str:
    """Run code, and return everything that its user reads: the error with its notes, warnings, what is printed.

    Args:
        capfd: the fixture.
        before: code that makes no mistake.
        code: what the newcomer types; ``warned`` is the list of its warnings so far.
        names: values for both.
    """
    exec(IMPORTS + before, names)
    capfd.readouterr()
    lines = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for kind in (UserWarning, RuntimeWarning):
            warnings.simplefilter("always", kind)
        names["warned"] = caught
        try:
            exec(code, names)
        except (Exception, SystemExit) as error:
            lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    printed = capfd.readouterr()
    return "\n".join([*lines, *(str(one.message) for one in caught), printed.out, printed.err]).strip()


def check(said: str, answer: str) -> None:
    """Fail unless what was said matches the pattern, without a traceback of Python's."""
    assert re.search(answer, said, re.DOTALL), said
    assert "Traceback" not in said, said
