"""Saving: every rank writes its own ranges, rank 0 verifies completeness, and a rename commits.

Owns the protocol. Read `contents.py` (what is written), `commit.py` (the folder) and `together.py` first.

Note: from tensors to a checkpoint
    1. Rank 0 checks that the checkpoint will be readable. Ranks agree on path, step and all common data; rank 0 creates
       `.tmp-<name>-<attempt>`.
    2. Each rank writes its two files there, and waits until they are on disk.
    3. Ranks exchange sizes and checksums; rank 0 writes extra.json and, last, the manifest, after a check that every
       element of every tensor is in exactly one file. It flushes file and folder.
    4. The folder is renamed, which makes it a checkpoint, and the folder above is flushed.
    5. LATEST, a hint for people, is replaced, and retention removes old checkpoints.
    A failure at any point, except of the hint, raises on all ranks. In the background, steps 2 to 5 run in threads
    (`background.py`), and ranks exchange their progress at each optimizer step.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.checkpoint import files
from zeroshard.checkpoint.attempt import new_attempt, temporary_folder
from zeroshard.checkpoint.background import BackgroundSave, Snapshot, Status
from zeroshard.checkpoint.commit import (
    check_limits,
    make_folder,
    publish,
    remove_older,
    write_manifest,
    write_tensors,
)
from zeroshard.checkpoint.contents import ADVICE, COMMITTED, LOOK, How, Plan, agree_on, make_plan
from zeroshard.checkpoint.inventory import own_entries
from zeroshard.checkpoint.islands import adopt, island_items, save_parts
from zeroshard.checkpoint.manifest import FileEntry
from zeroshard.checkpoint.places import join_plan
from zeroshard.checkpoint.together import begin, meet, together
from zeroshard.checkpoint.values import PIECE_NUMEL, bytes_of
from zeroshard.core.engine import Engine
from zeroshard.core.slot import slot_of
from zeroshard.outer.islands import Islands
from zeroshard.table.errors import CheckpointError
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.whole.owned import owned_states

__all__ = ["Saver"]

POLL_S: Final = 0.05


@final
class Saver:
    """The saves of one model: one at a time, at most one of them in the background.

    Args:
        optimizers: the optimizers of the model, including those attached later.
        islands: those that the model is trained on, if any.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        optimizers: Sequence[ShardedOptimizer],
        islands: Islands | None = None,
    ) -> None:
        self._engine, self._model, self._optimizers, self._islands = engine, model, optimizers, islands
        self._snapshot = Snapshot()
        self._under_way: BackgroundSave | None = None
        self._watched: list[Optimizer] = []
        self._asked: set[type[Optimizer]] = set()
        """Classes with a `state_dict` of their own."""

    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None,
        how: How,
        *,
        asynchronous: bool,
    ) -> Path:
        """Write a checkpoint. See `Zero.save`."""
        if self._islands is None:
            return self._save(Path(path), extra, how, asynchronous=asynchronous)
        for name, is_given in (("asynchronous", asynchronous), ("model_only", how.model_only)):
            if is_given:
                raise ValueError(
                    f"{self._engine.mesh} zero.save({name}=True) does not support islands, which commit one checkpoint "
                    f"of anchors and parameters together. Leave {name}= out."
                )

        def save(target: Path) -> Path:
            own = how if target == Path(path) else replace(how, keep=None)  # the first island's part removes old ones
            return self._save(target, extra, own, asynchronous=False)

        return save_parts(self._engine, self._islands, Path(path), save)

    def _save(self, target: Path, extra: Mapping[str, Any] | None, how: How, *, asynchronous: bool) -> Path:
        engine, what = self._engine, "zero.save()"
        begin(engine, what)
        self._settle(waits=True)
        with together(engine, f"{what}: looking at what is to be saved", ADVICE):
            owned = owned_states(engine, self._optimizers)
            if not how.model_only:
                self._warn_of_unsaved()
            change = None if self._islands is None else partial(island_items, engine, self._islands, target)
            plan = make_plan(engine, self._model, self._optimizers, target, extra or {}, how, owned, change)
        agree_on(engine, plan, what, f"asynchronous={asynchronous}, model_only={how.model_only}")
        plan, is_first = join_plan(engine, plan, what), engine.mesh.across.rank == 0
        attempt = engine.comm.across.texts(new_attempt(), "the name of a save")[0]
        folder, what = temporary_folder(target, attempt), f"{what} to {target}"
        with together(engine, f"{what}: making a folder", ADVICE):
            if is_first:
                check_limits(plan)
                make_folder(plan, folder)
        try:
            if asynchronous:
                # The program may change its folder before the files are written.
                self._start(replace(plan, path=target.absolute()), folder.absolute(), what)
            else:
                self._write(plan, folder, what)
        except CheckpointError:
            if is_first:
                files.remove_tree(folder)
            raise
        return target

    def _warn_of_unsaved(self) -> None:
        """Warn of states that are in no group, and, once for each class, of what it adds to the state dict of torch."""
        for one in self._optimizers:
            kind, here = type(one.optimizer), {*one.masters}
            left = [slot_of(m).name for m in one.entries if m not in here and one.optimizer.state.get(m)]
            if left:
                warnings.warn(
                    f"{self._engine.mesh} zero.save() does not save the states of {len(left)} parameter(s) that are in "
                    f"no group of {kind.__name__} any more, '{left[0]}' first: after zero.load() they have none. Add "
                    "their group again before the save to keep them.",
                    stacklevel=6,
                )
            if kind.state_dict is Optimizer.state_dict or kind in self._asked:
                continue
            self._asked.add(kind)
            if added := own_entries(one.optimizer):
                warnings.warn(
                    f"{self._engine.mesh} zero.save() does not save {', '.join(map(repr, added))}, which "
                    f"{kind.__name__}.state_dict() adds to 'state' and 'param_groups'. Pass such values in extra=, and "
                    "set them after zero.load(); or keep them in a group or in optimizer.state.",
                    stacklevel=6,
                )

    def wait(self, what: str) -> None:
        """Wait for the save in the background. See `Zero.wait`.

        Args:
            what: the call that waits, for messages.
        """
        begin(self._engine, what)
        self._settle(waits=True)

    # -- at once ------------------------------------------------------------------------------------------------------

    def _write(self, plan: Plan, folder: Path, what: str) -> None:
        engine, rank = self._engine, self._engine.mesh.across.rank
        entries = {}
        with together(engine, f"{what}: writing tensors", ADVICE), plan.exchange(engine) as rows:
            for name in plan.files_of(rank):
                pieces = (piece for value in plan.values(name, rows) for piece in value.split(PIECE_NUMEL))
                parts = map(bytes_of, pieces)
                entries[name] = write_tensors(plan, folder, name, parts)
        written = _exchange(engine, plan, entries)
        with together(engine, f"{what}: writing the manifest", ADVICE):
            if rank == 0:
                if self._islands is not None:
                    adopt(plan.path, folder)
                write_manifest(plan, folder, written)
        with together(engine, f"{what}: committing", LOOK):
            if rank == 0:
                publish(plan.path, folder)
        if plan.keep is not None:
            with together(engine, f"{what}: removing older checkpoints", COMMITTED):
                if rank == 0:
                    remove_older(plan, plan.keep)

    # -- in the background --------------------------------------------------------------------------------------------

    def _start(self, plan: Plan, folder: Path, what: str) -> None:
        mesh = self._engine.mesh
        with together(self._engine, f"{what}: copying to host memory", ADVICE), plan.exchange(self._engine) as rows:
            taken = self._snapshot.take(plan, rows)
        watchdog = self._engine.comm.across.watchdog
        self._under_way = BackgroundSave(
            plan, folder, mesh.across.rank, taken, watchdog.is_alive if watchdog is not None else lambda rank: True
        )
        for one in self._optimizers:
            if not any(optimizer is one.optimizer for optimizer in self._watched):
                self._watched.append(one.optimizer)
                # Before the update: a step that raises has changed nothing, and can be made again.
                hook = one.optimizer.register_step_pre_hook(lambda *_: self._settle(waits=False))
                self._engine.undo.keep(hook)

    def _settle(self, *, waits: bool) -> None:
        """Exchange the progress of a save in the background; raise its failure.

        Collective: an all-reduce of 32 bytes during a save, several if it `waits`; every rank must call.
        """
        while (save := self._under_way) is not None:
            if waits:
                save.join(POLL_S)
            least, most = meet(self._engine, f"the save of {save.path} in the background", save.status)
            if most == Status.FAILED:
                self._fail(save)
            if least == Status.DONE:
                save.close()
                self._under_way = None
            elif not waits:
                return

    def _fail(self, save: BackgroundSave) -> None:
        """End the save on every rank, and raise the error of the last rank with its own failure."""
        save.give_up()
        self._under_way = None
        texts = self._engine.comm.across.texts(save.failure, "the failure of a save")
        save.remove()
        save.close()
        raise CheckpointError(f"zero.save() to {save.path} in the background: {[t for t in texts if t][-1]}")


def _exchange(engine: Engine, plan: Plan, entries: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Return what every rank wrote, by file. Collective: an all-gather of sizes and checksums."""
    numbers = [n for entry in entries.values() for n in (entry.nbytes, len(entry.crc32), *entry.crc32)]
    comm = engine.comm.across
    length = -comm.agree([-len(numbers)], "the number of checksums")[0]
    row = torch.tensor(numbers + [0] * (length - len(numbers)), dtype=torch.int64, device=engine.mesh.device)
    found = {}
    for rank, all_numbers in enumerate(comm.collect(row, "the checksums", "state").tolist()):
        those = iter(all_numbers)
        for name in plan.files_of(rank):
            nbytes, count = next(those), next(those)
            found[name] = FileEntry(nbytes, tuple(next(those) for _ in range(count)))
    return found
