"""Conversion of a program's values to JSON and back: numbers, strings, lists, mappings, small tensors.

Owns the words for what JSON lacks: an object with one key that begins with "$". Nothing is ever executed or imported
to read a value back.
"""

import base64
import binascii
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.table.errors import CheckpointError
from zeroshard.torch_private import bytes_in

__all__ = [
    "PIECE_NUMEL",
    "bytes_of",
    "check_key",
    "decode",
    "dtype_name",
    "dtype_of",
    "encode",
    "fill_from",
    "tensor_of",
]

Tensor = torch.Tensor

PIECE_NUMEL = 1 << 20
"""How much of a tensor is read or written at a time, where it is not in memory already."""
MAX_DEPTH = 64
MAX_DIMS = 64
MAX_ALIKE = 16
"""So many keys of a mapping may have one hash: there are as many ways to write a number, and few."""

MAX_TENSOR_BYTES = 1 << 20
"""Largest tensor among such values; larger ones belong into the model, as buffers."""

_BY_NAME = (
    ("BOOL", torch.bool),
    ("U8", torch.uint8),
    ("I8", torch.int8),
    ("F8_E4M3", torch.float8_e4m3fn),
    ("F8_E5M2", torch.float8_e5m2),
    ("I16", torch.int16),
    ("U16", torch.uint16),
    ("F16", torch.float16),
    ("BF16", torch.bfloat16),
    ("I32", torch.int32),
    ("U32", torch.uint32),
    ("F32", torch.float32),
    ("I64", torch.int64),
    ("U64", torch.uint64),
    ("F64", torch.float64),
    ("C64", torch.complex64),
)


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the safetensors name of a dtype.

    Raises:
        CheckpointError: it has none.
    """
    for name, known in _BY_NAME:
        if known == dtype:
            return name
    raise CheckpointError(f"{where} is of {dtype}, which safetensors cannot hold. Keep it out of the model's state.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a safetensors name."""
    return dict(_BY_NAME)[name]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's values, shared with it where they lie in order on the CPU."""
    raw = bytes_in(tensor.detach().cpu())
    return raw.numpy().data.cast("B") if raw.numel() else memoryview(b"")


def fill_from(values: Tensor, start: int, buffer: memoryview) -> None:
    """Fill `buffer` with elements of a whole tensor from `start` on, row by row."""
    flat = values.reshape(-1)
    buffer[:] = bytes_of(flat[start : start + len(buffer) // flat.itemsize])


def tensor_of(data: bytearray, dtype: str) -> Tensor:
    """Return a flat CPU tensor that shares `data`."""
    kind = dtype_of(dtype)
    return torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind, device="cpu")


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """Return `value` as JSON can hold it.

    Args:
        where: how a message calls the value, as in "extra['scheduler']".

    Raises:
        CheckpointError: it holds something else; the text says where.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where} is nested deeper than {MAX_DEPTH}.")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": _encode_tensor(value, where)}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{place}]", depth + 1) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [[check_key(key, where), encode(item, f"{where}[{key!r}]", depth + 1)] for key, item in value.items()]
        if type(value) is Counter:
            # `MultiStepLR` counts milestones so, and asks for those that are not there.
            return {"$counter": pairs}
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs)
        return dict(pairs) if is_plain else {"$items": pairs}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved without pickling. "
        "Give its numbers, strings, lists, mappings or tensors (most objects have a state_dict())."
    )


def check_key(key: Any, where: str) -> Any:
    """Return a key of a mapping.

    Raises:
        CheckpointError: it is neither a text nor a finite number.
    """
    if isinstance(key, str):
        is_key = not any("\ud800" <= mark <= "\udfff" for mark in key)
    else:
        is_key = key is None or isinstance(key, (bool, int)) or (isinstance(key, float) and math.isfinite(key))
    if not is_key:
        raise CheckpointError(
            f"{where} has the key {key!a:.80}; keys must be strings that UTF-8 can encode, or finite numbers."
        )
    return key


def _encode_tensor(value: Tensor, where: str) -> dict[str, Any]:
    if value.nbytes > MAX_TENSOR_BYTES:
        raise CheckpointError(
            f"{where} is a tensor of {value.nbytes} bytes; at most {MAX_TENSOR_BYTES} are saved here. Make it a buffer "
            "of the model."
        )
    data = base64.b64encode(bytes_of(value)).decode()
    return {"data": data, "dtype": dtype_name(value.dtype, where), "shape": list(value.shape)}


def decode(value: Any, where: str, depth: int = 0) -> Any:
    """Return the value that `encode` was given; tensors are on the CPU.

    Raises:
        CheckpointError: the file holds what `encode` does not write.
    """
    if depth > 2 * MAX_DEPTH:
        raise CheckpointError(f"{where}: nested deeper than {MAX_DEPTH}.")
    if isinstance(value, list):
        return [decode(item, where, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    words = [key for key in value if key.startswith("$")]
    if not words:
        return {key: decode(item, where, depth + 1) for key, item in value.items()}
    try:
        return _decode_word(words[0], value[words[0]], where, depth, len(value))
    except (ValueError, TypeError, KeyError, RuntimeError, binascii.Error) as error:
        raise CheckpointError(f"{where}: {words[0]!a:.80} has invalid contents ({str(error)[:200]}).") from error


def _decode_word(word: str, content: Any, where: str, depth: int, count: int) -> Any:
    if count == 1 and word == "$float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if count == 1 and word == "$tuple" and isinstance(content, list):
        return tuple(decode(item, where, depth + 1) for item in content)
    if count == 1 and word in ("$items", "$counter") and isinstance(content, list):
        items = _decode_items(content, where, depth)
        return Counter(items) if word == "$counter" else items
    if count == 1 and word == "$tensor" and isinstance(content, dict):
        return _decode_tensor(content["data"], content["dtype"], content["shape"])
    raise ValueError("an unknown word")


def _decode_items(pairs: list[Any], where: str, depth: int) -> dict[Any, Any]:
    hashes = Counter(hash(check_key(key, where)) for key, _ in pairs if not isinstance(key, str))
    # Python's numbers hash to themselves modulo 2^61 - 1, so a file can hold many that meet in one place of a table,
    # which then takes quadratic time to fill.
    if hashes and hashes.most_common(1)[0][1] > MAX_ALIKE:
        raise ValueError("keys that hash alike")
    value = {key: decode(item, where, depth + 1) for key, item in pairs}
    if len(value) != len(pairs):
        raise ValueError("a key twice")
    return value


def _decode_tensor(text: Any, dtype: Any, shape: Any) -> Tensor:
    if not isinstance(text, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise ValueError("no tensor's data, dtype and shape")
    if len(text) > 4 * (MAX_TENSOR_BYTES // 3 + 1):
        raise ValueError(f"a tensor of some {len(text) * 3 // 4} bytes")
    if len(shape) > MAX_DIMS or not all(type(size) is int and 0 <= size <= MAX_TENSOR_BYTES for size in shape):
        raise ValueError("a shape of more dimensions, or larger ones, than there are")
    flat = tensor_of(bytearray(base64.b64decode(text, validate=True)), dtype)
    if flat.numel() != math.prod(shape):
        raise ValueError(f"{flat.numel()} elements of a tensor of {math.prod(shape)}")
    return flat.reshape(shape)
