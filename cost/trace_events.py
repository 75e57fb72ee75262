"""A timeline as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The form is the JSON object of Google's "Trace Event Format": metadata events (`ph` M) name a process for
every device and its two tracks, complete events (`ph` X), in microseconds, say when what is done.
Devices of one class with the same times are shown once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardwright.cost.timeline import Timeline

COMPUTE, EXCHANGE = 1, 2


def trace_events(timeline: Timeline, devices: Sequence[str], title: str) -> dict[str, Any]:
    """The JSON object of a timeline.

    Args:
        timeline: what to show.
        devices: names, in fleet order.
        title: of the whole, under `otherData`.
    """
    return {
        "traceEvents": list(_events(timeline, devices)),
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "iteration_s": timeline.iteration_s},
    }


def _events(timeline: Timeline, devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    for pid, members in enumerate(_alike(timeline, len(devices))):
        names = ", ".join(devices[d] for d in members)
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": names}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for tid, name in ((COMPUTE, "compute"), (EXCHANGE, "exchange")):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        for span in timeline.spans:
            start, end = float(span.start_s[members[0]]), float(span.end_s[members[0]])
            if end > start:
                yield {
                    "ph": "X",
                    "name": span.label,
                    "cat": "exchange" if span.exchange else "compute",
                    "pid": pid,
                    "tid": EXCHANGE if span.exchange else COMPUTE,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    **({"args": {"bytes": span.nbytes}} if span.exchange else {}),
                }


def _alike(timeline: Timeline, devices: int) -> list[list[int]]:
    """Devices with equal spans, in fleet order."""
    groups: dict[bytes, list[int]] = {}
    ends = np.array([span.end_s for span in timeline.spans]).reshape(len(timeline.spans), devices)
    starts = np.array([span.start_s for span in timeline.spans]).reshape(ends.shape)
    for device in range(devices):
        groups.setdefault(starts[:, device].tobytes() + ends[:, device].tobytes(), []).append(device)
    return list(groups.values())
