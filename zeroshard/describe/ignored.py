"""Parameters that `shard()` ignores.

Owns the accepted values of `ignored=`, and their checks.

Note: what ignored means
    User code owns an ignored parameter on each rank: it is not sharded, not copied from rank 0, and not converted. Its
    gradient in `.grad` belongs to this rank and is not reduced. It needs an optimizer that is not passed to `shard()`.
    Checkpoints do not contain it; `model.state_dict()` under `gathered()` does. Norms of sharded gradients exclude it.

    On the meta device, an ignored parameter has no values. It is initialized like all others, whole on every rank, with
    rank 0's values (`values/materialize.py`). Ignored parameters with values keep them, independent of initializers.
"""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["ignored_of"]


def ignored_of(model: nn.Module, asked: Sequence[object]) -> Mapping[int, str]:
    """Return the names of the ignored parameters, by identity.

    Args:
        asked: parameters, modules with all their parameters, or patterns of parameter names.

    Raises:
        ValueError: an item is not in the model.
        TypeError: it is no list, or an item is not a parameter, a module or a pattern.
    """
    # A generator would be empty at the second look.
    if isinstance(asked, str | nn.Module | nn.Parameter) or not isinstance(asked, Collection):
        raise TypeError(f"ignored= takes a list of parameters, modules or names; got {type(asked).__name__}, no list.")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = {id(module) for module in model.modules()}
    found: dict[int, str] = {}
    for one in asked:
        if isinstance(one, nn.Parameter):
            chosen = {id(one)} & names.keys()
        elif isinstance(one, nn.Module):
            chosen = {id(parameter) for parameter in one.parameters()} if id(one) in modules else set[int]()
        elif isinstance(one, str):
            places = model.named_parameters(remove_duplicate=False)
            chosen = {id(parameter) for name, parameter in places if fnmatchcase(name, one)}
        else:
            raise TypeError(f"ignored= takes parameters, modules and patterns of parameter names; got {one!r}.")
        if not chosen:
            shown = repr(one) if isinstance(one, str) else type(one).__name__
            raise ValueError(
                f"ignored= has {shown}, which is not a parameter of the model; parameters: "
                f"{', '.join(list(names.values())[:8])}, ..."
            )
        found |= {key: names[key] for key in chosen}
    return found
