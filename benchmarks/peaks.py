"""The most memory that a step takes from torch's CPU allocator, from the profiler's record of each allocation.

    python -m benchmarks.peaks

Owns the measurement that predictions are judged by. It is exact: every block, those that a kernel takes for itself
included, from the first parameter on. Shows it beside `zeroshard.plan.tracer`.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch.profiler import ProfilerActivity, profile

__all__ = ["Block", "Measured", "measure_peak"]


@final
@dataclass(frozen=True)
class Block:
    """One allocation, or the end of one.

    Args:
        nbytes: bytes; negative where memory is given back.
        operations: that ran, outermost first.
    """

    nbytes: int
    operations: tuple[str, ...]


@final
@dataclass(frozen=True)
class Measured:
    """What a run took from the allocator.

    Args:
        peak_bytes: live at the highest moment.
        at: the operations that ran then, outermost first.
        blocks: everything in order.
    """

    peak_bytes: int
    at: tuple[str, ...]
    blocks: tuple[Block, ...]


def measure_peak(run: Callable[[], Any]) -> Measured:
    """Measure what a function allocates on the CPU; what exists before is not counted.

    The profiler does not report the end of a block that it has not seen begin, so `run` makes everything: the model,
    the inputs and the optimizer.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    del kept
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _add_up(events)


def _add_up(events: list[dict[str, Any]]) -> Measured:
    moments: list[tuple[float, int, int, dict[str, Any]]] = []
    for index, event in enumerate(events):
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0:
            moments.append((event["ts"], 1, event["args"]["Ev Idx"], event))
        elif event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            moments.append((event["ts"], 0, index, event))
    moments.sort(key=lambda moment: moment[:3])
    running: list[dict[str, Any]] = []
    blocks: list[Block] = []
    live = peak_bytes = 0
    at: tuple[str, ...] = ()
    for ts, is_memory, _, event in moments:
        running = [one for one in running if one["ts"] + one["dur"] >= ts]
        if not is_memory:
            running.append(event)
            continue
        nbytes = int(event["args"]["Bytes"])
        blocks.append(Block(nbytes, tuple(one["name"] for one in running)))
        live += nbytes
        if live > peak_bytes:
            peak_bytes, at = live, blocks[-1].operations
    return Measured(peak_bytes, at, tuple(blocks))
