"""The states of a unit and of a gradient, each with its memory.

Owns the enumerations. `core/unit.py` changes the states of units, `core/grads.py` those of gradients.
"""

from enum import Enum, IntEnum, auto

__all__ = ["Own", "Presence", "Scope", "Sum"]


class Presence(Enum):
    """The state of the parameters of a unit."""

    RELEASED = auto()
    """This rank has its shard; reads of the parameters raise."""
    COMING = auto()
    """The full unit is allocated, and its values are being received; reads wait."""
    WHOLE = auto()
    """The full unit is allocated, with its values."""


class Own(Enum):
    """The state of this rank's gradient of one parameter, before the sum over ranks."""

    NONE = auto()
    """No gradient arrived since ranks last agreed on used parameters: no memory."""
    LOCAL = auto()
    """The gradient is in `FlatGradients.local`, which has the size of the full bucket."""
    SENT = auto()
    """A reduction has the gradient and its memory; ranks have not agreed yet."""


class Sum(Enum):
    """The state of the held gradient of one parameter: this rank's elements of the sum over ranks.

    Its memory is `FlatGradients.held`, for the whole bucket; it is freed when the last sum is dropped.
    """

    STALE = auto()
    """Stale after `zero_grad`: the next sum overwrites it."""
    UNUSED = auto()
    """An empty sum so far: no rank had a gradient."""
    USED = auto()
    """A sum with a gradient of some rank: `.grad` exists, and the optimizer updates."""


class Scope(IntEnum):
    """The ranks over which a backward pass sums gradients; a held gradient has the scope of its sum."""

    RANK = auto()
    """No sum: full gradients stay on this rank (`no_sync()`)."""
    COPY = auto()
    """The ranks of one replica of the state; the sum over replicas is deferred to a later pass."""
    ALL = auto()
    """All ranks of the mesh."""
