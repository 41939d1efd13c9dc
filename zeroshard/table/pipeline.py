"""Schedules of a pipeline: what each place does, in order, in integers only.

Owns the order of micro-batches and their messages. It knows places, chunks and micro-batches by number, and neither
tensors nor processes. The runner (`parallel/runner.py`) executes the lists of actions, and plans and tests read them.

Note: chunks and places
    The model is cut into `chunks` times `places` chunks, numbered in the order of the forward; chunk k is at place k
    modulo `places`. A forward of chunk k sends its output to chunk k + 1, whose backward sends the gradient back.
Note: order
    Every schedule runs the backwards of a chunk in the order of micro-batches, so gradients are added in that order.
    Between two places, messages of one direction are sent and received in one order: NCCL has no tags.

Source: GPipe: Huang et al. 2019. 1F1B: Narayanan et al., PipeDream, 2019. Interleaved: Narayanan et al. 2021.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, product
from types import MappingProxyType
from typing import NamedTuple, final

__all__ = ["Action", "Kind", "RECEIVES", "Schedule", "Spans", "balanced", "check", "play", "schedule_of", "training_of"]


class Kind(IntEnum):
    """What an action does with a micro-batch and a chunk."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    """A forward that was made without a graph, again: it needs no message, so it fills the wait for the gradient."""
    RECEIVE_INPUT = 3
    SEND_OUTPUT = 4
    RECEIVE_GRADIENT = 5
    SEND_GRADIENT = 6


@final
class Action(NamedTuple):
    """One action of a place."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.name.lower().replace('_', ' ')} of chunk {self.chunk}, micro-batch {self.micro_batch}"


RECEIVES = (Kind.RECEIVE_INPUT, Kind.RECEIVE_GRADIENT)


@final
@dataclass(frozen=True)
class Schedule:
    """The actions of a step (or an evaluation), in order, at each place."""

    name: str
    places: int
    chunks: int
    """The number of chunks at each place."""
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def all_chunks(self) -> int:
        """The number of chunks at all places."""
        return self.places * self.chunks

    def chunks_of(self, place: int) -> range:
        """Return the chunks at a place."""
        return range(place, self.all_chunks, self.places)

    def live(self, place: int) -> int:
        """Return the largest number of micro-batches, counted by chunk, whose backward at a place is still to come."""
        return max(accumulate((one.kind is Kind.FORWARD) - (one.kind is Kind.BACKWARD) for one in self.actions[place]))


Pairs = list[tuple[Kind, int, int]]
"""Forwards and backwards of a place: kind, chunk among those of the place, micro-batch."""


def _gpipe(place: int, places: int, chunks: int, count: int) -> Pairs:
    return [(kind, 0, micro) for kind in (Kind.FORWARD, Kind.BACKWARD) for micro in range(count)]


def _naive(*sizes: int) -> Pairs:
    return sorted(_gpipe(*sizes), key=lambda one: one[-1])


def _forwards(place: int, places: int, chunks: int, count: int) -> Pairs:
    return [(Kind.FORWARD, chunk, micro) for chunk in range(chunks) for micro in range(count)]


def _one_by_one(place: int, places: int, chunks: int, count: int) -> Pairs:
    """Return forwards and backwards in turn, after as many forwards as there are chunks behind; also interleaved.

    A place with several chunks takes the micro-batches in rounds, and runs a round through all its chunks.
    """
    rounds = 1 if chunks == 1 else max(1, count // places)
    size = count // rounds
    turns = [(chunk, at * size + micro) for at in range(rounds) for chunk in range(chunks) for micro in range(size)]
    forwards = [(Kind.FORWARD, *turn) for turn in turns]
    backwards = [(Kind.BACKWARD, chunks - 1 - chunk, micro) for chunk, micro in turns]
    behind = places - 1 - place
    ahead = min(len(turns), behind if chunks == 1 else (chunks - 1) * size + 2 * behind)
    steady = [one for pair in zip(forwards[ahead:], backwards, strict=False) for one in pair]
    return forwards[:ahead] + steady + backwards[len(turns) - ahead :]


SCHEDULES: Mapping[str, Callable[[int, int, int, int], Pairs]] = MappingProxyType(
    {"naive": _naive, "gpipe": _gpipe, "1f1b": _one_by_one, "interleaved": _one_by_one, "forward": _forwards}
)
REDUCES = ("auto", "last", "each")
"""When gradients are reduced: with the last micro-batch of a step, or with each; "auto" is "last" where that fits."""
APART = " It splits backwards, but gradients of weights are reduced when one backward has computed all of a unit."
SPLIT = ("zero-bubble", "zb1p", "zbv", "zbvzerobubble", "interleavedzerobubble", "dualpipe", "dualpipev")
"""Schedules that compute the gradients of inputs and those of weights apart."""


@lru_cache(256, typed=True)  # a search asks for the same ones a thousand times
def schedule_of(
    name: str, places: int, micro_batches: int, chunks: int = 1, *, recomputed: Sequence[int] = ()
) -> Schedule:
    """Return a schedule.

    Args:
        name: "naive" (one micro-batch at a time), "gpipe", "1f1b", "interleaved", or "forward" for an evaluation.
        places: the number of places along the pipe.
        chunks: the number of chunks at each place.
        recomputed: the chunks whose forward is made without a graph, and again before the backward; not of the first
            micro-batch, and not where the backward follows the forward immediately.

    Raises:
        ValueError: the name or the numbers are not supported.
    """
    for what, number in (("places", places), ("micro_batches", micro_batches), ("chunks", chunks)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{what} must be a number of at least 1; got {number!r}.")
    if (problem := _problem(name, places, micro_batches, chunks)) is not None:
        raise ValueError(problem)
    orders = (SCHEDULES[name](place, places, chunks, micro_batches) for place in range(places))
    actions = (tuple(_with_messages(order, at, places, places * chunks, recomputed)) for at, order in enumerate(orders))
    return Schedule(name, places, chunks, micro_batches, tuple(actions))


def training_of(
    name: str,
    places: int,
    micro_batches: int,
    chunks: int | None = None,
    reduce: str = "auto",
    *,
    recompute: bool = False,
) -> Schedule:
    """Return the schedule of a step, from the arguments of `zs.pipeline`, which plans have, too.

    Raises:
        ValueError, TypeError: an argument is not supported.
    """
    if type(recompute) is not bool:
        raise TypeError(f"recompute must be True or False; got {recompute!r}. Treatments of blocks are activations=.")
    if name == "forward":
        raise ValueError("schedule='forward' has no backwards: pipe.evaluate() runs it. Use '1f1b'.")
    count = chunks if chunks is not None else 2 if name == "interleaved" else 1
    schedule = schedule_of(name, places, micro_batches, count, recomputed=range(places * count * recompute))
    if reduce not in REDUCES:
        raise ValueError(f"reduce must be 'auto', 'last' or 'each'; got {reduce!r}.")
    return schedule


def _problem(name: str, places: int, micro_batches: int, chunks: int) -> str | None:
    """Return why a schedule is refused; None if it is supported."""
    rounds = max(1, micro_batches // places) if chunks > 1 and name == "interleaved" else 1
    if not isinstance(name, str) or name not in SCHEDULES:
        hint = APART if str(name).lower().removeprefix("schedule").replace("_", "-") in SPLIT else ""
        return f"schedule={name!r} is not one of {', '.join(map(repr, SCHEDULES))}.{hint}"
    if (chunks > 1) is not (name == "interleaved") and name != "forward":
        return f"schedule='{name}' with chunks={chunks}: '1f1b' has one chunk at each place, 'interleaved' two or more."
    if micro_batches < places and name in ("1f1b", "interleaved"):
        return f"micro_batches={micro_batches} is below the {places} places of the pipe: use as many, or 'gpipe'."
    if micro_batches % rounds:
        return f"micro_batches={micro_batches} must be a multiple of {rounds}, for {rounds} rounds with several chunks."
    return None


MESSAGES = MappingProxyType(
    {Kind.FORWARD: (Kind.RECEIVE_INPUT, Kind.SEND_OUTPUT), Kind.BACKWARD: (Kind.RECEIVE_GRADIENT, Kind.SEND_GRADIENT)}
)
"""What a place does before and after a forward or a backward, unless it is that of the first or the last chunk."""


def _with_messages(order: Pairs, place: int, places: int, count: int, recomputed: Sequence[int]) -> Iterator[Action]:
    """Yield the actions of a place: each receives before it begins, and sends when it ends."""
    before: tuple[Kind, int, int] | None = None
    for kind, number, micro in order:
        chunk, (receive, send) = number * places + place, MESSAGES[kind]
        first, last = (0, count - 1) if kind is Kind.FORWARD else (count - 1, 0)
        # Before the first backward of a chunk no other graph of the chunk exists: that micro-batch keeps its own.
        if kind is Kind.BACKWARD and chunk in recomputed and micro > 0 and before != (Kind.FORWARD, number, micro):
            yield Action(Kind.RECOMPUTE, chunk, micro)
        if chunk != first and places > 1:
            yield Action(receive, chunk, micro)
        yield Action(kind, chunk, micro)
        if chunk != last and places > 1:
            yield Action(send, chunk, micro)
        before = (kind, number, micro)


# -- how a schedule runs ----------------------------------------------------------------------------------------------


Spans = list[list[tuple[Action, float, float]]]
"""At each place: actions, and the seconds at which they begin and end."""


def play(
    schedule: Schedule,
    seconds: Mapping[Kind, Sequence[float]],
    message_s: float = 0.0,
    longer_s: Mapping[Action, float] = MappingProxyType({}),
    least_s: Mapping[Action, float] = MappingProxyType({}),
) -> Spans:
    """Return when each action of each place runs: as soon as the place is free and has what the action needs.

    Args:
        seconds: for forwards, backwards and recomputations, how long those of each chunk take.
        message_s: how long a message travels.
        longer_s: of actions that take longer than others of their chunk, by how much.
        least_s: of actions that wait for more than messages, when they end at the earliest.

    Raises:
        ValueError: the places wait for each other; see `check`.
    """
    spans, ends = Spans([] for _ in range(schedule.places)), dict[Action, float]()
    for place, action in _walk(schedule):
        start_s = spans[place][-1][-1] if spans[place] else 0.0
        if action.kind in RECEIVES:
            start_s = max(start_s, *(ends[one] + message_s for one in _needs(schedule, action)))
        took_s = seconds[action.kind][action.chunk] if action.kind in seconds else 0.0
        ends[action] = max(start_s + took_s + longer_s.get(action, 0.0), least_s.get(action, 0.0))
        spans[place].append((action, start_s, ends[action]))
    return spans


def _needs(schedule: Schedule, action: Action) -> list[Action]:
    """Return the actions that must be done before this one."""
    kind, chunk, micro = action
    is_piped = schedule.places > 1
    before = [(Kind.RECEIVE_INPUT, chunk) if is_piped else (Kind.FORWARD, chunk - 1)] * (chunk > 0)
    behind = [(Kind.RECEIVE_GRADIENT, chunk) if is_piped else (Kind.BACKWARD, chunk + 1)]
    behind *= chunk < schedule.all_chunks - 1
    needs = {
        Kind.FORWARD: before,
        Kind.BACKWARD: [(Kind.FORWARD, chunk), *behind],
        Kind.RECOMPUTE: [(Kind.FORWARD, chunk)],
        Kind.RECEIVE_INPUT: [(Kind.SEND_OUTPUT, chunk - 1)],
        Kind.SEND_OUTPUT: [(Kind.FORWARD, chunk)],
        Kind.RECEIVE_GRADIENT: [(Kind.SEND_GRADIENT, chunk + 1)],
        Kind.SEND_GRADIENT: [(Kind.BACKWARD, chunk)],
    }
    return [Action(*one, micro) for one in needs[kind]]


def _walk(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield place and action in an order in which the places can run.

    Raises:
        ValueError: some actions can never run.
    """
    left, done, moved = [deque(actions) for actions in schedule.actions], set[Action](), True
    while moved:
        moved = False
        for place, queue in enumerate(left):
            while queue and done.issuperset(_needs(schedule, queue[0])):
                done.add(queue[0])
                moved = True
                yield place, queue.popleft()
    if waiting := [f"place {place} waits in the {queue[0]}" for place, queue in enumerate(left) if queue]:
        raise ValueError(f"Places cannot go on: {'; '.join(waiting)}.")


def check(schedule: Schedule) -> None:
    """Raise unless every action stands once, at its place, after what it needs, and messages are received as sent.

    Raises:
        ValueError: what is wrong, with place, chunk and micro-batch.
    """
    kinds = (Kind.FORWARD, Kind.BACKWARD)[: 1 if schedule.name == "forward" else 2]
    for place, actions in enumerate(schedule.actions):
        own = schedule.chunks_of(place)
        if other := [one for one, count in Counter(actions).items() if count > 1 or one.chunk not in own]:
            raise ValueError(f"Place {place} has the {other[0]} twice, or it is that of another place.")
        for kind, chunk in product(kinds, own):
            order = [one.micro_batch for one in actions if one[:2] == (kind, chunk)]
            if order != [*range(schedule.micro_batches)]:
                raise ValueError(f"Place {place} has {kind.name.lower()}s of chunk {chunk} for micro-batches {order}.")
    deque(_walk(schedule), 0)
    messages = ((Kind.SEND_OUTPUT, Kind.RECEIVE_INPUT, 1), (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT, -1))
    for (send, receive, hop), place in product(messages, range(schedule.places)):
        sent = [(one.chunk + hop, one.micro_batch) for one in schedule.actions[place] if one.kind is send]
        receiver = (place + hop) % schedule.places
        taken = [(one.chunk, one.micro_batch) for one in schedule.actions[receiver] if one.kind is receive]
        if sent != taken:
            raise ValueError(
                f"Place {place} sends to chunk and micro-batch {sent}; place {receiver} receives {taken}: each message "
                "once, in the order in which they are sent."
            )


# -- the cut ----------------------------------------------------------------------------------------------------------


def balanced(weights: Sequence[int], count: int) -> list[int]:
    """Return the blocks at which chunks begin, so that the largest chunk is as small as possible.

    Args:
        weights: the size of each block; at least `count`.

    >>> from zeroshard.table.pipeline import balanced
    >>> balanced([3, 1, 1, 1, 2], 2)
    [0, 2]
    """
    sums = {sum(weights[first:end]) for first in range(len(weights)) for end in range(first + 1, len(weights) + 1)}
    limits = sorted(one for one in sums if one >= max(weights))
    firsts = next(firsts for limit in limits if len(firsts := _divide(weights, limit)) <= count)
    while len(firsts) < count:  # a chunk of several blocks can be divided
        ends = [*firsts[1:], len(weights)]
        widest = max(range(len(firsts)), key=lambda at: ends[at] - firsts[at])
        firsts.insert(widest + 1, (firsts[widest] + ends[widest] + 1) // 2)
    return firsts


def _divide(weights: Sequence[int], limit: int) -> list[int]:
    """Return where chunks begin that are at most `limit` large, each as large as possible."""
    firsts, size = [0], 0
    for at, weight in enumerate(weights):
        if size + weight > limit:
            firsts.append(at)
            size = 0
        size += weight
    return firsts
