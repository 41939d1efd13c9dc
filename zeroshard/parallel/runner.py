"""The runner of a pipeline: executes the actions of a schedule at one place.

Owns one step: its forwards and backwards, and what follows from exceptions. The order of actions is that of
`table/pipeline.py`, what a chunk computes that of `parallel/chunked.py`; messages are in `parallel/messages.py`.

Note: a step of a pipeline
    Each action of the schedule runs as soon as its message is here. The receiver of a message is ready before the
    action before it runs, so messages travel while a place computes; sends are not waited for. A forward ends with the
    tensors of the border, whose gradients begin the backward; the gradients of the input are sent when autograd has
    them, before those of the parameters. The first micro-batch of each shape also tells the next place what crosses the
    border; later ones are compared with it.
Note: forwards that run twice
    A chunk that is recomputed runs a forward without a graph, keeps its input, and runs it again, with a graph, while
    the gradient is on its way. The schedule says for which micro-batches.
Note: a place that fails
    An exception at one place must not leave the others waiting. The rank goes through the rest of its schedule in step
    with them: for a micro-batch that it cannot compute it makes the passes that the other ranks of its place make
    (`parallel/idle.py`), and sends zeros. At the end all ranks tell each other, drop the gradients, and raise.
"""

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from zeroshard.activations.recompute import sums_of
from zeroshard.core.engine import Engine
from zeroshard.core.flights import Chunk
from zeroshard.core.states import Scope
from zeroshard.parallel.again import Again, First
from zeroshard.parallel.batch import Batch, Compared
from zeroshard.parallel.chunked import Border, ChunkedModel, Learned, with_graph
from zeroshard.parallel.finite import Finite
from zeroshard.parallel.idle import idle_backward, idle_forward
from zeroshard.parallel.mail import Mail, check_shared
from zeroshard.parallel.messages import Messages, Turn
from zeroshard.parallel.tied import Tied
from zeroshard.table.errors import RankMismatchError
from zeroshard.table.pipeline import RECEIVES, Action, Kind, Schedule, schedule_of
from zeroshard.torch_private import NoSubclasses

__all__ = ["Loss", "Runner"]

Loss = Callable[[Any, Any], Tensor]
_Result = TypeVar("_Result")


@final
@dataclass
class _Flight:
    """A micro-batch of a chunk between its forward and its backward."""

    arrived: tuple[Tensor, ...]
    """The memory of its input."""
    outputs: tuple[Tensor, ...]
    """The tensors of the border behind, or the loss; none after an exception."""
    first: First | None = None
    """What the forward left that runs again."""


@final
class Runner:
    """One rank's part of the steps of a pipeline.

    Args:
        training: the schedule of a step.
        ranks: the rank of all places' communicator at each place along the pipe.
        units: the units of each chunk of this place.
        shared: the parameters that other places have, too, with the ranks of these places, in order.
        reduces_last: whether gradients are reduced with the last backward of each chunk, or with each.
    """

    def __init__(
        self,
        engine: Engine,
        chunked: ChunkedModel,
        training: Schedule,
        ranks: Sequence[int],
        loss: Loss | None,
        units: Mapping[int, Sequence[int]],
        shared: Mapping[nn.Parameter, Sequence[int]],
        *,
        reduces_last: bool,
    ) -> None:
        self.engine, self.chunked, self.loss, self.reduces_last = engine, chunked, loss, reduces_last
        self.training, self.ranks, self.own = training, ranks, ranks.index(engine.comm.across.mesh.rank)
        self.tied, self.again = Tied(engine, shared), Again(engine, chunked.model, units)
        engine.check_tied = self.tied.check
        self.chunks = {
            chunk: Chunk(f"chunk {chunk}", numbers, chunk == chunked.cut.count - 1) for chunk, numbers in units.items()
        }
        most = training.live(self.own) + 1
        self.mail = Mail(engine.comm.across, ranks, training.micro_batches, most, engine.ledger)
        self.finite = Finite(engine.mesh, training)
        self.compared = Compared(engine.mesh)
        engine.guard.origin = self.finite.told
        self.known: dict[Any, Learned] = {}
        """What is known of each chunk for inputs of a shape, as in `Messages`."""
        self.trained_before: dict[int, int] = {}
        """As in `Messages`."""

    def step(self, batch: Batch, *, is_last: bool) -> Tensor:
        """Run forwards and backwards of all micro-batches; return the mean loss.

        Args:
            is_last: whether gradients are reduced now; otherwise a later call accumulates.
        """
        return _Step(self, self.training, batch, self.loss, is_last=is_last).run()

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: Loss | None) -> Tensor:
        """Run the forwards of all micro-batches without gradients; return the mean loss."""
        return _Step(self, self._forwards(batch), batch, loss or self.loss, is_last=False).run()

    @torch.no_grad()
    def forward(self, batch: Batch, take: Callable[[Any], Any] | None) -> Tensor:
        """Run the forwards of all micro-batches without gradients; return the model's output, on every rank.

        Args:
            take: returns a tensor of the model's output, whose first dimension is that of the micro-batch.
        """
        found: list[Tensor] = []

        def keep(output: Any, targets: Any) -> Tensor:
            taken: Any = output if take is None else take(output)
            whose = "the model" if take is None else "take="
            if not isinstance(taken, Tensor) or not taken.ndim:
                raise TypeError(
                    f"{self.engine.mesh} pipe.forward() returns a tensor with a dimension for the batch; {whose} "
                    f"returned a {type(taken).__name__}. Pass take=, such as lambda output: output.logits."
                )
            check_shared(taken, found[0] if found else taken, whose)
            found.append(taken)
            return torch.zeros((), device=taken.device)

        _Step(self, self._forwards(batch), batch, keep, is_last=False).run()
        return self.mail.share(torch.cat(found) if found else None, len(self.ranks) - 1)

    def _forwards(self, batch: Batch) -> Schedule:
        return schedule_of("forward", self.training.places, batch.micro_batches, self.training.chunks)


@final
class _Step:
    """One step, or one evaluation."""

    def __init__(self, runner: Runner, schedule: Schedule, batch: Batch, loss: Loss | None, *, is_last: bool) -> None:
        self._function = loss
        self._runner, self._schedule, self._batch = runner, schedule, batch
        self._is_last, self._has_grad = is_last, torch.is_grad_enabled()
        self._key = batch.key, self._has_grad, runner.chunked.model.training
        device = runner.engine.mesh.device
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._token = torch.zeros((), device=device, requires_grad=True)
        self._flights: dict[Turn, _Flight] = {}
        with NoSubclasses():
            trained = bytes(one.requires_grad for unit in runner.engine.units for one in unit.parameters)
        known = runner.known, self._key, runner.trained_before, zlib.crc32(trained)
        self._messages = Messages(runner.engine.mesh, runner.mail, *known)
        self._twice = {action[1:] for action in schedule.actions[runner.own] if action.kind is Kind.RECOMPUTE}
        """Forwards that run twice."""
        self._repeated: list[tuple[Turn, First]] = []
        self._error: Exception | None = None
        self._failure = ""
        """The first exception of this rank, and its text for other ranks."""

    def run(self) -> Tensor:
        """Run all actions, and return the mean loss of all micro-batches and ranks, equal on every rank."""
        actions, engine = self._schedule.actions[self._runner.own], self._runner.engine
        act = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.RECOMPUTE: self._recompute,
            Kind.SEND_OUTPUT: self._send_output,
            Kind.SEND_GRADIENT: self._messages.send_gradient,
        }
        engine.follow_entries()
        if self._has_grad:
            engine.learn()  # an error of the last step is not one of this step
            self._runner.tied.check_dropped()
        self._runner.finite.begin()
        waits = self._runner.mail.waits
        waits.begin()
        self._comparing(self._runner.compared.check)
        for at, action in enumerate(actions):
            if action.kind in RECEIVES:
                self._messages.expect(action)
                continue
            self._messages.expect(next((one for one in actions[at + 1 :] if one.kind in RECEIVES), None))
            with self._told(action):
                act[action.kind](action.chunk, action.micro_batch)
        self._messages.finish()
        for turn, first in self._repeated:
            try:
                self._runner.again.compare(first)
            except RuntimeError as error:
                self._fail(*turn, error)
        is_summed = self._has_grad and self._is_last
        if is_summed and not self._failure and (missing := self._runner.tied.missing()):
            self._failure = f"{engine.mesh} {missing}"
        with waits.waiting():
            self._agree()
        waits.end()
        if is_summed:
            self._runner.tied.add_up()
        told = torch.stack([self._total, self._runner.finite.first(), self._batch.checksum(engine.mesh.device)])
        losses, found, sums = engine.comm.across.collect(told, "the loss of the last place").unbind(1)
        self._comparing(lambda: self._runner.compared.keep(sums.contiguous(), self._key))
        if self._has_grad:
            self._runner.finite.keep(found, is_last=self._is_last)
        return losses[engine.mesh.places()[-1].tolist()].mean()

    @contextmanager
    def _told(self, action: Action) -> Iterator[None]:
        """Tell other ranks what this one does, in case that it is lost there, or ends with an exception."""
        engine, watchdog = self._runner.engine, self._runner.engine.comm.across.watchdog
        if watchdog is not None:
            watchdog.does(f"the {action}, at pipe {self._runner.own}")
        engine.inside = f"a pipeline's step, in the {action}"
        try:
            yield
        except BaseException as error:
            error.add_note(f"{engine.mesh} This was raised in the {action}.")
            raise
        finally:
            engine.inside = ""
            if watchdog is not None:
                watchdog.does("")

    def _note(self, kind: Kind, chunk: int, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        if self._has_grad:
            self._runner.finite.note(kind, chunk, micro_batch, tensors)

    def _where(self, chunk: int, micro_batch: int) -> str:
        of = f" of chunk {chunk}" if self._schedule.chunks > 1 else ""
        return f"{self._runner.engine.mesh} Micro-batch {micro_batch}{of}:"

    # -- computation --------------------------------------------------------------------------------------------------

    def _send_output(self, chunk: int, micro_batch: int) -> None:
        flight = self._flights[chunk, micro_batch]
        self._messages.send_output(chunk, micro_batch, flight.outputs)
        if (chunk, micro_batch) in self._twice:
            flight.outputs = ()
        if not self._has_grad:
            self._messages.give(self._flights.pop((chunk, micro_batch)).arrived, is_read=False)

    def _forward(self, chunk: int, micro_batch: int) -> None:
        turn, is_final = (chunk, micro_batch), chunk == self._runner.chunked.cut.count - 1
        learned = self._messages.hear(chunk, micro_batch)
        arrived = self._messages.take(Kind.RECEIVE_INPUT, *turn) or ()
        self._note(Kind.RECEIVE_INPUT, *turn, arrived)
        flight = self._flights[turn] = _Flight(arrived, ())
        is_twice = turn in self._twice
        has_grad = self._has_grad and not is_twice
        if self._messages.is_blank(*turn) or (is_twice and not learned.is_known):
            idle_forward(self._runner.engine, self._runner.chunks[chunk], has_grad=has_grad)
        elif is_twice:
            # The chunk may change its input in place.
            run = functools.partial(self._compute, turn, tuple(one.clone() for one in arrived), learned)
            first = functools.partial(self._runner.again.first, chunk, run)
            flight.first, flight.outputs = self._attempt(turn, first, has_grad=has_grad) or (None, ())
        else:
            run = functools.partial(self._compute, turn, arrived, learned)
            flight.outputs = self._attempt(turn, run, has_grad=has_grad) or ()
        if is_final and not self._has_grad:
            self._messages.give(self._flights.pop(turn).arrived, is_read=True)

    def _recompute(self, chunk: int, micro_batch: int) -> None:
        """Run a forward again, with a graph."""
        flight = self._flights[turn := (chunk, micro_batch)]
        if (first := flight.first) is None:
            idle_forward(self._runner.engine, self._runner.chunks[chunk], has_grad=True)
            return

        def run() -> tuple[Tensor, ...]:
            with self._runner.again.restored(first):
                return self._compute(turn, flight.arrived, self._messages.learned(chunk), is_again=True)

        flight.outputs = self._attempt(turn, run, has_grad=True) or ()
        first.again = sums_of(flight.outputs)
        self._repeated.append((turn, first))

    def _attempt(self, turn: Turn, run: Callable[[], _Result], *, has_grad: bool) -> _Result | None:
        """Run a forward; after an exception of user code, complete its pass, and return None."""
        engine = self._runner.engine
        before = engine.order.count
        try:
            return run()
        except RankMismatchError:
            raise
        except Exception as error:
            self._fail(*turn, error)
            if engine.order.count == before:  # it failed before the model opened a pass
                idle_forward(engine, self._runner.chunks[turn[0]], has_grad=has_grad)
            engine.flights.end()
            return None

    def _compute(
        self, turn: Turn, arrived: tuple[Tensor, ...], learned: Learned, *, is_again: bool = False
    ) -> tuple[Tensor, ...]:
        """Run a chunk; return the tensors of the border behind, or the loss."""
        chunked, (chunk, micro_batch) = self._runner.chunked, turn
        args, kwargs, targets = self._batch.at(micro_batch)
        self._runner.engine.flights.chunk = self._runner.chunks[chunk]
        take = functools.partial(self._messages.send_gradient, chunk, micro_batch)
        followed = with_graph(self._token, learned.arrives, arrived, take) if torch.is_grad_enabled() else arrived
        arrive = self._runner.engine.flights.arrival()
        for one in (one for one in followed if one.requires_grad):
            one.register_hook(lambda grad: arrive())  # an input may be the output, too: before its other hooks
        learning = learned if learned.is_known else replace(learned, outputs={})
        try:
            output = chunked.run(chunk, args, kwargs, followed, learning)
        finally:
            self._runner.engine.flights.chunk = None
        if chunk == chunked.cut.count - 1:
            loss = self._loss(chunk, micro_batch, output, targets)
            self._total += 0.0 if is_again else loss.detach()
            self._note(Kind.FORWARD, chunk, micro_batch, [loss])
            outputs: tuple[Tensor, ...] = (loss,)
        else:
            outputs = output
            self._compare(chunk, micro_batch, learned, outputs)
        if not learned.is_known:
            self._messages.learn(chunk, replace(learning, is_known=True, sent=tuple(map(Border.of, outputs))))
        return outputs

    def _loss(self, chunk: int, micro_batch: int, output: Any, targets: Any) -> Tensor:
        """Return the loss of a micro-batch, as a part of the mean of all."""
        function = self._function
        loss: Any = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if function is not None:
            loss = function(output, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            whose = "loss= of zs.pipeline() returned" if function is not None else "without loss=, the model returned"
            raise ValueError(
                f"{self._where(chunk, micro_batch)} {whose} {got}. The loss must be a tensor with one floating-point "
                "value, the mean over the micro-batch."
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise RuntimeError(
                f"{self._where(chunk, micro_batch)} the loss has no graph: no gradient would reach a parameter. "
                "Compute it from the output, without detach() and no_grad()."
            )
        return loss.reshape(()) / self._schedule.micro_batches

    def _compare(self, chunk: int, micro_batch: int, learned: Learned, outputs: tuple[Tensor, ...]) -> None:
        """Compare what crosses a border with what the first micro-batch of this shape sent."""
        found, sent = tuple(map(Border.of, outputs)), learned.sent
        if not torch.is_grad_enabled():
            found, sent = (tuple(replace(one, has_gradient=False) for one in some) for some in (found, sent))
        if learned.is_known and found != sent:
            before, now = (", ".join(map(str, one)) for one in (sent, found))
            raise RuntimeError(
                f"{self._where(chunk, micro_batch)} the chunk sends {now} to the next place, which expects {before}, "
                "as for the first micro-batch of this shape. What crosses a border must depend on the shapes of the "
                "inputs and on what is trained alone."
            )

    def _backward(self, chunk: int, micro_batch: int) -> None:
        flight, engine = self._flights.pop((chunk, micro_batch)), self._runner.engine
        grads = self._messages.take(Kind.RECEIVE_GRADIENT, chunk, micro_batch)
        if grads is not None:
            self._note(Kind.RECEIVE_GRADIENT, chunk, micro_batch, grads)
            self._runner.mail.has_arrived(chunk, micro_batch)
        outputs, before = [one for one in flight.outputs if one.requires_grad], engine.backwards
        with self._reducing(micro_batch):
            try:
                if outputs:
                    torch.autograd.backward(outputs, grads or None)
            except RankMismatchError:
                raise
            except Exception as error:
                self._fail(chunk, micro_batch, error)
            if engine.backwards == before:  # here it failed, or used no unit
                idle_backward(engine, self._runner.chunks[chunk])
        self._messages.give(grads or (), is_read=True)
        self._messages.give(flight.arrived, is_read=chunk == self._runner.chunked.cut.count - 1 or bool(grads))

    def _reducing(self, micro_batch: int) -> AbstractContextManager[None]:
        """Return the context of a backward: whether it reduces gradients."""
        is_final = micro_batch == self._schedule.micro_batches - 1
        # Tied gradients are added up over the places with the last call: until then an update is refused.
        is_owed = is_final and not self._is_last and self._runner.tied.are_any
        if is_owed or (self._runner.reduces_last and not (is_final and self._is_last)):
            return self._runner.engine.reducing_over(Scope.RANK)
        return nullcontext()

    # -- failures -----------------------------------------------------------------------------------------------------

    def _fail(self, chunk: int, micro_batch: int, error: Exception) -> None:
        """Note an exception of user code, and complete the pass that it interrupted, in step with other ranks."""
        if self._error is None:
            self._error = error
            self._failure = f"{self._where(chunk, micro_batch)} {type(error).__name__}: {error}"
        engine = self._runner.engine
        inside, engine.inside = engine.inside, ""
        engine.leave_passes("the end of a chunk that failed")
        engine.inside = inside

    def _agree(self) -> None:
        """Raise on every rank if one of them failed; the gradients of the step are dropped then.

        Collective: all-reduce of 40 bytes over all places, and of a text from each rank after a failure.
        """
        engine, what = self._runner.engine, "the end of a step of the pipeline"
        if engine.order.votes.span(what, -bool(self._failure)) == 0:
            return
        texts = engine.comm.across.texts(self._failure, "why a step of the pipeline failed")
        self._drop()
        told = "\n".join(f"  {text}" for text in texts if text)
        text = f"{engine.mesh} A step of the pipeline failed, and its gradients were dropped:\n{told}"
        if self._error is None:
            raise RankMismatchError(text)
        self._error.add_note(text)
        raise self._error

    def _drop(self) -> None:
        for parameter in self._runner.chunked.model.parameters():
            parameter.grad = None

    def _comparing(self, compare: Callable[[], None]) -> None:
        """Drop gradients if a comparison of inputs raises, which it does on every rank."""
        try:
            compare()
        except RankMismatchError:
            self._drop()
            raise
