"""The random generators of this rank as bytes: torch's, CUDA's, numpy's and Python's.

Owns their layouts, so that none of them needs pickling.
"""

import random
import struct

import numpy as np
import torch

__all__ = ["read_generators", "write_generators"]

Tensor = torch.Tensor

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


def write_generators(states: dict[str, Tensor], device: torch.device) -> None:
    """Put each generator into a state that `read_generators` returned."""
    torch.set_rng_state(states["torch"])
    data = bytes(states["numpy"].tolist())
    place, has_gauss, gauss = _NUMPY.unpack(data[4 * WORDS :])
    np.random.set_state(("MT19937", np.frombuffer(data[: 4 * WORDS], dtype="<u4"), place, has_gauss, gauss))
    *words, has_next, next_gauss = _PYTHON.unpack(bytes(states["python"].tolist()))
    random.setstate((3, tuple(words), next_gauss if has_next else None))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
