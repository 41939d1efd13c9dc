"""The walk: one step at stage 3, explained event by event from a recorded trace of the engine.

Owns the sentences and the state after each event. It must not know torch or the engine: `tools/walk.py` runs the
engine and writes the recording bundled with the page. Read `tell_walk` first.

Note: what is read and what is derived
    The order, kind, unit and bytes of each step are those of an event of `zero.trace`; no event is added. Bytes in
    memory are those of `zero.memory()` on each rank when the next event was issued. The gathered units and the held
    gradients are derived from the events, and agree exactly with these bytes. The input of a block is kept for
    recomputation from the end of its forward (its release; for the last block, which stays gathered, the end of the
    pass) until its backward has used it (its reduction).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from zeroshard.report.schema import Walk, WalkEvent, WalkState, WalkStep, WalkUnit

__all__ = ["RECORDING", "read_walk", "tell_walk"]

RECORDING: Final = Path(__file__).parent / "assets" / "walk.json"
"""The recording of `tools/walk.py`."""

_ROOT: Final = ""
_ROOT_NAME: Final = "the root unit"


def read_walk() -> Walk:
    """Return the walk bundled with the page.

    >>> from zeroshard.report.walk import read_walk
    >>> read_walk()["steps"][0]["event"]["kind"]
    'gather'
    """
    return tell_walk(json.loads(RECORDING.read_text("utf-8")))


def tell_walk(recording: Mapping[str, Any]) -> Walk:
    """Convert a recording of `tools/walk.py` into steps.

    Args:
        recording: "model", "ranks", "units" as (name, numel, shard_numel), "events" as (phase, kind, unit, bytes sent,
            dtype), and "measured": for each rank, the bytes by column before each event and after the last event.

    Raises:
        ValueError: the number of measurements does not match the number of events.
    """
    events = [
        cast(WalkEvent, dict(zip(WalkEvent.__annotations__, event, strict=True))) for event in recording["events"]
    ]
    measured: Sequence[Sequence[dict[str, int]]] = recording["measured"]
    for rank, moments in enumerate(measured):
        if len(moments) != len(events) + 1:
            raise ValueError(f"rank {rank} has {len(moments)} measurements for {len(events)} events; expected one more")
    state = WalkState(whole=[], kept=[], reduced=[], is_updated=False, resident_bytes=[m[0] for m in measured])
    walk = Walk(
        model=recording["model"],
        ranks=recording["ranks"],
        units=[WalkUnit(name=name, numel=numel, shard_numel=shard) for name, numel, shard in recording["units"]],
        start=state,
        steps=[],
    )
    for place, event in enumerate(events):
        if event["phase"] == "backward" and events[place - 1]["phase"] == "forward":
            last = [unit for unit in state["whole"] if unit != _ROOT]
            state = WalkState(**{**state, "kept": state["kept"] + last})
        sentence = _sentence(event, state, walk["ranks"])
        state = _after(event, state, [moments[place + 1] for moments in measured])
        walk["steps"].append(WalkStep(sentence=sentence, event=event, state=state))
    return walk


def _after(event: WalkEvent, state: WalkState, resident_bytes: list[dict[str, int]]) -> WalkState:
    """Return the state after an event."""
    unit, kind = event["unit"], event["kind"]
    whole, kept, reduced = [*state["whole"]], [*state["kept"]], [*state["reduced"]]
    if kind == "gather":
        whole.append(unit)
    elif kind == "release":
        whole.remove(unit)
        if unit != _ROOT and event["phase"] == "forward":
            kept.append(unit)
    elif kind == "reduce":
        reduced.append(unit)
        if unit in kept:
            kept.remove(unit)
    is_updated = state["is_updated"] or kind == "step"
    return WalkState(whole=whole, kept=kept, reduced=reduced, is_updated=is_updated, resident_bytes=resident_bytes)


def _sentence(event: WalkEvent, state: WalkState, ranks: int) -> str:
    """Return a sentence about an event and its reason; `state` is the state before the event."""
    unit = event["unit"] or _ROOT_NAME
    in_use = [name for name in state["whole"] if name != _ROOT]
    sent = f"{event['nbytes']:,} bytes of {event['dtype']} sent by each rank"
    is_forward = event["phase"] == "forward"
    match event["kind"]:
        case "gather" if event["unit"] == _ROOT and is_forward:
            return (
                f"The forward begins: all ranks gather {unit}, the parameters outside the blocks, "
                f"each from the {ranks} shards ({sent})."
            )
        case "gather" if in_use and is_forward:
            return (
                f"{unit} is gathered ahead of its use, so that its values travel while {in_use[-1]} computes ({sent})."
            )
        case "gather" if is_forward:
            return f"All ranks gather {unit} for its forward: for a while each rank holds it whole ({sent})."
        case "gather" if in_use[-1] in state["kept"] and not state["reduced"]:
            return (
                f"The backward begins with {_ROOT_NAME} and {in_use[-1]}, which stayed gathered because the forward "
                f"used them last; {unit} is gathered again meanwhile ({sent})."
            )
        case "gather":
            return (
                f"{unit} is gathered again, while {in_use[-1]} is computed again from its kept input and its backward "
                f"follows ({sent})."
            )
        case "release" if is_forward:
            return (
                f"The forward of {unit} is over: the shards of other ranks are released, and its input alone is kept."
            )
        case "release" if event["unit"] == _ROOT:
            return f"The backward is over: {unit} is released, and each rank holds its shard of all gradients in fp32."
        case "release":
            return f"The backward of {unit} is over: the shards of other ranks are released."
        case "reduce":
            return (
                f"All gradients of {unit} are there: a reduce-scatter sums them over the {ranks} ranks, "
                f"and each rank keeps the sum of its own shard ({sent})."
            )
        case "step":
            return (
                "The update: AdamW changes the fp32 masters of each rank's shard, and the parameter shard becomes "
                "their bf16 values; nothing is sent, because the next forward gathers."
            )
        case _:
            return f"{unit} is published: ranks gather the updated parameters ({sent})."
