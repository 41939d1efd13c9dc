"""The time of steps on this rank: by category, by unit, as a table and as a trace for Perfetto.

Owns the presentation. `report/probe.py` chooses the measured events, `report/timeline.py` measures them.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, final

import torch
from torch import nn

from zeroshard.core.engine import Engine
from zeroshard.report.probe import Probe
from zeroshard.report.timeline import CATEGORIES, NO_UNIT, Slice, Timeline
from zeroshard.table.sizes import aligned
from zeroshard.text_files import write_whole
from zeroshard.update.optimizer import ShardedOptimizer

__all__ = ["Profile"]

_NS: Final = 1e-9
_MS_OF_NS: Final = 1e-6
_ROOT_NAME: Final = "(root)"


@final
class Profile:
    """The time of steps on this rank, measured inside `with`; a second `with` adds to the first.

    Categories, which do not overlap:

    - "forward", "backward": the model's own work, including recomputation in backward. Backward begins at the gradient
      of the model's outputs; a loss that is computed outside the model is "other".
    - "waiting": waits for messages and votes of other ranks.
    - "sending": conversion of messages, and their submission to the backend.
    - "copies": copies of gradients and shards, sums, casts of master weights, allocation and release of memory.
    - "hooks": the engine's own Python code.
    - "optimizer": updates, checks for finite gradients, norms.
    - "other": the program around the model.

    Times are measured on the host. On a GPU the device runs asynchronously: its own time appears where the host waits
    for it. The overhead is about a microsecond per event; without a profile there is none.

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zs.shard(model, optimizer)
    with zero.profile() as profile:
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    assert abs(sum(profile.seconds.values()) - profile.wall_s) < 1e-9
    assert profile.steps == 1 and "forward" in profile.table()
    ```
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizers: Sequence[ShardedOptimizer]) -> None:
        self._engine, self._timeline = engine, Timeline()
        self._probe = Probe(engine, model, optimizers, self._timeline)
        self.steps = 0
        """Number of counted updates."""

    def __enter__(self) -> Self:
        self._engine.leave_passes("A profile cannot begin")
        self._probe.attach()
        self.steps -= self._steps_so_far()
        self._timeline.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timeline.stop()
        self.steps += self._steps_so_far()
        self._probe.detach()

    def _steps_so_far(self) -> int:
        return self._engine.order.history.made

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by category; their sum is `wall_s`."""
        return {category: _NS * self._sum_ns(category) for category in CATEGORIES}

    @property
    def units(self) -> Mapping[str, Mapping[str, float]]:
        """Seconds by unit, named as in `zero.units`, and category; "(no unit)" is the time outside all units."""
        spent = self._timeline.spent_ns
        return {unit: {one: _NS * spent[one, unit] for one in CATEGORIES} for unit in self._names()}

    @property
    def wall_s(self) -> float:
        """Seconds inside the context."""
        return _NS * self._timeline.spent_ns.total()

    @property
    def slices(self) -> Sequence[Slice]:
        """All spans with start and duration, in the order of their ends."""
        return tuple(self._timeline.slices)

    def _names(self) -> list[str]:
        # Large parameters of one module are units with the same name.
        return [*dict.fromkeys(unit.name for unit in self._engine.units), NO_UNIT]

    def _sum_ns(self, category: str) -> int:
        return sum(ns for (one, _), ns in self._timeline.spent_ns.items() if one == category)

    def table(self) -> str:
        """Return a text table with one line per unit: milliseconds per step by category.

        ```python
        import torch, zeroshard as zs

        zero = zs.shard(torch.nn.Linear(4, 1))
        with zero.profile() as profile:
            pass
        assert profile.table() == str(profile)
        ```
        """
        spent, steps = self._timeline.spent_ns, max(1, self.steps)
        rows = {name or _ROOT_NAME: [spent[one, name] for one in CATEGORIES] for name in self._names()}
        rows["total"] = totals = [self._sum_ns(category) for category in CATEGORIES]
        cells = [[name, *(_ms(ns / steps) for ns in (*row, sum(row)))] for name, row in rows.items()]
        wall = max(1, sum(totals))
        cells.append(["share", *(f"{100 * ns / wall:.1f}%" for ns in (*totals, sum(totals)))])
        kind = "" if self._engine.mesh.device.type == "cpu" else "; times of the host, which runs ahead of the device"
        title = f"{self._engine.mesh} {self.steps} step(s) in {self.wall_s:.3f} s; milliseconds per step{kind}"
        return "\n".join([title, *aligned([["unit", *CATEGORIES, "total"], *cells], [0])])

    def __str__(self) -> str:
        return self.table()

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace of all ranks, for https://ui.perfetto.dev: one process per rank.

        Ranks of one host share a clock; ranks of several hosts are aligned by the clocks of the hosts.

        Args:
            path: a file, overwritten; rank 0 writes it.

        Raises:
            OSError: on every rank, if the file cannot be written.

        Collective: all-gathers of about ten bytes per event; every rank must call.

        ```python
        import json, pathlib, tempfile, torch, zeroshard as zs

        zero = zs.shard(torch.nn.Linear(4, 1))
        with zero.profile() as profile:
            pass
        with tempfile.TemporaryDirectory() as folder:
            profile.save(f"{folder}/trace.json")
            assert json.loads(pathlib.Path(folder, "trace.json").read_text())["traceEvents"]
        ```
        """
        by_rank, problem = self._collect(), ""
        if self._engine.mesh.rank == 0:
            try:
                write_whole(path, json.dumps(_chrome_trace(by_rank)))
            except OSError as error:
                problem = str(error)
        if (first := self._engine.comm.texts(problem, "the writing of a profile")[0]) != "":
            raise OSError(f"{self._engine.mesh} Rank 0 could not write the profile: {first}")

    def _collect(self) -> list[list[Slice]]:
        """Return every rank's slices, by rank."""
        comm, device = self._engine.comm, self._engine.mesh.device
        packed = zlib.compress(json.dumps(self._timeline.slices).encode())
        sizes = comm.collect(torch.tensor([len(packed)], device=device), "the sizes of profiles", "state").flatten()
        row = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        row[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        rows = comm.collect(row.to(device), "the profiles of all ranks", "state").cpu().numpy()
        texts = [zlib.decompress(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]
        return [[Slice(*one) for one in json.loads(text)] for text in texts]


def _chrome_trace(by_rank: Sequence[Sequence[Slice]]) -> dict[str, Any]:
    """Return complete events, in microseconds since the first event.

    Source: Trace Event Format, "JSON Object Format" and "Complete Events".
    """
    first_ns = min((one.start_ns for slices in by_rank for one in slices), default=0)
    events: list[dict[str, Any]] = []
    for rank, slices in enumerate(by_rank):
        process = {"pid": rank, "tid": 0, "ph": "M"}
        events.append({**process, "name": "process_name", "args": {"name": f"rank {rank} of {len(by_rank)}"}})
        events.append({**process, "name": "process_sort_index", "args": {"sort_index": rank}})
        events += [_complete_event(rank, one, first_ns) for one in slices]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete_event(rank: int, one: Slice, first_ns: int) -> dict[str, Any]:
    unit = one.unit or _ROOT_NAME
    return {
        "name": one.label if unit == NO_UNIT else f"{one.label} {unit}",
        "cat": one.category,
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "ts": (one.start_ns - first_ns) / 1000,
        "dur": one.duration_ns / 1000,
        "args": {"unit": unit},
    }


def _ms(ns: float) -> str:
    return f"{_MS_OF_NS * ns:.2f}"
