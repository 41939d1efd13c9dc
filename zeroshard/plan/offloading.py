"""Offload in a search: the configurations to try, the amount that each one moves, and the reason for the choice.

Owns the choice among configurations with offload. It must not know how a step is simulated, or which configurations a
search draws (`search.py`). Needs no torch.

Note: the order of trials
    Offload shortens the update at most, so the forwards and backwards of a configuration without offload are a lower
    bound of its time, as are its last backward and the update, on the host, of as much as has no room. The search tries
    configurations by this bound, fastest first, and stops when the bound is not below the time of the fastest plan so
    far. It skips a configuration that fits without offload, and one that would not fit even if everything that offload
    can move took no memory. For each of the others it looks for the smallest offload that fits, with the choices and
    the binary search of `offload="auto"` (`describe/offload.py`). At stage 3 it also tries all states with parameters
    in steps of a tenth. The fastest choice that fits is taken.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from zeroshard.describe.offload import PARTS, choices_for, least_of
from zeroshard.plan.job import Options, check_options, outside_bytes_of
from zeroshard.plan.result import Plan, verdict_of, wide_bytes
from zeroshard.plan.trying import Candidate, Simulated
from zeroshard.table.stages import row_of_stage

__all__ = ["Chosen", "choose_offload", "may_fit"]

LEAST_PART: Final = 0.9
"""Of what an update on the device reads and writes, that on the host does at least, which rounds no parameters."""
TENTH: Final = PARTS // 10
"""Number of choices in a tenth of the parameters."""


class Chosen(NamedTuple):
    """The fastest plan with offload; None if no offload is faster than the best plan without.

    Args:
        reason: the reason for offload.
        tried: number of simulated configurations.
    """

    candidate: Candidate | None
    plan: Plan | None
    reason: str
    tried: int


def choose_offload(
    bounds: Sequence[Candidate],
    best: Plan | None,
    places: Sequence[str],
    simulated: Simulated,
    whole: Callable[[Options], Plan],
) -> Chosen:
    """Return the fastest plan with offload, if no plan fits without offload or if it is faster than these.

    Args:
        bounds: of the configurations without offload, all with the same number of ranks.
        best: the fastest plan that fits without offload.
        places: "host" and folders, in the order of trial; a configuration uses the first place in which it fits.
        simulated: the simulations of these configurations.
        whole: plans a configuration in full.
    """
    found, candidate, fastest, tried = best, None, best.tokens_per_s if best is not None else 0.0, 0

    def simulate(options: Options) -> Candidate:
        nonlocal tried
        tried += 1
        return simulated.simulate(options)

    def may_be_faster(one: Candidate) -> bool:
        return _most_tokens_per_s(one) > fastest and one.verdict != "fits" and may_fit(one)

    seen = set[tuple[Options, bool]]()
    for one in simulated.fastest_first(bounds if places else (), _most_tokens_per_s, may_be_faster):
        if (alike := _alike(one.options)) in seen:
            continue
        seen.add(alike)
        for place in places:
            made = _least(one, place, fastest, simulate, whole)
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


def _most_tokens_per_s(one: Candidate) -> float:
    """Return the speed that no offload of a configuration exceeds.

    The host begins when the last backward ends, and what it updates is needed in the next forward.
    """
    parts_s = LEAST_PART * one.host_s * min(1.0, _excess_bytes(one) / max(1, one.movable_bytes))
    return one.options.tokens_per_step / max(one.passes_s, one.backward_s + parts_s)


def _excess_bytes(one: Candidate) -> float:
    """Return the bytes that must leave the device for a configuration to fit with its margin."""
    taken_bytes = wide_bytes(one.peak_bytes, outside_bytes_of(one.options), one.options)
    return max(0.0, taken_bytes - one.options.device.memory_bytes)


def _alike(options: Options) -> tuple[Options, bool]:
    """Return a key that is equal for configurations with the same result.

    On one rank, rows differ only in whether parameters can be offloaded.
    """
    row = options.row
    if options.shard_ranks * options.replicas == 1:
        row = dataclasses.replace(row_of_stage(0), activations=row.activations)
    return dataclasses.replace(options, row=row), options.row.cuts_parameters


def may_fit(one: Candidate) -> bool:
    """Return whether a configuration would fit if everything that offload can move took no memory."""
    least_bytes = max(0, one.peak_bytes - one.movable_bytes)
    return verdict_of(least_bytes, outside_bytes_of(one.options), one.options) == "fits"


def _least(
    start: Candidate,
    to: str,
    fastest: float,
    simulate: Callable[[Options], Candidate],
    whole: Callable[[Options], Plan],
) -> tuple[Candidate, Plan] | None:
    """Return the fastest offload of a configuration that fits; None if none fits and is faster than `fastest`.

    Args:
        start: the configuration without offload, which does not fit.
        to: "host" or a folder.
        fastest: tokens per second of the fastest plan so far.
    """
    choices = [one and dataclasses.replace(one, to=to) for one in choices_for(start.options.row)]

    def with_offload(place: int) -> Options:
        return dataclasses.replace(start.options, offload=choices[place])

    most = len(choices) - 1
    try:
        check_options(with_offload(most))
    except ValueError:  # the optimizer does not support states in files
        return None
    known = {0: start}

    def room_in(place: int) -> bool:
        known[place] = known.get(place) or simulate(with_offload(place))
        return not _excess_bytes(known[place])

    def fits(place: int) -> bool:
        plan = whole(with_offload(place))
        return wide_bytes(plan.reserved_bytes, plan.outside_bytes, plan.asked) <= plan.asked.device.memory_bytes

    least, is_found = least_of(range(most + 1), room_in)
    # Where the host has no room for the least offload, it has none for more.
    if not is_found or known[least].verdict != "fits" or not fits(most):
        return None
    least, _ = least_of(range(least, most + 1), fits)
    # More parameters may be faster, because the host then updates them where they are stored. A hundredth of the
    # parameters may be less than the first slice, so these steps are tenths.
    places = [least, *(place for place in range(PARTS + TENTH, len(choices), TENTH) if place > least)]
    found: tuple[Candidate, Plan] | None = None
    for place in filter(room_in, places):
        if known[place].tokens_per_s <= fastest:
            continue
        if (plan := whole(with_offload(place))).verdict == "fits" and plan.tokens_per_s > fastest:
            one = dataclasses.replace(known[place], options=plan.asked, peak_bytes=plan.peak_bytes)
            one = dataclasses.replace(one, step_s=plan.step_s, verdict="fits", reserved_bytes=plan.reserved_bytes)
            found, fastest = (one, plan), plan.tokens_per_s
    return found
