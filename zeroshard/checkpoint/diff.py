"""The differences between two checkpoints, element by element. Without torch.

Owns the comparison. It reads both checkpoints in pieces, with constant memory. Read `reader.py` first.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zeroshard.checkpoint.manifest import PARTS
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.verify import other_islands, part_of

__all__ = ["Difference", "as_floats", "diff"]

Read = Callable[[str, int, int], bytearray]

PIECE_NUMEL = 1 << 20


@dataclass(frozen=True)
class Difference:
    """A difference: the name of a tensor or field, and a description."""

    name: str
    what: str


def diff(first: str | Path, second: str | Path) -> list[Difference]:
    """Return the differences of two checkpoints; empty if every tensor, alias and text is equal bit for bit.

    The number of ranks and the ranges in files are not compared, nor are random generators. Of islands, each one's part
    is compared with that of the same number.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    one, other = CheckpointReader(Path(first)), CheckpointReader(Path(second))
    found = _differences(one, other)
    islands, others = {*other_islands(one)}, {*other_islands(other)}
    for island in sorted(islands | others):
        name = f"island {island}"
        if island in islands & others:
            of_parts = _differences(part_of(one, island), part_of(other, island))
            found += [replace(part, name=f"{name}: {part.name}") for part in of_parts]
        else:
            found.append(Difference(name, f"only in the {'first' if island in islands else 'second'}"))
    return found


def _differences(one: CheckpointReader, other: CheckpointReader) -> list[Difference]:
    found = _compare_specs(one.specs, other.specs)
    found += _compare_specs(_states(one), _states(other))
    for name, spec in one.specs.items():
        if other.specs.get(name) == spec:
            found += _compare(spec, one.read, other.read)
    for name, spec in _states(one).items():
        if other.states.get(name) == spec:
            found += _compare(spec, one.read_state, other.read_state)
    if one.manifest.step != other.manifest.step:
        found.append(Difference("step", f"{one.manifest.step} and {other.manifest.step}"))
    if one.manifest.aliases != other.manifest.aliases:
        found.append(Difference("aliases", "other parameters are tied"))
    if one.read_extra() != other.read_extra():
        found.append(Difference("extra.json", "what the program gave, or hyper-parameters and counters, differ"))
    return found


def _states(reader: CheckpointReader) -> dict[str, Spec]:
    """Return what is compared: states of optimizers, and what islands have; no generators and no checksums of parts."""
    return {name: spec for name, spec in reader.states.items() if spec.kind != "rng" and name != PARTS}


def _compare_specs(first: Mapping[str, Spec], second: Mapping[str, Spec]) -> list[Difference]:
    found = [Difference(name, "only in the first") for name in first if name not in second]
    found += [Difference(name, "only in the second") for name in second if name not in first]
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            sides = (
                f"{s.dtype} {s.shape}{f' in order {s.order}' if s.order else ''}" for s in (first[name], second[name])
            )
            found.append(Difference(name, " and ".join(sides)))
    return sorted(found, key=lambda one: one.name)


def _compare(spec: Spec, first: Read, second: Read) -> list[Difference]:
    count, most = 0, 0.0
    for start in range(0, spec.numel, PIECE_NUMEL):
        stop = min(start + PIECE_NUMEL, spec.numel)
        one, other = first(spec.name, start, stop), second(spec.name, start, stop)
        if one != other:
            rows = [np.frombuffer(data, dtype=np.uint8).reshape(-1, spec.item_bytes) for data in (one, other)]
            is_different = (rows[0] != rows[1]).any(1)
            count += int(is_different.sum())
            gaps = np.abs(as_floats(one, spec.dtype)[is_different] - as_floats(other, spec.dtype)[is_different])
            most = max(most, float(gaps.max()) if not np.isnan(gaps).any() else math.inf)
    what = f"{count} of {spec.numel} elements differ, by at most {most:.3g}"
    return [Difference(spec.name, what)] if count else []


def as_floats(data: bytearray, dtype: str) -> NDArray[np.float64]:
    """Return elements as numbers, (numel,) fp64; of dtypes that numpy lacks, their bits."""
    if dtype == "BF16":
        wide = np.frombuffer(data, dtype="<u2").astype("<u4") << 16
        return wide.view("<f4").astype(np.float64)
    names = {"BOOL": "u1", "F8_E4M3": "u1", "F8_E5M2": "u1", "C64": "<f4"}
    kind = names.get(dtype) or f"<{dtype[0].lower()}{int(dtype[1:]) // 8}"
    values = np.frombuffer(data, dtype=kind).astype(np.float64)
    return np.hypot(values[0::2], values[1::2]) if dtype == "C64" else values
