"""What is simulated for pipelines: messages between places, and modules that compute with one number.

Owns the matching of messages, and what stands for units, parameters and the model below the real engine. It must not
know what must hold. Read `world.py` first.

Note: what is real
    The runner, its mail, tied gradients and passes after failures (`parallel/`), the engine with its flights, hooks,
    saved tensors and `Order` (`core/`), and autograd are the product's. Simulated are the transport, and the memory of
    units: a unit has one parameter of value 1 for each of its chunks, and what was summed is counted in bits. Each
    activation is the input of its rank's micro-batch unchanged, so a message that is another's is seen.
Note: messages
    A message is copied when its sender has sent it and its receiver has begun to receive it, and both waits return
    then: a rank may wait for the receiver of what it sends. As before each wait of the product, posted votes are read
    first.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.engine import Engine
from zeroshard.core.hooks import Enter, Exit, Landed
from zeroshard.core.states import Own, Presence, Scope
from zeroshard.core.unit import Unit
from zeroshard.parallel.pipe import SetApart
from zeroshard.wire.comm import Channel, Tag, Vote

from .program import Path
from .world import _CONTROL, Crew, FakeComm, FakeUnit, Stuck, World

__all__ = ["Across", "Letters", "Marks", "Model", "Module", "PipeMesh", "PipeUnit", "PlaceComm"]

Marks = Callable[[str], None]


class PipeMesh:
    """The ranks of one place, or of all."""

    device = torch.device("cpu")

    def __init__(self, rank: int, ranks: Sequence[int], places: Sequence[Sequence[int]]) -> None:
        self.ranks, self._places = tuple(ranks), torch.tensor(places, device="cpu")
        self.rank, self.world_size, self.data_ranks = ranks.index(rank), len(ranks), self.ranks
        self.number = rank
        self.across = self

    def along(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks of a place, by their numbers in it."""
        return tuple(range(self.world_size))

    def rows(self, *axes: str) -> Tensor:
        """Return the ranks of each pipe, where this has all places."""
        return self._places.T

    def places(self) -> Tensor:
        """Return the ranks of each place."""
        return self._places

    def lines(self, texts: Sequence[str]) -> str:
        """Return a line for each rank."""
        return "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts) if text)

    def __str__(self) -> str:
        return f"[rank {self.number}]"


# -- messages ---------------------------------------------------------------------------------------------------------


class _Letter:
    """One message: copied once both ranks have come."""

    __slots__ = ("given", "is_done", "taken", "waiting")

    def __init__(self) -> None:
        self.given: Tensor | None = None
        self.taken: Tensor | None = None
        self.is_done = False
        self.waiting: list[int] = []


class Letters:
    """The messages of one run."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._open: dict[tuple[int, int, int], deque[_Letter]] = defaultdict(deque)
        self.order: dict[tuple[str, int, int, int], list[int]] = defaultdict(list)
        """What was sent and received between two ranks, in order, by the parity of the bucket; what NCCL would send."""
        self.count = 0

    @property
    def left(self) -> int:
        """How many messages one rank alone has come to."""
        return sum(map(len, self._open.values()))

    def come(self, source: int, to: int, tag: Tag, *, given: Tensor | None = None, taken: Tensor | None = None) -> Any:
        """Have the sender or the receiver come to a message."""
        kind, number = "received" if given is None else "sent", tag.message(Tag.GATHER)
        if (taken if given is None else given).is_floating_point():  # others are in host memory, where tags match
            self.order[kind, source, to, tag.bucket % 2].append(number)
        here = self._open[source, to, number]
        if here and (here[0].given if taken is None else here[0].taken) is None:
            one = here.popleft()
        else:
            here.append(one := _Letter())
        one.given, one.taken = one.given if given is None else given, one.taken if taken is None else taken
        if one.given is not None and one.taken is not None:
            with torch.no_grad():
                one.taken.copy_(one.given)
            one.is_done = True
            self.count += 1
            self._crew.wake(one.waiting)
        return one

    def wait(self, rank: int, one: _Letter) -> None:
        """Return when the message was copied."""
        if self._crew.is_stuck:
            raise Stuck("no rank can go on")
        while not one.is_done:
            one.waiting.append(rank)
            self._crew.pause(rank)


class _PendingLetter:
    __slots__ = ("_across", "_what", "is_waited", "one")

    def __init__(self, across: "Across", one: _Letter, what: str) -> None:
        self._across, self.one, self._what, self.is_waited = across, one, what, False

    def wait(self) -> bool:
        """Return when the message was copied."""
        if not self.is_waited:
            self._across.mark(f"wire: wait for {self._what}")
            self._across.before_message()
            self._across.letters.wait(self._across.rank, self.one)
            self.is_waited = True
        return True


class PlaceComm(FakeComm):
    """The collectives of one rank within its place."""

    def __init__(self, world: World, rank: int, mesh: PipeMesh, across: "Across") -> None:
        super().__init__(world, rank)
        self.mesh, self.across = mesh, across

    def call_before_waits(self, catch_up: Callable[[], None]) -> None:
        """Have it called before each wait of the host."""
        self.catch_up = catch_up


class Across(FakeComm):
    """The collectives and messages of one rank over all places."""

    def __init__(self, world: World, rank: int, mesh: PipeMesh, letters: Letters, mark: Marks) -> None:
        super().__init__(world, rank)
        self.mesh, self.letters, self.mark = mesh, letters, mark
        self.watchdog = None

    def before_message(self) -> None:
        """Do what the product does before the host waits for a message: read posted votes."""
        self.catch_up()

    def post(self, values: list[int], what: str, channel: Channel) -> Vote:
        """Tell the others some numbers; what is returned waits for the least of each."""
        one = self._come((channel.name,), ("agree", len(values)), values)

        def hear() -> list[int]:
            self.catch_up()
            found: list[int] = self.world.wait(self.rank, one)
            return found

        return Vote(hear)

    def texts(self, text: str, what: str) -> list[str]:
        """Return every rank's text."""
        one = self._come(_CONTROL, ("texts",), text)
        self.catch_up()
        found: list[str] = self.world.wait(self.rank, one)
        return found

    def collect(self, tensor: Any, what: str) -> Any:
        """Return (ranks, *shape): every rank's tensor."""
        one = self._come(_CONTROL, ("collect",), tensor.detach().clone())
        self.catch_up()
        return torch.stack(self.world.wait(self.rank, one))

    def send(self, tensor: Tensor, rank: int, tag: Tag) -> _PendingLetter:
        """Send a tensor to a rank."""
        self.mark(f"wire: send {tag.what}")
        return self._coming(self.letters.come(self.rank, rank, tag, given=tensor), tag)

    def receive(self, tensor: Tensor, rank: int, tag: Tag) -> _PendingLetter:
        """Begin to receive a tensor of a rank."""
        self.mark(f"wire: receive {tag.what}")
        return self._coming(self.letters.come(rank, self.rank, tag, taken=tensor), tag)

    def _coming(self, one: _Letter, tag: Tag) -> _PendingLetter:
        if self._crew.choose is not None and not one.is_done:
            self._crew.give_way(self.rank)
        return _PendingLetter(self, one, tag.what)


# -- units ------------------------------------------------------------------------------------------------------------


class PipeUnit(FakeUnit):
    """One unit of one rank, as the real engine knows units.

    Args:
        parts: how many parameters it has: one for each chunk.
        told: called with what is wrong.
        landed: called with the number of a unit, the place of a parameter and its gradient.
        moved: called when its gather or its reduction begins.
    """

    blocks = ()
    scale = 1.0
    is_read_outside = False
    count_landed, has_all_landed = Unit.count_landed, Unit.has_all_landed
    is_complete, end_backward = Unit.is_complete, Unit.end_backward
    copy_arrived, is_coming = Unit.copy_arrived, False

    def __init__(
        self,
        number: int,
        rank: int,
        parts: int,
        *,
        is_whole: bool,
        until: str,
        told: Callable[[str], None],
        landed: Callable[[int, int, Tensor], None],
        moved: Callable[[str, int], None],
    ) -> None:
        self._tensor = torch.zeros(1, dtype=torch.float64, device="cpu")
        self.is_tied = False
        super().__init__(
            number,
            rank,
            is_whole=is_whole,
            is_held=until != "use",
            released=until,
            told=told,
            opened=lambda: None,
            expects=lambda unit: False,
        )
        self.calls = self.landed = self.recomputed = 0
        self.has_end_hint = False
        self._missing: dict[int, Tensor] = {}
        self.parameters: list[Any] = [torch.nn.Parameter(torch.ones(1, device="cpu")) for _ in range(parts)]
        self._landed_here, self._moved = landed, moved
        self.own = [Own.NONE] * parts
        self.used = [False] * parts
        self._given: list[Own] = []
        self._hooks: list[Any] = []
        self.buckets: list[Any] = [self._bucket(one) for one in self.parameters]

    def _bucket(self, parameter: Tensor) -> Any:
        states = SimpleNamespace(states=SimpleNamespace(is_on_device=True))
        spec = SimpleNamespace(name=self.name, row=states, lands_on_sums=False)
        landing = SimpleNamespace(wait=lambda: None, end_pass=lambda: None)
        grads = SimpleNamespace(land=self.land_at, part=lambda index: self._tensor, landing=landing)
        return SimpleNamespace(spec=spec, full=parameter.detach(), updates=0, flat=None, grads=grads)

    def hang(self, engine: Engine, mark: Marks) -> None:
        """Give its parameters their slots and hooks."""
        landed = Landed(engine)
        for index, parameter in enumerate(self.parameters):
            parameter.__dict__["_zeroshard"] = SimpleNamespace(
                name=f"{self}, parameter {index}",
                unit=self.number,
                index=index,
                bucket=self.buckets[index],
                form=SimpleNamespace(part=lambda grad: grad),
                master_grad=None,
                is_whole=True,
                is_own=False,
            )

            self._hooks += [
                parameter.register_hook(lambda grad: mark(f"land {self}")),
                parameter.register_post_accumulate_grad_hook(landed),
                parameter.register_post_accumulate_grad_hook(lambda one: mark(f"landed {self}")),
            ]

    def unhang(self) -> None:
        """Remove the hooks of its parameters, which hold the rank unseen by the collector."""
        for hook in self._hooks:
            hook.remove()

    def start_gather(self, comm: FakeComm, number: int, where: str, kind: str = "gather") -> None:
        """Begin to make it whole."""
        self._moved("gather", self.number)
        super().start_gather(comm, number, where, kind)

    def start_reduction(self, comm: FakeComm, number: int, where: str, scope: Scope, *, is_ready: bool) -> Any:
        """Begin to sum its gradients."""
        self._moved("reduce", self.number)
        return super().start_reduction(comm, number, where, scope, is_ready=is_ready)

    # -- gradients --------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:  # type: ignore[override]
        """The sum, where tied gradients are added up in place."""
        return int(self._tensor.item()) if self.is_tied else self._held

    @held.setter
    def held(self, bits: int) -> None:
        if self.is_tied:
            self._tensor.fill_(bits)
        else:
            self._held = bits

    @property
    def presence(self) -> Presence:
        """Whether it is whole."""
        return Presence.WHOLE if self.is_open else Presence.RELEASED

    @property
    def has_local(self) -> bool:
        """Whether there are gradients that were not reduced."""
        return Own.LOCAL in self.own

    @property
    def waits(self) -> bool:
        """Whether gradients wait for a sum."""
        return self.has_local or self.is_deferred

    def land_at(self, index: int, grad: Tensor, scale: float) -> None:
        """Take a gradient of a parameter."""
        self.own[index] = Own.LOCAL
        self.land()
        self._landed_here(self.number, index, grad)

    def take_local(self) -> int:
        """Hand the gradients over."""
        self._given, self.own = self.own, [Own.SENT if one is Own.LOCAL else one for one in self.own]
        return super().take_local()

    def take_back(self, bits: int) -> None:
        """Take them back, because a rank was not ready."""
        super().take_back(bits)
        self.own = self._given

    def has_landed(self) -> list[bool]:
        """Tell of each parameter whether a gradient of it came."""
        return [one is not Own.NONE for one in self.own]

    def take_used(self, flags: Iterator[bool]) -> None:
        """Take which parameters some rank used; a gradient that is not summed yet stays as it is."""
        for index in range(len(self.own)):
            is_used = next(flags)
            if self.own[index] is not Own.LOCAL:
                self.own[index], self.used[index] = Own.NONE, self.used[index] or is_used

    def clear(self, index: int) -> None:
        """Drop the gradient of a parameter; what was summed goes with the last one."""
        self.own[index], self.used[index] = Own.NONE, False
        if not any(self.used) and Own.LOCAL not in self.own:
            self.local = 0
        if not any(self.used):
            self.held, self.scope = 0, Scope.ALL


class Gradient:
    """A parameter as user code has it: its gradient is read and dropped."""

    requires_grad = True

    def __init__(self, engine: Engine, unit: PipeUnit, index: int) -> None:
        self._engine, self._unit, self._index = engine, unit, index
        self._zeroshard = unit.parameters[index].__dict__["_zeroshard"]

    @property
    def grad(self) -> Tensor | None:
        """The gradient; reading it may need the votes of past passes."""
        unit, index = self._unit, self._index
        if not unit.used[index] and unit.own[index] is not Own.SENT:
            self._engine.catch_up()
        return unit._tensor if unit.used[index] or unit.own[index] is not Own.NONE else None

    @grad.setter
    def grad(self, value: None) -> None:
        self._engine.change_gradients("zero_grad()", is_forgotten=True)
        self._unit.clear(self._index)


# -- modules ----------------------------------------------------------------------------------------------------------


class Module:
    """A module of the model, with the engine's hooks, called as torch calls modules."""

    training = True

    def __init__(self, engine: Engine, name: str, units: tuple[int, ...], *, is_part: bool = False) -> None:
        self._enter, self._exit = Enter(engine, name, units), Exit(engine)
        self._apart = SetApart(engine, name, units) if is_part else None
        self.name = name

    def call(self, x: Tensor, inside: Callable[[Tensor], Tensor]) -> Tensor:
        """Call it."""
        self._enter._run(self, (x,), {})  # type: ignore[arg-type]
        try:
            y = inside(x)
        except BaseException:
            self._exit._run(self, (x,), {}, None)  # type: ignore[arg-type]
            raise
        if self._apart is not None:
            self._apart._run(self, (x,), y)  # type: ignore[arg-type]
        self._exit._run(self, (x,), {}, y)  # type: ignore[arg-type]
        return y


class Model:
    """The part of the model at one place: what `ChunkedModel` is to the runner.

    Args:
        path_of: returns the path of a chunk in the forward under way, and the units without a gradient.
        told: called with what is wrong.
    """

    training = True

    def __init__(
        self,
        engine: Engine,
        chunks: int,
        places: int,
        units: Sequence[PipeUnit],
        tied: PipeUnit | None,
        path_of: Callable[[int, float], tuple[Path, tuple[int, ...]]],
        mark: Marks,
        told: Callable[[str], None],
    ) -> None:
        self.model, self.cut = self, SimpleNamespace(count=chunks)
        self._engine, self._places, self._units, self._tied = engine, places, units, tied
        self._path_of, self._mark, self._told = path_of, mark, told
        self._root = Module(engine, "", (0,), is_part=True)
        self._modules = [Module(engine, unit.name, (unit.number,)) for unit in units]
        self._gradients = [Gradient(engine, unit, index) for unit in units for index in range(len(unit.parameters))]
        self.is_exact = True
        """Whether each place computes: otherwise zeros may arrive."""

    def parameters(self) -> list[Gradient]:
        """Return what user code knows as parameters."""
        return self._gradients

    def named_modules(self) -> list[Any]:
        """Return what has modes and buffers: nothing."""
        return []

    def run(self, chunk: int, args: Any, kwargs: Any, arrived: tuple[Tensor, ...], learned: Any) -> Any:
        """Run the forward of a chunk."""
        given, own = args[0], chunk // self._places
        x = arrived[0] if chunk else given
        path, silent = self._path_of(chunk, given.item())
        self._mark(f"begin the forward of chunk {chunk}")
        y = self._root.call(x, lambda x: self._inside(x, given, chunk, own, path, silent))
        self._mark(f"end the forward of chunk {chunk}")
        if y.requires_grad:
            y.register_hook(lambda grad: self._mark(f"begin the backward of chunk {chunk}"))
        return y if chunk == self.cut.count - 1 else (y,)

    def _inside(self, x: Tensor, given: Tensor, chunk: int, own: int, path: Path, silent: tuple[int, ...]) -> Tensor:
        if self.is_exact and x.item() != given.item():
            self._told(f"chunk {chunk} got {x.item()} for the micro-batch of {given.item()}")
        last = chunk == self.cut.count - 1
        if self._tied is not None and chunk == 0:
            x = self._call(self._tied.number, 0, x, lambda y: y)
        x = self._used(0, own, x)

        def body(y: Tensor, at: int) -> tuple[Tensor, int]:
            """Follow the path to the end of the call that it is in."""
            while at < len(path) and path[at] > 0:
                unit, end = path[at] + 2 * own, at + 1
                is_silent, reached = path[at] in silent, [0]

                def inside(y: Tensor, end: int = end, reached: list[int] = reached) -> Tensor:
                    y, reached[0] = body(y, end)
                    return y + 0 if reached[0] > end else y

                y = self._call(unit, 0, y, inside, is_silent=is_silent)
                at = reached[0] + 1
            return y, at

        x, _ = body(x, 0)
        if self._tied is not None and last:
            x = self._call(self._tied.number, 0, x, lambda y: y)
        return x

    def _call(
        self, unit: int, index: int, x: Tensor, inside: Callable[[Tensor], Tensor], *, is_silent: bool = False
    ) -> Tensor:
        self._mark(f"enter unit {unit}")

        def within(x: Tensor) -> Tensor:
            y = inside(self._used(unit, index, x, is_silent=is_silent))
            self._mark(f"leave unit {unit}")
            if y.requires_grad:
                y.register_hook(lambda grad: self._mark(f"back to unit {unit}"))
            return y

        return self._modules[unit].call(x, within)

    def _used(self, unit: int, index: int, x: Tensor, *, is_silent: bool = False) -> Tensor:
        one = self._units[unit]
        if not one.is_there:
            self._told(f"{one} is used and not whole")
        parameter = one.parameters[index]
        return x * (parameter.detach() if is_silent else parameter)
