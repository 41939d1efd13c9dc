"""What ranks along the axis "tensor" must have alike in a forward: the model's inputs, and the common random stream.

Owns the comparison of inputs at the first forward of each shape, that of streams at the end of each forward, and what
follows from a difference. It must not know how layers are split. Read `streams.py` first.

Note: a difference
    Ranks along "tensor" compare by messages among themselves, and other ranks are in forwards of their own. Inputs with
    other values but equal shapes keep all ranks in step, so a forward with gradients goes on, and the ranks that know
    vote against the step: every rank of the mesh raises the error there, before the update. Other shapes would stop a
    collective of torch, and a forward without gradients has no step: then these ranks come to a vote, where all ranks
    that come to another vote see them, and raise.
"""

import dataclasses
import inspect
import logging
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import nn

from zeroshard.activations.values import Values, values_of
from zeroshard.core.engine import Engine
from zeroshard.core.hooks import Eager
from zeroshard.devices import generator_of
from zeroshard.parallel.streams import Begin, Follow, Streams, Watch
from zeroshard.setup.duplicate import owner_of
from zeroshard.table.errors import RankMismatchError
from zeroshard.table.settings import Settings
from zeroshard.torch_private import bytes_in, has_split, local_of
from zeroshard.wire.comm import Channel, Tag

__all__ = ["checksum", "watch_axis"]

Tensor = torch.Tensor

TEXT_BYTES = 1024
WHAT = "the inputs and the random stream of ranks along 'tensor'"


def watch_axis(engine: Engine, model: nn.Module, settings: Settings) -> None:
    """Compare what ranks along "tensor" must have alike, and give split activations random numbers of their own."""
    mesh, keep = engine.mesh, engine.undo.keep
    streams = Streams(generator_of(mesh.device), mesh.tensor_ranks.index(mesh.rank), str(mesh))
    pipe = mesh.across.along("pipe") if mesh.pipe is not None else (mesh.across.rank,)
    # What later places of a pipe get are activations, which may be split.
    alike = Alike(engine, model, streams, compares=settings.compare_inputs and pipe[0] == mesh.across.rank)
    before = engine.check_forward

    def check(name: str, inputs: Any) -> None:
        before(name, inputs)
        alike.check(name, inputs)

    engine.check_forward = check
    for number, (name, module) in enumerate(model.named_modules()):
        if has_split(type(one) for one in module.parameters(recurse=False)):
            keep(module.register_forward_hook(Follow(streams, number, name)))
    keep(model.register_forward_pre_hook(Watch(streams, keep), prepend=True))
    keep(model.register_forward_pre_hook(Begin(streams), prepend=True))
    keep(model.register_forward_hook(End(alike), always_call=True))
    for path in settings.forward_methods:
        owner, method = owner_of(model, path)
        engine.undo.put(vars(owner), method, _inside(streams, alike, getattr(owner, method)))


def _inside(streams: Streams, alike: "Alike", method: Any) -> Any:
    """Return a method of the model that counts as a forward for random numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        is_outermost = not streams.is_open
        has_raised = True
        if is_outermost:
            streams.begin()
        try:
            result = method(*args, **kwargs)
            has_raised = False
            return result
        finally:
            if is_outermost:
                alike.finish(has_raised=has_raised)

    return run


@final
class Alike:
    """The comparison of one model's ranks along "tensor".

    Args:
        compares: whether inputs are compared, and not random streams alone.
    """

    def __init__(self, engine: Engine, model: nn.Module, streams: Streams, *, compares: bool) -> None:
        self._engine, self._model = weakref.ref(engine), weakref.ref(model)  # both have this object
        self._streams, self._compares = streams, compares
        self._known, self._count = set[Any](), 0
        self._runs = False
        """Whether a forward with values runs, at whose end streams are compared."""

    def check(self, name: str, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Compare, at the first forward with inputs of these shapes.

        Args:
            name: the method that runs, other than the model's forward.

        Raises:
            RankMismatchError: shapes differ, or values in a forward without gradients.

        Collective: at the first forward of each shape, an all-gather of 16 bytes along "tensor"; more of a difference.
        """
        engine, model = self._engine(), self._model()
        if engine is None or model is None:
            return
        named = dict(_arguments(model, *inputs))
        self._runs = all(values_of(one) is not Values.NEVER for one in named.values())
        if name or not self._runs:
            return
        named = named if self._compares else {}
        shapes = tuple((key, tuple(one.shape), one.dtype) for key, one in named.items() if one.layout is torch.strided)
        if (model.training, shapes) in self._known:
            return
        self._known.add((model.training, shapes))
        sums = [checksum(named[key]) for key, *_ in shapes]
        told = "\n".join(f"{key} {tuple(shape)} {dtype}" for key, shape, dtype in shapes)
        said = f"in {'training' if model.training else 'evaluation'}, with inputs\n{told}"
        rows = self._gather(engine, [zlib.crc32(said.encode()), zlib.crc32(repr(sums).encode())])
        of = f"{type(model).__name__}.forward()"
        if (other := _first_other(rows[0])) is not None:
            texts = self._texts(engine, said)
            at, there = f"{self._place(engine, 0)} {texts[0]}", f"{self._place(engine, other)} {texts[other]}"
            _tell(engine, f"{of} got inputs of other shapes along the axis 'tensor': {at}\n{there}\n{BATCH}")
        elif _first_other(rows[1]) is not None:
            columns = self._gather(engine, sums)
            index, place = next((i, p) for i, one in enumerate(columns) if (p := _first_other(one)) is not None)
            argument, shape, dtype = shapes[index]
            who = f"{self._place(engine, place)} than on {self._place(engine, 0)}"
            text = f"Argument '{argument}' {shape} {dtype} of {of} has other values on {who}. {BATCH}"
            _tell(engine, text, goes_on=torch.is_grad_enabled())

    def finish(self, *, has_raised: bool) -> None:
        """End a forward with the common stream.

        Raises:
            RankMismatchError: in a forward without gradients, a rank drew numbers, and streams differ.

        Collective: a vote along "tensor"; with a difference, an all-gather of 8 bytes.
        """
        streams, engine, (runs, self._runs) = self._streams, self._engine(), (self._runs, False)
        streams.end()
        if engine is None or not runs or has_raised:
            return
        mine = checksum(streams.generator.get_state())
        least, greatest, drawn = engine.comm.post([mine, -mine, -streams.has_drawn], WHAT, Channel.TENSOR).read()
        if not drawn:
            streams.take_back()
        elif least != -greatest and (other := _first_other(self._gather(engine, [mine])[0])) is not None:
            of = f"{type(self._model()).__name__}.forward()"
            who = f"{self._place(engine, 0)} and {self._place(engine, other)}"
            text = f"{of} draws random numbers, but {who} have different random streams. {SEED}"
            _tell(engine, text, goes_on=torch.is_grad_enabled())

    def _gather(self, engine: Engine, numbers: list[int]) -> list[list[int]]:
        """Return, for each number, that of each rank along "tensor". Collective: all-gather along "tensor"."""
        mesh = engine.mesh
        rows = torch.zeros(len(mesh.tensor_ranks), len(numbers), dtype=torch.int64, device=mesh.device)
        rows[mesh.tensor_ranks.index(mesh.rank)] = torch.tensor(numbers, dtype=torch.int64, device=mesh.device)
        self._count += 1
        # Other exchanges along the axis use the buckets from 0 on.
        engine.comm.gather(rows.view(-1), Tag(self._count, Tag.BUCKETS - 1, WHAT), "agree", "tensor").wait()
        return [[int(number) for number in column] for column in rows.t().tolist()]

    def _texts(self, engine: Engine, text: str) -> list[str]:
        data = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)
        rows = zip(*self._gather(engine, list(data)), strict=True)
        return [bytes(row).decode(errors="replace").rstrip() for row in rows]

    @staticmethod
    def _place(engine: Engine, place: int) -> str:
        """Return the name of the rank at a place along "tensor", for errors."""
        mesh = engine.mesh
        return f"rank {mesh.numbers[mesh.tensor_ranks[place]]} (tensor {place})"


BATCH = (
    "Ranks along 'tensor' compute one model together, and need the same batch: divide data among the ranks along "
    "'replicate' and 'shard' alone, for example by mesh.get_local_rank('shard') instead of the rank. If the inputs are "
    "meant to differ there, as parts of a sequence, pass zs.Settings(compare_inputs=False)."
)
SEED = (
    "Masks of dropout would differ where these ranks have the same activations. Seed ranks along 'tensor' alike after "
    "zs.init(), which seeds each rank differently: torch.manual_seed(seed + mesh.get_local_rank('shard')). Outside of "
    "the model, draw on all of them or from a generator of your own."
)


def _tell(engine: Engine, text: str, *, goes_on: bool = False) -> None:
    """Let every rank raise an error: at the next step if ranks stay in step, else at the next vote of each."""
    votes = engine.order.votes
    if goes_on:
        logging.getLogger(__name__).warning("%s %s The next step raises this error.", engine.mesh, text)
        votes.fault = votes.fault or text
        return
    votes.meet("ranks that differ along 'tensor'", what=text)
    raise RankMismatchError(f"{engine.mesh} {text}")


@final
class End(Eager):
    """After the model's forward, also one that raised."""

    def __init__(self, alike: Alike) -> None:
        super().__init__()
        self._alike = alike

    def _run(self, module: nn.Module, args: Any, output: Any) -> None:
        self._alike.finish(has_raised=output is None)


def _first_other(values: list[int]) -> int | None:
    """Return the first place whose value is not that of place 0."""
    return next((place for place, value in enumerate(values) if value != values[0]), None)


def _arguments(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the arguments of a forward that all ranks should have alike, with names for errors."""
    try:
        names = [*inspect.signature(model.forward).parameters]
    except (TypeError, ValueError):
        names = []
    for index, value in enumerate(args):
        yield from _tensors(value, names[index] if index < len(names) else f"argument {index}")
    for name, value in kwargs.items():
        yield from _tensors(value, name)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not has_split([type(value)]) or all(one.is_replicate() for one in value.placements):  # type: ignore[attr-defined]
            yield name, local_of(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None), f"{name}.{field.name}")


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's values in their order; on a device, the host waits for them."""
    return zlib.crc32(bytes_in(tensor.detach().cpu()).numpy().data)
