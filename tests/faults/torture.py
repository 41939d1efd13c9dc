"""Kills a job again and again, and looks each time at what is left: nothing committed may be lost, no bit may differ.

Owns the kills and the counts; `job.py` is what is killed. `tools/torture.py` runs it for as long as one likes.
"""

import itertools
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import zeroshard as zs
from zeroshard.checkpoint.diff import diff
from zeroshard.testing import RankFailure, run_ranks

from .job import PARTS, Kill, Layout, place_of, train

__all__ = ["Counts", "Torture"]

STEPS, MOVING_STEPS = 6, 100
NEAR = 1e-4
"""How far the losses of a job that continued in other layouts may be from those of an undisturbed one, relatively."""
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved")
TIMEOUT_S, MOVING_TIMEOUT_S = 180.0, 600.0
KILLS_OF_A_JOB = 8
GRACE_S = 1.0
WITHOUT_WATCHDOG = ("before the start", "join", "shard")
"""Phases in which others wait for a killed rank until their launcher ends them."""
MOST_FAILED = 10


@dataclass
class Counts:
    """What came of it.

    Args:
        kills: starts that a kill ended.
        phases: of the job, in which the killed ranks were.
        places: what they did then, more closely.
        jobs: that were killed at least once and then run to their end.
        kinds: of these jobs.
        resumed: of them, how many starts went on from a checkpoint.
        lost: kills after which a checkpoint that was committed, and not removed as an old one, was gone or damaged.
        mismatched: jobs whose losses, parameters, states or counters are not those of the undisturbed one; of jobs that
            continued in other layouts, whose losses are not near.
        failed: starts that ended with an error that was no kill.
        exits_s: of each kill that left survivors, the seconds until the last of them had ended by itself.
        problems: one line for each that is lost, mismatched or failed, or whose survivors stayed too long.
    """

    kills: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    lost: int = 0
    mismatched: int = 0
    failed: int = 0
    exits_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True)
class Kind:
    """A kind of job."""

    world: int
    stage: int
    asynchronous: bool
    has_paths: bool
    offload: str
    layout: Layout = Layout()  # noqa: RUF009 (it is frozen)

    def __str__(self) -> str:
        options = f"{'-asynchronous' if self.asynchronous else ''}{'-paths' if self.has_paths else ''}"
        options += f"-offload-{self.offload}" if self.offload else ""
        return f"ranks-{self.world}-stage-{self.stage}{options}{self.layout}"

    @property
    def is_possible(self) -> bool:
        """Whether there is such a job: a pipe saves in the background here, and all ranks take one path."""
        tensor, pipe, moves = self.layout.tensor, self.layout.pipe, self.layout.moves
        fits = self.world % (tensor * pipe) == 0 and not (moves and PARTS % (self.world // (tensor * pipe)))
        # Two chunks each at four places would need eight blocks.
        has_blocks = self.layout.schedule != "interleaved" or pipe == 2
        return fits and has_blocks and ((pipe == 1 and not moves) or (self.asynchronous and not self.has_paths))

    @property
    def steps(self) -> int:
        """The number of steps."""
        return MOVING_STEPS if self.layout.moves else STEPS


@dataclass(frozen=True)
class Whole:
    """The undisturbed job: its checkpoint, its losses, how long it and its first phases took.

    Args:
        operations: number of its file operations.
        actions: number of a pipeline's actions; 0 without one.
    """

    folder: Path
    losses: list[float]
    seconds: float
    join_s: float
    shard_s: float
    operations: int
    actions: int


class Torture:
    """Jobs that are killed at random.

    Args:
        folder: for the jobs; what is in it afterwards belongs to jobs that went wrong, and to undisturbed ones.
        key: chooses when and whom.
        worlds: rank counts to choose from.
        stages: stages to choose from.
        paths: whether ranks take different paths, to choose from.
        offloads: memories of states and parameters to choose from, "" for the device's.
        tensors: numbers of ranks over which torch splits layers, to choose from.
        pipes: numbers of places to choose from. Half of the jobs with several continue after each kill in another
            layout: with other places, another stage and schedule, other ranks, or without a pipe.
        part: which share of the kinds of jobs, and of how many: several processes divide them.
        promised_s: seconds in which the survivors of a kill must have ended by themselves; None to end them at once.

    Jobs save at once or in the background, half of them each.
    """

    def __init__(
        self,
        folder: Path,
        key: int,
        worlds: Sequence[int] = (1, 2, 3),
        stages: Sequence[int] = (0, 1, 2, 3),
        paths: Sequence[bool] = (False, True),
        part: tuple[int, int] = (0, 1),
        *,
        offloads: Sequence[str] = ("", "host", "files"),
        tensors: Sequence[int] = (1,),
        pipes: Sequence[int] = (1,),
        promised_s: float | None = None,
    ) -> None:
        self.counts = Counts()
        layouts = [Layout(tensor) for tensor in tensors if 1 in pipes]
        several = itertools.product(tensors, [pipe for pipe in pipes if pipe > 1], SCHEDULES, (False, True))
        layouts += [Layout(*each) for each in several]
        drawn = itertools.product(worlds, stages, (False, True), paths, offloads, layouts)
        kinds = [kind for kind in (Kind(*each) for each in drawn) if kind.is_possible]
        plain = itertools.product({1, *worlds}, stages, [Layout(moves=True)])
        self._plain = [kind for kind in (Kind(w, s, True, False, "", one) for w, s, one in plain) if kind.is_possible]
        """Jobs without a pipe, as which others continue."""
        self._moving = [kind for kind in kinds if kind.layout.moves]
        random.Random(key).shuffle(kinds)
        number, parts = part
        self._folder, self._draw = folder, random.Random(f"{key} {number}")
        self._kinds = kinds[number % len(kinds) :: parts]
        self._whole: dict[Kind, Whole] = {}
        self._number, self._promised_s = 0, promised_s

    def run(self, is_enough: Callable[[Counts], bool]) -> Counts:
        """Kill jobs until it is enough; the last one is run to its end. End early where start after start fails."""
        while not is_enough(self.counts) and self.counts.failed < MOST_FAILED:
            self._number += 1
            try:
                self._job(self._draw.choice(self._kinds), is_enough)
            except RankFailure:
                self.counts.failed += 1  # `_start` has told what
        return self.counts

    def _job(self, kind: Kind, is_enough: Callable[[Counts], bool]) -> None:
        whole = self._undisturbed(kind)
        folder = self._folder / f"job-{self._number}-{kind}"
        folder.mkdir()
        kills = 0
        while True:
            is_last = kills >= KILLS_OF_A_JOB or (kills > 0 and is_enough(self.counts))
            now = self._moved(kind) if kills and kind.layout.moves else kind
            kill = Kill() if is_last else self._kill(now.world, whole)
            self.counts.resumed += self._newest(folder) is not None
            losses = self._start(folder, now, kill)
            if losses is not None:
                break
            kills += 1
            if not self._look(folder, kill):
                return
        if kills:
            self.counts.jobs += 1
            self.counts.kinds[str(kind)] += 1
            self._compare(folder, kind, whole, losses)
        if not any(folder.name in problem for problem in self.counts.problems):
            shutil.rmtree(folder)

    def _moved(self, kind: Kind) -> Kind:
        """Return the job in another layout."""
        others = [one for one in self._moving if (one.world, one.layout) != (kind.world, kind.layout)]
        return replace(self._draw.choice(self._draw.choice([others or self._plain, self._plain])), offload=kind.offload)

    def _kill(self, world: int, whole: Whole) -> Kill:
        """Choose one rank or all, and when.

        In the rendezvous, in `zs.shard`, at any time, at a file operation, or at an action of a pipeline: few moments
        are in one of these, and most that matter.
        """
        ranks = tuple(range(world)) if self._draw.random() < 0.2 else (self._draw.randrange(world),)
        how = self._draw.random()
        if how < 0.4:
            return Kill(ranks, operation=self._draw.randint(1, whole.operations))
        if how < 0.5:
            return Kill(ranks, after_s=self._draw.uniform(0.0, whole.join_s))
        if how < 0.6:
            return Kill(ranks, after_s=self._draw.uniform(0.0, whole.shard_s), phase="shard")
        if whole.actions and how < 0.8:
            return Kill(ranks, action=self._draw.randint(1, whole.actions))
        return Kill(ranks, after_s=self._draw.uniform(0.0, whole.seconds))

    def _start(self, folder: Path, kind: Kind, kill: Kill) -> list[float] | None:
        """Start the job, or go on with it; return rank 0's losses, None where it was killed."""
        args = (str(folder), kind.stage, kind.steps, kill, kind.asynchronous, kind.has_paths, kind.offload, kind.layout)
        grace_s = GRACE_S if self._promised_s is None else self._promised_s
        timeout_s = MOVING_TIMEOUT_S if kind.layout.moves else TIMEOUT_S
        try:
            # Ranks join by themselves, so that they can be killed while they do; those that wait for one that was
            # killed are ended, as a launcher does.
            return run_ranks(train, kind.world, *args, timeout_s=timeout_s, grace_s=grace_s, process_group=False)[0]
        except RankFailure as failure:
            if not any(error.type_name == "SIGKILL" for error in failure.errors.values()):
                told = "; ".join(f"rank {rank}: {error.message}" for rank, error in failure.errors.items())
                self.counts.problems.append(f"{folder.name}: {told}")
                raise
            if self._promised_s is not None:
                self._time_survivors(folder, kill, failure)
        return None

    def _time_survivors(self, folder: Path, kill: Kill, failure: RankFailure) -> None:
        """Record how long the survivors of a kill took to end."""
        ended_s = time.time()
        survivors = failure.errors.keys() - set(kill.ranks)
        if not survivors or any(place_of(folder, rank).partition(":")[0] in WITHOUT_WATCHDOG for rank in kill.ranks):
            return
        self.counts.exits_s.append(ended_s - min(float((folder / f"killed-{rank}").read_text()) for rank in kill.ranks))
        stayed = [rank for rank in survivors if failure.errors[rank].type_name == "TimeoutError"]
        if stayed:
            self.counts.problems.append(f"{folder.name}: ranks {stayed} were there {self._promised_s} s after the kill")

    def _look(self, folder: Path, kill: Kill) -> bool:
        """Count a kill, and look whether what was committed before it is still there."""
        counts = self.counts
        counts.kills += 1
        places = [place_of(folder, rank) for rank in kill.ranks]
        counts.places.update(places)
        counts.phases.update(place.partition(":")[0] for place in places)
        ledger = folder / "committed"
        committed = ledger.read_text().split()[-1:] if ledger.exists() else []
        newest = self._newest(folder)
        # A kill between the commit and the ledger leaves one more than the ledger knows.
        is_lost = bool(committed) and (newest is None or newest.name < committed[0])
        if is_lost:
            counts.lost += 1
            counts.problems.append(f"{folder.name}: {committed[0]} was committed, and {newest} is the newest whole one")
        return not is_lost

    def _newest(self, folder: Path) -> Path | None:
        """Return the newest whole checkpoint of a job; where there are some and none is whole, that is a problem."""
        try:
            return zs.latest(folder / "checkpoints") if (folder / "checkpoints").exists() else None
        except zs.CheckpointError as error:
            self.counts.problems.append(f"{folder.name}: {error}")
            return None

    def _compare(self, folder: Path, kind: Kind, whole: Whole, losses: list[float]) -> None:
        newest, last = self._newest(folder), _last(whole.folder, kind.steps)
        if newest is None or newest.name != last.name:
            found = [f"ends with the checkpoint {newest}"]
        elif not kind.layout.moves:
            found = [f"{one.name}: {one.what}" for one in diff(last, newest)]
        else:
            off = max(abs(one - other) / other for one, other in zip(losses, whole.losses, strict=True))
            found = [f"losses are off by {off:.1e}, of {NEAR:g}"] * (off > NEAR)
        if losses != whole.losses and not kind.layout.moves:
            found.append(f"losses {losses}, undisturbed {whole.losses}")
        if found:
            self.counts.mismatched += 1
            self.counts.problems.append(f"{folder.name}: {'; '.join(found[:5])}")

    def _undisturbed(self, kind: Kind) -> Whole:
        if kind not in self._whole:
            folder = self._folder / f"whole-{self._number}-{kind}"
            folder.mkdir()
            losses = self._start(folder, kind, Kill())
            assert losses is not None and len(losses) == kind.steps
            entered = json.loads((folder / "entered-0").read_text())
            seconds, join_s, shard_s = (
                entered[end] - entered[begin] for begin, end in (("join", "end"), ("join", "shard"), ("shard", "load"))
            )
            counts = json.loads((folder / "counts-0").read_text())
            self._whole[kind] = Whole(folder, losses, seconds, join_s, shard_s, *counts)
        return self._whole[kind]


def _last(folder: Path, steps: int) -> Path:
    newest = zs.latest(folder / "checkpoints")
    assert newest is not None and newest.name == f"step-{steps:04d}"
    return newest
