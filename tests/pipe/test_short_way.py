"""The call path from ``Pipe.step`` to a layer is short; ``python tests/pipe/frames.py`` prints it."""

from frames import ways

MOST_FRAMES, MOST_FILES = 10, 5
MOST_FRAMES_RECOMPUTED = 12
"""In this case the forward is a part of the backward, and runs in the state of the thread that asked for the first
run.
"""


def test_the_way_from_a_step_to_a_layer_is_short():
    found = ways()
    assert found.keys() == {"inline", "worker", "inline, recomputed", "worker, recomputed"}
    for place, frames in found.items():
        listing = "\n".join(map(str, frames))
        most = MOST_FRAMES_RECOMPUTED if "recomputed" in place else MOST_FRAMES
        assert len(frames) <= most, f"{place}: {len(frames)} frames\n{listing}"
        if "recomputed" not in place:
            assert len({frame.file for frame in frames}) <= MOST_FILES, f"{place}\n{listing}"


def test_the_way_begins_at_the_step_and_ends_at_the_layers():
    """No frame is missing: each one was called by the one before."""
    frames = ways()["inline"]
    assert frames[0].function == "step"
    assert frames[-1].file == "pymoe/pipe/sequential.py"
