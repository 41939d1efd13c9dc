"""The islands of a model: when an exchange begins and ends, and what follows it.

Owns the schedule of exchanges, which hangs on the optimizers' steps, and the state that islands have besides the
engine's. It must not know files. Read `formula.py`, `fragments.py` and `exchange.py` first.

Note: steps and exchanges
    `every` steps are divided among the fragments in turn: fragment f of F is exchanged at each step that is
    (f + 1) * every / F modulo `every`. An exchange ends in that step, after the optimizer's update, and begins `delay`
    steps before. At its end the ranks of an island agree, outside passes, that all values are finite. Then each moves
    its shard of the anchors, replaces or mixes its master weights, and publishes them as after an update. Between
    exchanges islands send each other nothing.
Note: values that the program writes
    What `gathered(writeback=True)` wrote would be a change that the island has learned: rounded, weighed by the outer
    optimizer, and not in the anchors that a checkpoint has. So it is written where islands have nothing but anchors,
    on all of them: those of the first island, which become the anchors, as at the start.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, final

import torch
from torch import nn

from zeroshard.core.engine import Engine
from zeroshard.outer import formula
from zeroshard.outer.apart import Apart, with_states
from zeroshard.outer.exchange import Arrived, Exchange, is_finite
from zeroshard.outer.fragments import Fragment, fragments_of, store_of
from zeroshard.outer.options import Outer
from zeroshard.setup.equal import check_equal, options_text
from zeroshard.table.errors import RankMismatchError
from zeroshard.table.trace import Memory
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.whole.copies import sum_bits
from zeroshard.wire.comm import Comm

__all__ = ["Islands"]

Tensor = torch.Tensor
PIECE_NUMEL: Final = 1 << 22
"""Elements that are sent at a time."""


@final
class Islands(Apart):
    """The islands that one model is trained on, seen from this rank.

    Args:
        comm: connects this rank with its counterparts on all islands.
        options: how they exchange.
        optimizers: the model's, including those attached later.

    Collective: see `align`.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        comm: Comm,
        options: Outer,
        optimizers: Sequence[ShardedOptimizer],
    ) -> None:
        super().__init__(engine, optimizers)
        self._model, self.comm, self.options = model, comm, options
        self.fragments: list[Fragment] = fragments_of(engine.units, options, store_of(options, engine.mesh.device))
        self.align()
        self.optimizer = options.make([fragment.anchor for fragment in self.fragments])
        """The outer optimizer; None for the average."""
        self.exchanges = 0
        """Exchanges so far; they and the steps are equal on all islands at an exchange."""
        self.under_way: Exchange | Arrived | None = None

    def align(self) -> None:
        """Give all islands the parameters and buffers of the first one, which are the anchors then.

        Collective: broadcasts of this rank's shards, and of buffers; every rank of all islands must call.
        """
        for unit in self._engine.units:
            for bucket in unit.buckets:
                what = f"the values of {unit} on all islands"
                for values in (bucket.array(), bucket.full if bucket.spec.is_whole else bucket.shard):
                    for piece in values.detach().split(PIECE_NUMEL):
                        sent = piece.clone()  # it may lie in a file
                        self.comm.broadcast(sent, what, "start")
                        piece.copy_(sent)
                bucket.changes.accept()
        for name, tensor in self._model.named_buffers():
            self.comm.broadcast(tensor.data, f"buffer '{name}' on all islands", "start")
        for fragment in self.fragments:
            fragment.take_anchors()
        self._engine.order.barrier("the values of all islands")

    @contextmanager
    def written(self, gathered: AbstractContextManager[None]) -> Iterator[None]:
        """See `Apart`. Collective: also `align`; every rank of all islands must enter."""
        if self.under_way is not None or any(one.exchanged_at != self.steps for one in self.fragments):
            raise RuntimeError(
                f"{self._engine.mesh} gathered(writeback=True) at step {self.steps}, between exchanges of islands: "
                "what it writes would be taken for what this island has learned. Call zero.finish() before, on all "
                "islands; to replace the weights, zero.load(path, model_only=True) works at any step."
            )
        with gathered:
            yield
        self.align()

    def exchange(self) -> None:
        """See `Apart`."""
        options = self.options
        turn, rest = divmod(self.steps + options.delay, options.distance)
        if not rest:
            self.begin(self.fragments[(turn - 1) % options.fragments])
        if not self.steps % options.distance and self.under_way is not None:
            self.end(options.mix)

    def begin(self, fragment: Fragment) -> None:
        """Begin the exchange of a fragment. Collective: see `Exchange`; every rank of all islands must call."""
        self._engine.leave_passes("An exchange between islands")
        self.exchanges += 1
        self.under_way = Exchange(self.comm, fragment, self.exchanges, self.steps)

    def end(self, own: float) -> None:
        """End the exchange that is under way.

        Args:
            own: the weight of this island's own parameters.

        Raises:
            RuntimeError: on all ranks of all islands, if a change was not finite; nothing was changed.
            RankMismatchError: islands are at different exchanges.

        Collective: every rank of all islands must call.
        """
        engine, exchange = self._engine, self.under_way
        assert exchange is not None, "an exchange is under way"
        engine.leave_passes("An exchange between islands")
        mean, fragment, what = exchange.mean(), exchange.fragment, exchange.what
        self.under_way = exchange = None
        # Counterparts have the same mean, so all islands find the same.
        if not engine.order.barrier(what, int(is_finite(mean)))[0]:
            raise RuntimeError(
                f"{engine.mesh} In {what}, the change of an island was not finite, so it was not applied "
                "anywhere. The parameters of an island have diverged: lower its learning rate, or clip its gradients, "
                "and load a checkpoint."
            )
        engine.order.let_go()
        formula.moved([fragment.anchor], [mean], self.optimizer)
        del mean
        fragment.mix_in(own)
        fragment.publish(engine, what)
        fragment.exchanged_at = -1 if own else self.steps

    def finish(self) -> None:
        """Exchange what was not exchanged yet, so that all islands have equal parameters. See `Zero.finish`."""
        self._engine.leave_passes("zero.finish()")
        if self.under_way is not None:
            self.end(self.options.mix)
        for fragment in self.fragments:
            if fragment.exchanged_at != self.steps:
                self.begin(fragment)
                self.end(0.0)

    @property
    def device(self) -> torch.device:
        """The rank's device."""
        return self._engine.mesh.device

    def loaded(self) -> None:
        """See `Apart`: `checkpoint/islands.py` reads what islands have."""

    def settle(self) -> None:
        """Wait for the messages of an exchange that is under way, if any, which then still ends at its own step."""
        if self.under_way is not None:
            self.under_way.mean()

    def restart(self, steps: int, exchanges: int, under_way: Arrived | None) -> None:
        """Continue as a checkpoint says.

        Args:
            steps, exchanges: see `__init__`.
            under_way: an exchange that had begun.
        """
        self.steps, self.exchanges, self.under_way = steps, exchanges, under_way
        self.recount()

    def states(self) -> list[Tensor]:
        """Return the tensors that islands keep besides the engine's state, beginning with the anchors."""
        found = [fragment.anchor.data for fragment in self.fragments]
        found += [fragment.lost for fragment in self.fragments if fragment.lost is not None]
        held = self.optimizer.state.values() if self.optimizer is not None else ()
        return found + [value for state in held for value in state.values() if isinstance(value, Tensor)]

    def counted(self, memory: Memory) -> Memory:
        """Return `memory` with anchors, outer states and what rounding lost."""
        now = sum(one.nbytes for one in self.states())
        later = max(now, self.options.kept_per_element * sum(fragment.anchor.nbytes for fragment in self.fragments))
        return with_states(memory, self.options.cell, now, later)

    def sent_bytes(self) -> Counter[str]:
        """Return the bytes that this rank has sent to its counterparts on other islands, by kind as in `Traffic`."""
        sent = Counter(self.comm.sent_bytes)
        apart = {kind: sent[kind] for kind in ("agree", "start", "state")}
        return Counter({**apart, "replicate": sent.total() - sum(apart.values())})

    def check_copies(self) -> None:
        """Raise on every rank of all islands unless what islands have in common is equal, bit for bit.

        These are anchors and outer states, and parameters that have made no step since they were exchanged.

        Raises:
            RankMismatchError: they differ; the text names the fragment.

        Collective: an all-gather of 8 bytes for each tensor over islands, and agreements; every rank must call.
        """
        engine, named = self._engine, list[tuple[str, Tensor]]()
        engine.leave_passes("check_copies()")
        for fragment in self.fragments:
            named.append((f"the anchors of {fragment}", fragment.anchor.data))
            state = self.optimizer.state.get(fragment.anchor, {}) if self.optimizer is not None else {}
            named += [(f"{key} of {fragment}", state[key]) for key in sorted(state) if isinstance(state[key], Tensor)]
            if fragment.exchanged_at == self.steps:
                named += [(f"the parameters of {part.bucket.spec.name}", part.values()) for part in fragment.parts]
        what, mesh = "the comparison of islands", self.comm.mesh
        numbers = [number for one in (self.steps, len(named)) for number in (one, -one)]
        low = self.comm.agree(numbers, what)
        failure = "" if low == [self.steps, -self.steps, len(named), -len(named)] else "The islands' steps differ."
        sums = torch.stack([sum_bits(one).to(mesh.device) for _, one in named])
        if not failure and (differs := (rows := self.comm.collect(sums, what)) != rows[0]).any():
            first = int(differs.any(0).nonzero()[0])
            held = mesh.lines([f"{value & 2**64 - 1:016x}" for value in rows[:, first].tolist()])
            failure = f"Islands no longer have equal values of {named[first][0]}; sums of their bits:\n{held}"
        if not engine.order.barrier(what, int(not failure))[0]:
            raise RankMismatchError(
                f"{engine.mesh} {failure or 'Islands have different values at another rank, whose error names them.'}\n"
                "Memory or a kernel of a rank failed, or user code changed parameters on one island. Load a checkpoint."
            )

    def follow(self, one: ShardedOptimizer) -> None:
        """See `Apart`. Collective: as `check_equal`; every rank of all islands must call.

        Raises:
            RankMismatchError: on all islands, if one has another optimizer.
        """
        name = type(one.optimizer).__name__
        lines = [f"optimizer: {name}, {options_text(group)}" for group in one.optimizer.param_groups]
        check_equal(self.comm.mesh, self.comm, lines)
        super().follow(one)

    def check_detach(self) -> None:
        """See `Apart`.

        Raises:
            RuntimeError: an exchange is under way.
        """
        if self.under_way is not None:
            raise RuntimeError(
                f"{self._engine.mesh} zero.detach() during {self.under_way.what}: call zero.finish() first, on all "
                "islands."
            )

    def close(self) -> None:
        """See `Apart`."""
        self.comm.close()
