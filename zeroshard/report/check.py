"""Validation of the data of a page: types, lengths, indices, and matching allocations and releases.

Owns the errors. It must not know torch, HTML, or the use of the data by views. Read `zeroshard/report/schema.py` first:
its annotations define the types.
"""

import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from zeroshard.report.schema import VERSION, Film, PageData, Walk

__all__ = ["check_page"]

_ALIGNMENTS: Final = (1, 2, 4, 8, 16, 32, 64)


def check_page(data: Mapping[str, Any]) -> None:
    """Check that a mapping is a valid and consistent `PageData`.

    Raises:
        TypeError: an entry does not have the type of the schema; the message gives the path of the entry.
        ValueError: an entry is unknown or missing, columns differ in length, an index or a number is out of range, or
            memory is released that was not allocated.

    >>> from zeroshard.report.check import check_page
    >>> check_page({"version": 2, "title": "a run"})
    """
    _check(data, PageData, "data")
    if data["version"] != VERSION:
        raise ValueError(f"data.version must be {VERSION}, got {data['version']}: create the data again")
    _check_sources(data)
    columns, names = data.get("columns", []), data.get("names", [])
    for place, rank in enumerate(data.get("ranks") or ()):
        if unknown := sorted(rank["resident_bytes"].keys() - set(columns)):
            raise ValueError(f"data.ranks[{place}].resident_bytes has {unknown}, which is not in data.columns")
    if film := data.get("film"):
        _check_film(film, len(columns), len(names))
    for place, lane in enumerate(data.get("lanes") or ()):
        _check_lengths(lane["spans"], f"data.lanes[{place}].spans")
    for place, run in enumerate(data.get("curves") or ()):
        _check_lengths({key: run[key] for key in run if key not in ("run", "heldout")}, f"data.curves[{place}]")
        _check_lengths(run.get("heldout", {}), f"data.curves[{place}].heldout")
    if (player := data.get("player")) and not player["units"]:
        raise ValueError("data.player.units is empty: give the number of elements of each unit, the root first")
    if player and (align := player.get("align_numel", 1)) not in _ALIGNMENTS:
        raise ValueError(f"data.player.align_numel must be a power of two up to 64, got {align}")
    if walk := data.get("walk"):
        _check_walk(walk)


def _check_sources(data: Mapping[str, Any]) -> None:
    sources = data.get("sources", [])
    for place, source in enumerate(sources):
        memory = source.get("memory")
        if memory and (found := sum(memory["parts"].values())) != memory["total_bytes"]:
            raise ValueError(
                f"data.sources[{place}].memory: the parts are {found:,} bytes, and the total is "
                f"{memory['total_bytes']:,}; they must be equal"
            )
    for view, places in data.get("shows", {}).items():
        if view not in PageData.__annotations__:
            raise ValueError(f"data.shows has {view!r}, which is no entry of the data")
        _check_indices(places, len(sources), f"data.shows.{view}")
    of = [rank["source"] for rank in data.get("ranks") or () if "source" in rank]
    _check_indices(of, len(sources), "data.ranks: source")


def _check_film(film: Film, columns: int, names: int) -> None:
    live: dict[int, tuple[int, int]] = {}
    for where, events in (("data.film.initial", film.get("initial")), ("data.film.events", film["events"])):
        if events is None:
            continue
        _check_lengths(events, where)
        _check_indices(events["column"], columns, f"{where}.column")
        _check_indices(events["module"], names, f"{where}.module")
        _check_indices(events["tensor"], names, f"{where}.tensor")
        _check_indices(events["operation"], names, f"{where}.operation")
        for place, (nbytes, storage, column) in enumerate(
            zip(events["nbytes"], events["storage"], events["column"], strict=True)
        ):
            if nbytes == 0:
                raise ValueError(f"{where}: event {place} has 0 bytes; omit storages without memory")
            if nbytes > 0 and storage in live:
                raise ValueError(f"{where}: event {place} allocates storage {storage}, which is already allocated")
            if nbytes < 0 and live.pop(storage, None) != (-nbytes, column):
                raise ValueError(
                    f"{where}: event {place} releases {-nbytes} bytes of storage {storage} in column {column}; release "
                    "the bytes that were allocated, in the same column"
                )
            if nbytes > 0:
                live[storage] = (nbytes, column)
    _check_order(film["events"]["t_s"], "data.film.events.t_s")
    if ticks := film.get("ticks"):
        _check_lengths(ticks, "data.film.ticks")
        _check_indices(ticks["unit"], names, "data.film.ticks.unit")
        _check_order(ticks["t_s"], "data.film.ticks.t_s")


def _check_walk(walk: Walk) -> None:
    units = {unit["name"] for unit in walk["units"]}
    states = [walk["start"], *(step["state"] for step in walk["steps"])]
    for place, state in enumerate(states):
        if unknown := {*state["whole"], *state["kept"], *state["reduced"]} - units:
            raise ValueError(f"data.walk: state {place} names {sorted(unknown)}, which is not in data.walk.units")
        if len(state["resident_bytes"]) != walk["ranks"]:
            raise ValueError(f"data.walk: state {place} has {len(state['resident_bytes'])} of {walk['ranks']} ranks")


def _check_lengths(columns: Mapping[str, Any], where: str) -> None:
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: columns differ in length: {lengths}")


def _check_indices(values: Sequence[int], limit: int, where: str) -> None:
    if values and not (min(values) >= 0 and max(values) < limit):
        raise ValueError(f"{where}: indices must be from 0 to {limit - 1}, got {min(values)} to {max(values)}")


def _check_order(times: Sequence[float], where: str) -> None:
    for place in range(1, len(times)):
        if times[place] < times[place - 1]:
            raise ValueError(f"{where}: entry {place} is earlier than the entry before it; sort events by time")


def _check(value: Any, expected: Any, where: str) -> None:
    """Compare a value with an annotation of the kinds that the schema uses."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if typing.is_typeddict(expected):
        _check_mapping(value, expected, where)
    elif origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} must be one of {list(arguments)}, got {value!r}")
    elif origin in (types.UnionType, typing.Union):
        _check_union(value, arguments, where)
    elif origin is list:
        _require(isinstance(value, list), value, "a list", where)
        (entry,) = arguments
        if entry in (int, str, bool) and all(type(one) is entry for one in value):
            return  # columns of events, checked at the speed of C
        for place, one in enumerate(value):
            _check(one, entry, f"{where}[{place}]")
    elif origin is dict:
        _require(isinstance(value, Mapping), value, "a mapping", where)
        for key, one in value.items():
            _require(isinstance(key, str), key, "a str as key", where)
            _check(one, arguments[1], f"{where}.{key}")
    elif expected is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(is_number, value, "a number", where)
        if not math.isfinite(value):
            raise ValueError(f"{where} must be finite, got {value}")
    else:
        _require(type(value) is expected, value, "None" if expected is types.NoneType else expected.__name__, where)


def _check_mapping(value: Any, expected: Any, where: str) -> None:
    _require(isinstance(value, Mapping), value, "a mapping", where)
    annotations = typing.get_type_hints(expected)
    if missing := sorted(expected.__required_keys__ - value.keys()):
        raise ValueError(f"{where} has no {missing}")
    if unknown := sorted(value.keys() - annotations.keys()):
        raise ValueError(f"{where} has {unknown}, which {expected.__name__} does not have")
    for key, one in value.items():
        _check(one, annotations[key], f"{where}.{key}")


def _check_union(value: Any, members: Sequence[Any], where: str) -> None:
    if value is None and types.NoneType in members:
        return
    others = [member for member in members if member is not types.NoneType]
    plain = [member for member in others if isinstance(member, type) and not typing.is_typeddict(member)]
    if type(value) in plain:
        others = [type(value)]
    elif len(others) > 1:
        _require(False, value, " or ".join(member.__name__ for member in plain), where)
    _check(value, others[0], where)


def _require(is_right: bool, value: Any, expected: str, where: str) -> None:
    if not is_right:
        raise TypeError(f"{where} must be {expected}, got {type(value).__name__}: {str(value)[:80]!r}")
