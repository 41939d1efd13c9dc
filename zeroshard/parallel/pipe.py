"""Pipelines: an axis "pipe" joins the domains of modules that make one step.

Owns what all places of a pipe are compared for, the parts of a model at one place, and the refusal of what torch's
pipelining does and the engine cannot serve. It must not know the order of micro-batches. Read `Mesh.at_place`
(`wire/mesh.py`) and `Comm.across` (`wire/comm.py`) first.
"""

import re
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn

from zeroshard.callers import SPLIT, split_backward
from zeroshard.core.engine import Engine
from zeroshard.core.hooks import Eager
from zeroshard.core.slot import NormsOfPlaces, Slot, slot_of
from zeroshard.join.start import accepted_by_all, texts_across_ranks
from zeroshard.parallel.alike import checksum
from zeroshard.setup.equal import check_equal, facts_of
from zeroshard.setup.request import Described, check_selections
from zeroshard.table.activations import Activations
from zeroshard.table.cells import Residency
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import graph_task, local_of
from zeroshard.tree import find
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh

__all__ = ["check_callers", "check_places", "norms_over", "set_parts_apart"]

STAGES = "torch.distributed.pipelining.stage"
SCHEDULES = "torch.distributed.pipelining.schedules"
META = "on the meta device"


def check_places(described: Described, comm: Comm, version: str, *, draws_alike: bool) -> frozenset[str]:
    """Compare the ranks of each place, and the places; return the parameters that an earlier place has, too.

    Norms count these there.

    Args:
        draws_alike: whether places draw equal first values for a parameter on the meta device.

    Raises:
        RankMismatchError: on every rank, if ranks of a place differ, or places differ in options or versions, or have
            different parameters of one name.

    Collective: all-gathers of names, and of checksums of the parameters that several places have.
    """
    mesh, named = described.mesh, dict(described.model.named_parameters())
    with accepted_by_all(mesh.across, "zs.shard()"):
        check_equal(mesh, comm, facts_of(described, version))
    facts = [f"zeroshard {version}", f"torch {torch.__version__}", f"options: {described.options()}"]
    check_equal(mesh.across, comm.across, facts)
    _check_selections(described)
    shapes = {name: str(tuple(one.shape)) for name, one in named.items() if id(one) not in described.ignored}
    by_place = _told(mesh, shapes)
    shared = {name for name in shapes if sum(name in place for place in by_place) > 1}
    values = {name: f"{shapes[name]} {_checksum(named[name])}" for name in sorted(shared)}
    for number, place in enumerate(told := _told(mesh, values)):
        for name, value in place.items():
            first = next(index for index, other in enumerate(told) if name in other)
            if told[first][name] != value or (META in value and not draws_alike):
                ranks = [", ".join(str(mesh.across.numbers[rank]) for rank in row) for row in mesh.places()]
                raise RankMismatchError(
                    f"{mesh} Places {first} and {number} of the pipe both have a parameter '{name}': "
                    f"{told[first][name]} on rank(s) {ranks[first]}, and {value} on rank(s) {ranks[number]}. Equal "
                    "names mean one parameter, with equal values, which norms count once. Keep the names of the whole "
                    "model when you cut it: replace modules of other places by nn.Identity(), or wrap a part in a "
                    "module whose name has the number of the place."
                )
    own = next(index for index, rank in enumerate(mesh.across.along("pipe")) if rank == mesh.across.rank)
    return frozenset(name for name in shared if any(name in place for place in told[:own]))


def _check_selections(described: Described) -> None:
    """Raise on every rank if a pattern of `parameters=` or `activations=` selects units at no place.

    Collective: as `texts_across_ranks`.
    """
    mesh, row, cell = described.mesh, described.row, described.row.activations
    # Each by itself: two patterns may each select units at another place.
    rows = [replace(row, units=(one,), activations=Activations()) for one in row.units]
    cells = [Activations(cell.chain), *(Activations(units=(one,)) for one in cell.units)]
    rows += [replace(row, units=(), activations=one) for one in cells]
    refusals = [_refusal(one, described) for one in rows]
    told = [text.split("\n") for text in texts_across_ranks(mesh.across, "\n".join(refusals))]
    for refusal, *others in zip(refusals, *told, strict=True):
        if all(others):
            raise ValueError(f"{mesh} At every place of the pipe: {refusal}")


def _refusal(row: Residency, described: Described) -> str:
    """Return why the patterns of a row select no units at this place; "" if they do."""
    try:
        check_selections(row, described.plans, len(described.mesh.tensor_ranks))
    except ValueError as error:
        return str(error)
    return ""


def _told(mesh: Mesh, mine: Mapping[str, str]) -> list[dict[str, str]]:
    """Return what the first rank of each place says of its parameters."""
    texts = texts_across_ranks(mesh.across, "\n".join(f"{name}\t{text}" for name, text in mine.items()))
    return [dict(line.split("\t") for line in texts[row[0]].splitlines()) for row in mesh.places()]


def _checksum(parameter: nn.Parameter) -> str:
    return META if parameter.is_meta else f"with checksum {checksum(local_of(parameter)):08x}"


def norms_over(engine: Engine, elsewhere: Collection[str]) -> NormsOfPlaces:
    """Return the function that turns the norms of gradients of one place into those of all places: the total and zeros.

    torch computes the norm of several gradients from that of each, so it finds the total, equal on all ranks.

    Args:
        elsewhere: the parameters that an earlier place has, too, which count there.
    """
    alive = weakref.ref(engine)  # the engine has this function

    def over(norms: list[Tensor], slots: Sequence[Slot], p: float, several: bool) -> list[Tensor]:
        engine = alive()
        assert engine is not None, "its gradients ask"
        comm, what = engine.comm.across, f"a {p:g}-norm over the places of the pipe"
        if not several:
            raise RuntimeError(
                f"{engine.mesh} The norm of one gradient ('{slots[0].name}') says nothing of other places of the pipe, "
                "so clipping by such norms would differ between places. zero.grad_norm(), and clip_grad_norm_ without "
                "foreach=False, take the norm over all places."
            )
        if p <= 0:
            raise ValueError(f"{engine.mesh} {what} is not defined: the order must be positive.")
        given = {slot.name for slot in slots}
        left = [one for one in engine.slots.values() if one.has_grad and one.name not in given]
        engine.order.votes.span(what if not left else f"{what}, of some of its gradients")
        if left:
            raise RuntimeError(
                f"{engine.mesh} The norm is of {len(given)} gradients of this place, without that of '{left[0].name}': "
                "norms of groups or of modules lie at different places of the pipe, and are not those of the whole "
                "model. Clip all parameters together: clip_grad_norm_(model.parameters(), ...)."
            )
        mine = [norm for norm, slot in zip(norms, slots, strict=True) if slot.name not in elsewhere]
        zero = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
        own = torch.linalg.vector_norm(torch.stack([zero, *(norm.double() for norm in mine)]), p)
        total = torch.linalg.vector_norm(comm.collect(own, what)[list(comm.mesh.along("pipe"))], p)
        dtype = norms[0].dtype if norms else torch.float32
        return [total.to(dtype), *(norm.new_zeros(()) for norm in norms[1:])]

    return over


@final
class SetApart(Eager):
    """After the forward of a part: keeps with its outputs what its backward needs ("Note: micro-batches in flight")."""

    def __init__(self, engine: Engine, part: str, numbers: Sequence[int]) -> None:
        super().__init__()
        self._engine, self._part, self._numbers = engine, part, numbers

    def _run(self, module: nn.Module, args: Any, output: Any) -> None:
        flights, tensors = self._engine.flights, [one for one in find(output, Tensor) if one.grad_fn is not None]
        if tensors and self._engine.gathered is None and graph_task() == -1:
            arrive = flights.arrival()
            flights.set_apart(self._part, self._numbers)
            for one in tensors:
                one.register_hook(lambda grad: arrive())


def set_parts_apart(engine: Engine, described: Described) -> None:
    """Let the kind of a backward name the part of the model at whose outputs it begins, as a schedule calls them."""
    for part, name in described.parts.items():
        inside = set(part.modules())
        numbers = [number for number, plan in enumerate(described.plans) if inside & plan.entries.keys()]
        # First, so that the outputs' hooks run before those that the engine registers when the forward ends.
        engine.undo.keep(part.register_forward_hook(SetApart(engine, name, numbers), prepend=True))


def check_callers(engine: Engine) -> None:
    """Raise where torch's pipelining calls a model as its mesh or the engine cannot serve it.

    These are pipeline stages on a mesh without an axis "pipe", and split backwards.
    """
    check = _caller_check(engine.mesh)
    engine.check_caller, engine.check_forward = partial(check, False), lambda *_: check(True)


def _caller_check(mesh: Mesh) -> Callable[[bool], None]:
    known = weakref.WeakSet[Any]()
    """Schedules that do not split backwards."""
    has_run = False
    """Whether a forward has begun: a model in the loss of a pipeline stage has a backward there, and may."""

    def check(is_forward: bool) -> None:
        nonlocal has_run
        is_apart, has_run = has_run and not is_forward, has_run or is_forward
        if STAGES not in sys.modules:
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            name = frame.f_globals.get("__name__")
            if name == STAGES and mesh.pipe is None and not is_apart:
                raise RuntimeError(
                    f"{mesh} torch's PipelineStage runs a model that zs.shard() took over without an axis 'pipe': all "
                    "ranks of its mesh have the values of the first one, and norms, clipping and overflows would be "
                    "those of one pipeline stage. Pass a DeviceMesh with an axis named 'pipe' to zs.shard(mesh=)."
                )
            if name == SPLIT[0] and (function := frame.f_code.co_name) in SPLIT[1]:
                weight = frame.f_locals.get("weight")
                whose = "" if weight is None else f" of '{slot_of(weight).name}'"
                raise RuntimeError(f"{mesh} {split_backward(f'{function}()', whose)}")
            if name == SCHEDULES and (schedule := frame.f_locals.get("self")) is not None and schedule not in known:
                if _is_split(schedule):
                    raise RuntimeError(f"{mesh} {split_backward(type(schedule).__name__)}")
                known.add(schedule)
            frame = frame.f_back

    return check


def _is_split(schedule: object) -> bool:
    """Return whether a schedule has backwards for inputs or for weights alone, such as "2I0" and "2W0"."""
    orders = [getattr(schedule, name, None) for name in ("pipeline_order", "pipeline_order_with_comms")]
    actions = (action for order in orders if order for row in order.values() for action in row)
    return any(re.search(r"\d[IW]\d", str(action)) for action in actions)
