"""Which entries of a folder of torch.distributed.checkpoint are a model, and which its optimizers.

Owns that knowledge; opens nothing. torch saves nested mappings as flat keys, and keeps the way to each. An optimizer is
what has `param_groups` beside `state`, with both of torch's spellings (`get_optimizer_state_dict`):

    ("optim", "state", "blocks.0.weight", "exp_avg")    ("optim", "param_groups", 0, "lr")
    ("optim", "state.blocks.0.weight.exp_avg",)         ("optim", "param_groups.blocks.0.weight.lr",)

A model is a mapping with tensors under the names that the optimizers have; without optimizers the largest one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from zeroshard.table.errors import CheckpointError

__all__ = ["Entry", "Layout", "METADATA", "NAMES", "OptimizerKeys", "layout_of"]

METADATA: Final = ".metadata"
"""The file that makes a folder one of torch.distributed.checkpoint."""
NAMES: Final = (
    "Save the optimizer by torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or import the model alone "
    "(--model-only)."
)

Way = tuple[Any, ...]


@dataclass(frozen=True)
class Entry:
    """One entry of the folder.

    Args:
        key: torch's flat name.
        way: the keys of the nested mappings and lists that lead there.
        numel: its elements; None where it is no tensor.
    """

    key: str
    way: Way
    numel: int | None


@dataclass
class OptimizerKeys:
    """The flat keys of one optimizer's entries.

    Args:
        states: of each parameter the key of each state.
        groups: the way below `param_groups`, and the key.
        is_flat: whether options are listed by parameter, not by group.
    """

    where: str
    states: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    groups: dict[Way, str] = field(default_factory=dict)
    is_flat: bool = False


@dataclass(frozen=True)
class Layout:
    """What a folder holds.

    Args:
        model: of each parameter and buffer the flat key.
        optimizers: ordered by where they are.
        rest: flat keys of other entries.
        extra: names under which state dicts hold the extra state of modules, which is among the rest.
    """

    model: Mapping[str, str]
    optimizers: Sequence[OptimizerKeys]
    rest: Sequence[str]
    extra: Sequence[str] = ()


def layout_of(entries: Sequence[Entry], where: str, *, model: str | None, model_only: bool) -> Layout:
    """Tell the model from its optimizers and the rest.

    Args:
        where: the folder, for messages.
        model: the keys that lead to the model, joined by dots; "" where the folder holds its state dict alone.
        model_only: count the optimizers among the rest.

    Raises:
        CheckpointError: there is no model, or several fit, or states have numbers for names.
    """
    roots = {one.way[:place] for one in entries for place, key in enumerate(one.way) if _kind(key) == "param_groups"}
    optimizers = {root: OptimizerKeys(".".join(map(str, root))) for root in sorted(roots, key=str)}
    models: dict[Way, dict[str, Entry]] = defaultdict(dict)
    rest, extra = list[str](), set[str]()
    for one in entries:
        root = next((way for way in optimizers if _is_below(one.way, way)), None)
        if root is not None and not model_only:
            _add(optimizers[root], one, one.way[len(root) :], where)
        elif names := [key for key in one.way if str(key).rpartition(".")[2] == "_extra_state"]:
            rest.append(one.key)
            extra.add(names[0])
        elif root is None and one.numel is not None and isinstance(one.way[-1], str):
            models[one.way[:-1]][one.way[-1]] = one
        else:
            rest.append(one.key)
    way = _model_of(models, {name for keys in optimizers.values() for name in keys.states}, where, model)
    rest += [one.key for other, found in models.items() if other != way for one in found.values()]
    found = [] if model_only else list(optimizers.values())
    return Layout({name: one.key for name, one in models[way].items()}, found, sorted(rest), sorted(extra))


def _kind(key: Any) -> str:
    return str(key).partition(".")[0]


def _is_below(way: Way, root: Way) -> bool:
    """Tell whether an entry belongs to the optimizer at `root`."""
    return way[: len(root)] == root and len(way) > len(root) and _kind(way[len(root)]) in ("state", "param_groups")


def _add(keys: OptimizerKeys, one: Entry, way: Way, where: str) -> None:
    """Add an entry to an optimizer's, by its way below the optimizer."""
    kind, _, flat = str(way[0]).partition(".")
    if flat:
        name, _, last = flat.rpartition(".")
        keys.is_flat = True
        way = (kind, name, last)
    if kind == "param_groups":
        keys.groups[way[1:]] = one.key
    elif len(way) == 3 and isinstance(way[1], str):
        keys.states[way[1]][str(way[2])] = one.key
    else:
        raise CheckpointError(f"{where}: '{one.key}' is not the state of a parameter. {NAMES}")


def _model_of(models: Mapping[Way, Mapping[str, Entry]], wanted: set[str], where: str, asked: str | None) -> Way:
    """Return the way to the model: the one that was asked for, or that has all parameters of the optimizers."""
    found = {".".join(map(str, way)): way for way in models}
    if not models or (asked is not None and asked not in found):
        raise CheckpointError(
            f"{where}: holds no tensors of a model at '{asked or ''}'; there are {sorted(found)[:5]}."
        )
    if asked is not None:
        return found[asked]
    if not wanted:
        return max(models, key=lambda way: sum(one.numel or 0 for one in models[way].values()))
    fit = [way for way, tensors in models.items() if wanted <= tensors.keys()]
    if not fit and all(name.isdecimal() for name in wanted):
        raise CheckpointError(f"{where}: the optimizers' states are under numbers, not names of parameters. {NAMES}")
    if len(fit) != 1:
        has = "no state dict has" if not fit else f"{len(fit)} state dicts have"
        raise CheckpointError(
            f"{where}: {has} all {len(wanted)} parameters of the optimizers, such as '{min(wanted)}'. Name the "
            f"model's with --model; there are {sorted(found)[:5]}."
        )
    return fit[0]
