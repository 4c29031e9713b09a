"""Where a rank is, read by others of its host."""

import os

import pytest

from pymoe.pipe.distributed.liveness import Position, PositionPage


@pytest.fixture
def page():
    page = PositionPage.create()
    if page is None:
        pytest.skip("this system has no such memory")
    yield page
    page.close()


def test_others_read_what_was_written_last(page):
    other = PositionPage.open(os.getpid(), page.file)
    assert other is not None
    assert other.read() is None
    for at in (Position("forward pass", 1, 12), Position("backward pass of weights", 10, 3), None):
        page.write(at)
        assert other.read() == at
    other.close()


@pytest.mark.parametrize("text", [b"1", b"1 1", b"x 2 forward pass", b"\xff\xfe 1 2"])
def test_half_a_position_is_none(page, text):
    page._memory[:] = text.ljust(len(page._memory))
    assert page.read() is None
