"""What a rank holds of a model, from names: precisions, optimizers, and the units of a shape.

Owns the names that a plan is asked with. Must not know memory over time (`film.py`). Needs no torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, final

from zeroshard.describe.offload import with_apart
from zeroshard.plan.shapes import Parameters, Transformer
from zeroshard.table.bytes import Updates
from zeroshard.table.cells import Residency
from zeroshard.table.layout import plan_layout
from zeroshard.table.spec import BucketSpec, Formats, UnitSpec, itemsize

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "States",
    "all_updates_of",
    "kernel_bytes_of",
    "own_units",
    "specs_of",
    "updates_of",
]

_WIDE: Final = "float32"
PRECISIONS: Final[Mapping[str, Formats]] = MappingProxyType(
    {
        "fp32": Formats(_WIDE, _WIDE, _WIDE, _WIDE, _WIDE),
        "bf16": Formats("bfloat16", _WIDE, _WIDE, _WIDE, _WIDE),
        "fp16": Formats("float16", _WIDE, _WIDE, _WIDE, _WIDE),
        "paper": Formats("float16", "float16", "float16", _WIDE, _WIDE),
        "bf16-grads": Formats("bfloat16", "bfloat16", "bfloat16", _WIDE, _WIDE),
        "all-bf16": Formats("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    }
)
"""Precisions by name: those of `zs.shard`, the paper's, gradients as they are computed, and everything in bfloat16."""


@final
@dataclass(frozen=True, slots=True)
class States:
    """What an optimizer keeps and does.

    Args:
        per_element: numbers that it keeps for each element.
        counter_bytes: that it keeps for each parameter.
        passing: numbers for each element of one parameter that torch's loop over parameters, its default on a CPU,
            has beside these at most.
        element_bytes, block_bytes, block_numel: of states that lie packed, as `Updates` has them.
        matrix_numbers: that it keeps for each element of a matrix of a hidden layer, where it treats these otherwise.
        is_fused: whether torch has a kernel for the host that updates in one pass, which `zs.shard` chooses for states
            in another memory; it takes nothing beside them.
    """

    per_element: int
    counter_bytes: int
    passing: int = 0
    element_bytes: int = 0
    block_bytes: int = 0
    block_numel: int = 1
    matrix_numbers: int | None = None
    is_fused: bool = False


OPTIMIZERS: Final[Mapping[str, States]] = MappingProxyType(
    {
        "adamw": States(2, 4, 2, is_fused=True),
        "adam": States(2, 4, 2, is_fused=True),
        "sgd": States(0, 0, is_fused=True),
        "momentum": States(1, 0, is_fused=True),
        "lion": States(1, 0),
        "adagrad": States(1, 4, 1, is_fused=True),
        "adamw8bit": States(0, 4, element_bytes=2, block_bytes=8, block_numel=256),
        "lamb": States(2, 4, 2),
        "muon": States(2, 4, 2, matrix_numbers=1),
        "adafactor": States(0, 4, 1),
    }
)
"""Optimizers by name, as torch and `zs.optim` keep their states.

Of Adafactor the statistics of rows and columns are left out: 4 (n + m) bytes of a matrix of n rows and m columns.
"""

_NOT_HIDDEN: Final = re.compile(r"norm|bias|\bln_|\bw[tp]e\b|embed|head")
"""Names of parameters that are no matrices of hidden layers, or that Muon leaves to AdamW."""


def own_units(model: Transformer, tensor: int = 1, expert_ranks: int = 1) -> Mapping[str, Parameters]:
    """Return the parameters of each unit that one tensor rank holds, by name; the root comes first."""
    found = dict(model.units())
    prefix = "transformer.h." if model.block == "gpt2" else "model.layers."
    for name in found:
        if name.startswith(prefix):
            found[name] = model.block_parameters(int(name.removeprefix(prefix)), tensor, expert_ranks)
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
        found.append(UnitSpec(number, name, (bucket,)))
    return with_apart(found, row)


def updates_of(units: Sequence[UnitSpec], states: States) -> Updates:
    """Return what one optimizer of all parameters updates and keeps."""
    buckets = [bucket for unit in units for bucket in unit.buckets]
    places = [(bucket, index) for bucket in buckets for index in range(len(bucket.names))]
    packed = (states.element_bytes, states.block_bytes, states.block_numel)
    return Updates(places, states.per_element, states.counter_bytes, *packed)


def all_updates_of(units: Sequence[UnitSpec], states: States) -> list[Updates]:
    """Return what one optimizer of all parameters updates and keeps, matrices of hidden layers apart where they are."""
    whole = updates_of(units, states)
    if states.matrix_numbers is None:
        return [whole]
    hidden = [place for place in whole.parameters if not _NOT_HIDDEN.search(place[0].names[place[1]])]
    rest = [place for place in whole.parameters if _NOT_HIDDEN.search(place[0].names[place[1]])]
    matrices = replace(whole, parameters=hidden, per_element=states.matrix_numbers, counter_bytes=0)
    return [matrices, replace(whole, parameters=rest)]


def kernel_bytes_of(updates: Sequence[Updates], states: States) -> int:
    """Return what the kernels of an optimizer that updates one parameter after the other take at most."""
    most = 0
    for bucket, index in (place for one in updates for place in one.parameters):
        start, stop = bucket.layout.overlap(index, *bucket.states)
        most = max(most, (stop - start) * itemsize(bucket.formats.state))
    return states.passing * most
