"""The caching allocator in the ZeRO paper's runs with full devices: whether retries explain their speed.

Owns the allocations that such a run leaves to the allocator, and the table about them. It must not know the allocator
(`allocator.py`) or its cost (`retries.py`). Read `paper_runs.py` first.

Note: what the allocator has
    Model states, gradients, checkpoints (M_D) and constant buffers (C_B) have permanent separate memory, so the
    allocator has the rest of the device for all other tensors of a step. The relevant rules of today's allocator equal
    those of torch 1.1 to 1.3: pools, segments of 2 and 20 MiB and of single blocks, the choice and the splitting of a
    block, and the return of all free segments when the driver has no memory left.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from zeroshard.evidence import paper_data as data
from zeroshard.evidence.paper_data import Run
from zeroshard.evidence.paper_runs import BUDGET_BYTES, CB_BYTES, DGX_2, film_of, outcome_of
from zeroshard.evidence.paper_tables import Column, Table, Value
from zeroshard.plan.machine.allocator import Event, Rules, simulate
from zeroshard.plan.machine.retries import Retries, play_steps
from zeroshard.plan.step.film import Film, calls_of
from zeroshard.table.stages import CONFIGURATIONS

__all__ = ["allocator", "full_runs", "peak_and_room_of", "retries_of"]

GB: Final = 10**9
NEARLY_FULL: Final = 0.9
"""Fraction of the budget: runs above it are much slower than predicted (figures 2 and 4)."""
STEPS: Final = 3


def full_runs() -> list[Run]:
    """Return the ZeRO runs of figures 4 and 2 with a predicted peak of nearly the whole device."""
    runs = [*(run for run in data.FIGURE_4 if run.row in CONFIGURATIONS), *(pair.zero for pair in data.FIGURE_2)]
    return [run for run in runs if outcome_of(run).peak_bytes > NEARLY_FULL * BUDGET_BYTES]


@lru_cache(maxsize=1)  # films are large, and each is used several times in a row
def _settled(run: Run) -> tuple[Film, frozenset[int]]:
    """Return a steady step, and its storages with separate memory: earlier storages and checkpoints."""
    film, live = film_of(run, is_settled=True), dict[int, str]()
    for one in film.events:
        if one.at_s > film.phases[0].stop_s:
            break
        if one.nbytes > 0:
            live[one.storage] = one.unit if one.column == "activations" else ""
        else:
            live.pop(one.storage, None)
    # The unnamed tensors that the root leaves for the backward belong to the loss.
    checkpoints = {storage for storage, unit in live.items() if unit}
    return film, frozenset({one.storage for one in film.before} | checkpoints)


def peak_and_room_of(run: Run) -> tuple[int, int]:
    """Return the peak of a run's allocations outside separate memory, and the memory available for them."""
    film, kept = _settled(run)
    own = sum(one.nbytes for one in (*film.before, *film.events) if one.storage in kept and one.nbytes > 0)
    live = peak = 0
    for one in film.events:
        if one.storage not in kept:
            live += one.nbytes
            peak = max(peak, live)
    return peak, BUDGET_BYTES - CB_BYTES * (run.row in CONFIGURATIONS) - own


def _steps_of(run: Run) -> Iterator[Iterator[Event]]:
    """Yield the allocator's calls of some steps, each with separate keys."""
    film, kept = _settled(run)
    shift = 1 + max(one.storage for one in (*film.before, *film.events))
    for step in range(STEPS):
        yield calls_of(
            [one._replace(storage=one.storage + step * shift) for one in film.events if one.storage not in kept]
        )


def retries_of(run: Run, room_bytes: int) -> Retries:
    """Simulate some steps of a run with `room_bytes` for the allocator."""
    return play_steps(_steps_of(run), Rules(device_bytes=room_bytes), DGX_2)


def allocator() -> Table:
    """Return the allocator's behaviour in runs with full devices, and the retries that would explain their time."""
    columns = [Column("model"), Column("step s", ".1f"), Column("missing s", ".1f"), Column("peak GB", ".2f"),
               Column("room GB", ".2f"), Column("retries, first steps"), Column("retries, steady step"),
               Column("one that returns all, ms", ".0f"), Column("of them to explain", ".0f")]  # fmt: skip
    rows = list[Sequence[Value]]()
    for run in full_runs():
        found = outcome_of(run)
        missing_s = found.step_s * (found.teraflops / run.published - 1)
        peak_bytes, room_bytes = peak_and_room_of(run)
        retries = retries_of(run, room_bytes)
        end = simulate(next(_steps_of(run)), Rules(device_bytes=room_bytes))
        all_s = DGX_2.retry_s(2 * len(end.segments), end.reserved_bytes)
        rows.append([run.label, found.step_s, missing_s, peak_bytes / GB, room_bytes / GB, sum(retries.by_step[:-1]),
                     retries.steady, all_s * 1000, missing_s / all_s])  # fmt: skip
    notes = [
        "Missing is the published step's time less the predicted one. Peak and room are those of the allocator alone.",
        "The last columns: a retry that returns all that the allocator has, and how many a step would have to have.",
    ]
    title = "Figures 2 and 4: the caching allocator of the runs that fill their devices"
    return Table("allocator", title, columns, rows, notes)
