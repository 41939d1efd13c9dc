"""Which parameters the caller of `shard()` leaves out.

Owns what may be written, and its checks.

Note: what ignored means
    The parameter stays the caller's own on each rank: it is not sharded, not made equal to rank 0's, not converted, and
    its gradient is this rank's, in `.grad`, not reduced. Its optimizer is one that is not handed over. Checkpoints do
    not have it; `model.state_dict()` under `gathered()` does. Norms of sharded gradients do not count it.

    On the meta device it has no values that could be the caller's: it gets them as all others do, whole on every rank
    and rank 0's (`state/materialize.py`). Ignored parameters that have values keep them, whatever initializers write.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["ignored_of"]


def ignored_of(model: nn.Module, asked: Sequence[object]) -> Mapping[int, str]:
    """Return the names of the ignored parameters, by identity.

    Args:
        asked: parameters, modules with all their parameters, or patterns of parameter names.

    Raises:
        ValueError: something that is not in the model.
        TypeError: none of these.
    """
    if isinstance(asked, str | nn.Module | nn.Parameter):
        raise TypeError(f"ignored= takes a list of parameters, modules or names; got {type(asked).__name__} itself.")
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
                f"ignored= has {shown}, which is no parameter of the model; parameters: "
                f"{', '.join(list(names.values())[:8])}, ..."
            )
        found |= {key: names[key] for key in chosen}
    return found
