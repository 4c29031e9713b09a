"""A rank's position, as other ranks on its host read it."""

import mmap
import pickle

import pytest

from pymoe.pipe.distributed.watchdog import PAGE_BYTES, Heartbeat, Peer, Position, new_page


@pytest.fixture
def page():
    """Provide a rank's shared memory, and another rank that reads it."""
    first = Heartbeat(new_page(), at=Position("loss", 3, 0))
    if first.page < 0:
        pytest.skip("this system has no such memory")
    peer = Peer(0, first)
    assert peer.is_watched
    return mmap.mmap(first.page, PAGE_BYTES), peer


def test_others_read_what_was_written_last(page):
    memory, peer = page
    assert peer.heartbeat.at == ("loss", 3, 0), "nothing was written: the rank's first heartbeat says where it is"
    for at in (Position("forward pass", 1, 12), Position("backward pass of weights", 10, 3), None):
        memory[:] = pickle.dumps((7, *(at or ()))).ljust(PAGE_BYTES)
        assert (peer.heartbeat.steps, peer.heartbeat.at) == (7, at)
        assert str(peer) == f"rank 0, last seen {at or 'between its steps'}"


@pytest.mark.parametrize("text", [b"1", b"1 1", b"x 2 forward pass", b"\xff\xfe 1 2"])
def test_half_a_record_does_not_count(page, text):
    memory, peer = page
    memory[:] = text.ljust(PAGE_BYTES)
    assert peer.heartbeat.at == ("loss", 3, 0)


def test_a_record_that_was_cut_off_does_not_count(page):
    memory, peer = page
    whole = pickle.dumps((7, *Position("forward", 1, 12)))
    for bytes_there in range(len(whole)):
        memory[:] = whole[:bytes_there].ljust(PAGE_BYTES, b"\0")
        assert peer.heartbeat.at == ("loss", 3, 0)
