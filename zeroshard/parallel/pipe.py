"""Pipelines: an axis "pipe" joins the domains of modules that make one step.

Owns what all places of a pipe are compared for, and the refusal of torch's pipeline stages on a mesh without the axis.
It must not know schedules. Read `Mesh.at_place` (`wire/mesh.py`) and `Comm.across` (`wire/comm.py`) first.
"""

import sys
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from zeroshard.core.engine import Engine
from zeroshard.core.slot import NormsOfPlaces, Slot
from zeroshard.join.start import texts_across_ranks
from zeroshard.setup.equal import check_equal
from zeroshard.setup.request import Described
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import local_of
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh

__all__ = ["check_places", "norms_over", "stage_check"]

STAGES = "torch.distributed.pipelining.stage"
META = "on the meta device"


def check_places(described: Described, comm: Comm, version: str) -> frozenset[str]:
    """Compare the places of a pipe; return the parameters that an earlier place has, which norms count there.

    Raises:
        RankMismatchError: on every rank, if places differ in options or versions, or have different parameters of one
            name.

    Collective: all-gathers of names, and of checksums of the parameters that several places have.
    """
    mesh, named = described.mesh, dict(described.model.named_parameters())
    facts = [f"zeroshard {version}", f"torch {torch.__version__}", f"options: {described.options()}"]
    check_equal(mesh.across, comm.across, facts)
    shapes = {name: str(tuple(one.shape)) for name, one in named.items() if id(one) not in described.ignored}
    by_place = _told(mesh, shapes)
    shared = {name for name in shapes if sum(name in place for place in by_place) > 1}
    values = {name: f"{shapes[name]} {_checksum(named[name])}" for name in sorted(shared)}
    for number, place in enumerate(told := _told(mesh, values)):
        for name, value in place.items():
            first = next(index for index, other in enumerate(told) if name in other)
            if told[first][name] != value or META in value:
                raise RankMismatchError(
                    f"{mesh} Places {first} and {number} of the pipe both have a parameter '{name}', here {value}, "
                    f"there {told[first][name]}. Equal names mean one parameter, with equal values, which norms count "
                    "once. Keep the names of the whole model when you cut it: replace modules of other places by "
                    "nn.Identity(), or wrap a part in a module whose name has the number of the place."
                )
    own = next(index for index, rank in enumerate(mesh.across.along("pipe")) if rank == mesh.across.rank)
    return frozenset(name for name in shared if any(name in place for place in told[:own]))


def _told(mesh: Mesh, mine: Mapping[str, str]) -> list[dict[str, str]]:
    """Return what the first rank of each place says of its parameters."""
    texts = texts_across_ranks(mesh.across, "\n".join(f"{name}\t{text}" for name, text in mine.items()))
    rows = mesh.across.rows("pipe")
    return [dict(line.split("\t") for line in texts[rank].splitlines()) for rank in rows[0].tolist()]


def _checksum(parameter: nn.Parameter) -> str:
    if parameter.is_meta:
        return META
    raw = local_of(parameter.detach()).cpu().contiguous().view(-1).view(torch.uint8)
    return f"with checksum {zlib.crc32(bytes(raw.numpy().data)):08x}"


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
        mine = [norm for norm, slot in zip(norms, slots, strict=True) if slot.name not in elsewhere]
        zero = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
        engine.order.votes.span(what)
        own = torch.linalg.vector_norm(torch.stack([zero, *(norm.double() for norm in mine)]), p)
        total = torch.linalg.vector_norm(comm.collect(own, what)[list(comm.mesh.along("pipe"))], p)
        dtype = norms[0].dtype if norms else torch.float32
        return [total.to(dtype), *(norm.new_zeros(()) for norm in norms[1:])]

    return over


def stage_check(mesh: Mesh) -> Callable[[str, object], None]:
    """Return a function that raises if torch's PipelineStage is running, for a mesh without an axis "pipe"."""

    def check(name: str, inputs: object) -> None:
        if STAGES not in sys.modules:
            return
        frame = sys._getframe()
        while frame is not None:
            if frame.f_globals.get("__name__") == STAGES:
                raise RuntimeError(
                    f"{mesh} torch's PipelineStage runs a model that zs.shard() took over without an axis 'pipe': all "
                    "ranks of its mesh have the values of the first one, and norms, clipping and overflows would be "
                    "those of one pipeline stage. Pass a DeviceMesh with an axis named 'pipe' to zs.shard(mesh=)."
                )
            frame = frame.f_back  # type: ignore[assignment]

    return check
