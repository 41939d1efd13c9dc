"""Pickles of other programs, opened so that nothing in them runs.

Owns the two ways: files of `torch.save` with `weights_only=True`, and the metadata of torch.distributed.checkpoint.
torch unpickles the latter without a check; here it is read twice, first with stand-ins for the few names that torch
writes, where any other name and any other way to set an attribute is an error. No other module opens pickles.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import Metadata

from zeroshard.checkpoint import files
from zeroshard.checkpoint.reader import opened, read_exactly
from zeroshard.table.errors import CheckpointError

__all__ = ["read_dcp_metadata", "read_tensors", "read_value"]

MAX_METADATA_BYTES: Final = 256 << 20
"""Some 70 bytes for each part of a tensor: a model of 1,000 tensors, with two states each, on 1,000 ranks."""

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_KNOWN: Final = frozenset(
    [
        *(
            (_METADATA, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (_FILES, "_StorageInfo"),
        (_FILES, "_StoragePrefix"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(("torch", str(dtype).removeprefix("torch.")) for dtype in vars(torch).values() if type(dtype) is torch.dtype),
    ]
)
"""What torch's metadata is made of: records, numbers and names, of which none opens, imports or runs anything."""


def read_tensors(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a `torch.save`d state dict, which stay in the file until they are read.

    Raises:
        CheckpointError: the file holds anything but a mapping from names to tensors.
    """
    files.refuse_link(path)
    with opened(path):
        pass
    try:
        value = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise _refused(path, error) from error
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not a state dict of tensors.")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise CheckpointError(
                f"{path}: {name!a:.80} is a {type(tensor).__name__}; only a state dict of dense tensors can be "
                "imported. Save the model's state_dict() alone."
            )
    return value


def read_value(data: io.BytesIO, where: str) -> Any:
    """Return a small value of `torch.save`: numbers, texts, lists, mappings, tensors.

    Raises:
        CheckpointError: it holds another object.
    """
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _refused(where, error) from error


def read_dcp_metadata(path: Path) -> Metadata:
    """Return the metadata of a folder of torch.distributed.checkpoint.

    Args:
        path: the file `.metadata`.

    Raises:
        CheckpointError: it is damaged, or holds a name that torch does not write there.
    """
    with opened(path) as descriptor:
        nbytes = files.size_of(descriptor)
        if nbytes > MAX_METADATA_BYTES:
            raise CheckpointError(f"{path}: has {nbytes} bytes; at most {MAX_METADATA_BYTES} are read.")
        data = bytearray(nbytes)
        read_exactly(descriptor, memoryview(data), 0, path)
    try:
        _Vetting(io.BytesIO(data)).load()
        metadata = _OfKnownNames(io.BytesIO(data)).load()
    except Exception as error:
        raise _refused(path, error) from error
    if type(metadata) is not Metadata:
        raise CheckpointError(f"{path}: holds a {type(metadata).__name__}, not the metadata of a checkpoint.")
    return metadata


def _refused(where: object, error: Exception) -> CheckpointError:
    text = (str(error).splitlines() or [""])[0]
    return CheckpointError(
        f"{where}: cannot be read without running code that it names, or is damaged ({type(error).__name__}: "
        f"{text[:200]}). Only numbers, texts and tensors are read from other programs' pickles."
    )


class _OfKnownNames(pickle.Unpickler):
    """An unpickler that finds what torch's metadata is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise CheckpointError(f"it names {module}.{name}"[:200])
        return super().find_class(module, name)


class _Vetting(_OfKnownNames):
    """The same with stand-ins: what a pickle calls and sets is looked at before anything of torch's takes part."""

    def find_class(self, module: str, name: str) -> Any:
        super().find_class(module, name)
        # A class of its own for each name: what a pickle may do to a class, it does to one that nobody else has.
        return type("_StandIn", (_StandIn,), {})


class _StandIn:
    """An object of a name in a pickle; attributes are set by a mapping or a tuple, never one by one."""

    def __init__(self, *args: Any) -> None:
        """Take what the real name takes."""

    def __setstate__(self, state: Any) -> None:
        is_slots = isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)
        if is_slots or not isinstance(state, (dict, tuple)):
            raise CheckpointError("it sets attributes in another way than torch's metadata")
