"""What a rank holds of a model, from names: precisions, optimizers, and the units of a shape.

Owns the names that a plan is asked with. Must not know memory over time (`film.py`). Needs no torch.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, final

from zeroshard.describe.offload import with_places
from zeroshard.plan.shape.shapes import Parameters, Transformer
from zeroshard.plan.step.staging import piece_numel
from zeroshard.table.bytes import Cost, Owned, Sliced, Updates
from zeroshard.table.cells import Residency
from zeroshard.table.layout import plan_layout
from zeroshard.table.owners import newton_schulz_cost
from zeroshard.table.settings import HOT_NUMEL
from zeroshard.table.spec import BucketSpec, Formats, UnitSpec, itemsize
from zeroshard.table.whole import make_updates

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "States",
    "Whole",
    "own_units",
    "passing_bytes_of",
    "specs_of",
    "updates_of",
]

Shape = tuple[int, ...]
_WIDE: Final = "float32"
PRECISIONS: Final[Mapping[str, Formats]] = MappingProxyType(
    {
        "fp32": Formats(_WIDE, _WIDE, _WIDE, _WIDE, _WIDE),
        "bf16": Formats("bfloat16", _WIDE, _WIDE, _WIDE, _WIDE),
        "fp16": Formats("float16", _WIDE, _WIDE, _WIDE, _WIDE),
        "paper": Formats("float16", "float16", "float16", _WIDE, _WIDE),
        "bf16-grads": Formats("bfloat16", "bfloat16", "bfloat16", _WIDE, _WIDE),
        "bf16-pure": Formats("bfloat16", "bfloat16", _WIDE, _WIDE, _WIDE),
        "all-bf16": Formats("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    }
)
"""Precisions by name: those of `zs.shard`, the paper's, gradients as they are computed, gradients exchanged in bfloat16
and held in float32 ("PURE" of FSDP), and everything in bfloat16."""


@final
@dataclass(frozen=True, slots=True)
class Passing:
    """What an optimizer's step has beside its states at most, in numbers for each element.

    Args:
        total: for elements of all parameters, as functions on lists of tensors have.
        own: for elements of the parameter that is updated.
        before: for elements of the parameter before that, whose values a loop still holds.
        batch_numel: of how many elements `total` counts, on a CPU and elsewhere; 0 for all.
    """

    total: float = 0
    own: float = 0
    before: float = 0
    batch_numel: tuple[int, int] = (0, 0)


@final
@dataclass(frozen=True, slots=True)
class States:
    """What an optimizer keeps and does.

    Args:
        per_element: numbers that it keeps for each element.
        counter_bytes: that it keeps for each parameter.
        passing: what its step has beside these, on a CPU by torch's default, a loop over parameters.
        element_bytes, block_bytes, block_numel: of states that lie packed, as `Updates` has them.
        whole: what it updates whole, on owners; None where slices are enough.
        is_fused: whether torch has a kernel that updates in one pass and takes nothing beside the states; `zs.shard`
            chooses that kernel on a GPU, and for states in another memory.
        is_made: as in `Updates`.
    """

    per_element: int
    counter_bytes: int
    passing: Passing = Passing()
    element_bytes: int = 0
    block_bytes: int = 0
    block_numel: int = 1
    whole: "Whole | None" = None
    is_fused: bool = False
    is_made: bool = False


@final
@dataclass(frozen=True, slots=True)
class Whole:
    """What an optimizer updates whole.

    Args:
        takes: whether it updates a parameter so, by name and shape.
        cost: of an update by shape, as owners are balanced.
        keeps: elements of states by shape.
        counter_bytes: that it keeps for each parameter beside.
        kind: of the update, a key of `plan.step.turns.KINDS`.
    """

    takes: Callable[[str, Shape], bool]
    cost: Callable[[Shape], float]
    keeps: Callable[[Shape], int]
    counter_bytes: int
    kind: str


_NOT_HIDDEN: Final = re.compile(r"norm|bias|\bln_|\bw[tp]e\b|embed|head")
"""Names of parameters that are no matrices of hidden layers, or that Muon leaves to AdamW."""


def _is_hidden(name: str, shape: Shape) -> bool:
    return len(shape) > 1 and not _NOT_HIDDEN.search(name)


def _factors(shape: Shape) -> int:
    """Return the elements of Adafactor's second moments: of rows and columns, or of all elements of a vector."""
    *stack, rows, columns = shape if len(shape) > 1 else (*shape, 1, 0)
    return math.prod(stack) * (rows + columns)


_LOOP: Final = Passing(own=2, before=1)
"""Of Adam's loop: the divisor of one parameter lives until that of the next one is made."""
OPTIMIZERS: Final[Mapping[str, States]] = MappingProxyType(
    {
        "adamw": States(2, 4, _LOOP, is_fused=True),
        "adam": States(2, 4, _LOOP, is_fused=True),
        "sgd": States(0, 0, is_fused=True),
        "momentum": States(1, 0, is_fused=True),
        "lion": States(1, 0, Passing(own=2)),
        "adagrad": States(1, 4, Passing(own=1, before=1), is_fused=True, is_made=True),
        "adamw8bit": States(
            0, 4, Passing(9.5, batch_numel=(1 << 16, 1 << 23)), element_bytes=2, block_bytes=8, block_numel=256
        ),
        "lamb": States(2, 4, Passing(total=1, own=1)),
        "muon": States(2, 4, _LOOP, whole=Whole(_is_hidden, newton_schulz_cost, math.prod, 0, "newton-schulz")),
        "adafactor": States(0, 4, whole=Whole(lambda *_: True, math.prod, _factors, 4, "adafactor")),
    }
)
"""Optimizers by name, as torch and `zs.optim` keep their states."""


def own_units(model: Transformer, tensor: int = 1) -> Mapping[str, Parameters]:
    """Return the parameters of each unit that one tensor rank holds, by name; the root comes first."""
    found = dict(model.units())
    prefix = "transformer.h." if model.block == "gpt2" else "model.layers."
    for name in found:
        if name.startswith(prefix):
            found[name] = model.block_parameters(int(name.removeprefix(prefix)), tensor)
        elif name.endswith(("wte", "embed_tokens", "lm_head")):
            found[name] = (("weight", -(-model.vocabulary // tensor) * model.hidden),)
    return MappingProxyType(found)


def specs_of(
    units: Mapping[str, Parameters], row: Residency, formats: Formats, ranks: int, *, replicas: int = 1, rank: int = 0
) -> tuple[UnitSpec, ...]:
    """Return the units of a model as one rank sees them.

    Args:
        units: parameters by unit, the root first.
        ranks: that one copy of the state is sharded over.
    """
    found = []
    for number, (name, parameters) in enumerate(units.items()):
        layout = plan_layout([numel for _, numel in parameters], itemsize(formats.param), ranks, replicas)
        names = tuple(f"{name}.{key}" if name else key for key, _ in parameters)
        bucket = BucketSpec(name or "the root", number, names, layout, formats, row.of_unit(name), rank, replicas)
        found.append(UnitSpec(number, name, (bucket,) * bool(parameters)))
    return with_places(found, row)


def updates_of(
    units: Sequence[UnitSpec], states: States, shape_of: Callable[[str, int], Shape] = lambda name, numel: (numel,)
) -> Updates:
    """Return what one optimizer of all trained parameters updates and keeps.

    Args:
        shape_of: of a parameter by its name and elements.
    """
    packed = states.element_bytes, states.block_bytes, states.block_numel
    cost = Cost(states.per_element, states.counter_bytes, *packed)
    entries = list[Sliced | Owned]()
    for bucket in (bucket for unit in units for bucket in unit.reduced):
        for index, (name, numel) in enumerate(zip(bucket.names, bucket.layout.numels, strict=True)):
            whole, shape = states.whole, shape_of(name, numel)
            if whole is None or not whole.takes(name, shape):
                entries.append(Sliced(bucket, index, cost))
            else:
                nbytes = whole.keeps(shape) * itemsize(bucket.formats.state), whole.counter_bytes
                entries.append(Owned(bucket, index, shape, *nbytes, float(whole.cost(shape)), whole.kind))
    return replace(make_updates(entries), is_made=states.is_made)


def passing_bytes_of(
    updates: Sequence[Updates], passing: Sequence[Passing], *, is_cpu: bool, is_fused: bool
) -> tuple[int, int]:
    """Return what updates take beside the states: the optimizers' kernels, and on a CPU the check of gradients.

    Args:
        passing: of each optimizer.
        is_fused: whether the kernels take nothing.
    """
    pairs = zip(updates, passing, strict=True)
    most = 0 if is_fused else max((_kernel_bytes(*pair, is_cpu=is_cpu) for pair in pairs), default=0)
    return most, _checked_bytes(updates) if is_cpu else 0


def _kernel_bytes(updates: Updates, passing: Passing, *, is_cpu: bool) -> int:
    """Return what the kernels of an optimizer take at most: of states in files for a piece at a time."""
    most, before, size, totals = 0.0, 0, 0, Counter[int | None]()
    per_element = max(updates.trained.kept.values(), default=0)
    # Where nothing is sent to owners, one call updates whole tensors and slices; `turns.py` has what other kinds take.
    whole = (one for one in updates.trained.whole if one.kind == "other" and one.bucket.updates_all)
    entries: list[Sliced | Owned] = [*updates.trained.parameters, *whole]
    for one in entries:
        numel, size, piece = one.numel, itemsize(one.bucket.formats.state), None
        if one.bucket.is_updated_in_pieces:
            numel, piece = min(numel, at_a_time := piece_numel(one.bucket, per_element)), one.bucket.number
        most, before = max(most, passing.own * numel + passing.before * before), numel
        totals[piece] = totals[piece] + numel if piece is None else min(totals[piece] + numel, at_a_time)
    total = max(totals.values(), default=0)
    return int(size * (most + passing.total * min(total, passing.batch_numel[not is_cpu] or total)))


def _checked_bytes(updates: Sequence[Updates]) -> int:
    """Return the bytes of small gradients that are copied together to check that they are finite, on a CPU."""
    found = 0
    buckets = {entry.bucket.number: entry.bucket for one in updates for entry in one.trained.entries}
    for bucket in buckets.values():
        start, stop = bucket.states
        numels = bucket.layout.numels if bucket.lands_on_sums else [stop - start]
        found += sum(numel for numel in numels if numel < HOT_NUMEL) * itemsize(bucket.formats.grad)
    return found
