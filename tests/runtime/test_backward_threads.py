"""Backward passes for which a node of another pass waits do not need autograd's thread for their device."""

import pytest
from processes import run_python

# Autograd counts devices before its first backward pass, so the pretended device needs a process of its own.
PREPARED = """
import os
import threading
import torch
from torch import nn
from limits import LONG
from pretended import DEVICE, pretended

def ended(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(LONG)
    assert found, "the other pass waits for the thread on which this node waits"
    return found[0]

class WaitsFor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, work):
        ctx.work = work
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        assert threading.current_thread() is not threading.main_thread()
        ended(ctx.work)
        return grad, None

def leaf():
    return torch.ones(3).to(DEVICE).requires_grad_()

def graph():
    x = leaf()
    return (x * 2).sum(), x
"""

PASSES = {
    "of a served expert": """
from pymoe.runtime.differentiate import run_backward_pass
def work():
    with pretended():
        y, x = graph()
        return run_backward_pass([y], [torch.ones(()).to(DEVICE)], [x], False)
""",
    "of a trained expert": """
from pymoe.runtime.differentiate import run_backward_pass
def work():
    with pretended():
        y, x = graph()
        return run_backward_pass([y], [torch.ones(()).to(DEVICE)], [x], True)
""",
}

# Without an orderly exit: Python may end before autograd's thread for the device has left it, and then aborts.
ENDING = """
with pretended():
    WaitsFor.apply(leaf(), work).sum().backward()
print("ended", flush=True)
os._exit(0)
"""


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_ends_while_a_node_on_the_device_waits_for_it(name):
    """On an H200 a client on the GPU waited without end for a server in its process, whose expert was on the GPU."""
    ended = run_python(PREPARED + PASSES[name] + ENDING)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "ended\n"
