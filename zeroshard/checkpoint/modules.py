"""The state that modules keep beside parameters and buffers: `get_extra_state` and `set_extra_state` of torch.

Owns its place in a checkpoint: among `extra`, by the names of modules, so that older programs can read it.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from torch import nn

from zeroshard.checkpoint.fields import quoted
from zeroshard.checkpoint.values import encode
from zeroshard.table.errors import CheckpointError

__all__ = ["MODULES", "check_modules", "modules_with_state", "set_states", "states_of_modules"]

MODULES: Final = "zeroshard.modules"
"""The key of the states among a checkpoint's `extra`, which `load` takes out again."""


def modules_with_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have extra state, by name; torch asks their classes in the same way."""
    none = nn.Module.get_extra_state
    return {name: one for name, one in model.named_modules() if type(one).get_extra_state is not none}


def states_of_modules(model: nn.Module) -> dict[str, Any]:
    """Return the extra states as JSON can hold them, under `MODULES`; {} if no module has any.

    Raises:
        CheckpointError: a state has a value that a checkpoint cannot hold; the text names the module.
    """
    states = {
        name: encode(one.get_extra_state(), f"get_extra_state() of module '{name}' ({type(one).__name__})")
        for name, one in modules_with_state(model).items()
    }
    return {MODULES: states} if states else {}


def check_modules(saved: Any, names: Collection[str], where: object) -> Mapping[str, Any]:
    """Return the states of a checkpoint; none if it was saved without any, as before states were saved.

    Raises:
        CheckpointError: they are of other modules.
    """
    if saved is None:
        return {}
    if not isinstance(saved, dict) or saved.keys() != set(names):
        other = min(saved.keys() ^ set(names), key=str) if isinstance(saved, dict) else MODULES
        raise CheckpointError(
            f"{where} is not of this model: only one of them has a module {quoted(str(other))} with get_extra_state()."
        )
    return saved


def set_states(modules: Mapping[str, nn.Module], states: Mapping[str, Any]) -> None:
    """Give modules their states, in the order of the model; a place of a pipe has some of the modules."""
    for name, module in modules.items():
        if name in states:
            module.set_extra_state(states[name])
