"""The actions of one place of a pipe in a simulated step, and the memory of its messages.

Owns micro-batches in flight and the buffers of messages, as `parallel/runner.py` and `parallel/mail.py` have them. It
must not know how a pass is played (`passes.py`), nor when messages arrive (`plan/pipes.py`). Needs no torch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Final, final

from zeroshard.plan.step.clock import Clock
from zeroshard.plan.step.rank_job import Border, Piped
from zeroshard.plan.step.storages import Storages
from zeroshard.table.pipeline import RECEIVES, Action, Kind
from zeroshard.table.step import Phase

__all__ = ["Place"]

Play = Callable[[int, int, Phase, dict[int, int], bool], None]
"""Plays a pass: of a chunk, of a micro-batch, forward or backward, with the storages of the micro-batch by tensor, and
with the graph that autograd records, or without."""

SENT: Final = MappingProxyType(
    {Kind.SEND_OUTPUT: (Kind.RECEIVE_INPUT, 1), Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1)}
)
"""Of a message that is sent: how it is received, and the distance of the chunk that receives it."""


@final
class Place:
    """One place in one step.

    Args:
        free: buffers of messages that an earlier step left.
    """

    def __init__(self, pipe: Piped, clock: Clock, storages: Storages, free: Sequence[Border]) -> None:
        self._pipe, self._clock, self._storages, self._stocked = pipe, clock, storages, free
        self._free: dict[Border, list[int]] = {}
        self._incoming: dict[Action, list[tuple[Border, int]]] = {}

    def stock(self) -> None:
        """Take the memory of the buffers of an earlier step."""
        self._give([(border, self._make(border)) for border in self._stocked])

    def free(self) -> list[Border]:
        """Return the buffers that the step leaves."""
        return [border for border, free in self._free.items() for _ in free]

    def run(self, play: Play) -> None:
        """Play all actions."""
        pipe, clock, actions = self._pipe, self._clock, self._pipe.actions
        flights: dict[tuple[int, int], dict[int, int]] = {}
        most, sent = pipe.schedule.live(pipe.place) + 1, deque[Sequence[int]]()
        twice, sending = {one[1:] for one in actions if one.kind is Kind.RECOMPUTE}, dict[tuple[int, int], list[int]]()
        for at, action in enumerate(actions):
            kind, chunk, micro = action
            if kind in RECEIVES:
                self._expect(action)
                clock.wait("a message", pipe.ready_s.get(action, 0.0))
                continue
            self._expect(next((one for one in actions[at + 1 :] if one.kind in RECEIVES), None))
            if kind in (Kind.FORWARD, Kind.RECOMPUTE):
                has_graph = kind is Kind.RECOMPUTE or (chunk, micro) not in twice
                made = flights[chunk, micro] = {}
                play(chunk, micro, "forward", made, has_graph)
                if not has_graph:
                    self._storages.drop_all(made.values())
                    outputs = pipe.messages.get((Kind.RECEIVE_INPUT, chunk + 1), ())
                    sending[chunk, micro] = [self._make(one) for one in outputs]
            elif kind is Kind.BACKWARD:
                left = flights.pop((chunk, micro))
                self._storages.drop_all(sending.pop((chunk, micro), ()))
                play(chunk, micro, "backward", left, True)
                for one in RECEIVES:
                    self._give(self._incoming.pop(Action(one, chunk, micro), []))
                sent.append([*left.values()])  # what a backward leaves are the gradients of its input
                self._storages.drop_all(sent.popleft() if len(sent) > most else ())
            else:
                received, distance = SENT[kind]
                clock.sent["pipe send"] += sum(nbytes for _, nbytes in pipe.messages[received, chunk + distance])
        self._storages.drop_all(chain.from_iterable(sent))
        clock.wait("other places", pipe.end_s)

    def add_up(self) -> None:
        """Exchange the gradients of what other places have, too, before the update."""
        for one in self._pipe.tied:
            self._storages.pass_by(len(one.places) * one.nbytes, "transient", "", "gradients of tied weights")
            self._clock.send("gradients of tied weights", (len(one.places) - 1) * one.nbytes, "pipe")

    def _expect(self, action: Action | None) -> None:
        if action is not None and action not in self._incoming:
            borders = self._pipe.messages.get((action.kind, action.chunk), ())
            self._incoming[action] = [(one, self._take(one)) for one in borders]

    def _take(self, border: Border) -> int:
        free = self._free.get(border)
        return free.pop() if free else self._make(border)

    def _make(self, border: Border) -> int:
        return self._storages.make(border[1], "transient", "", "message of the pipe")

    def _give(self, buffers: Sequence[tuple[Border, int]]) -> None:
        for border, storage in buffers:
            self._free.setdefault(border, []).append(storage)
