"""``detect_anomaly()`` with threads: torch releases the GIL while it holds a leaf's lock."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from processes import run_python

import pymoe

PRELUDE = """
import threading, time, warnings
import torch
import torch.fx.traceback
from torch import nn
import pymoe
import pymoe.pipe.execution.plan
from pymoe.runtime import ExpertClient, MixtureOfExpertBackends

warnings.simplefilter("ignore")
pymoe.pipe.execution.plan.ALWAYS_THREADS = True
# What torch calls while it makes a node, and so the accumulator of a leaf, under the leaf's lock: other threads run.
torch.fx.traceback.format_stack = lambda: time.sleep(0.002) or []
x = torch.ones(6, 4)

def served():
    expert = nn.Linear(4, 4)
    opt = torch.optim.SGD(expert.parameters(), 0.1)
    return pymoe.ExpertBackend("e", expert, opt, args_schema=[pymoe.BatchTensorProto(4)])

def in_threads(work):
    def loop():
        for _ in range(10):
            work()
    threads = [threading.Thread(target=loop, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
USES = {
    "one client": """
backend = served()
with pymoe.Runtime([backend]), torch.autograd.detect_anomaly():
    client = ExpertClient(backend)
    in_threads(lambda: client(x).sum().backward())
""",
    "one mixture": """
backend = served()
with pymoe.Runtime([backend]), torch.autograd.detect_anomaly():
    mixture = MixtureOfExpertBackends([backend], top_k=1, gate=lambda x: x[:, :1].detach())
    in_threads(lambda: mixture(x).sum().backward())
""",
    "a pipe": """
pipe = pymoe.Pipe(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), balance=[1, 1, 1], chunks=3)
with torch.autograd.detect_anomaly():
    for _ in range(20):
        pipe.step(x, loss_fn=lambda y: y.square().mean())
""",
    "pipes of several threads": """
with torch.autograd.detect_anomaly():
    def step():
        pymoe.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=2).step(x, loss_fn=lambda y: y.mean())
    in_threads(step)
""",
}


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("use", USES)
def test_threads_do_not_wait_for_each_other_under_detect_anomaly(use: str) -> None:
    """The threads deadlocked, and Ctrl-C did nothing: one held the lock of pymoe's leaf and waited for the GIL."""
    try:
        done = run_python(USES[use], PRELUDE, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.fail("the threads wait for each other")
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_keeps_a_leaf_of_its_own() -> None:
    """Several threads may use nodes that outlive a call, so these take ``ANCHOR``, whose accumulator always exists."""

    def makes_leaf(value: ast.AST) -> bool:
        return any(
            (
                isinstance(node, ast.keyword)
                and node.arg == "requires_grad"
                and getattr(node.value, "value", False) is True
            )
            or (isinstance(node, ast.Attribute) and node.attr == "requires_grad_")
            for node in ast.walk(value)
        )

    def is_kept(statement: ast.stmt, module: ast.Module) -> bool:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        return statement in module.body or any(isinstance(target, ast.Attribute) for target in targets)

    root = Path(pymoe.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        module = ast.parse(path.read_text())
        found += [
            f"{path.relative_to(root)}:{statement.lineno}"
            for statement in ast.walk(module)
            if isinstance(statement, (ast.Assign, ast.AnnAssign))
            and statement.value is not None
            and makes_leaf(statement.value)
            and is_kept(statement, module)
        ]
    assert found == []
