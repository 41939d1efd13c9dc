"""Facts that must be equal on all ranks before training, and the comparison that names the first difference.

Owns the facts of a model, its optimizers and versions, as lines of text. It must not know the training.
"""

import sys
import zlib
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Number

import numpy as np
import torch
from torch import nn

from zeroshard.join.start import texts_across_ranks
from zeroshard.setup.request import Described
from zeroshard.table.errors import RankMismatchError
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh

__all__ = ["check_equal", "check_mesh", "facts_of", "facts_of_optimizer", "options_text", "tell_refusal"]


def facts_of(described: Described, version: str) -> list[str]:
    """Return the facts that must be equal on all ranks, one per line."""
    model, optimizers, plans = described.model, described.optimizers, described.plans
    versions = _library_versions([*model.modules(), *optimizers]) | {"numpy": np.__version__, "zeroshard": version}
    lines = [f"{library} {found}" for library, found in sorted(versions.items())] + [f"options: {described.options()}"]
    lines += [f"module '{name}': {type(module).__qualname__}" for name, module in model.named_modules()]
    for name, p in model.named_parameters():
        trains = "trainable" if p.requires_grad else "frozen"
        if id(p) in described.ignored:
            trains += ", ignored, on the meta device" if p.is_meta else ", ignored"
        placed = f", placements {p.placements}" if hasattr(p, "placements") else ""
        lines.append(f"parameter '{name}': {tuple(p.shape)} {p.dtype} {trains} strides {tuple(p.stride())}{placed}")
    lines += [f"buffer '{name}': {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    lines += [f"unit '{plan.name}': {len(plan.parameters)} parameters, {plan.numel} elements" for plan in plans]
    for number, optimizer in enumerate(optimizers):
        lines += facts_of_optimizer(model, optimizer, number)
    return lines


def facts_of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[str]:
    """Return the facts of an optimizer that must be equal on all ranks, one per line."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lines = []
    for place, group in enumerate(optimizer.param_groups):
        has_state = sum(parameter in optimizer.state for parameter in group["params"])
        entries = f"{len(group['params'])} entries ({has_state} with state)"
        lines.append(f"optimizer {number}, group {place}: {type(optimizer).__name__}, {entries}, {options_text(group)}")
        lines += [f"optimizer {number}, group {place}: '{names[id(parameter)]}'" for parameter in group["params"]]
    return lines


def options_text(group: Mapping[str, object]) -> str:
    """Return the options of an optimizer's group as a text that is equal on ranks with equal options."""
    return ", ".join(f"{key}={_text_of(value)}" for key, value in sorted(group.items()) if key != "params")


def _text_of(value: object) -> str:
    """Return the values in an option, and the types of other objects, whose texts may have addresses."""
    if isinstance(value, torch.Tensor):
        return f"{value.tolist()}" if type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta else "Tensor"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text_of(key)}: {_text_of(one)}' for key, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text_of, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text_of, value)))}}}"
    if value is None or isinstance(value, (Number, str, Enum, torch.dtype)):
        return f"{value}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _library_versions(things: Iterable[object]) -> dict[str, str]:
    """Return the versions of the libraries that define the classes of things, and torch's."""
    tops = {type(thing).__module__.partition(".")[0] for thing in things} | {"torch"}
    versions = {top: getattr(sys.modules.get(top), "__version__", None) for top in tops}
    return {top: str(version) for top, version in versions.items() if version is not None}


def check_mesh(mesh: Mesh) -> None:
    """Raise on every rank unless all have the same ranks along the same axes, which their connections depend on.

    Collective: as `texts_across_ranks`.
    """
    axes = ", ".join(f"{name} {size}" for name, size in mesh.axes)
    texts = texts_across_ranks(mesh, f"axes {axes} over the ranks {mesh.ranks}")
    if len(set(texts)) > 1:
        raise RankMismatchError(
            f"{mesh} Ranks were given different mesh=:\n{mesh.lines(texts)}\nPass the same mesh= on every rank."
        )


def tell_refusal(mesh: Mesh, comm: Comm, error: Exception) -> None:
    """Report this rank's error to ranks that have none. Collective: as `check_equal`."""
    try:
        check_equal(mesh, comm, [f"refused: {error}"])
    except RankMismatchError as mismatch:
        raise error from mismatch


def check_equal(mesh: Mesh, comm: Comm, lines: list[str]) -> None:
    """Raise on every rank, with the first difference, unless all ranks have equal facts.

    Collective: an all-reduce of 16 bytes; where ranks differ, all-gathers of digests and of one line.
    """
    digest = zlib.crc32("\n".join(lines).encode())
    low, high, _, most = comm.agree([digest, -digest, 0, -len(lines)], "the comparison of models and options")
    if low == -high:
        return
    digests = torch.zeros(-most, dtype=torch.int64, device="cpu")
    digests[: len(lines)] = torch.tensor([zlib.crc32(line.encode()) + 1 for line in lines], device="cpu")
    rows = comm.collect(digests.to(mesh.device), "the comparison of models and options")
    first = int((rows != rows[0]).any(0).nonzero()[0])
    texts = comm.texts(lines[first] if first < len(lines) else "(nothing)", "the comparison of models and options")
    raise RankMismatchError(
        f"{mesh} Ranks were given different models, options or versions; the first difference is:\n"
        f"{mesh.lines(texts)}\nBuild the same model and optimizer, with the same arguments and the same versions, on "
        "every rank."
    )
