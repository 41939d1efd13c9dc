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
from dataclasses import dataclass, field, fields
from pathlib import Path

import zeroshard as zs
from zeroshard.checkpoint.diff import diff
from zeroshard.testing import RankFailure, run_ranks

from .job import Kill, place_of, train

__all__ = ["Counts", "Torture"]

STEPS = 6
TIMEOUT_S = 180.0
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
        mismatched: jobs whose losses, parameters, states or counters are not those of the undisturbed one.
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
    tensor: int = 1

    def __str__(self) -> str:
        options = f"{'-asynchronous' if self.asynchronous else ''}{'-paths' if self.has_paths else ''}"
        options += f"-offload-{self.offload}" if self.offload else ""
        options += f"-tensor-{self.tensor}" if self.tensor > 1 else ""
        return f"ranks-{self.world}-stage-{self.stage}{options}"


@dataclass(frozen=True)
class Whole:
    """The undisturbed job: its checkpoint, its losses, how long it and its first phases took, its file operations."""

    folder: Path
    losses: list[float]
    seconds: float
    join_s: float
    shard_s: float
    operations: int


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
        promised_s: float | None = None,
    ) -> None:
        self.counts = Counts()
        drawn = itertools.product(worlds, stages, (False, True), paths, offloads, tensors)
        kinds = [kind for kind in (Kind(*each) for each in drawn) if kind.world % kind.tensor == 0]
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
            kill = Kill() if is_last else self._kill(kind.world, whole)
            self.counts.resumed += self._newest(folder) is not None
            losses = self._start(folder, kind, kill)
            if losses is not None:
                break
            kills += 1
            if not self._look(folder, kill):
                return
        if kills:
            self.counts.jobs += 1
            self.counts.kinds[str(kind)] += 1
            self._compare(folder, whole, losses)
        if not any(folder.name in problem for problem in self.counts.problems):
            shutil.rmtree(folder)

    def _kill(self, world: int, whole: Whole) -> Kill:
        """Choose one rank or all, and when.

        In the rendezvous, in `zs.shard`, at any time, or at a file operation: few moments are in one of these, and most
        that matter.
        """
        ranks = tuple(range(world)) if self._draw.random() < 0.2 else (self._draw.randrange(world),)
        how = self._draw.random()
        if how < 0.4:
            return Kill(ranks, operation=self._draw.randint(1, whole.operations))
        if how < 0.5:
            return Kill(ranks, after_s=self._draw.uniform(0.0, whole.join_s))
        if how < 0.6:
            return Kill(ranks, after_s=self._draw.uniform(0.0, whole.shard_s), phase="shard")
        return Kill(ranks, after_s=self._draw.uniform(0.0, whole.seconds))

    def _start(self, folder: Path, kind: Kind, kill: Kill) -> list[float] | None:
        """Start the job, or go on with it; return rank 0's losses, None where it was killed."""
        args = (str(folder), kind.stage, STEPS, kill, kind.asynchronous, kind.has_paths, kind.offload, kind.tensor)
        grace_s = GRACE_S if self._promised_s is None else self._promised_s
        try:
            # Ranks join by themselves, so that they can be killed while they do; those that wait for one that was
            # killed are ended, as a launcher does.
            return run_ranks(train, kind.world, *args, timeout_s=TIMEOUT_S, grace_s=grace_s, process_group=False)[0]
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

    def _compare(self, folder: Path, whole: Whole, losses: list[float]) -> None:
        newest = self._newest(folder)
        if newest is None or newest.name != _last(whole.folder).name:
            found = [f"ends with the checkpoint {newest}"]
        else:
            found = [f"{one.name}: {one.what}" for one in diff(_last(whole.folder), newest)]
        if losses != whole.losses:
            found.append(f"losses {losses}, undisturbed {whole.losses}")
        if found:
            self.counts.mismatched += 1
            self.counts.problems.append(f"{folder.name}: {'; '.join(found[:5])}")

    def _undisturbed(self, kind: Kind) -> Whole:
        if kind not in self._whole:
            folder = self._folder / f"whole-{self._number}-{kind}"
            folder.mkdir()
            losses = self._start(folder, kind, Kill())
            assert losses is not None and len(losses) == STEPS
            entered = json.loads((folder / "entered-0").read_text())
            seconds, join_s, shard_s = (
                entered[end] - entered[begin] for begin, end in (("join", "end"), ("join", "shard"), ("shard", "load"))
            )
            operations = int((folder / "operations").read_text())
            self._whole[kind] = Whole(folder, losses, seconds, join_s, shard_s, operations)
        return self._whole[kind]


def _last(folder: Path) -> Path:
    newest = zs.latest(folder / "checkpoints")
    assert newest is not None and newest.name == f"step-{STEPS:04d}"
    return newest
