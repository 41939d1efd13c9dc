"""The chunks of a module that is divided over a pipe, each traced by itself.

Owns the borders of a traced chunk: what arrives, and what is given to its backward, has memory of its own, as messages
have. The cut and the forward of a chunk are the product's (`parallel/cut.py`, `parallel/chunked.py`): read them first.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from zeroshard.core.undo import Undo
from zeroshard.describe.units import UnitPlan
from zeroshard.parallel.chunked import Border, ChunkedModel, Learned, with_graph
from zeroshard.parallel.cut import Cut, is_here, remove_others, stand_in_on
from zeroshard.plan.step.rank_job import Job, Piped, tied_unit
from zeroshard.plan.step.script import Script
from zeroshard.table.pipeline import Kind, Schedule
from zeroshard.table.schedule import ROOT

__all__ = ["Chunks", "at_place"]


@final
@dataclass(frozen=True)
class Chunks:
    """The chunks of a model, some of which are traced.

    Args:
        place: along the pipe.
        own: the chunks that are traced.
        removed: what stands for the parameters of other places, by name.
        learned: what is known of each chunk's borders, in order; a step of the next chunk adds to it.
    """

    cut: Cut
    schedule: Schedule
    place: int
    own: Sequence[int]
    removed: dict[str, Tensor]
    learned: list[Learned]

    def of_copy(self, twins: Mapping[nn.Module, nn.Module], model: nn.Module) -> ChunkedModel:
        """Have a copy of the model run a chunk at a time.

        Args:
            twins: the copy of each module.
            model: the copy.
        """
        stand_in_on(torch.device("meta"), model, self.removed)
        parts = {twins[part]: named for part, named in self.cut.parts.items()}
        chunked = ChunkedModel(model, dataclasses.replace(self.cut, parts=parts), self.own, self.removed)
        vars(model)["forward"] = chunked.replacement()
        return chunked

    def piped(self, job: Job, scripts: Mapping[int, Script], plans: Sequence[UnitPlan]) -> Piped:
        """Return what the place does.

        Args:
            job: of the place.
            scripts: of each chunk.
        """
        jobs = {chunk: dataclasses.replace(job, script=script) for chunk, script in scripts.items()}
        messages = dict[tuple[Kind, int], Sequence[tuple[str, int]]]()
        for chunk in range(self.cut.count):
            for kind, some in zip((Kind.RECEIVE_INPUT, Kind.RECEIVE_GRADIENT), self.borders(chunk), strict=True):
                messages[kind, chunk] = [(f"{tuple(one.shape)} {one.dtype}", one.nbytes) for one in some]
        chunks = self.cut.chunks(plans[ROOT].module)
        places = [_places_of(plan, chunks, self.schedule) for plan in plans]
        tied = [tied_unit(unit, some) for unit, some in zip(job.units, places, strict=True) if len(some) > 1]
        return Piped(self.schedule, self.place, jobs, messages, tied)

    def borders(self, chunk: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return what arrives at a chunk, and the gradients of what it sends, without memory."""
        before, own = self.learned[chunk - 1].sent if chunk else (), self.learned[chunk:][:1]
        return _empty(before), _empty([one for known in own for one in known.sent if one.has_gradient])

    def step(
        self,
        chunked: ChunkedModel,
        chunk: int,
        sent: list[Tensor],
        begin: Callable[[Any], Any],
        finish: Callable[[Any], Tensor],
    ) -> Callable[..., Tensor]:
        """Return a step of a chunk for a trace: called with the model, its inputs and those of `borders`.

        Args:
            sent: gets the gradients that the backward sends, which so outlive it.
            begin: casts the model's inputs.
            finish: returns the loss of the model's output.
        """
        is_known, before = chunk < len(self.learned), self.learned[chunk - 1] if chunk else Learned()
        told = Learned(chunk > 0, before.sent, {**before.heard, **before.outputs})
        learned = self.learned[chunk] if is_known else told

        def take(grads: Sequence[Tensor | None]) -> None:
            sent.extend(one.contiguous() for one in grads if one is not None)

        def step(model: nn.Module, given: Any, arrived: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
            for name in self.removed:
                path, _, key = name.rpartition(".")
                self.removed[name] = vars(model.get_submodule(path))[key]
            given = begin(given)
            token, args, kwargs = torch.zeros((), requires_grad=True), given, dict[str, Any]()
            if isinstance(given, Mapping):
                args, kwargs = (), dict(given)
            out = chunked.run(chunk, args, kwargs, with_graph(token, before.sent, arrived, take), learned)
            is_last = chunk == self.cut.count - 1
            if not is_known:
                found = () if is_last else tuple(map(Border.of, out))
                self.learned.append(dataclasses.replace(learned, is_known=True, sent=found))
            if is_last:
                return finish(out)
            borders = [one for one in out if one.requires_grad]
            if not is_known:
                return sum((one.float().sum() for one in borders), token)
            return _Depart.apply(token, grads, (out, [one.detach().contiguous() for one in out]), *borders)  # type: ignore[no-any-return, no-untyped-call]

        return step


def _places_of(plan: UnitPlan, chunks: Mapping[nn.Parameter, Sequence[int]], schedule: Schedule) -> Sequence[int]:
    """Return the places that have the parameters of a unit: those that are tied over places are units of their own."""
    found = (sorted({chunk % schedule.places for chunk in chunks.get(one, ())}) for _, one in plan.parameters)
    return max(found, key=len, default=[])


def _empty(borders: Sequence[Border]) -> list[Tensor]:
    return [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in borders]


class _Depart(torch.autograd.Function):
    """Ends a chunk: its backward begins with gradients that have memory already."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, grads: Sequence[Tensor], held: object, *tensors: Tensor) -> Any:
        # What is sent is kept until the backward ends. Autograd adds nothing to a gradient whose memory others have.
        ctx.grads, ctx.held = grads, (held, [one.detach() for one in grads])
        return torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, *ctx.grads


@contextmanager
def at_place(
    model: nn.Module, cut: Cut, own: Sequence[int], units: Sequence[object] | None, ignored: Sequence[object]
) -> Iterator[tuple[dict[str, Tensor], Sequence[object] | None, Sequence[object]]]:
    """Have a model as one place of a pipe has it; yield what stands for removed parameters, units and `ignored`.

    Args:
        own: the chunks of the place.
        units, ignored: as in `zs.pipeline`.

    Raises:
        ValueError: a block would be a unit with parameters of several chunks.
    """
    undo = Undo()
    try:
        removed = remove_others(model, cut, own, undo)
        yield removed, cut.units(model, own, units), [one for one in ignored if is_here(model, one)]
    finally:
        undo.run()
