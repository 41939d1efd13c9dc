"""Bytes that modules keep for the backward in a trace, which tests compare with modules that run."""

from collections import Counter

from zeroshard.plan.trace.events import Trace

__all__ = ["saved_by_module", "saved_within"]


def saved_by_module(trace: Trace) -> dict[str, int]:
    """Return the bytes that each module keeps for the backward, without modules that keep none."""
    found = Counter[str]()
    for event in trace.events:
        if event.nbytes > 0 and event.storage in trace.saved:
            found[trace.saved[event.storage]] += event.nbytes
    return dict(found)


def saved_within(trace: Trace, module: str) -> int:
    """Return the bytes that a module and those inside it keep."""
    kept = saved_by_module(trace)
    return sum(kept[name] for name in kept if name == module or name.startswith(f"{module}."))
