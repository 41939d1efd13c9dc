"""The messages of one step of a pipeline at one place: when each is received and sent, and what it tells.

Owns what is known of the borders in this step. `parallel/mail.py` has memory, tags and headers of messages; it must not
know what is computed between them.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from zeroshard.parallel.batch import SAME
from zeroshard.parallel.chunked import Border, Learned
from zeroshard.parallel.mail import NOTHING, Incoming, Mail
from zeroshard.table.errors import RankMismatchError
from zeroshard.table.pipeline import Action, Kind
from zeroshard.wire.mesh import Mesh

__all__ = ["Messages", "Turn"]

Turn = tuple[int, int]
"""A chunk and a micro-batch."""


@final
class Messages:
    """The messages of one step, or one evaluation.

    Args:
        known: what is known of each chunk, by the key of inputs, the chunk, and what is trained up to the chunk before
            it and at this place; without the last, what the place before has told.
        key: the key of the inputs of this step: their shapes, and the mode.
        before: for each chunk, a checksum of what is trained up to the chunk before it, as it was last told.
        trained: a checksum of what is trained at this place.
    """

    def __init__(
        self, mesh: Mesh, mail: Mail, known: dict[Any, Learned], key: Any, before: dict[int, int], trained: int
    ) -> None:
        self._mesh, self._mail, self._known, self._key = mesh, mail, known, key
        self._before, self._trained = before, trained
        self._incoming: dict[Action, Incoming] = {}
        self._sent: set[Turn] = set()
        """Gradients that were sent, by the chunk that sent them."""
        self._kept: list[Tensor] = []
        """Memory of inputs that a message of this step may still read."""
        self._shapes = zlib.crc32(repr(key).encode())
        self._heard: set[int] = set()
        """Chunks whose first message of this step has come, or was sent from here."""
        self._blank: set[Turn] = set()
        """Borders that no message crosses, by the chunk behind: the place before failed before it knew the shapes."""
        mail.begin()

    def learned(self, chunk: int) -> Learned:
        """Return what is known of a chunk."""
        told, key = self._keys(chunk)
        if key not in self._known:
            self._known[key] = replace(self._known.get(told, Learned()))
        return self._known[key]

    def learn(self, chunk: int, learned: Learned) -> None:
        """Note what the first forward of a chunk found."""
        self._known[self._keys(chunk)[1]] = learned

    def _keys(self, chunk: int) -> tuple[Any, Any]:
        """Return the keys of what the place before has told of a chunk, and of all that is known of it."""
        before = self._key, chunk, self._before.get(chunk, 0)
        return before, (*before, self._trained)

    def is_blank(self, chunk: int, micro_batch: int) -> bool:
        """Return whether a chunk gets no input, since the place before has failed."""
        return (chunk, micro_batch) in self._blank

    def expect(self, action: Action | None) -> None:
        """Begin to receive a message, if its shapes are known."""
        if action is None or action in self._incoming:
            return
        kind, chunk, micro_batch = action
        learned = self.learned(chunk)
        if self.is_blank(chunk + (kind is Kind.RECEIVE_GRADIENT), micro_batch):
            return
        if kind is Kind.RECEIVE_INPUT and learned.is_heard:
            self._incoming[action] = self._mail.receive(*action, learned.arrives)
        elif kind is Kind.RECEIVE_GRADIENT and learned.is_known and (chunk == 0 or chunk in self._heard):
            borders = [one for one in learned.sent if one.has_gradient]
            self._incoming[action] = self._mail.receive(*action, borders)

    def take(self, kind: Kind, chunk: int, micro_batch: int) -> tuple[Tensor, ...] | None:
        """Wait for a message, and return its tensors; None if there is none."""
        message = self._incoming.pop(Action(kind, chunk, micro_batch), None)
        return None if message is None else message.wait()

    def hear(self, chunk: int, micro_batch: int) -> Learned:
        """Return what is known of a chunk; the first message of a step may tell more.

        Raises:
            RankMismatchError: the place before has inputs of other shapes.
        """
        if chunk == 0 or chunk in self._heard:
            return self.learned(chunk)
        shapes, trained, told = self._mail.hear(chunk, micro_batch)
        if shapes != self._shapes:
            raise RankMismatchError(
                f"{self._mesh} The place before this one on the pipe got inputs of other shapes than {self._key}. "
                f"{SAME}"
            )
        if told is None:
            self._blank.add((chunk, micro_batch))
            return self.learned(chunk)
        self._heard.add(chunk)
        self._before[chunk] = trained
        if told is not NOTHING:
            for learned in (self._known.setdefault(self._keys(chunk)[0], Learned()), self.learned(chunk)):
                learned.is_heard, learned.arrives, learned.heard = True, told["sent"], told["outputs"]
        self.expect(Action(Kind.RECEIVE_INPUT, chunk, micro_batch))
        return self.learned(chunk)

    def send_output(self, chunk: int, micro_batch: int, outputs: Sequence[Tensor]) -> None:
        """Send the output of a chunk: zeros after an exception, and nothing if its shapes are not known."""
        learned = self.learned(chunk)
        if chunk + 1 not in self._heard:
            told: Any = NOTHING
            if not learned.is_known:
                told = None
            elif not learned.is_told:
                told = {"sent": learned.sent, "outputs": {**learned.heard, **learned.outputs}}
            trained = zlib.crc32(f"{self._before.get(chunk, 0)} {self._trained}".encode())
            self._mail.tell(chunk, micro_batch, self._shapes, trained, told)
            if learned.is_known:
                learned.is_told = True
                self._heard.add(chunk + 1)
        if not learned.is_known:
            self._blank.add((chunk + 1, micro_batch))
        else:
            self._mail.send(Kind.SEND_OUTPUT, chunk, micro_batch, outputs or [*map(self._zeros, learned.sent)])

    def send_gradient(self, chunk: int, micro_batch: int, grads: Sequence[Tensor | None] | None = None) -> None:
        """Send the gradients of a chunk's input, once; zeros where no loss depends on it."""
        if (chunk, micro_batch) in self._sent | self._blank:
            return
        borders = [one for one in self.learned(chunk).arrives if one.has_gradient]
        full = [
            self._zeros(border) if grad is None else grad
            for border, grad in zip(borders, grads or [None] * len(borders), strict=True)
        ]
        self._mail.send(Kind.SEND_GRADIENT, chunk, micro_batch, full)
        self._sent.add((chunk, micro_batch))  # after an exception the action of the schedule sends zeros

    def _zeros(self, border: Border) -> Tensor:
        return torch.zeros(border.shape, dtype=border.dtype, device=self._mesh.device)

    def give(self, tensors: Sequence[Tensor], *, is_read: bool) -> None:
        """Give back the memory of an input: now, if every message that may read it was received, or after the step."""
        if is_read:
            self._mail.give(tensors)
        else:
            self._kept += tensors

    def finish(self) -> None:
        """Wait for everything that was sent."""
        self._mail.finish()
        self._mail.give(self._kept)
