"""The random generators of this rank: their states as bytes, and which of a checkpoint's are its own.

Owns the layouts of torch's, CUDA's, numpy's and Python's states, so that none of them needs pickling.
"""

import random
import struct
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from zeroshard.checkpoint.cuts import ranks_here
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.values import tensor_of
from zeroshard.table.errors import CheckpointError
from zeroshard.wire.mesh import Mesh

__all__ = ["SHARED", "check_generators", "check_states", "read_generators", "saved_generators", "write_generators"]

Tensor = torch.Tensor

_TORCH = struct.Struct("<QiiQ")
_NUMPY = struct.Struct("<iid")
_PYTHON = struct.Struct("<625I?d")
WORDS = 624
SHARED: Final = frozenset(["torch", "cuda"])
"""Generators of which ranks along "tensor" have one stream. It is saved once: elsewhere these ranks are no copies."""


def read_generators(device: torch.device) -> dict[str, Tensor]:
    """Return the state of each generator, (nbytes,) uint8."""
    # The legacy interface is the one that user code and torch's workers seed.
    _, key, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    assert version == 3, f"Python's generator has state version {version}; 3 is known"
    states = {
        "torch": torch.get_rng_state().clone(),
        "numpy": _tensor(
            np.asarray(key, dtype="<u4").tobytes() + _NUMPY.pack(int(place), int(has_gauss), float(gauss))
        ),
        "python": _tensor(_PYTHON.pack(*words, next_gauss is not None, next_gauss or 0.0)),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def check_generators(mesh: Mesh, reader: CheckpointReader) -> None:
    """Raise if the checkpoint's generators of this rank are invalid; those of other programs have none."""
    if not any(spec.kind == "rng" for spec in reader.states.values()):
        return
    for name, state in read_generators(mesh.device).items():
        if (rank := _source(mesh, name)) >= reader.manifest.world_size:
            continue
        spec = reader.states.get(f"rng/{rank}/{name}")
        if spec is None and name in SHARED:
            continue
        if spec is None or spec.shape != (state.numel(),) or spec.dtype != "U8":
            raise CheckpointError(
                f"{reader.path}: the state of the random generator '{name}' of rank {rank} is missing or invalid."
            )
    try:
        check_states(saved_generators(mesh, reader), read_generators(mesh.device))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{reader.path}: the state of a random generator of rank {rank} is invalid ({error})."
        ) from error


def saved_generators(mesh: Mesh, reader: CheckpointReader) -> dict[str, Tensor]:
    """Read the generators of this rank; one that the checkpoint does not have keeps its state."""
    states = read_generators(mesh.device)
    for name in states:
        full_name = f"rng/{_source(mesh, name)}/{name}"
        if (spec := reader.states.get(full_name)) is not None:
            states[name] = tensor_of(reader.read_state(full_name, 0, spec.numel), "U8")
    return states


def _source(mesh: Mesh, name: str) -> int:
    """Return the rank of the checkpoint whose generator this rank takes."""
    return ranks_here(mesh)[mesh.tensor_ranks[0] if name in SHARED else mesh.rank]


def check_states(states: dict[str, Tensor], known: dict[str, Tensor]) -> None:
    """Raise ValueError, or the generator's own error, for invalid states.

    Args:
        known: what `read_generators` returns.
    """
    for name, state in states.items():
        is_known = name in known and isinstance(state, Tensor) and state.dtype == torch.uint8
        if not is_known or state.shape != known[name].shape:
            raise ValueError(f"'{name}' is of no generator, or has another size")
    torch.Generator().set_state(states["torch"])
    # Numpy looks at nothing and torch not at both together; they would read beyond their words.
    _, left, _, place = _TORCH.unpack_from(states["torch"].numpy().tobytes())
    if place + left - 1 > WORDS:
        raise ValueError(f"torch's generator is at word {place} of {WORDS}, with {left - 1} to come")
    _, _, place, *_ = _numpy_state(states["numpy"])
    if not 0 <= place <= WORDS:
        raise ValueError(f"numpy's generator is at word {place} of {WORDS}")
    random.Random().setstate(_python_state(states["python"]))


def write_generators(states: dict[str, Tensor], device: torch.device) -> None:
    """Put each generator into a state that `read_generators` returned or `check_generators` has seen."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(_numpy_state(states["numpy"]))
    random.setstate(_python_state(states["python"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _numpy_state(state: Tensor) -> tuple[str, NDArray[np.uint32], int, int, float]:
    data = state.numpy().tobytes()
    place, has_gauss, gauss = _NUMPY.unpack(data[4 * WORDS :])
    return "MT19937", np.frombuffer(data[: 4 * WORDS], dtype="<u4"), place, has_gauss, gauss


def _python_state(state: Tensor) -> tuple[int, tuple[int, ...], float | None]:
    *words, has_next, next_gauss = _PYTHON.unpack(state.numpy().tobytes())
    return 3, tuple(words), next_gauss if has_next else None


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
