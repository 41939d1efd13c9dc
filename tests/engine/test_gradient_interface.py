"""A logical gradient's whole interface against torch's: the same answer, or a refusal by name; never another value.

Note: how it is found out
    `interface.py` enumerates what the installed torch and Python can ask of a tensor. The sharded model is asked first.
    Where it refuses by name, its gradients must be as they were, bit for bit. Where it answers, or raises anything
    else, the same is asked of the plain gradient of an oracle, which must answer the same, or raise, too, and change
    in the same way.
"""

import itertools
import math
import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S, WATCHDOG_S
from zeroshard.core.gradient import LogicalGradient, MappedGradient
from zeroshard.core.slot import slot_of
from zeroshard.testing import run_ranks

from . import interface


class Shapes(nn.Module):
    """Parameters of several numbers of dimensions; padding behind each; one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 30).view(6, 5))
        self.square = nn.Parameter(torch.linspace(-1, 2, 16).view(4, 4))
        self.vector = nn.Parameter(torch.linspace(-1, 3, 7))
        self.number = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.cube = nn.Parameter(torch.linspace(-1, 1, 24).view(2, 3, 4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.matrix).sum(-1) * self.number
        rest = self.vector.sin().sum() + self.cube.cos().sum() + self.square.exp().sum() + self.empty.sum()
        return y + rest


USED = ("matrix", "square", "vector", "number", "empty", "cube")


def gradients(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Run one backward, equal on all ranks, so that the mean over ranks is each rank's own gradient, bit for bit."""
    model(torch.linspace(-1, 1, 15).view(3, 5).to(dtype)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Attack:
    """One sharded model, its oracle, and what asking both came to."""

    def __init__(self, stage: int, *, shared_memory: bool, dtype: torch.dtype = torch.float32) -> None:
        plain = models.build(Shapes).to(dtype)
        self.plain = {name: g.clone() for name, g in gradients(plain, dtype).items()}
        self.model = models.build(Shapes).to(dtype)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.zero = zs.shard(
            self.model, optimizer, stage=stage, settings=zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S)
        )
        gradients(self.model, dtype)
        self.parameters = dict(self.model.named_parameters())
        assert isinstance(self.parameters["matrix"].grad, LogicalGradient)
        self.found: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.bits = self._bits()

    def _bits(self) -> list[Tensor]:
        buckets = {id(b): b for b in (slot_of(p).bucket for p in self.parameters.values())}
        grads = [b.grads for b in buckets.values() if b.grads.tensors()]
        return [g.own_shard().clone() for g in grads]

    def ask(self, name: str, label: str, call: interface.Call) -> str:
        """Ask one thing of one gradient; return "refused", "answered" or "raised"."""
        other = next(n for n in USED if n != name)
        p, plain, plain_other = self.parameters[name], self.plain[name].clone(), self.plain[other].clone()
        grad = p.grad
        assert isinstance(grad, LogicalGradient)
        where = f"{label} of {name}"
        outcome = "answered"
        try:
            value = call(grad, self.parameters[other].grad, torch.ones_like(plain))
        except (RuntimeError, TypeError) as error:
            text = str(error)
            outcome = "refused" if "The gradient of '" in text and "full_tensor()" in text else "raised"
            value = error
        except Exception as error:
            outcome, value = "raised", error
        if outcome == "refused":
            return outcome
        is_changed = outcome == "answered" and not self._is_unchanged()
        try:
            expected = call(plain, plain_other, torch.ones_like(plain))
        except Exception as error:
            if outcome == "answered":
                self.found.append(f"{where}: answered {short(value)}, where torch raises {short(error)}")
        else:
            if outcome == "raised" and not re.search("Cannot (swap|access data pointer)", str(value)):
                self.found.append(f"{where}: raised {short(value)}, where torch answers {short(expected)}")
            elif outcome == "answered" and not self.agree(value, expected, plain if SIGNED.search(label) else None):
                self.found.append(f"{where}: answered {short(value)}, where torch answers {short(expected)}")
        # Whether to compare is decided by the oracle, so that all ranks gather together.
        is_changed_there = not (same(plain, self.plain[name]) and same(plain_other, self.plain[other]))
        if outcome == "answered" and is_changed_there:
            mine = p.grad.full_tensor() if isinstance(p.grad, LogicalGradient) else p.grad
            if mine is None or not same(mine, plain):
                self.found.append(f"{where}: changed to {short(mine)}, where torch changes to {short(plain)}")
            self._restore()
        elif is_changed:
            self.found.append(f"{where}: changed the gradients, and torch does not")
            self._restore()
        return outcome

    def _is_unchanged(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.bits, self._bits(), strict=True))

    def check_unchanged(self, name: str) -> None:
        """Note it where something that refused or raised changed gradients all the same."""
        if not self._is_unchanged():
            self.found.append(f"{name}: refused, and changed the gradients")
            self._restore()

    def _restore(self) -> None:
        for name, p in self.parameters.items():
            p.grad = self.plain.get(name)

    def agree(self, value: Any, expected: Any, summed: Tensor | None = None) -> bool:
        """Tell whether an answer is torch's.

        Args:
            summed: the elements that the answer is a sum or a mean of.
        """
        if isinstance(value, LogicalGradient):
            # What stands for the gradient itself: torch must answer with the gradient, too.
            return isinstance(expected, Tensor) and (expected.shape, expected.dtype) == (value.shape, value.dtype)
        if isinstance(value, MappedGradient):
            # A function of each element, whose elements are known by what is asked of all of them.
            if not isinstance(expected, Tensor) or (expected.shape, expected.dtype) != (value.shape, value.dtype):
                return False
            asked = (torch.count_nonzero, *((torch.max, torch.min) if expected.numel() else ()))
            return all(self.agree(question(value), question(expected)) for question in asked)
        if (
            isinstance(value, (list, tuple))
            and isinstance(expected, (list, tuple))
            and not isinstance(value, torch.Size)
        ):
            pairs = zip(value, expected, strict=False)
            return len(value) == len(expected) and all(self.agree(a, b) for a, b in pairs)
        if isinstance(value, Tensor):
            return isinstance(expected, Tensor) and is_close(value, expected, summed)
        if isinstance(value, float) and isinstance(expected, float):
            return math.isclose(value, expected, rel_tol=2e-6) or (math.isnan(value) and math.isnan(expected))
        return bool(value == expected)


def same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit; NaN equals itself."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))
    )


def is_close(value: Tensor, expected: Tensor, summed: Tensor | None = None) -> bool:
    """Tell whether a norm is the expected one but for the order of a sum of few squares.

    Args:
        summed: of a sum of elements of both signs, which may cancel out, these: rounding is relative to them.
    """
    if (value.shape, value.dtype, value.device) != (expected.shape, expected.dtype, expected.device):
        return False
    relative = {torch.float64: 1e-14, torch.float32: 2e-6}.get(value.dtype, 2**-8)
    absolute = 0.0 if summed is None else torch.finfo(summed.dtype).eps * summed.double().abs().sum().item()
    return torch.allclose(value.double(), expected.double(), rtol=relative, atol=absolute, equal_nan=True)


def short(value: Any) -> str:
    """Return a text of one line."""
    return f"{type(value).__name__} {value!r}".replace("\n", " ")[:160]


SIGNED = re.compile(r"sum|mean|aten")
"""Names of what adds elements up with their signs; of "aten" the packets of overloads are asked by one name."""
BY_DESIGN = frozenset(
    """
    repr str ascii format __repr__ __str__ __format__ hash __hash__ __dir__ __sizeof__ __getstate__ id _cdata
    __reduce_ex__ _reduce_ex_internal _python_dispatch
    """.split()
)
"""What differs between any two tensors, or tells the object and none of its values."""

ROWS = ((1, True), (2, False), (3, True), (3, False))
LISTS = ("[g]", "[t], [g]", "[g], 2.0", "[g], [g]")
PARTS = 5
ENOUGH = 6
"""Refusals of a function that answered nothing, after which the rest is not tried."""


def everything(part: int) -> tuple[list[str], dict[str, int], list[str]]:
    """Ask everything of one gradient at stage 3, and what was answered there of all others at all stages.

    Args:
        part: which of `PARTS` parts of all functions; the last one asks what is no function of torch's, too.

    Returns:
        What is wrong; how many functions refused, answered and raised; the names of those that answered.
    """
    warnings.simplefilter("ignore")
    attack = Attack(3, shared_memory=True)
    outcomes: Counter[str] = Counter()
    answered: dict[str, list[tuple[str, interface.Call]]] = {}
    for name, function in list(interface.functions().items())[part::PARTS]:
        if BY_DESIGN & set(re.split(r"\W+", name)):
            continue
        kinds: dict[str, str] = {}
        for shape, call in interface.calls_of(function):
            if shape.startswith(("[", "t], [")) and all(kinds.get(one) == "raised" for one in LISTS):
                continue  # takes no lists
            kinds[shape] = attack.ask("matrix", f"{name}({shape})", call)
            if kinds[shape] == "answered":
                answered.setdefault(name, []).append((shape, call))
            elif name not in answered and Counter(kinds.values())["refused"] == ENOUGH:
                break
        attack.check_unchanged(name)
        outcomes.update(set(kinds.values()))
    found = attack.found
    asked = interface.other_calls() if part == PARTS - 1 else ()
    others = [(label, call) for label, call in asked if not BY_DESIGN & set(re.split(r"\W+", label))]
    for row, (stage, shared_memory) in enumerate(ROWS):
        attack = Attack(stage, shared_memory=shared_memory)
        # Each parameter on two of the rows: which one is asked does not depend on where its elements are.
        for parameter in (p for place, p in enumerate(USED) if (place + row + part) % 2 == 0 or p == "matrix"):
            for name, ways in answered.items():
                for shape, call in ways:
                    attack.ask(parameter, f"{name}({shape})", call)
            if parameter == "matrix" or (stage == 3 and shared_memory and parameter in ("number", "empty")):
                for label, call in others:
                    attack.ask(parameter, label, call)
            attack.check_unchanged(parameter)
        found += [f"stage {stage}, shared_memory={shared_memory}: {text}" for text in attack.found]
    return found, dict(outcomes), sorted(answered)


@pytest.mark.product
@pytest.mark.parametrize("part", range(PARTS))
def test_a_gradient_answers_as_torch_does_or_refuses_by_name(part: int) -> None:
    for rank, (found, outcomes, answered) in enumerate(run_ranks(everything, 2, part, timeout_s=4 * TIMEOUT_S)):
        assert not found, f"rank {rank}, {len(found)} differences:\n" + "\n".join(found[:40])
        # The enumeration itself has to be one: most functions are there, and reach the gradient.
        assert outcomes["refused"] > 1500 // PARTS, outcomes
        assert len(answered) > 100 // PARTS, answered


ORDERS = (2, 1, 0, -1, -2, 0.5, 3, math.inf, -math.inf, "fro", "nuc", True, None)
NORM_KEYWORDS: tuple[dict[str, Any], ...] = (
    {},
    {"dim": 0},
    {"dim": -1, "keepdim": True},
    {"keepdim": True},
    {"dtype": torch.float64},
    {"dtype": torch.float16},
)


def norms() -> list[str]:
    """Ask for every norm of every gradient, in two dtypes."""
    warnings.simplefilter("ignore")
    found = []
    for stage, shared_memory, dtype in ((1, True, torch.float32), (2, False, torch.bfloat16), (3, True, torch.float32)):
        attack = Attack(stage, shared_memory=shared_memory, dtype=dtype)
        answered = 0
        for name, function in itertools.product(USED, (torch.norm, torch.linalg.norm, torch.linalg.vector_norm)):
            for order, keywords in itertools.product(ORDERS, NORM_KEYWORDS):
                label = f"{function.__name__}({order}, {keywords})"
                call = lambda g, o, t, f=function, p=order, k=keywords: f(g, p, **k)  # noqa: E731
                answered += attack.ask(name, label, call) == "answered"
        assert answered > 100, answered
        found += [f"stage {stage}, {dtype}: {text}" for text in attack.found]
    return found


@pytest.mark.rotates
def test_every_norm_is_torchs_or_refused() -> None:
    for found in run_ranks(norms, 2, timeout_s=TIMEOUT_S):
        assert not found, "\n".join(found[:40])


def utilities(model: nn.Module, run: str) -> list[Any]:
    """Use what torch.nn.utils has for gradients on a model that has some; return what there is to compare."""
    parameters = [p for p in model.parameters() if p.numel()]
    seen: list[Any] = []

    def look() -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append([g.full_tensor() if isinstance(g, LogicalGradient) else g.clone() for g in grads])

    for order in (2.0, 1.0, 3.0, 0.5, 0.0, -1.0, math.inf, -math.inf):
        for foreach in (None, True, False):
            model.zero_grad()
            gradients(model, torch.float32)
            seen.append(nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=order, foreach=foreach))
            seen.append(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], order))
    look()
    for foreach in (None, True, False):
        model.zero_grad()
        gradients(model, torch.float32)
        nn.utils.clip_grad_value_(model.parameters(), 0.1, foreach=foreach)
        look()
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, torch.tensor(3.0), foreach=foreach)
        look()
    first = next(model.parameters())
    first.grad = torch.full_like(first.grad, 0.25, requires_grad=False) if run == "plain" else torch.full((6, 5), 0.25)
    look()
    before = first.grad
    norm = before.norm()
    norm.mul_(100)
    seen.append([first.grad.norm(), first.grad.data.norm(2), first.grad.detach().float().norm().item()])
    gradients(model, torch.float32)  # accumulates
    look()
    model.zero_grad(set_to_none=False)
    look()
    del first.grad
    look()
    if run != "plain":
        with pytest.raises(RuntimeError, match="'matrix' is no longer valid"):
            before.norm()
        for wrong in (5, model.get_parameter("square").grad, "x"):
            with pytest.raises(TypeError, match="'matrix' must be a plain tensor"):
                first.grad = wrong
        with pytest.raises(RuntimeError, match="must have shape"):
            first.grad = torch.ones(3)
        assert first.grad is None
    return seen


def utilities_everywhere() -> list[str]:
    """Compare the utilities on the plain model and on all rows."""
    plain, found = utilities(models.build(Shapes), "plain"), []
    for stage, shared_memory in ((1, True), (2, False), (3, True)):
        attack = Attack(stage, shared_memory=shared_memory)
        attack.model.zero_grad()
        mine = utilities(attack.model, "sharded")
        assert len(mine) == len(plain)
        for place, (one, other) in enumerate(zip(mine, plain, strict=True)):
            if not attack.agree(one, other):
                found.append(f"stage {stage}, {place}: {short(one)}, where torch has {short(other)}")
    return found


@pytest.mark.rotates
def test_the_utilities_of_torch_do_what_they_do_on_whole_gradients() -> None:
    for found in run_ranks(utilities_everywhere, 2, timeout_s=TIMEOUT_S):
        assert not found, "\n".join(found[:40])


def negated(stage: int) -> dict[str, Tensor]:
    model = Shapes()
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, units=[])
    grads = gradients(model, torch.float32)
    for name in USED[:4]:
        grads[name].neg_()
    torch._foreach_neg_([grads[name] for name in USED[3:]])
    return {name: full(grad) for name, grad in grads.items()}


def full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, LogicalGradient) else grad.clone()


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_are_negated_in_place(stage: int) -> None:
    plain = gradients(Shapes(), torch.float32)
    for found in run_ranks(negated, 2, stage):
        assert found.keys() == plain.keys()
        for name, grad in found.items():
            assert torch.equal(grad, plain[name] if name == "number" else -plain[name]), name
