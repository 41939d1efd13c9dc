"""The attributes that code has set on parameters, such as a factor of the learning rate that an optimizer reads.

Owns which those are, and what a trial has of them. It must not know what stands for a parameter in an update.

Note: kinds of parameters
    An optimizer treats parameters alike if the attributes that its steps read are equal. A trial notes what is read of
    its parameter. So names, which are different for each parameter, make no kinds unless an optimizer reads them; if it
    reads them, there is a trial for each.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

import torch

__all__ = ["Kinds", "OWN", "attributes_of", "tried_attributes"]

Tensor = torch.Tensor

OWN = frozenset(["_replaced", "_zeroshard", "uncut"])
"""Names of the package on parameters and on what stands for them."""


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """Return what code has set on a parameter, or on its slice."""
    found = object.__getattribute__(parameter, "__dict__")  # without a note
    return {name: value for name, value in found.items() if name not in OWN}


class _Noting(torch.nn.Parameter):
    """A parameter of a trial, which notes what is read of it."""

    __slots__ = ("_zeroshard_notes",)
    _zeroshard_notes: set[str]

    def __getattribute__(self, name: str) -> Any:
        with suppress(AttributeError):  # copies that an optimizer makes have no notes
            super().__getattribute__("_zeroshard_notes").add(name)
        return super().__getattribute__(name)


@final
class Kinds:
    """Tells apart the parameters that an optimizer does not treat alike, by what its trials have read so far.

    Args:
        parameters: all that the optimizer has.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._is_needed = any(map(attributes_of, parameters))
        self._read = set[str]()

    def of(self, parameter: Tensor | None) -> str:
        """Return a text that is equal for parameters which an optimizer treats alike, once one of them was tried."""
        given = {} if parameter is None else attributes_of(parameter)
        used = given if "__dict__" in self._read else {key: v for key, v in given.items() if key in self._read}
        values = {key: v if isinstance(v, bool | int | float | str | None) else type(v) for key, v in used.items()}
        return repr(sorted(values.items()))

    def each(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        """Give the first parameter of each kind, and expect its trial before the next one."""
        done = set[str]()
        for parameter in parameters:
            if self.of(parameter) not in done:
                yield parameter
                done.add(self.of(parameter))

    def tried(self, values: Tensor, given: Mapping[str, Any]) -> torch.nn.Parameter:
        """Return a parameter for a trial, with some attributes; what is read of it counts."""
        if not self._is_needed:
            return torch.nn.Parameter(values)
        made = _Noting(values)
        vars(made).update(given)
        made._zeroshard_notes = self._read
        return made


def tried_attributes(parameter: Tensor | None, shape: Sequence[int]) -> dict[str, Any]:
    """Return copies of a parameter's attributes for a trial; those of its shape are ones of another shape.

    Args:
        parameter: the model's; None for no attributes.
        shape: of the parameter in the trial.
    """
    found = dict[str, Any]()
    for name, value in ({} if parameter is None else attributes_of(parameter)).items():
        if isinstance(value, Tensor):
            is_alike = value.ndim > 0 and value.shape == getattr(parameter, "shape", None)
            ones = torch.ones(tuple(shape) if is_alike else (), dtype=value.dtype, device="cpu")
            found[name] = ones if is_alike else value.detach().cpu().clone()
        else:
            found[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    return found
