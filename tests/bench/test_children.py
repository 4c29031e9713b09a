"""Tests of processes that answer lines of JSON: answers are separated from other output, and failures are named."""

import sys

import pytest

from benchmarks.common.children import Child, ChildError, answers
from benchmarks.runtime.clients import Effort
from benchmarks.runtime.hivemind_peer import HivemindProcess
from benchmarks.runtime.scenario import Cell

ECHO = """
from benchmarks.common.children import serve
def start():
    print("noise")
    def answer(request):
        print("more noise")
        if request == "end":
            raise SystemExit
        return request["number"] + 1
    return answer
serve(start)
"""


@pytest.fixture
def pair():
    children = [Child([sys.executable, "-c", ECHO]) for _ in range(2)]
    yield children
    for child in children:
        child.kill()


def test_answers_come_from_each_child_in_order(pair):
    for number, child in enumerate(pair):
        child.send({"number": number})
    assert answers(pair) == [1, 2]
    assert pair[0].ask({"number": 41}) == 42
    pair[0].end()
    assert pair[0].process.returncode == 0


def test_a_child_that_fails_or_ends_is_named(pair):
    with pytest.raises(ChildError, match="KeyError: 'number'"):
        pair[0].ask({})
    assert pair[0].ask({"number": 1}) == 2, "a failure is an answer; the child goes on"
    with pytest.raises(ChildError, match="its process ended"):
        pair[0].ask("end")
    pair[1].limit = 0.1
    with pytest.raises(ChildError, match="no answer within 0 s"):
        pair[1].answer()


def test_a_peer_is_checked_and_measured_in_its_process():
    peer = HivemindProcess("small", sys.executable, "tests.bench.stand_in_worker")
    try:
        assert peer.check() == ""
        sample = peer.measure(Cell("small", "forward", 1, 2, "threads"), Effort(0.0, 0.0, cycles=2, limit=30.0))
    finally:
        peer.close()
    assert sample.rate > 0
    assert (sample.wrong, sample.error) == (0, "")
