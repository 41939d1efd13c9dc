"""The cut of a model into the chunks of a pipe: which modules and parameters belong to which chunk.

Owns the cut, and the removal of what belongs to other places. It must not know schedules or messages.
`parallel/chunked.py` runs a chunk.

Note: parts
    Modules belong to chunks in the order in which they are registered: each name of `cut=` begins the next chunk. A
    *part* is a module whose parameters all belong to one chunk, and which is in no other part. A parameter of a module
    that has parts of several chunks is *loose*. Modules without parameters (rotary embeddings, dropout) run everywhere,
    except batch norms, which change their statistics.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from zeroshard.core.undo import Undo
from zeroshard.describe.blocks import find_blocks
from zeroshard.describe.ignored import ignored_of
from zeroshard.describe.units import choose_units
from zeroshard.parallel.remote import Absence, remote
from zeroshard.table.pipeline import balanced

__all__ = ["Cut", "cut_model", "is_here", "own_bytes", "registered", "remove_others", "stand_in_on"]


@final
@dataclass(frozen=True)
class Cut:
    """The chunks of a model."""

    starts: tuple[str, ...]
    """The names of the modules at which the chunks after the first begin."""
    parts: dict[nn.Module, tuple[str, int]] = field(default_factory=dict)
    """The name and the chunk of each part."""
    loose: dict[str, int] = field(default_factory=dict)
    """The chunk of each loose parameter, by name."""
    blocks: frozenset[nn.Module] = frozenset()
    """The blocks of the whole model: one of them alone does not look like a block."""

    @property
    def count(self) -> int:
        """The number of chunks."""
        return len(self.starts) + 1

    def units(self, model: nn.Module, own: Sequence[int], units: Sequence[object] | None) -> Sequence[object] | None:
        """Return the argument `units=` of a place: no unit has parameters of two chunks, or of a tied one and others.

        Args:
            own: the chunks of the place.
            units: the user's.

        Raises:
            ValueError: a block would be such a unit.
        """
        chunks, first = self.chunks(model), dict[nn.Parameter, nn.Module]()
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    first.setdefault(parameter, module)
        tied = {first[parameter] for parameter, found in chunks.items() if len(found) > 1}
        here = _with_parameters(self.blocks)
        are_seen = units is not None or here == _with_parameters(find_blocks(model)[0])
        if len(own) == 1 and not tied and are_seen:
            return units
        chosen = here if units is None else choose_units(model, units)
        inside = {one for block in chosen for one in block.modules()}
        for block in chosen:
            of = {str(chunks[p]) for module in block.modules() if module not in tied for p in module.parameters(False)}
            if len(of) > 1:
                raise ValueError(
                    f"A {type(block).__name__} would be a unit with parameters of several chunks: cut the model "
                    "between its blocks, or name smaller units with units=."
                )
        for module in tied:
            if len(names := [name for name, _ in module.named_parameters()]) > 1:
                raise ValueError(
                    f"A {type(module).__name__} has a weight that is tied to another chunk, and others: {names}. A "
                    "module with a tied weight must have no other parameters where the weight is first registered."
                )
        outside = (part for part in self.parts if part not in inside and not chosen & {*part.modules()})
        return [*{**dict.fromkeys(chosen), **dict.fromkeys(tied), **dict.fromkeys(outside)}]

    def chunks(self, model: nn.Module) -> dict[nn.Parameter, list[int]]:
        """Return the chunks of each parameter: several, if it is tied over them."""
        chunks: dict[nn.Parameter, list[int]] = {}
        for _, _, parameter, chunk in registered(model, self):
            known = chunks.setdefault(parameter, [])
            if chunk not in known:
                known.append(chunk)
        return chunks


def cut_model(model: nn.Module, cut: Sequence[str] | None, count: int, costs: Mapping[str, int] | None = None) -> Cut:
    """Return the chunks of a model.

    Args:
        cut: the names of the modules at which the chunks after the first begin; None to divide the blocks of the model
            so that the largest chunk costs as little as possible: those of the plan for pipelines that models of
            Transformers have, or those of `find_blocks`.
        count: the number of chunks.
        costs: of each module without its children, by name; by default the bytes of its own parameters.

    Raises:
        ValueError: a name is not that of a module, or a chunk would have no parameters.
    """
    named = dict(model.named_modules())
    places = {module: number for number, module in enumerate(named.values())}
    blocks = find_blocks(model)[0]
    names = tuple(cut) if cut is not None else _balanced(model, named, blocks, count, costs or own_bytes(model))
    if len(names) != count - 1:
        raise ValueError(
            f"cut={list(names)} makes {len(names) + 1} chunks, but the pipe has {count}: name the module at which each "
            "chunk after the first begins."
        )
    for name in names:
        if name not in named or not name:
            near = [one for one in named if one.rpartition(".")[2] == name.rpartition(".")[2] and one][:3]
            hint = f" There are {near}." if near else ""
            raise ValueError(f"cut= names '{name}', which is not a module of {type(model).__name__}.{hint}")
        if sum(p.numel() for p in named[name].parameters()) == 0:
            raise ValueError(f"cut= names '{name}', which has no parameters: name the first module that has.")
    starts = [places[named[name]] for name in names]
    if sorted(set(starts)) != starts:
        raise ValueError(
            f"cut={list(names)} is not in the order in which {type(model).__name__} registers its modules, or names a "
            "module twice."
        )
    found = Cut(names, blocks=frozenset(blocks))
    _sort(model, "", found, starts, places)
    for chunk in range(count):
        if chunk not in {*found.loose.values(), *(one for _, one in found.parts.values())}:
            raise ValueError(
                f"cut={list(names)} leaves chunk {chunk} without parameters: a place of a pipe needs some to train."
            )
    _refuse_shared(model, found)
    return found


def _sort(module: nn.Module, prefix: str, cut: Cut, starts: Sequence[int], places: dict[nn.Module, int]) -> None:
    """Sort the children of a module into parts, and its own parameters into loose ones."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            cut.loose[prefix + key] = bisect_right(starts, places[module])
    for key, child in module.named_children():
        chunks = {bisect_right(starts, places[one]) for one in child.modules() if _has_state(one)}
        if not chunks:
            continue
        if len(chunks) == 1 and type(child).forward is not nn.Module.forward:
            cut.parts[child] = f"{prefix}{key}", next(iter(chunks))
        else:
            _sort(child, f"{prefix}{key}.", cut, starts, places)


def _with_parameters(modules: Iterable[nn.Module]) -> set[nn.Module]:
    return {module for module in modules if any(True for _ in module.parameters())}


def _has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters, or statistics that a forward changes."""
    return any(p is not None for p in module._parameters.values()) or getattr(module, "track_running_stats", False)


def _refuse_shared(model: nn.Module, cut: Cut) -> None:
    """Raise if one module is registered in two chunks: its calls would be at two places."""
    chunks: dict[nn.Module, tuple[str, int]] = {}
    for part, (name, chunk) in cut.parts.items():
        for inner in part.modules():
            if inner in chunks and chunks[inner][1] != chunk:
                raise ValueError(
                    f"Module '{name}' of chunk {chunk} contains a module of '{chunks[inner][0]}', which is in chunk "
                    f"{chunks[inner][1]}: a module can be at one place only. Share a weight instead of a module, or "
                    "cut elsewhere."
                )
            chunks[inner] = name, chunk
    for name, module in model.named_modules(remove_duplicate=False):
        if module in cut.parts and cut.parts[module][0] != name:
            raise ValueError(f"Module '{name}' is also '{cut.parts[module][0]}': a pipe needs one name for a module.")


def own_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the parameters of each module without its children, by name."""
    return {
        name: sum(p.nbytes for p in module._parameters.values() if p is not None)
        for name, module in model.named_modules()
    }


def _balanced(
    model: nn.Module, named: dict[str, nn.Module], found: set[nn.Module], count: int, costs: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the blocks at which chunks begin, so that the largest chunk costs as little as possible.

    Args:
        found: the blocks of the model, where it has no plan of its own.
    """
    if count == 1:
        return ()
    chosen = _with_parameters(_planned_blocks(model, named) or found)
    blocks = [name for name, module in named.items() if module in chosen]
    inner = {one for name in blocks for one in blocks if one.startswith(f"{name}.")}
    blocks = [name for name in blocks if name not in inner]
    if len(blocks) < count:
        raise ValueError(
            f"{type(model).__name__} has {len(blocks)} blocks, too few for a pipe of {count} chunks. Use fewer places, "
            "or name the modules at which chunks begin with cut=."
        )
    order = [*named]
    starts = [order.index(name) for name in blocks]
    sizes = [0] * (len(blocks) + 1)
    for number, name in enumerate(named):
        sizes[bisect_right(starts, number)] += costs.get(name, 0)
    # The part before the first block stays with it.
    weights = [sizes[0] + sizes[1], *sizes[2:]]
    return tuple(blocks[first] for first in balanced(weights, count)[1:])


def _planned_blocks(model: nn.Module, named: dict[str, nn.Module]) -> set[nn.Module]:
    """Return the members of the lists of modules in a model's own plan for pipelines; none without such a plan.

    Models of Transformers have this plan, `base_model_pp_plan` of their configuration under the names of the model. Its
    other modules, such as embedding and head, stay with the blocks beside them.
    """
    lists = [named[name] for name in getattr(model, "_pp_plan", None) or () if name in named]
    return {member for one in lists if isinstance(one, nn.ModuleList) for member in one}


# -- what is at other places ------------------------------------------------------------------------------------------


def remove_others(
    model: nn.Module, cut: Cut, own: Sequence[int], undo: Undo, absence: Absence | None = None
) -> dict[str, Tensor]:
    """Remove the parameters and the saved buffers of other places; names, modules and tied parameters stay.

    In the place of a parameter, the module has a tensor of its shape that takes no memory.

    Args:
        absence: of the values of other places; None where no forward will ask for them.

    Returns: these tensors, by name.
    """
    all_registered, removed = [*registered(model, cut)], dict[str, Tensor]()
    kept = {id(parameter) for _, _, parameter, chunk in all_registered if chunk in own}
    for name, (module, key), parameter, chunk in all_registered:
        if chunk not in own and id(parameter) not in kept:
            removed[name] = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
            _move(module, module._parameters, key, removed[name], undo)
    for part, (_, chunk) in cut.parts.items():
        for inner in part.modules() if chunk not in own else ():
            for key in inner._buffers.keys() - inner._non_persistent_buffers_set:
                if (buffer := inner._buffers[key]) is not None and absence is not None:
                    buffer = remote(buffer, cut.parts[part][0], absence)
                _move(inner, inner._buffers, key, buffer, undo)
    return removed


def is_here(model: nn.Module, ignored: object) -> bool:
    """Return whether an item of `ignored=` selects parameters of this place."""
    try:
        return bool(ignored_of(model, [ignored]))
    except ValueError:
        return False


def stand_in_on(
    device: torch.device, model: nn.Module, removed: dict[str, Tensor], absence: Absence | None = None
) -> None:
    """Have what stands for removed parameters on a device: code between parts may compute with it."""
    for name, tensor in removed.items():
        path, _, key = name.rpartition(".")
        made = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        removed[name] = made if absence is None else remote(made, name, absence)
        vars(model.get_submodule(path))[key] = removed[name]


def _move(module: nn.Module, registry: dict[str, Any], key: str, value: Any, undo: Undo) -> None:
    """Replace a parameter or a buffer of a module by a plain attribute of the same name."""
    before = [*registry.items()]

    def take_back() -> None:
        registry.clear()
        registry.update(before)  # in the order of before

    undo.add(take_back)
    del registry[key]
    undo.put(vars(module), key, value)


def registered(model: nn.Module, cut: Cut) -> Iterator[tuple[str, tuple[nn.Module, str], nn.Parameter, int]]:
    """Yield each registration of each parameter: its name, the module and the key, the parameter, the chunk."""
    for part, (prefix, chunk) in cut.parts.items():
        for path, inner in part.named_modules(prefix=prefix):
            for key, parameter in inner._parameters.items():
                if parameter is not None:
                    yield f"{path}.{key}", (inner, key), parameter, chunk
    for name, chunk in cut.loose.items():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if (parameter := module._parameters.get(key)) is not None:
            yield name, (module, key), parameter, chunk
