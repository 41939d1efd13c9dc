"""Offload in a search: which configurations are worth it, how much they move, and why one was chosen.

Owns the choice. Must not know how a step is simulated, nor which configurations a search draws (`search.py`). Needs no
torch.

Note: what is tried
    Nothing is faster with offload than without, so the speed of a configuration bounds what offload can reach there.
    Configurations are tried in the order of this bound, and no longer when the fastest plan so far reaches it. One that
    would not fit if all that can move took no memory is not tried. Of the rest all states are moved first. If that
    fits, the least offload of those that `offload="auto"` tries (`describe/offload.py`) is sought, as long as it may
    become the fastest. At stage 3 that is repeated with all states and tenths of the parameters.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from zeroshard.describe.offload import PARTS, Offload, choices_for
from zeroshard.plan.job import Options, check_options, outside_bytes_of
from zeroshard.plan.result import Plan, error_of, verdict_of
from zeroshard.plan.trying import Candidate
from zeroshard.table.stages import row_of_stage

__all__ = ["Chosen", "choose_offload"]

MARGINS: Final = (0, 2, 5, 10, 20, 200)
"""Choices by which an offload is raised until the whole plan, which counts what is reserved, fits."""
TENTH: Final = PARTS // 10
"""Choices between two parts of the parameters that are tried."""


class Chosen(NamedTuple):
    """The fastest plan with offload; None where none is faster than what it is compared with.

    `reason` says why there is offload, and `tried` how many plans were simulated to find out.
    """

    candidate: Candidate | None
    plan: Plan | None
    reason: str
    tried: int


def choose_offload(
    candidates: Sequence[Candidate],
    best: Plan | None,
    places: Sequence[str],
    simulate: Callable[[Options], Candidate],
    whole: Callable[[Options], Plan],
) -> Chosen:
    """Return the fastest plan with offload, where nothing fits without, or where it is faster.

    Args:
        candidates: of one number of ranks, without offload.
        best: the fastest that fits without.
        places: that something may be moved to, the first one that it fits in: "host" and folders.
        simulate, whole: a configuration, quickly and wholly.
    """
    found, candidate, fastest, tried = best, None, best.tokens_per_s if best is not None else 0.0, 0

    def counted(options: Options) -> Candidate:
        nonlocal tried
        tried += 1
        return simulate(options)

    seen = set[tuple[Options, bool]]()
    for one in sorted(candidates, key=lambda one: -one.tokens_per_s):
        if one.tokens_per_s <= fastest:
            break
        if (alike := _alike(one.options)) in seen:
            continue
        seen.add(alike)
        for place in places if _may_fit(one) else ():
            made = _least(one, place, fastest, counted, whole)
            if made is not None and made[1].tokens_per_s > fastest:
                candidate, found = made
                fastest = found.tokens_per_s
            if made is not None:
                break
    if candidate is None or found is None:
        return Chosen(None, None, "", tried)
    reason = "nothing fits without offload"
    if best is not None:
        more = fastest / best.tokens_per_s - 1
        reason = f"{more:.0%} faster than the fastest that fits without offload ({best.tokens_per_s:,.0f} tokens/s)"
    return Chosen(candidate, found, reason, tried)


def _alike(options: Options) -> tuple[Options, bool]:
    """Return what configurations have in common that come to the same.

    On one rank, rows differ only in whether parameters can be elsewhere.
    """
    row = options.row
    if options.shard_ranks * options.replicas == 1:
        row = dataclasses.replace(row_of_stage(0), activations=row.activations)
    return dataclasses.replace(options, row=row), options.row.cuts_parameters


def _may_fit(one: Candidate) -> bool:
    """Tell whether a configuration does not fit as it is, and would if what can move took no memory."""
    least_bytes = max(0, one.peak_bytes - one.movable_bytes)
    return one.verdict != "fits" and verdict_of(least_bytes, outside_bytes_of(one.options), one.options) == "fits"


def _guess(low: int, high: int, low_bytes: int, fitting: Candidate) -> int:
    """Return the choice between two others that is expected to fit, by the line between their peaks; 0 for none."""
    options = fitting.options
    room_bytes = (options.device.memory_bytes - outside_bytes_of(options)) / (1 + error_of(options)[1])
    slope = (low_bytes - fitting.peak_bytes) / (high - low)
    place = low + math.ceil((low_bytes - room_bytes) / slope) if slope > 0 else 0
    return place if low < place < high else 0


def _least(
    start: Candidate,
    to: str,
    fastest: float,
    simulate: Callable[[Options], Candidate],
    whole: Callable[[Options], Plan],
) -> tuple[Candidate, Plan] | None:
    """Return the least offload of a configuration that fits; None if none does, or if it is not above `fastest`.

    Args:
        to: the place that something is moved to.
    """
    options = start.options
    choices = [one and dataclasses.replace(one, to=to) for one in choices_for(options.row)]

    def with_offload(offload: Offload | None) -> Options:
        return dataclasses.replace(options, offload=offload)

    try:
        check_options(with_offload(choices[-1]))
    except ValueError:  # states that cannot be in files
        return None
    known = dict[int, Candidate]()

    def fits(place: int) -> bool:
        if place not in known:
            known[place] = simulate(with_offload(choices[place]))
        return known[place].verdict == "fits"

    end = len(choices) - 1
    known[0] = start
    wanted = _first(fits, known, range(min(PARTS, end) + 1), fastest)
    # With states on the host, new values of parameters there do not pass through the device, so a part of these may be
    # faster than none. Hundredths of them may be less than the first slice.
    wanted += _first(fits, known, range(PARTS, end + 1, TENTH), fastest) if end > PARTS else []
    found: tuple[Candidate, Plan] | None = None
    for place in sorted(wanted, key=lambda place: -known[place].tokens_per_s):
        for margin in MARGINS:
            if known[place].tokens_per_s <= fastest:
                break
            plan = whole(with_offload(choices[min(place + margin, len(choices) - 1)]))
            if plan.verdict == "fits":
                one = dataclasses.replace(known[place], options=plan.asked, peak_bytes=plan.peak_bytes)
                one = dataclasses.replace(one, step_s=plan.step_s, verdict="fits", reserved_bytes=plan.reserved_bytes)
                found = (one, plan) if plan.tokens_per_s > fastest else found
                fastest = max(fastest, plan.tokens_per_s)
                break
    return found


def _first(
    fits: Callable[[int], bool], known: Mapping[int, Candidate], places: Sequence[int], fastest: float
) -> list[int]:
    """Return the least of the choices that fits, but for the first; nothing if none does or can be above `fastest`.

    Args:
        known: what `fits` simulated.
        places: of choices.
    """
    if not fits(places[-1]):
        return []
    if fits(places[1]):
        return [places[1]]
    low, high, is_guessed = 1, len(places) - 1, False
    while high - low > 1:
        one, other = known[places[low]], known[places[high]]
        # More than at `low`, which does not fit, is not faster than that.
        if one.tokens_per_s <= fastest:
            return []
        is_guessed = not is_guessed
        middle = _guess(low, high, one.peak_bytes, other) if is_guessed else 0
        middle = middle or (low + high) // 2
        low, high = (low, middle) if fits(places[middle]) else (middle, high)
    return [places[high]]
