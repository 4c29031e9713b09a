"""Measure the memory that a call takes from torch's allocator, as torch's profiler sees it."""

import json

from torch.profiler import ProfilerActivity, profile


def allocations(call, folder):
    """Return a call's result, the bytes it leaves allocated, and the most it held at once above the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = call()
    trace = folder / "trace.json"
    found.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        now += event["args"]["Bytes"]
        most = max(most, now)
    assert events
    return result, now, most
