"""Calls a function in front of each action of a pipeline's steps: what breaks there is planted with it.

Owns where the runner begins the actions of `table/pipeline.py`. It must not know what is planted.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zeroshard.parallel.mail import Incoming, Mail
from zeroshard.parallel.runner import _Step
from zeroshard.table.pipeline import Action, Kind

__all__ = ["watch_actions"]


def watch_actions(
    before: Callable[[Action], None], passes: Callable[[Action, Sequence[Tensor]], None] = lambda *_: None
) -> None:
    """Call `before` in front of each action of each pipeline of this process, from now on.

    Args:
        passes: called with the tensors of each message: before they are sent, or after they came.
    """
    forward, backward, send, receive = _Step._forward, _Step._backward, Mail.send, Mail.receive

    def watched_forward(step: _Step, chunk: int, micro_batch: int) -> None:
        before(Action(Kind.FORWARD, chunk, micro_batch))
        forward(step, chunk, micro_batch)

    def watched_backward(step: _Step, chunk: int, micro_batch: int) -> None:
        before(Action(Kind.BACKWARD, chunk, micro_batch))
        backward(step, chunk, micro_batch)

    def watched_send(mail: Mail, kind: Kind, chunk: int, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        before(Action(kind, chunk, micro_batch))
        passes(Action(kind, chunk, micro_batch), tensors)
        send(mail, kind, chunk, micro_batch, tensors)

    def watched_receive(mail: Mail, kind: Kind, chunk: int, micro_batch: int, borders: Sequence[Any]) -> Incoming:
        incoming = receive(mail, kind, chunk, micro_batch, borders)
        wait = incoming.wait

        def watched_wait() -> tuple[Tensor, ...]:
            before(Action(kind, chunk, micro_batch))
            tensors = wait()
            passes(Action(kind, chunk, micro_batch), tensors)
            return tensors

        incoming.wait = watched_wait  # type: ignore[method-assign]
        return incoming

    _Step._forward, _Step._backward = watched_forward, watched_backward  # type: ignore[method-assign]
    Mail.send, Mail.receive = watched_send, watched_receive  # type: ignore[method-assign]
