"""Offload in a search: the configurations to try, the amount that each one moves, and the reason for the choice.

Owns the choice among configurations with offload. It must not know how a step is simulated, or which configurations a
search draws (`search.py`). Needs no torch.

Note: the order of trials
    Offload shortens the update at most, so the forwards and backwards of a configuration without offload are a lower
    bound of its time, as are its last backward and the update, on the host, of as much as has no room. The search tries
    configurations by this bound, fastest first, and stops when the bound is not below the time of the fastest plan so
    far. It skips a configuration that fits without offload, and one that would not fit even if everything that offload
    can move took no memory. For each of the others it takes the fastest offload that fits, as `offload="auto"` of a
    plan does. The largest offload is planned in full first: where that has no room with what the allocator reserves,
    no other has. With each fifth of the parameters the least states that must move for what is allocated follow from
    the ends, as memory falls nearly evenly with what is moved, and are simulated; gradients move with their states, or
    stay where that is faster. Those that may be the fastest are then planned in full, from the one on that is fastest
    by simulations, with as many more states as what the allocator reserves asks for.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle
from math import ceil, inf
from operator import itemgetter
from typing import Final, NamedTuple

from zeroshard.describe.offload import HOST, PARTS, Offload, choices_for
from zeroshard.plan.job import Options, check_options, outside_bytes_of
from zeroshard.plan.margins import margin_of
from zeroshard.plan.result import Plan, verdict_of
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.trying import Candidate, Simulated, candidate_of
from zeroshard.table.cells import Residency
from zeroshard.table.stages import row_of_stage

__all__ = ["Chosen", "automatic_offload", "choose_offload", "first_below", "may_fit"]

Tried = Candidate | Plan
Chain = list[Offload | None]
LEAST_GAIN: Final = 1.01
"""How many times as fast as the fastest choice another one may be, at least, to be planned in full."""
LEAST_RESERVED: Final = 0.5
"""The part of what the allocator reserves beyond what is allocated, with the largest offload, that others need, too."""
NEAR: Final = 0.25
"""Of what one step more moves, the room that a choice may leave for the search to end there."""
LEAST_PART: Final = 0.9
"""Of what an update on the device reads and writes, that on the host does at least, which rounds no parameters."""


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
    best_tokens_per_s: float | None,
    places: Sequence[str],
    simulated: Simulated,
    whole: Callable[[Options], Plan],
) -> Chosen:
    """Return the fastest plan with offload, if nothing fits without offload or if that is slower.

    Args:
        bounds: of the configurations without offload, all with the same number of ranks.
        best_tokens_per_s: of the fastest configuration that fits without offload; None if none fits.
        places: "host" and folders, in the order of trial; a configuration uses the first place in which it fits.
        simulated: the simulations of these configurations.
        whole: plans a configuration in full.
    """
    found, fastest, tried = None, best_tokens_per_s or 0.0, list[Options]()

    def simulate(options: Options) -> Candidate:
        tried.append(options)
        return simulated.simulate(options)

    def may_be_faster(one: Candidate) -> bool:
        is_wanted = _most_tokens_per_s(one) > fastest and may_fit(one)
        return is_wanted and (set(places) != {HOST} or _has_host_room(one))

    seen = set[tuple[Options, bool]]()
    for one in simulated.fastest_first(bounds if places else (), _most_tokens_per_s, may_be_faster):
        if (alike := _alike(one.options)) in seen:
            continue
        seen.add(alike)
        if one.verdict == "fits" and whole(one.options).verdict == "fits":
            continue
        for place in places:
            made = _fastest(one, place, fastest, simulate, whole)
            if made is not None:
                found, fastest = made, made[1].tokens_per_s
                break
    if found is None:
        return Chosen(None, None, "", len(tried))
    reason = "nothing fits without offload"
    if best_tokens_per_s is not None:
        more = fastest / best_tokens_per_s - 1
        reason = f"{more:.0%} faster than the fastest that fits without offload ({best_tokens_per_s:,.0f} tokens/s)"
    return Chosen(*found, reason, len(tried))


def _most_tokens_per_s(one: Candidate) -> float:
    """Return the speed that no offload of a configuration exceeds.

    The host begins when the last backward ends, and what it updates is needed in the next forward.
    """
    parts_s = LEAST_PART * one.host_s * min(1.0, max(0.0, one.excess_bytes) / max(1, one.movable_bytes))
    return one.options.tokens_per_step / max(one.passes_s, one.backward_s + parts_s)


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
    return verdict_of(one.least_bytes, outside_bytes_of(one.options), one.options) == "fits"


def _has_host_room(one: Candidate) -> bool:
    """Return whether the host has room for what must leave the device."""
    least_bytes = one.excess_bytes / (1 + margin_of(one.options).nine_tenths) - one.gradient_bytes
    return one.options.node_processes * least_bytes <= one.options.device.host_bytes


def _fastest(
    start: Candidate,
    to: str,
    fastest: float,
    simulate: Callable[[Options], Candidate],
    whole: Callable[[Options], Plan],
) -> tuple[Candidate, Plan] | None:
    """Return the fastest offload of a configuration that fits; None if none fits and is faster than `fastest`.

    Args:
        start: the configuration without offload, which does not fit.
    """
    options = start.options
    if to == HOST and not _has_host_room(start):
        return None

    def with_offload(offload: Offload | None) -> Options:
        return dataclasses.replace(options, offload=offload)

    try:
        check_options(with_offload(Offload(to=to)))
    except ValueError:  # the optimizer does not support states in files
        return None
    quick = cache(lambda offload: start if offload is None else simulate(with_offload(offload)))
    plan = _fastest_choice(
        options.row, quick, lambda offload: whole(with_offload(offload)), to=to, tokens_per_s=fastest
    )
    if plan is None:
        return None
    one = dataclasses.replace(quick(plan.asked.offload), options=plan.asked, peak_bytes=plan.peak_bytes)
    one = dataclasses.replace(one, step_s=plan.step_s, verdict="fits", reserved_bytes=plan.reserved_bytes)
    return one, plan


def automatic_offload(
    shape: Transformer | None, options: Options, whole: Callable[[Offload | None], Plan]
) -> tuple[Offload | None, bool]:
    """Return the offload "auto" of a plan, and whether it fits; otherwise the largest offload.

    Args:
        shape: None for a module, each plan of which takes seconds.
        whole: plans with an offload in full.
    """

    @cache
    def quick(offload: Offload | None) -> Tried:
        if shape is None:
            return whole(offload)
        return candidate_of(shape, dataclasses.replace(options, offload=offload))

    # A simulation of a pipe takes half a second.
    found = _fastest_choice(options.row, quick, whole, steps=2 if shape is None else 5 if options.pipe == 1 else 1)
    if found is None:
        # Small states may take less than the copies that offload needs.
        return (None, True) if whole(None).verdict == "fits" else (choices_for(options.row)[-1][-1], False)
    return found.asked.offload, True


def _fastest_choice(
    row: Residency,
    quick: Callable[[Offload | None], Tried],
    whole: Callable[[Offload | None], Plan],
    *,
    to: str = HOST,
    steps: int = 5,
    tokens_per_s: float = 0.0,
) -> Plan | None:
    """Return the fastest plan with offload, or without, that fits; None if none fits and is faster than asked.

    Args:
        row: without offload.
        quick: simulates a step with an offload.
        whole: plans it in full, which says what the allocator reserves.
        to: "host" or a folder.
        steps: number of steps in which parameters are moved.
        tokens_per_s: the speed to exceed.
    """

    def chain_of(part: int, gradients: float | None) -> Chain:
        states = (number / PARTS for number in range(PARTS + 1))
        made: Chain = [Offload(states=one, gradients=gradients, parameters=part / steps, to=to) for one in states]
        return made if part else [None, *made[1:]]

    parts = range(steps + 1 if row.cuts_parameters else 1)
    # What takes the least memory: where that has no room beside what the allocator reserves, no choice has.
    most = [chain_of(part, None)[-1] for part in sorted({parts[0], parts[-1]}, reverse=True)]
    fullest = next((one for one in most if quick(one).excess_bytes <= 0 and whole(one).excess_bytes <= 0), None)
    if fullest is None:
        return None
    reserved_bytes = max(0.0, whole(fullest).excess_bytes - quick(fullest).excess_bytes)

    # Memory falls nearly evenly from choice to choice. Without offloaded states gradients stay on the device.
    ends = [
        [quick(one).excess_bytes for one in (chain_of(part, 0)[0], chain_of(part, None)[-1])] for part in parts[::steps]
    ]
    tried, found, fastest, most_gain = list[tuple[float, Chain, int, float]](), None, tokens_per_s, 0.0
    for part in sorted(parts, key=lambda part: part % steps):
        begin, end = (a + (b - a) * part / steps for a, b in zip(ends[0], ends[-1], strict=True))
        each_bytes, chain = max(1.0, (begin - end) / PARTS), chain_of(part, None)
        place = min(PARTS, max(0, ceil(begin / each_bytes)))
        # Where the host has no room for the least offload, it has none for more.
        if end > -LEAST_RESERVED * reserved_bytes or (one := quick(chain[place])).verdict == "no":
            continue
        tried.append((one.tokens_per_s, chain, place, each_bytes))
        # Gradients that stay on the device ask for at least as many states elsewhere. Without parameters elsewhere, or
        # with all, it is seen whether that may be faster.
        if part % steps == 0 or most_gain > 1:
            tried.append((quick((stays := chain_of(part, 0))[place]).tokens_per_s, stays, place, each_bytes))
            most_gain = max(most_gain, tried[-1][0] / one.tokens_per_s)
    full_bytes = inf  # the least, by simulations, of a choice that has no room when planned in full
    for most_tokens_per_s, chain, place, each_bytes in sorted(tried, key=itemgetter(0), reverse=True):
        if most_tokens_per_s <= fastest * (LEAST_GAIN if found is not None else 1):
            break
        if full_bytes < inf and quick(chain[-1]).excess_bytes >= full_bytes:
            continue
        guess = place + ceil(reserved_bytes / each_bytes)
        last_bytes = whole(fullest).excess_bytes if chain[-1] == fullest else None
        least = first_below(chain, lambda one: whole(one).excess_bytes, guess, each_bytes, last_bytes=last_bytes)
        if least is None:
            full_bytes = min(full_bytes, quick(chain[-1]).excess_bytes)
        elif (plan := whole(chain[least])).verdict == "fits" and plan.tokens_per_s > fastest:
            found, fastest = plan, plan.tokens_per_s
    return found


def first_below(
    chain: Chain,
    excess_of: Callable[[Offload | None], float],
    place: int,
    each_bytes: float,
    *,
    last_bytes: float | None = None,
) -> int | None:
    """Return the place of the first choice that has room, or of one that has `NEAR` of a step to spare.

    Returns None if none has room.

    Args:
        excess_of: returns the bytes that have no room, which fall nearly evenly from choice to choice.
        place: the first choice to look at.
        each_bytes: how much less a choice takes than the choice before it, roughly.
        last_bytes: what `excess_of` returns for the last choice, if that is known and at most 0.
    """
    low, high, before, near_bytes = -1, len(chain), None, NEAR * each_bytes
    if last_bytes is not None:
        high, before = len(chain) - 1, (len(chain) - 1, last_bytes)
    for is_between in cycle((False, False, True)):
        if high - low == 1 or (before is not None and -near_bytes < before[1] <= 0):
            break
        place = min(max(place, low + 1), high - 1)
        excess_bytes = excess_of(chain[place])
        if before is not None and (fallen := (before[1] - excess_bytes) / (place - before[0])) > 0:
            each_bytes = fallen
        before = place, excess_bytes
        low, high = (low, place) if excess_bytes <= 0 else (place, high)
        # Where memory does not fall evenly, a step of each_bytes may be short: each third one halves what is left.
        place = (low + high) // 2 if is_between and high < len(chain) else place + ceil(excess_bytes / each_bytes)
    return high if high < len(chain) else None
