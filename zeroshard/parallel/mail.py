"""The messages between the places of a pipe: activations and their gradients, in memory that is allocated once.

Owns buffers, messages under way, and what places tell each other of shapes. It must not know schedules or models.
Read `Comm.send` (`wire/comm.py`) first.

Note: when a message has arrived
    A send is over when its receiver has begun to receive it, which its sender sees only by a wait. So an activation is
    kept until its gradient has come back, and then the wait returns at once. Of gradients, as many are kept as
    micro-batches may be in flight: those before them have been received, or later activations would not have come.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor

from zeroshard.parallel.chunked import Border
from zeroshard.parallel.waits import Waits
from zeroshard.table.pipeline import Kind
from zeroshard.table.trace import Ledger
from zeroshard.wire.comm import Comm, Pending, Tag

__all__ = ["Mail", "NOTHING", "check_shared"]

SHARED: Final = (Tag.BUCKETS - 4, Tag.BUCKETS - 6)
"""In tags, beyond those of activations."""
MOST_DIMS: Final = 8
DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
NOTHING: Final = object()
"""What a place tells of a shape that it has told before."""

TENSORS = 64
"""The largest number of tensors that cross a border, and a bound of their messages' tags."""


Shape = tuple[tuple[int, ...], torch.dtype]


def check_shared(tensor: Tensor, first: Tensor, whose: str) -> None:
    """Raise TypeError if a tensor cannot be a part of an output that all places get.

    Args:
        first: that of the first micro-batch.
        whose: what returned it, for the error.
    """
    if tensor.dtype not in DTYPES or tensor.ndim > MOST_DIMS:
        raise TypeError(
            f"pipe.forward() returns tensors of at most {MOST_DIMS} dimensions and of a usual dtype; {whose} returned "
            f"{tensor.ndim} dimensions of {tensor.dtype}."
        )
    if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
        raise TypeError(
            f"pipe.forward() joins the outputs of micro-batches along the first dimension; {whose} returned "
            f"{tuple(tensor.shape)} {tensor.dtype} after {tuple(first.shape)} {first.dtype}."
        )


@final
@dataclass
class Incoming:
    """A message that is being received."""

    tensors: tuple[Tensor, ...]
    waits: Waits
    pending: list[Pending] = field(default_factory=list)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the message, and return its tensors."""
        with self.waits.waiting():
            for one in self.pending:
                one.wait()
        self.pending = []
        return self.tensors


@final
class Mail:
    """The messages of one rank to and from its neighbours along the pipe.

    Args:
        comm: the communicator of all places.
        ranks: the rank of `comm` at each place along the pipe.
        most: the number of gradients whose messages may be under way.
        ledger: counts the memory that messages are received into.
    """

    def __init__(self, comm: Comm, ranks: Sequence[int], micro_batches: int, most: int, ledger: Ledger) -> None:
        self._comm, self._ranks, self._micro_batches, self._most = comm, ranks, micro_batches, most
        self._ledger, self._counted_bytes = ledger, 0
        self._free: dict[Shape, list[Tensor]] = {}
        self._used: set[Shape] = set()
        """What the step needs: memory of other shapes is dropped when the next one begins."""
        self._outputs: dict[tuple[int, int], list[tuple[Pending, Tensor]]] = {}
        """Activations under way, by chunk and micro-batch."""
        self._gradients: deque[list[tuple[Pending, Tensor]]] = deque()
        self._calls = 0
        self.waits = Waits(comm.mesh.device)

    def begin(self) -> None:
        """Begin a step or an evaluation: its messages are others than those before."""
        self._calls += 1
        self._free = {shape: free for shape, free in self._free.items() if shape in self._used}
        self._used = set()
        # Of a step that failed, what was received is not given back.
        self._count(sum(one.nbytes for free in self._free.values() for one in free) - self._counted_bytes)

    def _count(self, nbytes: int) -> None:
        self._counted_bytes += nbytes
        self._ledger.add("transient", nbytes)

    def finish(self) -> None:
        """Wait for everything that was sent."""
        for one in [*self._outputs.values(), *self._gradients]:
            self._end(one)
        self._outputs, self._gradients = {}, deque()

    def _tag(self, kind: Kind, chunk: int, micro_batch: int, number: int) -> Tag:
        """Return the tag of one tensor of a message.

        Args:
            kind: the kind of the action that receives it.
            chunk: the chunk that receives it.
        """
        about = (chunk * TENSORS + number) * 2 + (kind is Kind.RECEIVE_GRADIENT)
        what = self.name(kind, chunk, micro_batch, len(self._ranks))
        return Tag(self._calls * self._micro_batches + micro_batch, about, what)

    @staticmethod
    def name(kind: Kind, chunk: int, micro_batch: int, places: int) -> str:
        """Return the name of a message, for errors; see `_tag`."""
        name, source = ("gradient", chunk + 1) if kind is Kind.RECEIVE_GRADIENT else ("activation", chunk - 1)
        of = f" of chunk {source}" if source >= places or chunk >= places else ""
        return f"the {name} of micro-batch {micro_batch} from pipe {source % places}{of}"

    def _rank(self, chunk: int) -> int:
        return self._ranks[chunk % len(self._ranks)]

    # -- tensors ------------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, chunk: int, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Send the output of a chunk to the next one, or the gradients of its input to the one before; do not wait."""
        is_back = kind is Kind.SEND_GRADIENT
        to, received = (chunk - 1, Kind.RECEIVE_GRADIENT) if is_back else (chunk + 1, Kind.RECEIVE_INPUT)
        works = []
        for number, tensor in enumerate(tensors):
            dense = tensor.detach().contiguous()
            tag = self._tag(received, to, micro_batch, number)
            works.append((self._comm.send(dense, self._rank(to), tag), dense))
        if not is_back:
            self._outputs.setdefault((chunk, micro_batch), []).extend(works)
            return
        self._gradients.append(works)
        if len(self._gradients) > self._most:
            self._end(self._gradients.popleft())

    def has_arrived(self, chunk: int, micro_batch: int) -> None:
        """Note that the next chunk has received an output: its gradient is here."""
        self._end(self._outputs.pop((chunk, micro_batch), []))

    def _end(self, works: Sequence[tuple[Pending, Tensor]]) -> None:
        with self.waits.waiting():
            for pending, _ in works:
                pending.wait()

    def receive(self, kind: Kind, chunk: int, micro_batch: int, borders: Sequence[Border]) -> Incoming:
        """Begin to receive the input of a chunk, or the gradients of its output."""
        source = chunk + 1 if kind is Kind.RECEIVE_GRADIENT else chunk - 1
        incoming = Incoming(tuple(self._take(border) for border in borders), self.waits)
        for number, tensor in enumerate(incoming.tensors):
            tag = self._tag(kind, chunk, micro_batch, number)
            incoming.pending.append(self._comm.receive(tensor, self._rank(source), tag))
        return incoming

    def _take(self, border: Border) -> Tensor:
        self._used.add((border.shape, border.dtype))
        if free := self._free.get((border.shape, border.dtype)):
            return free.pop()
        with torch.inference_mode(False):  # for later steps, too
            made = torch.empty(border.shape, dtype=border.dtype, device=self._comm.mesh.device)
        self._count(made.nbytes)
        return made

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Take back the memory of a message that nothing reads any more."""
        for one in tensors:
            self._free.setdefault((tuple(one.shape), one.dtype), []).append(one)

    def share(self, tensor: Tensor | None, place: int) -> Tensor:
        """Return the tensor of one place along the pipe, on every rank along it; None elsewhere."""
        source, what = self._ranks[place], f"the output of the model from pipe {place}"
        tags = [Tag(self._calls, bucket, what) for bucket in SHARED]
        if tensor is not None:
            shape = [tensor.ndim, DTYPES.index(tensor.dtype), *tensor.shape]
            head = torch.tensor([*shape, *[0] * (MOST_DIMS + 2 - len(shape))], device="cpu")
            sent, others = (head, tensor.contiguous()), [rank for rank in self._ranks if rank != source]
            pending = [self._comm.send(one, rank, tag) for rank in others for one, tag in zip(sent, tags, strict=True)]
            for one in pending:
                one.wait()
            return tensor
        head = torch.zeros(MOST_DIMS + 2, dtype=torch.int64, device="cpu")
        self._comm.receive(head, source, tags[0]).wait()
        ndim, dtype, *sizes = head.tolist()
        taken = torch.empty(sizes[:ndim], dtype=DTYPES[dtype], device=self._comm.mesh.device)
        self._comm.receive(taken, source, tags[1]).wait()
        return taken

    # -- what the first message of a shape says -----------------------------------------------------------------------

    def tell(self, chunk: int, micro_batch: int, shapes: int, trained: int, told: Any = NOTHING) -> None:
        """Tell the next chunk, before its first message in a step, what its input follows from, and `told`, if any.

        Args:
            shapes: a checksum of the shapes of the model's inputs.
            trained: a checksum of what is trained in this chunk and those before it.
            told: nested tuples, lists and mappings of borders, numbers and texts.
        """
        text = b"" if told is NOTHING else json.dumps(_encoded(told)).encode()
        head = torch.tensor([shapes, trained, len(text)], device="cpu")
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else None
        works = self._outputs.setdefault((chunk, micro_batch), [])
        for number, tensor in enumerate((head, body)):
            if tensor is not None:
                tag = self._tag(Kind.RECEIVE_INPUT, chunk + 1, micro_batch, TENSORS - 1 - number)
                works.append((self._comm.send(tensor, self._rank(chunk + 1), tag), tensor))

    def hear(self, chunk: int, micro_batch: int) -> tuple[int, int, Any]:
        """Return what the chunk before tells: the two checksums, and the rest, or `NOTHING`."""
        tags = [self._tag(Kind.RECEIVE_INPUT, chunk, micro_batch, TENSORS - 1 - number) for number in range(2)]
        head = torch.zeros(3, dtype=torch.int64, device="cpu")
        with self.waits.waiting():
            self._comm.receive(head, self._rank(chunk - 1), tags[0]).wait()
        shapes, trained, size = head.tolist()
        if not size:
            return shapes, trained, NOTHING
        body = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._comm.receive(body, self._rank(chunk - 1), tags[1]).wait()
        return shapes, trained, _decoded(json.loads(bytes(body.tolist())))


def _encoded(value: Any) -> Any:
    """Return a value of JSON for nested borders."""
    if isinstance(value, Border):
        return {"border": [list(value.shape), str(value.dtype).removeprefix("torch."), value.has_gradient]}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(one) for one in value]}
    if isinstance(value, list):
        return [_encoded(one) for one in value]
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(one)] for key, one in value.items()]}
    return value


def _decoded(value: Any) -> Any:
    """Return the value that `_encoded` got."""
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "border":
        return Border(tuple(content[0]), getattr(torch, content[1]), content[2])
    if kind == "tuple":
        return tuple(_decoded(one) for one in content)
    return {key: _decoded(one) for key, one in content}
