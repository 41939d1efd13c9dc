"""Plain whole values of split parameters, for code that does not know DTensors: `zero.gathered(whole=True)`.

Owns the replacement of DTensors, in modules and in states of optimizers, by plain tensors, and the way back. The import
takes half a second in torch, so only `handle.py` imports this module, for a mesh with an axis "tensor". Read
`whole/gathered.py` first.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zeroshard.core.engine import Engine
from zeroshard.core.hooks import Hook
from zeroshard.core.parameter import ShardedParameter
from zeroshard.core.slot import slot_of
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import version_of
from zeroshard.wire.mesh import Mesh

__all__ = ["with_whole_values"]


@final
@dataclass(frozen=True)
class _Whole:
    """The plain whole tensor in the place of a DTensor, with its version at the beginning.

    Args:
        where: the parameters of a module, or the states of a parameter.
    """

    where: dict[Any, Any]
    key: Any
    split: DTensor
    plain: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether user code has changed or replaced the plain tensor."""
        return self.where.get(self.key) is not self.plain or version_of(self.plain) != self.version


@contextmanager
def with_whole_values(
    outer: AbstractContextManager[None],
    engine: Engine,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    writeback: bool,
    states: bool,
) -> Iterator[None]:
    """Replace split parameters, and their states, by plain whole tensors inside `gathered()`.

    Args:
        outer: `gathered()`, which writes back, or finds changes, after the DTensors are in place again.

    Raises:
        RuntimeError: a plain parameter was replaced by another object; nothing is written back.
        RankMismatchError: with `writeback`, states differ between ranks in names or shapes.

    Collective: all-gathers along "tensor" on entry; with `writeback`, broadcasts of whole tensors on exit.
    """
    with outer:
        found = [state for one in optimizers for state in one.state.items()] if states else []
        with torch.inference_mode(mode=False), torch.no_grad():
            parameters = list(_plain_parameters(model))
            held = list(_plain_states(found))
        refusal = model.register_forward_pre_hook(RefuseForward(engine.mesh), prepend=True)
        has_finished = False
        try:
            yield
            has_finished = True
        finally:
            refusal.remove()
            replaced = [one for one in parameters if one.where.get(one.key) is not one.plain]
            with torch.no_grad():
                for one in (*parameters, *held) if not writeback else parameters:
                    is_fine = has_finished and not replaced
                    _take_back(one, engine, writeback=is_fine and writeback, tells=is_fine and not writeback)
                if writeback and has_finished and not replaced and states:
                    _split_states(engine, [state for one in optimizers for state in one.state.items()])
        if replaced:
            raise RuntimeError(
                f"{engine.mesh} '{_name(replaced[0].split)}' was replaced by another tensor inside "
                "gathered(whole=True), so nothing was written back. Change values in place, as "
                "parameter.copy_(values) and load_state_dict() do."
            )


def _plain_parameters(model: nn.Module) -> Iterator[_Whole]:
    """Put plain parameters in the places of split ones, one object for each that several modules share."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        named: list[tuple[str, Any]] = list(module._parameters.items())
        for key, parameter in named:
            if isinstance(parameter, DTensor):
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(_whole(parameter), parameter.requires_grad)
                plain = made[id(parameter)]
                module._parameters[key] = plain
                yield _Whole(module._parameters, key, parameter, plain, version_of(plain))


def _plain_states(states: Sequence[tuple[Tensor, dict[Any, Any]]]) -> Iterator[_Whole]:
    """Put plain tensors in the places of split states, in the same order on all ranks."""
    for _, state in sorted(states, key=lambda one: slot_of(one[0]).name):
        for key, value in sorted(state.items(), key=lambda one: repr(one[0])):
            if isinstance(value, DTensor):
                state[key] = plain = _whole(value)
                yield _Whole(state, key, value, plain, version_of(plain))


def _whole(tensor: DTensor) -> Tensor:
    """Return the whole of a DTensor in memory of its own. Collective: all-gather along "tensor"."""
    whole: Tensor = tensor.full_tensor()
    return whole.clone() if all(one.is_replicate() for one in tensor.placements) else whole


def _take_back(one: _Whole, engine: Engine, *, writeback: bool, tells: bool) -> None:
    """Put the DTensor back in its place, with the values of rank 0 if they are to be written back.

    Args:
        tells: whether `gathered()` is to find a change, which is lost.
    """
    is_changed = one.is_changed
    one.where[one.key] = one.split
    is_ignored = isinstance(one.plain, nn.Parameter) and not isinstance(one.split, ShardedParameter)
    if writeback and not is_ignored:
        engine.comm.broadcast(one.plain.data, f"the whole '{_name(one.split)}'", "state")
        values = _split(one.plain.data, one.split)
        # The same bits are no change, should `gathered()` refuse to write back what it compares after this.
        before, after = (part.to_local().detach().reshape(-1).view(torch.uint8) for part in (one.split, values))
        if not torch.equal(before, after):
            one.split.copy_(values)
    elif is_ignored and is_changed:
        one.split.copy_(_split(one.plain.data, one.split))  # each rank's own
    elif is_changed and tells:
        one.split.copy_(one.split)  # `gathered()` compares versions, and names what was changed


def _split_states(engine: Engine, states: Sequence[tuple[Tensor, dict[Any, Any]]]) -> None:
    """Replace plain whole states of split parameters by DTensors with the values of rank 0."""
    whole = [
        (parameter, state, key, value)
        for parameter, state in sorted(states, key=lambda one: slot_of(one[0]).name)
        for key, value in sorted(state.items(), key=lambda one: repr(one[0]))
        if isinstance(parameter, DTensor) and type(value) is Tensor and value.shape == parameter.shape
    ]
    text = ";".join(f"{_name(parameter)}/{key}{value.dtype}" for parameter, _, key, value in whole)
    least, greatest = engine.order.barrier("the end of gathered(whole=True)", zlib.crc32(text.encode()))
    if least != greatest:
        raise RankMismatchError(
            f"{engine.mesh} Optimizer states differ in names or dtypes between ranks at the end of "
            "gathered(whole=True, writeback=True). Load the same state on every rank inside the context."
        )
    for parameter, state, key, value in whole:
        engine.comm.broadcast(value, f"the whole state '{key}' of '{_name(parameter)}'", "state")
        state[key] = _split(value, parameter)


def _split(whole: Tensor, like: Tensor) -> DTensor:
    """Return the DTensor of a whole tensor that every rank has, without communication."""
    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _name(parameter: Tensor) -> str:
    return slot_of(parameter).name if isinstance(parameter, ShardedParameter) else "a state or an ignored parameter"


@final
class RefuseForward(Hook):
    """Before a forward of the model with plain parameters."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise."""
        raise RuntimeError(
            f"{self._mesh} A forward inside gathered(whole=True): layers that are split over 'tensor' have plain whole "
            "weights there, which torch's hooks cannot use. For evaluation and generation, use gathered() without "
            "whole=True."
        )
