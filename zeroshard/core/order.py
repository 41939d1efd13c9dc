"""The order of communication in passes: agreed in the first pass of a kind, then followed.

Owns the current pass, the records of past passes, and the rounds in which ranks agree. It converts the schedule's
actions into calls on units and events of the trace. It must not know hooks, parameters or the optimizer. Read
`table/schedule.py` first.

Note: rounds
    Each pass ends with a vote (`core/votes.py`). A rank that follows the record to the end of the pass requests
    nothing. A rank that needs a unit outside the record posts the vote earlier, with its request (`Ask`), and reads the
    smallest request of all ranks. Gathers come before reductions. All ranks serve that request together and vote again
    in rounds, until no rank has one.
Note: leaving the record
    A rank that needs a unit outside the record first issues the rest of the record, so that no rank waits for it, and
    then requests the unit in rounds. The other ranks follow the record to its end and serve the requests when they read
    the vote there. The pass is slow but correct, and the next record includes the requests. After such a forward pass,
    ranks agree on the backward in rounds from its beginning, so that no rank has to keep gradients while another
    catches up.
Note: when the vote at the end of a pass is read
    A forward pass reads its vote before the forward returns: user code may then wait for other ranks, and one of them
    may still have a request. A backward pass that follows its record does not read its vote. The vote says which
    parameters some rank used, and whether some rank has gradients outside the record; the optimizer's step is usually
    the first to need this. Earlier readers (`catch_up`) are a gradient that this rank did not compute, the next pass,
    and a norm unless `is_sure` proves that no rank can have a request.
Note: one sum a pass
    A reduction may be due before the gradients of a rank are complete, if it uses units in another order. The rank
    reports that it is not ready. All ranks keep their gradients of the unit, and reduce them once all are ready, at the
    latest when the pass closes (`core/unit.py`). The next record has the reduction at that place.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from zeroshard.core.changes import check_equal, checksum_of
from zeroshard.core.followed import Followed, OwnBuffers
from zeroshard.core.history import History
from zeroshard.core.passes import Pass, Phase
from zeroshard.core.states import Scope
from zeroshard.core.unit import Reduction, Unit, advanced
from zeroshard.core.votes import Ask, Told, Votes
from zeroshard.table.schedule import WINDOW, Action, Record, Schedule
from zeroshard.table.sizes import size_text
from zeroshard.table.spec import Staying
from zeroshard.torch_private import NoFunctionTransforms, is_profiling, profiled
from zeroshard.wire.comm import Comm, Pending

__all__ = ["Order"]

CALM_PASSES = 3
"""Number of passes that must follow their record before a rank is expected to follow it."""
FAULT = -2
"""Payload of a step that must not be made: a rank knows that its gradients, or a norm of them, are wrong."""


class Order:
    """The passes of one model.

    Args:
        units: all units, indexed by number.
        comm: the communicator of the model.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self._units, self._comm, self._staying = units, comm, Staying([unit.spec for unit in units])
        self._changes = [change for unit in units for change in unit.changes]
        self.is_sharded = any(not unit.spec.is_whole for unit in units)
        """Whether parameters are gathered for use."""
        self.carried: frozenset[int] = frozenset()
        """Units that a forward left gathered for its backward; equal on all ranks."""
        self.current: Pass | None = None
        self._has_warned, self.count = False, 0
        """`count` is the number of passes and exchanges so far; equal on all ranks between passes."""
        self._records: dict[Hashable, Record] = {}
        self.history = History(units, self._records)
        self._in_flight: list[Reduction] = []
        self._tails: list[list[Pending]] = [[] for _ in units]
        """Gathers of sums that every rank needs in full, by unit."""
        self._has_left_record = False
        """Whether a rank left the record of a forward pass whose backward is pending; equal on all ranks."""
        self.votes = Votes(comm)
        self.check_update: Callable[[], None] = lambda: None
        """Raises on all ranks if an update in the background failed on one. Collective: all-reduce of 8 bytes."""
        self.buffers: Followed = OwnBuffers()
        """The buffers of modules."""
        self.launch: Callable[[], None] = lambda: None
        """Launches gathers that wait for values from another memory (`store/ahead.py`), before later collectives."""
        self._ended: list[Pass] = []
        """Passes whose final vote this rank has not read."""
        self._calm: Counter[Hashable] = Counter()
        """By kind of pass: the number of consecutive passes that followed their record."""
        self._has_made_rounds = False
        """Whether a pass since the last `settle` needed rounds; equal on all ranks."""

    # -- one pass ---------------------------------------------------------------------------------------------------

    def open(
        self,
        phase: Phase,
        key: Hashable,
        *,
        scope: Scope = Scope.RANK,
        expected: set[int] | None = None,
        numbers: Sequence[int] | None = None,
        place: str = "",
        holds: bool = False,
    ) -> Pass:
        """Begin a pass; the previous pass must be closed.

        Args:
            numbers: the units whose gradients a backward reduces; None for all.
            place: text of the first vote; "" for no vote.
            holds: whether a backward will follow, for which units may stay gathered.
        """
        if phase == "backward" or self.is_sharded:
            self.catch_up()
            # Ranks may make different numbers of passes without messages, which must not change those of messages.
            self.count += self.is_sharded or scope is not Scope.RANK
        self.history.begin_step(phase)
        key = (key, self.carried) if self.carried else key
        record = self._records.get(key)
        asks = record is None or (phase == "backward" and self._has_left_record)
        held = self._staying.to_backward if holds else self.carried if phase == "forward" else self._staying.to_step
        followed = (record or Record(carried=self.carried)).holding(held, self._staying.last)
        schedule = Schedule(
            replace(followed, requests=()) if asks else followed, lambda unit: self._units[unit].is_complete()
        )
        pass_ = Pass(phase, key, self.count, scope, schedule, record is None, asks)
        pass_.expected, pass_.numbers = expected or set(), numbers or range(len(self._units))
        if place:
            self.votes.post(place)
            if asks:
                self.catch_up()
        self.current = pass_
        return pass_

    def need(self, unit: int) -> None:
        """Gather `unit`, and wait for it. Collective: by record or in rounds; other ranks take part in either case."""
        pass_ = self._open_pass()
        if self._units[unit].spec.is_whole:
            return
        if pass_.schedule.whole.get(unit):
            self._units[unit].wait()
            return
        pass_.marks.append(("need", unit))
        actions = pass_.schedule.need(unit)
        if actions is None:
            # Released too early, or passed over: the next pass of this kind keeps it.
            is_again = unit in pass_.schedule.issued
            self._do(pass_.schedule.flush())
            self._ask("gather", unit, is_again)
            pass_.schedule.grant(unit)
        else:
            self._do(actions)
        self._units[unit].wait()

    def leave(self, unit: int) -> None:
        """Record that this rank does not need `unit` for now."""
        pass_ = self._open_pass()
        pass_.expected.discard(unit)
        pass_.marks.append(("leave", unit))
        self._do(pass_.schedule.leave(unit))

    def land(self, unit: int) -> None:
        """Record that this rank has all its gradients of `unit`."""
        pass_ = self._open_pass()
        self._units[unit].copy_arrived(is_sent=pass_.scope is not Scope.RANK and unit in pass_.numbers)
        if pass_.scope is Scope.RANK:
            return
        pass_.marks.append(("land", unit))
        if not pass_.asks:
            self._do(pass_.schedule.land(unit))
        elif self._units[unit].has_local:
            self._ask("reduce", unit, False)

    def close(self) -> None:
        """Complete the pass on all ranks: the rest of the record, requests outside it, and the used parameters.

        Collective: every rank that opened the pass must close it.
        """
        pass_ = self._open_pass()
        pass_.marks.append(("close", 0))
        pass_.is_closing = True
        # This rank needs no more units: later gathers serve other ranks, and are released at once.
        pass_.expected.clear()
        self._do(pass_.schedule.close())
        self._finish_all()
        if not pass_.asks:
            # Otherwise a rank may still wait for this rank in a round.
            self._wait_for_tails()
        pass_.checksum, self.current, self.history.phase = checksum_of(self._changes), None, "step"
        self.carried = frozenset(pass_.schedule.whole)
        if pass_.scope is not Scope.RANK:
            pass_.used = [flag for unit in self._units for flag in unit.has_landed()]
            pass_.buffers = self.buffers.digest(is_followed=pass_.scope is Scope.ALL)
        elif not self.is_sharded:
            self._keep(pass_)
            return
        self._ended.append(pass_)
        if pass_.has_asked:
            self._end(pass_, None)
            return
        pass_.is_sure = not pass_.asks and self._is_complete(pass_)
        request = next((pass_.ask_for("reduce", unit, is_again=False) for unit in self._left_over(pass_)), None)
        self.votes.post(pass_.end, partial(self._end, pass_), pass_.payload, request)
        has_late_sums = pass_.waiting or any(unit.is_deferred for unit in self._units)
        if pass_.phase == "forward" or pass_.asks or has_late_sums:
            self.catch_up()

    def _left_over(self, pass_: Pass) -> Iterator[int]:
        """Return the units with unreduced gradients, last first, in the order of backward passes."""
        is_reduced = pass_.scope is not Scope.RANK
        return (unit for unit in reversed(pass_.numbers) if is_reduced and self._units[unit].has_local)

    def _is_complete(self, pass_: Pass) -> bool:
        """Return whether a pass that follows its record leaves nothing for a rank to request."""
        requests = self._records[pass_.key].requests
        is_calm = not self.is_sharded or self._calm[pass_.key] >= CALM_PASSES
        return is_calm and all(("reduce", n) in requests for n in pass_.numbers if self._units[n].reducible())

    def _end(self, pass_: Pass, told: Told | None) -> None:
        """End a pass on all ranks: serve requests, complete reductions, agree on used parameters.

        Args:
            told: the result of the final vote; None if this rank posted it earlier, with a request.
        """
        self._ended.remove(pass_)
        before, self.current = self.current, pass_
        try:
            if told is None or told.request is not None:
                told = self._serve_all(pass_, told)
            # A rank that was not ready may have no gradients, and no request; all ranks are closing here. Where sums
            # stay within copies, another copy may have had its sum before, so the record knows nothing of this one.
            self._do([("reduce", unit) for unit in sorted(pass_.waiting)])
            self._finish_all()
            changes = self._agree_on_use(pass_, told)
            if pass_.scope is Scope.ALL:
                for number in pass_.numbers:
                    self._tails[number] += self._units[number].finish_deferred(self._comm, pass_.number, str(pass_))
            self._wait_for_tails()
        finally:
            self.current = before
        self._keep(pass_)
        self._keep_changes(*changes, str(pass_))

    def _serve_all(self, pass_: Pass, told: Told | None) -> Told:
        """Vote in rounds until no rank has a request, and return the result of the last vote."""
        self._has_made_rounds = True
        if told is not None and told.request is not None:
            pass_.has_asked = True
            if pass_.relied_on:
                kind, unit = pass_.meaning_of(told.request)
                self.votes.note_early(f"{pass_.relied_on} before the {kind} of {self._units[unit]} in {pass_}")
            self._serve(told.request)
        for unit in self._left_over(pass_):
            self._ask("reduce", unit, False)
        while (last := self._round(pass_, None, pass_.end)).request is not None:
            self._serve(last.request)
        return last

    def _wait_for_tails(self, *numbers: int) -> None:
        """Wait for the gathers of sums of these units, or of all units."""
        for number in numbers or range(len(self._units)):
            tails, self._tails[number] = self._tails[number], []
            for tail in tails:
                tail.wait()
                self.history.note("wait", self._units[number].name)

    def _keep(self, pass_: Pass) -> None:
        """Keep the record of a pass that is over."""
        has_left = not pass_.is_first and bool(pass_.agreed)
        self._has_left_record = pass_.phase == "forward" and (self._has_left_record or has_left)
        self._calm[pass_.key] = 0 if pass_.asks or has_left else min(CALM_PASSES, self._calm[pass_.key] + 1)
        self._records[pass_.key] = pass_.next_record(self._records.get(pass_.key, Record()))
        # The pass may have served other ranks after it was closed.
        self.carried = frozenset(self._units[n].hold() for n in pass_.schedule.whole)
        self.history.add_pass(pass_.phase, pass_.key, pass_.marks)

    def _agree_on_use(self, pass_: Pass, told: Told) -> tuple[int, int]:
        """Agree on the parameters that any rank used; return minimum and maximum checksum of in-place changes."""
        if pass_.scope is Scope.RANK:
            return told.least, told.greatest
        agreed, least, greatest, rest = pass_.used, pass_.checksum, pass_.checksum, list[int]()
        if told.least != told.greatest:
            # Used by any rank equals not unused by all: a minimum of the negated flags over ranks.
            mine = [least, -least, *(int(not flag) for flag in pass_.used), *self.buffers.numbers()]
            least, greatest, *rest = self._comm.agree(mine, "the used parameters")
            agreed, greatest, rest = [not flag for flag in rest[: len(agreed)]], -greatest, rest[len(agreed) :]
        self.buffers.agree(rest)
        flags = iter(agreed)
        for unit in self._units:
            unit.take_used(flags)
        return least, greatest

    # -- outside passes ---------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether this rank has unread votes of the end of a pass."""
        return bool(self._ended)

    def catch_up(self) -> None:
        """Read posted votes, and serve their requests. Collective: if a rank has a request."""
        self.votes.read()

    def let_go(self) -> None:
        """Release units that a pass kept for a later one; every rank must call, outside passes."""
        for number in self.carried:
            self._units[number].release()
        self.carried = frozenset()
        for pass_ in self._ended:
            pass_.schedule.keep_none()

    def barrier(self, place: str, payload: int = 0) -> tuple[int, int]:
        """Wait until all ranks are at `place`, outside passes; return the minimum and the maximum payload.

        Raises:
            RankMismatchError: ranks are at different places.
        Collective: all-reduce of 40 bytes; every rank must call.
        """
        self.check_update()
        told = self.votes.meet(place, payload)
        return told.least, told.greatest

    def answer(self, place: str) -> None:
        """Post a vote at `place`, where this rank computes a result from reduced gradients.

        It waits for the others only if their votes may change the result.
        """
        is_sure = not self._comm.is_on_host and all(pass_.is_sure for pass_ in self._ended)
        self.votes.post(place)
        if not is_sure:
            self.catch_up()
        for pass_ in self._ended:
            pass_.relied_on = pass_.relied_on or place

    def settle(self, place: str, detail: str = "", *, is_fine: Callable[[], bool] = lambda: True) -> bool:
        """Wait until all ranks are at `place`, outside passes, and keep in-place changes of user code.

        Args:
            detail: what is equal within a place of a pipe only.

        Returns: whether `is_fine()` on all ranks; otherwise changes stay pending.

        Raises:
            RankMismatchError: ranks are at different places, or made different changes.
        Collective: all-reduce of 40 bytes; every rank must call.
        """
        self.check_update()
        self.let_go()
        for unit in self._units:
            unit.note_changes()

        def payload() -> int:
            return FAULT if self.votes.fault else checksum_of(self._changes) if is_fine() else -1

        told = self.votes.meet(place + detail, payload())
        if self._has_made_rounds:
            # Some ranks posted this vote before they read requests of others, and reduced gradients since.
            told = self.votes.round(place + detail, payload())
        self._has_made_rounds = False
        # Each place of a pipe has changes of its own.
        least = self.votes.span(place, min(told.least, 0))
        if least == FAULT:
            self.votes.raise_fault(place)
        self.buffers.settle()
        if least == 0:
            self._keep_changes(told.least, told.greatest, place)
        return least == 0

    def _keep_changes(self, least: int, greatest: int, place: str) -> None:
        """Keep in-place changes of user code that are equal on all ranks with the same tensors."""
        if not greatest:
            return
        what = f"the parameters that were changed in place before {place}"
        if least != greatest or any(one.torn for one in self._changes):
            try:
                check_equal(self._changes, self._comm, what)
            except RuntimeError:
                for unit in self._units:
                    unit.drop_changes()
                raise
        for unit in self._units:
            unit.keep_changes()
        # From here on, other ranks may read the shards in place.
        self.votes.round(what)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _ask(self, kind: Literal["gather", "reduce"], unit: int, is_again: bool) -> None:
        """Serve requests of all ranks, smallest first, until this rank's request is served."""
        pass_ = self._open_pass()
        ask = pass_.ask_for(kind, unit, is_again=is_again)
        what = f"{kind} of {self._units[unit]} in {pass_}"
        first: Ask | None = None
        while first is None or not first.is_same(ask):
            if (first := self._round(pass_, ask, what).request) is not None:
                self._serve(first, is_own=first.is_same(ask))

    def _round(self, pass_: Pass, request: Ask | None, what: str) -> Told:
        # Replicas exchange sums when a reduction is finished: no rank may wait here for such a rank.
        self._finish_all()
        if pass_.has_asked:
            return self.votes.round(pass_.end, pass_.payload, request, what)
        pass_.has_asked = True
        return self.votes.meet(pass_.end, pass_.payload, request, what)

    def _serve(self, ask: Ask, *, is_own: bool = False) -> None:
        """Execute a request, together with all ranks."""
        pass_ = self._open_pass()
        kind, unit = pass_.meaning_of(ask)
        pass_.agreed.append((kind, unit, not ask.is_new))
        if kind == "reduce":
            self._do([("reduce", unit)])
        elif is_own or unit in pass_.schedule.whole:
            self._do([("gather", unit)])
        elif unit in pass_.expected:
            pass_.schedule.grant(unit, is_used=False)
            self._do([("gather", unit)])
        else:
            self._do([("gather", unit), *pass_.schedule.let_go(unit)])

    # -- actions ----------------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action], *, is_named: bool = False) -> None:
        if not is_named and is_profiling():
            for kind, number in actions:
                with profiled(kind, self._units[number].name):
                    self._do([(kind, number)], is_named=True)
            return
        pass_, sent, history = self._open_pass(), self._comm.sent_bytes, self.history
        for kind, number in actions:
            unit = self._units[number]
            if kind == "reduce":
                self._finish_all(before=unit)
            before = sent[kind]
            if kind == "gather":
                # An active transform of torch.func would reject writes to tensors from outside it.
                with NoFunctionTransforms():
                    unit.start_gather(self._comm, pass_.number, str(pass_))
            elif kind == "release":
                if not unit.release():
                    continue
                for staying in pass_.schedule.staying:
                    # A unit that is also the model's head is not needed for now, and may be a large part of memory.
                    self._units[staying].rest()
            else:
                # A late sum of the same pass writes to the buffer of the first sum, which is being gathered.
                self._wait_for_tails(number)
                is_ready = pass_.is_closing or not self._comm.can_postpone or unit.is_complete()
                reduction = unit.start_reduction(self._comm, pass_.number, str(pass_), pass_.scope, is_ready=is_ready)
                self._in_flight.append(reduction)
            # Written after the action, with the bytes that the transport counted.
            history.add(pass_.phase, pass_.key, kind, number, sent[kind] - before)
            if kind == "reduce" and self._comm.wire.is_in_place:
                # No message is under way, and the next unit's gradients can reuse the buffer.
                self._finish_all()

    def _finish_all(self, before: Unit | None = None) -> None:
        """Finish the reductions under way, and launch what is due before what comes next.

        Args:
            before: the unit that is reduced next: sums over replicas that begin now may stay under way beside it.
        """
        self.launch()
        for reduction in advanced(self._in_flight, before):
            self._finish(reduction)

    def _finish(self, reduction: Reduction) -> None:
        sent_bytes = self._comm.sent_bytes["reduce"]
        with profiled("wait for the reduce of", reduction.unit.name):
            tails = reduction.finish()
        self.history.trace.add_sent("reduce", reduction.unit.name, self._comm.sent_bytes["reduce"] - sent_bytes)
        if tails is None:
            self._postpone(reduction.unit)
        else:
            self._open_pass().waiting.discard(reduction.unit.number)
            self._tails[reduction.unit.number] += tails

    def _postpone(self, unit: Unit) -> None:
        """Record that gradients of `unit` wait for another rank; warn if they take more memory than two units."""
        pass_, history = self._open_pass(), self.history
        pass_.postponed.add(unit.number)
        pass_.waiting.add(unit.number)
        history.add(pass_.phase, pass_.key, "postpone", unit.number)
        if self._comm.mesh.rank == 0 and len(pass_.postponed) > WINDOW and not self._has_warned:
            self._has_warned = True
            logging.getLogger(__name__).warning(
                "%s %s keeps the gradients of %d units (%s) until other ranks have theirs, because ranks use "
                "units in different orders. If memory is short, use units in the same order on all ranks.",
                self._comm.mesh,
                pass_,
                len(pass_.postponed),
                size_text(sum(self._units[number].local_bytes for number in pass_.postponed)),
            )

    def _open_pass(self) -> Pass:
        assert self.current is not None, "the engine asked for a unit outside a pass"
        return self.current

    # -- steps ------------------------------------------------------------------------------------------------------

    def publish(self, numbers: Sequence[int], start: Callable[[Unit], list[Pending]]) -> None:
        """End an update: gather the updated parameters of the units `numbers` if replicated; count the step."""
        pending, sent = list[tuple[str, Pending]](), self._comm.sent_bytes
        for number in numbers:
            before, name = sent["gather"], self._units[number].name
            with profiled("publish", name):
                pending += [(name, one) for one in start(self._units[number])]
            self.history.add_publish(number, sent["gather"] - before)
        for name, one in pending:
            one.wait()
            self.history.note("wait", name)
        self.history.end_step()

    def next_number(self) -> int:
        """Return a number for an exchange outside passes, distinct from the numbers of passes; see `Tag`."""
        self.count += 1
        return self.count
