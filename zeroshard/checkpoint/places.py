"""One checkpoint of all places of a pipe: each place tells the others what it has, and names join the parts.

Owns what places tell each other, and the comparison of what several places have. Without a pipe it changes nothing. It
must not know files. Read `contents.py` and `together.py` first.
"""

import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch

from zeroshard.checkpoint import strict
from zeroshard.checkpoint.adapter import TRAINED
from zeroshard.checkpoint.contents import ADVICE, INTEGERS, Plan
from zeroshard.checkpoint.cuts import writers_of
from zeroshard.checkpoint.described import pack, unpack
from zeroshard.checkpoint.inventory import Item
from zeroshard.checkpoint.manifest import EXTRA
from zeroshard.checkpoint.modules import MODULES
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.together import agree_equal, together
from zeroshard.checkpoint.values import encode
from zeroshard.core.engine import Engine
from zeroshard.table.errors import CheckpointError
from zeroshard.wire.mesh import Mesh

__all__ = ["Whole", "join_model", "join_plan"]

ONE: Final = "Equal names mean one parameter or buffer, which a checkpoint holds once."
TIED: Final = "The parameter that is tied to"
Key = tuple[str, str]
"""Kind and name of a tensor."""


@final
@dataclass(frozen=True)
class Whole:
    """The model of all places, as `load` compares it with a checkpoint.

    Args:
        specs: parameters and buffers, by name.
        optimizers: as `groups_of` returns them, with the parameters of all places and the options of this one.
        modules: the names of those with extra state.
    """

    specs: Mapping[str, Spec]
    aliases: Mapping[str, str]
    optimizers: list[dict[str, Any]]
    modules: Collection[str] = ()


def join_model(engine: Engine, here: Whole, what: str, advice: str) -> Whole:
    """Return the model of all places.

    Raises:
        CheckpointError: places have different tensors of one name, or different optimizers.

    Collective: with a pipe, agreements and an all-gather of names and shapes; every rank must call.
    """
    mesh = engine.mesh
    if mesh.pipe is None:
        return here
    told = _tell(
        engine,
        {
            "aliases": dict(here.aliases),
            "items": [_row(spec, ()) for spec in here.specs.values()],
            "modules": [*here.modules],
            "optimizers": [
                {"class": one["class"], "groups": [{"params": group["params"]} for group in one["groups"]]}
                for one in here.optimizers
            ],
        },
        what,
        advice,
    )
    with together(engine, f"{what}: joining the places of the pipe", advice):
        specs = {spec.name: spec for spec, _, _ in _joined(told, mesh)}
        _check_alike(told, mesh)
        optimizers = [
            {**one, "groups": [{**group, "params": _params(told, n, g)} for g, group in enumerate(one["groups"])]}
            for n, one in enumerate(here.optimizers)
        ]
        return Whole(
            specs, _agreed(told, mesh, "aliases", TIED), optimizers, {name for one in told for name in one["modules"]}
        )
    raise AssertionError("together raises what it catches")


def join_plan(engine: Engine, plan: Plan, what: str) -> Plan:
    """Return the plan of all places: tensors that other places write have no value here.

    Raises:
        CheckpointError: places have different tensors, values or states of one name, or different optimizers.

    Collective: with a pipe, agreements and an all-gather of names, shapes, ranges and counters, and one of 8 bytes for
        each tensor that several places have; every rank must call.
    """
    mesh = engine.mesh
    if mesh.pipe is None:
        return plan
    content, writers = strict.loads(plan.extra, EXTRA), writers_of(mesh)
    items = [item for item in plan.items if item.spec.kind != "rng"]
    told = _tell(
        engine,
        {
            "aliases": dict(plan.aliases),
            "items": [_row(item.spec, item.chunks(writers)) for item in items],
            "modules": content["extra"].get(MODULES, {}),
            "optimizers": content["optimizers"],
            "trained": content["extra"].get(TRAINED),
        },
        what,
        ADVICE,
    )
    shared: dict[Key, list[int]] = {}
    with together(engine, f"{what}: joining the places of the pipe", ADVICE):
        own = {(item.spec.kind, item.spec.name): item for item in items}
        here, joined = _place_of(mesh), list[Item]()
        for spec, at, ranges in _joined(told, mesh):
            key = spec.kind, spec.name
            joined.append(own[key] if at[0] == here else Item(spec, None, (0, 0), by_others=ranges))
            if len(at) > 1:
                shared[key] = at
        _check_alike(told, mesh)
        places = {item.spec.name: place for place, item in enumerate(joined) if item.spec.kind == "model"}
        if states := _agreed(told, mesh, "modules", "get_extra_state() of module"):
            content["extra"][MODULES] = states
        if trained := [one["trained"] for one in told if one["trained"] is not None]:
            content["extra"][TRAINED] = sorted({name for names in trained for name in names})
        content["optimizers"] = pack(_optimizers(told, mesh), places)
        generators = [item for item in plan.items if item.spec.kind == "rng"]
        extra = strict.dumps(content, EXTRA)
        plan = replace(plan, items=(*joined, *generators), aliases=_agreed(told, mesh, "aliases", TIED), extra=extra)
        sums = torch.tensor([_sum_bits(own.get(key), mesh) for key in shared], dtype=torch.int64, device="cpu")
    if shared:
        _compare(engine, shared, sums, what)
    return plan


# -- what places tell each other --------------------------------------------------------------------------------------


def _tell(engine: Engine, value: Any, what: str, advice: str) -> list[Any]:
    """Return the value of each place, which must be equal on its ranks. Collective: agreements, and an all-gather."""
    mesh, across = engine.mesh, engine.comm.across
    data = json.dumps(value).encode()
    message = f"ranks at one place of the pipe have different models or optimizers. {advice}"
    agree_equal(engine, f"{what}: comparing the ranks of a place", zlib.crc32(data), message, common=0)
    # Each rank of a place tells a part: together the ranks receive the text of each place once.
    longest = -across.agree([-len(data)], f"{what}: the lengths of what places tell")[0]
    numel = -(-longest // mesh.world_size)
    part = data[mesh.rank * numel : (mesh.rank + 1) * numel]
    row = torch.zeros(numel, dtype=torch.uint8, device="cpu")
    row[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else row[:0]
    rows = across.collect(row, f"{what}: what places tell", "state")
    return [json.loads(rows[ranks].numpy().tobytes().rstrip(b"\0")) for ranks in mesh.places()]


def _place_of(mesh: Mesh) -> int:
    return mesh.across.along("pipe").index(mesh.across.rank)


def _named(mesh: Mesh, place: int) -> str:
    """Return how messages call a place."""
    numbers = [str(mesh.across.numbers[rank]) for rank in mesh.places()[place].tolist()]
    return f"place {place} of the pipe (rank{'s' * (len(numbers) > 1)} {', '.join(numbers)})"


def _row(spec: Spec, ranges: Collection[tuple[int, int, int]]) -> list[Any]:
    return [spec.kind, spec.name, spec.dtype, spec.shape, spec.order, [*ranges]]


def _joined(told: Sequence[Any], mesh: Mesh) -> Iterator[tuple[Spec, list[int], tuple[tuple[int, int, int], ...]]]:
    """Yield each tensor, the places that have it, and what is written by whom at the first of them."""
    found: dict[Key, tuple[Spec, list[int], tuple[tuple[int, int, int], ...]]] = {}
    for place, one in enumerate(told):
        for kind, name, dtype, shape, order, ranges in one["items"]:
            spec = Spec(kind, name, dtype, tuple(shape), tuple(order))
            first, at, _ = found.setdefault((kind, name), (spec, [], tuple((r, a, b) for r, a, b in ranges)))
            at.append(place)
            if (first.dtype, first.shape) != (spec.dtype, spec.shape):
                raise CheckpointError(
                    f"'{name}' is {first.dtype} {first.shape} at {_named(mesh, at[0])}, and {spec.dtype} {spec.shape} "
                    f"at {_named(mesh, place)}. {ONE} Keep the names of the whole model when you cut it."
                )
    yield from (one for kind in ("model", "state") for one in found.values() if one[0].kind == kind)


def _agreed(told: Sequence[Any], mesh: Mesh, key: str, what: str) -> dict[str, Any]:
    """Return the entries under a key of all places, which must agree on the value of each name.

    Args:
        what: the value of a name, for the error.
    """
    found: dict[str, Any] = {}
    for place, one in enumerate(told):
        for name, value in one[key].items():
            if found.setdefault(name, value) != value:
                raise CheckpointError(
                    f"{what} '{name}' is {value!r} at {_named(mesh, place)}, and {found[name]!r} before. {ONE}"
                )
    return found


# -- optimizers -------------------------------------------------------------------------------------------------------


def _check_alike(told: Sequence[Any], mesh: Mesh) -> None:
    """Raise unless the optimizers of all places have the same classes, steps, groups and options."""

    def facts(place: int) -> list[tuple[str, Any]]:
        optimizers = told[place]["optimizers"]
        found: list[tuple[str, Any]] = [("the optimizers are", [one["class"] for one in optimizers])]
        for number, one in enumerate(optimizers):
            found += [
                (f"the steps of optimizer {number} are", one.get("steps")),
                (f"the states of no parameter of optimizer {number} are", one.get("others")),
                (f"the number of groups of optimizer {number} is", len(one["groups"])),
                *(
                    (f"the options of group {at} of optimizer {number} are", group.get("options"))
                    for at, group in enumerate(one["groups"])
                ),
            ]
        return found

    first = facts(0)
    for place in range(1, len(told)):
        for (text, here), (_, there) in zip(first, facts(place), strict=False):
            if here != there:
                raise CheckpointError(
                    f"{text} {here} at {_named(mesh, 0)}, and {there} at {_named(mesh, place)}, but a checkpoint "
                    "holds one value. Build the same optimizers at each place, with the same groups (of which some "
                    "may be empty) and options."
                )


def _params(told: Sequence[Any], optimizer: int, group: int) -> list[Any]:
    """Return the parameters of a group at all places, each once."""
    return list(dict.fromkeys(n for one in told for n in one["optimizers"][optimizer]["groups"][group]["params"]))


def _optimizers(told: Sequence[Any], mesh: Mesh) -> list[dict[str, Any]]:
    """Return the optimizers of all places, as `groups_of` does."""
    by_place = [unpack(one["optimizers"], [item[1] for item in one["items"]], "what places tell") for one in told]
    joined = []
    for number, first in enumerate(by_place[0]):
        states: dict[str, tuple[int, dict[Any, Any]]] = {}
        for place, optimizers in enumerate(by_place):
            for name, state in optimizers[number]["states"].items():
                before, known = states.setdefault(name, (place, state))
                if known is not state and encode(known, name) != encode(state, name):
                    raise CheckpointError(
                        f"the state of '{name}' in optimizer {number} is {known} at {_named(mesh, before)}, and "
                        f"{state} at {_named(mesh, place)}. {ONE}"
                    )
        groups = [
            {
                "options": group["options"],
                "params": list(dict.fromkeys(p for one in by_place for p in one[number]["groups"][at]["params"])),
            }
            for at, group in enumerate(first["groups"])
        ]
        joined.append({**first, "groups": groups, "states": {name: state for name, (_, state) in states.items()}})
    return joined


# -- what several places have -----------------------------------------------------------------------------------------


def _sum_bits(item: Item | None, mesh: Mesh) -> int:
    """Return the sum, as integers, of the elements that this rank alone of its place counts."""
    if item is None or mesh.replica_ranks[0] != mesh.rank:
        return 0
    if item.slot is None:
        start, stop = (0, item.spec.numel) if item.owner == mesh.across.rank else (0, 0)
    else:
        start, stop = item.range_of(mesh.shard_rank) if item.cut or mesh.tensor_ranks[0] == mesh.rank else (0, 0)
    if start >= stop:
        return 0
    value = item.part(start, stop)
    return int(value.view(INTEGERS[value.itemsize]).sum(dtype=torch.int64))


def _compare(engine: Engine, shared: Mapping[Key, Sequence[int]], sums: torch.Tensor, what: str) -> None:
    """Raise on every rank if places hold different values of one name. Collective: an all-gather."""
    mesh = engine.mesh
    totals = engine.comm.across.collect(sums, f"{what}: comparing what several places have")[mesh.places()].sum(1)
    for column, ((_, name), at) in enumerate(shared.items()):
        values = totals[:, column].tolist()
        for place in at:
            if values[place] != values[at[0]]:
                raise CheckpointError(
                    f"{what}: '{name}' has different values at {_named(mesh, at[0])} and at {_named(mesh, place)}. "
                    f"{ONE} Add up the gradients of a tied parameter over its places before each step. {ADVICE}"
                )
