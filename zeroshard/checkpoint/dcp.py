"""A checkpoint for `torch.distributed.checkpoint`, so that FSDP2 and other jobs load it without conversion.

Owns the translation of boxes, which torch asks for, into the flat ranges that files hold. Not imported by the rest of
the package. Read `reader.py` first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from zeroshard.checkpoint.load import read_content, to_rows
from zeroshard.checkpoint.manifest import MANIFEST, split_state
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.values import bytes_of, dtype_name, dtype_of, tensor_of
from zeroshard.table.errors import CheckpointError

__all__ = ["DcpReader"]

Tensor = torch.Tensor


@final
class DcpReader(StorageReader):
    """The storage reader of `torch.distributed.checkpoint.load` for a checkpoint that `zero.save` wrote.

    A state dict's tensors are found under the names of the sharded model. Optimizers' states, counters among them, are
    found as `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` names them; hyper-parameters are not
    tensors, and stay the job's own. Every byte that is read is compared with its checksum.

    Args:
        path: the checkpoint.
        model: the key in the state dict under which the model's is; "" where it is the state dict itself.
        optimizers: the keys under which those of the optimizers are, in the order that `zs.shard` was given.
        cast: convert dtypes that differ, instead of raising.

    ```python
    import tempfile, torch, zeroshard as zs
    import torch.distributed.checkpoint as dcp
    from zeroshard.checkpoint.dcp import DcpReader

    model, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    zero = zs.shard(model)
    with tempfile.TemporaryDirectory() as folder:
        zero.save(f"{folder}/step-1")
        dcp.load(other.state_dict(), storage_reader=DcpReader(f"{folder}/step-1"), no_dist=True)
    with zero.gathered():
        assert torch.equal(model.weight, other.weight)
    ```
    """

    def __init__(
        self, path: str | PathLike[str], *, model: str = "", optimizers: Sequence[str] = (), cast: bool = False
    ) -> None:
        self._path, self._model, self._optimizers, self._cast = Path(path), model, tuple(optimizers), cast
        self._entries: dict[str, _Entry] = {}

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Begin a new load, of another checkpoint if one is named."""
        self._path, self._entries = Path(checkpoint_id or self._path), {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata: each tensor as a box, of which any part can be read."""
        self._entries = dict(self._list_entries())
        described = {key: entry.describe() for key, entry in self._entries.items()}
        return Metadata(dict(described), storage_meta=StorageMeta(checkpoint_id=str(self._path)))

    def _list_entries(self) -> "Iterator[tuple[str, _Entry]]":
        reader = CheckpointReader(self._path)
        prefix = f"{self._model}." if self._model else ""
        for name, spec in reader.specs.items():
            yield prefix + name, _Entry(spec, reader.read)
        for alias, name in (reader.aliases or {}).items():
            yield prefix + alias, _Entry(reader.specs[name], reader.read)
        for spec in reader.states.values():
            if spec.kind != "state":
                continue
            number, key, name = split_state(spec.name)
            if number < len(self._optimizers):
                yield f"{self._optimizers[number]}.state.{name}.{key}", _Entry(spec, reader.read_state)
        for optimizer, described in zip(self._optimizers, read_content(reader).optimizers, strict=False):
            for name, state in described["states"].items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield f"{optimizer}.state.{name}.{key}", _Entry.of(value)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: every rank has read the manifest."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            key = item.storage_index.fqn
            values = self._entries[key].read_box(item.storage_offsets, item.lengths)
            if values.dtype != target.dtype and not self._cast:
                raise CheckpointError(
                    f"'{key}' is {target.dtype} in the state dict and {values.dtype} in {self._path} (cast=True "
                    "converts)."
                )
            target.copy_(values)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return whether this is the path of a checkpoint."""
        return (Path(checkpoint_id) / MANIFEST).is_file()


@dataclass(frozen=True)
class _Entry:
    """A tensor, and the function that reads a range of its elements."""

    spec: Spec
    read: Callable[[str, int, int], bytearray]

    @classmethod
    def of(cls, value: Tensor) -> "_Entry":
        """Return the entry of a small tensor in memory."""
        spec = Spec("state", "", dtype_name(value.dtype, "A counter"), tuple(value.shape))
        return cls(spec, lambda _, start, stop: bytearray(bytes_of(value.reshape(-1)[start:stop])))

    def describe(self) -> TensorStorageMetadata:
        shape = torch.Size(self.spec.shape)
        whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
        return TensorStorageMetadata(TensorProperties(dtype=dtype_of(self.spec.dtype)), shape, [whole])

    def read_box(self, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Return a box of the tensor; reads the rows that contain the box."""
        spec = self.spec
        if spec.order or not spec.shape:
            whole = tensor_of(self.read(spec.name, 0, spec.numel), spec.dtype)
            return to_rows(whole, spec)[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        row = prod(spec.shape[1:])
        data = self.read(spec.name, offsets[0] * row, (offsets[0] + lengths[0]) * row)
        rows = tensor_of(data, spec.dtype).reshape(lengths[0], *spec.shape[1:])
        return rows[(slice(None), *(slice(o, o + n) for o, n in zip(offsets[1:], lengths[1:], strict=True)))]
