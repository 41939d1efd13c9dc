"""The random generators of this rank as bytes: torch's, CUDA's, numpy's and Python's.

Owns their layouts, so that none of them needs pickling.
"""

import random
import struct

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["check_generators", "read_generators", "write_generators"]

Tensor = torch.Tensor

_TORCH = struct.Struct("<QiiQ")
_NUMPY = struct.Struct("<iid")
_PYTHON = struct.Struct("<625I?d")
WORDS = 624


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


def check_generators(states: dict[str, Tensor]) -> None:
    """Raise ValueError, or the generator's own error, for invalid states."""
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
    """Put each generator into a state that `read_generators` returned and `check_generators` has seen."""
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
