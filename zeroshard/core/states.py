"""The states of a unit and of a gradient, each with what it costs in memory.

Owns the words alone. `core/unit.py` changes the states of units, `core/grads.py` those of gradients.
"""

from enum import Enum, IntEnum, auto

__all__ = ["Own", "Presence", "Scope", "Sum"]


class Presence(Enum):
    """Whether the parameters of a unit are there."""

    RELEASED = auto()
    """This rank has its shard; reads of the parameters raise."""
    COMING = auto()
    """The whole unit has memory, and its values are on their way from other ranks."""
    WHOLE = auto()
    """The whole unit has memory, and its values are there."""


class Own(Enum):
    """This rank's gradient of one parameter, before it is summed over ranks."""

    NONE = auto()
    """No gradient came since ranks last agreed on who used what: no memory."""
    LOCAL = auto()
    """It lies in `FlatGradients.local`, which has the size of the whole bucket."""
    SENT = auto()
    """A reduction has it, and the memory it lies in; ranks have not agreed yet."""


class Sum(Enum):
    """What is held of one parameter's gradient: this rank's elements of the sum over ranks.

    The memory is that of `FlatGradients.held`, for the whole bucket together; it goes when the last sum is forgotten.
    """

    STALE = auto()
    """Left over from before `zero_grad`: the next sum overwrites it."""
    UNUSED = auto()
    """A sum of nothing so far: no rank had a gradient."""
    USED = auto()
    """A sum to which some rank had something to add: `.grad` is there, and the optimizer updates."""


class Scope(IntEnum):
    """Over which ranks a backward pass sums gradients; a gradient that is held has the scope of its sum."""

    RANK = auto()
    """None: they stay on this rank, whole (`no_sync()`)."""
    COPY = auto()
    """The ranks that share one copy of the state; the sum over copies is left to a later pass."""
    ALL = auto()
    """All ranks of the mesh."""
