"""A sharded parameter's whole interface against torch's: released it is right or refuses by name, whole it is torch's.

Note: how it is found out
    `interface.py` enumerates what the installed torch and Python can ask of a tensor, also what never comes to Python.
    What the sharded parameter answers or raises is compared with the same asked of a plain parameter; a refusal that
    names the parameter is right where its values are released, and so is a text that torch has for any such tensor.
"""

import itertools
import re
import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.core.parameter import ShardedParameter
from zeroshard.testing import run_ranks

from . import interface, models
from .oracle import TIMEOUT_S, WATCHDOG_S
from .test_gradient_interface import BY_DESIGN, Shapes, same, short

REFUSALS = "'matrix'.*(gathered|replaced|cannot be swapped)|TorchScript interpreter|Cannot access data pointer"
"""The last is what torch says where no operation is called, as in `to_dlpack`."""

NOT_ASKED = re.compile(
    # The engine's own hook is among these; autograd's own slot; a count of changes, which the test makes; a backward is
    # a pass; random or any content; a fork of this process.
    r"_hooks|register_|\b_grad\b|_version|backward|rand|empty|share_memory|_fix_weakref|_debug"
)


class Asked:
    """A parameter and a plain one that are asked the same."""

    def __init__(self, stage: int, *, shared_memory: bool) -> None:
        warnings.simplefilter("ignore")
        plain, model = models.build(Shapes), models.build(Shapes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.zero = zs.shard(model, optimizer, stage=stage, shared_memory=shared_memory, watchdog_s=WATCHDOG_S)
        self.pairs = [(m.get_parameter("matrix"), m.get_parameter("cube")) for m in (model, plain)]
        self.is_released = stage == 3
        self.start = [p.detach().clone() for p in self.pairs[1]]
        self.found: list[str] = []
        self.outcomes: Counter[str] = Counter()

    def ask(self, label: str, call: interface.Call) -> str:
        """Ask both; return "refused", "answered" or "raised"."""
        kind, value = self._one(call, *self.pairs[0])
        if kind == "raised" and re.search(REFUSALS, str(value), re.DOTALL):
            kind = "refused"
        self.outcomes[kind] += 1
        if kind == "refused":
            return kind
        plain_kind, expected = self._one(call, *self.pairs[1])
        if kind != plain_kind or (kind == "answered" and not self._agree(value, expected)):
            self.found.append(f"{label}: {kind} {short(value)}; torch {plain_kind} {short(expected)}")
        return kind

    def _one(self, call: interface.Call, p: nn.Parameter, other: nn.Parameter) -> tuple[str, Any]:
        torch.manual_seed(0)
        try:
            value = call(p, other, torch.ones(p.shape))
            kind, value = "answered", p.shape if value is p else value
        except Exception as error:
            kind, value = "raised", error
        p.grad = None
        p.requires_grad_()
        if p is self.pairs[1][0] or not self.is_released:
            with torch.no_grad():
                for one, start in zip((p, other), self.start, strict=True):
                    one.copy_(start)
        return kind, value

    def _agree(self, value: Any, expected: Any) -> bool:
        if isinstance(value, ShardedParameter):
            return isinstance(expected, nn.Parameter)
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
            return isinstance(expected, Tensor) and value.layout is expected.layout
        if isinstance(value, Tensor):
            return isinstance(expected, Tensor) and same(value.detach(), expected.detach())
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return len(value) == len(expected) and all(map(self._agree, value, expected))
        is_plain = isinstance(value, (bool, int, float, str, torch.Size, torch.dtype, torch.device, torch.layout))
        return value == expected if is_plain else type(value) is type(expected)


def everything(stage: int, *, shared_memory: bool) -> tuple[list[str], dict[str, int]]:
    """Ask everything of one parameter, a part of it on each rank; nothing here communicates.

    Returns:
        What is wrong; how often the parameter refused, answered and raised.
    """
    asked = Asked(stage, shared_memory=shared_memory)
    rank = torch.distributed.get_rank()
    for label, call in itertools.islice(interface.other_calls(), rank, None, 2):
        if not (BY_DESIGN & set(re.split(r"\W+", label)) or NOT_ASKED.search(label)):
            asked.ask(label, call)
    for name, function in itertools.islice(interface.functions().items(), rank, None, 2):
        is_of_ranks = str(getattr(function, "__module__", "")).startswith("torch.distributed")
        if is_of_ranks or BY_DESIGN & set(re.split(r"\W+", name)) or NOT_ASKED.search(name):
            continue
        for shape, call in itertools.islice(interface.calls_of(function), 6):
            if asked.ask(f"{name}({shape})", call) != "raised":
                break
    return asked.found, dict(asked.outcomes)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_released_parameter_is_right_or_refuses_by_name(shared_memory: bool) -> None:
    for found, outcomes in run_ranks(partial(everything, 3, shared_memory=shared_memory), 2, timeout_s=3 * TIMEOUT_S):
        assert not found, f"{len(found)} differences:\n" + "\n".join(found[:40])
        assert outcomes["refused"] > 500, outcomes
        assert outcomes["answered"] > 20, outcomes


def test_a_whole_parameter_is_torchs() -> None:
    for found, outcomes in run_ranks(partial(everything, 1, shared_memory=True), 2, timeout_s=3 * TIMEOUT_S):
        assert not found, f"{len(found)} differences:\n" + "\n".join(found[:40])
        assert outcomes["answered"] > 300, outcomes
