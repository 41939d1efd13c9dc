"""Oracles of the engine's tests, and the one way to compare with them.

Owns: training scripts run twice, plainly and sharded, and exact comparison. Must not know the engine beyond its public
interface. Read `Run` first: a test writes an ordinary training loop against it, once, and `assert_matches` runs that
loop as plain data parallelism (`Plain`) and through `zs.shard` (`Sharded`) and compares everything bit for bit.

Note: what plain data parallelism is here
    After each backward every rank's gradients are summed in rank order 0, 1, ... N-1, then scaled by 1/N, and added to
    what the parameter had accumulated. A parameter that no rank used keeps None; one that some rank used counts as
    zeros on the others. That is the arithmetic that design.md promises, written without shards, buckets or overlap.
    One rank alone runs torch, untouched. `single_run` is the same in one process, and `ddp_run` is torch's own
    DistributedDataParallel.
"""

import contextlib
import copy
import dataclasses
import functools
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from tests.rotation import third
from tools.settled import settled
from zeroshard.describe.offload import offload_of, row_with
from zeroshard.describe.parameters import row_with_parameters
from zeroshard.describe.treatments import activations_of
from zeroshard.table.stages import STAGES as ROWS
from zeroshard.testing import run_ranks
from zeroshard.wire.host import HostComm

STAGES: Final = (0, 1, 2, 3)
WORLDS: Final = (1, 2, 3, 4)
STAGES_AT: Final = MappingProxyType({1: STAGES, 2: STAGES, 3: (1, 3), 4: (2, 3)})
"""What a test of its own loop runs; runs on three or four processes of two cores are most of what the tests cost."""
WATCHDOG_S: Final = 5.0
TIMEOUT_S: Final = 30.0

Script = Callable[["Run"], None]


def run_cases(
    target: Callable[..., Any], world: int, cases: Sequence[tuple[Any, ...]], **options: Any
) -> dict[tuple[Any, ...], list[Any]]:
    """Run `target(*case)` for one case after the other on one group of ranks; return by case what each rank returned.

    A group of ranks costs as much as some steps of a small model. Where each case is a test, one cached call has all.
    """
    by_rank = run_ranks(_each, world, target, tuple(cases), process_group=world > 1, **options)
    return {case: [results[place] for results in by_rank] for place, case in enumerate(cases)}


def _each(target: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [target(*case) for case in cases]


def at_worlds(cases: Iterable[Any]) -> list[Any]:
    """Pair each case with two ranks, and with 1, 3 and 4 in turn, for `pytest.mark.parametrize`.

    `test_parity` and `test_shapes` have every number of ranks, and `tools/programs` draws it.
    """
    return [
        pytest.param(case, world, id=f"{getattr(case, '__name__', case)}-{world}")
        for place, case in enumerate(cases)
        for world in (2, (1, 3, 4)[place % 3])
    ]


def stages_of(script: Callable[..., Any]) -> tuple[int, ...]:
    """Return the stages that a script runs at: 3, and by its name one of those that keep parameters whole.

    `test_parity` compares all stages, and so do the tests that name them.
    """
    text = f"{script.func.__name__} {script.keywords}" if isinstance(script, functools.partial) else script.__name__
    return zlib.crc32(re.sub("0x[0-9a-f]+", "", text).encode()) % 3, 3


def seed(*key: int) -> None:
    """Seed torch's generator from a key, such as (step, rank)."""
    # Where there is no GPU, `torch.manual_seed` keeps the caller's stack as text, which takes longer than a small step.
    torch.default_generator.manual_seed(_mix(key))
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(_mix(key))


def randn(*shape: int, key: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers that depend on the key alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(_mix(key)), dtype=dtype)


def randint(high: int, *shape: int, key: Sequence[int]) -> Tensor:
    """Draw integers in [0, high) that depend on the key alone."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(_mix(key)))


def _mix(key: Sequence[int]) -> int:
    value = 17
    for part in key:
        value = value * 1009 + part + 1
    return value % (2**31)


@contextlib.contextmanager
def not_written_is_nan() -> Iterator[None]:
    """Fill memory that torch allocates without values with NaN, so that each value that is read was written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Run(ABC):
    """One execution of a training script on one rank: the loop is the script's, the parallelism is the subclass's."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.records: list[dict[str, Any]] = []

    @abstractmethod
    def shard(self, model: nn.Module, *optimizers: Optimizer, **options: Any) -> None:
        """Prepare a model for training on all ranks."""

    @abstractmethod
    def attach(self, optimizer: Optimizer) -> None:
        """Prepare an optimizer built after `shard`."""

    @abstractmethod
    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward, and reduce the gradients unless inside `no_sync`."""

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Leave the gradients unreduced."""

    def forget(self, parameter: nn.Parameter) -> None:
        """Forget the gradient of one parameter."""
        parameter.grad = None

    @abstractmethod
    def gathered(self, *, writeback: bool = False, states: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Make everything whole."""

    @abstractmethod
    def grad_norm(self, p: float = 2.0) -> Tensor:
        """Return the norm of all gradients of the last model."""

    def record(self, **values: Any) -> None:
        """Keep what the script observed, by value."""
        self.records.append({name: _copied(value) for name, value in values.items()})

    def result(self) -> dict[str, Any]:
        """Return what the script recorded and the state it ended in, by value."""
        with self.gathered(states=True):
            return {
                "records": self.records,
                "parameters": [
                    {name: _copied(p) for name, p in model.named_parameters(remove_duplicate=False)}
                    for model in self.models
                ],
                "buffers": [{name: _copied(b) for name, b in model.named_buffers()} for model in self.models],
                "states": [_copied(optimizer.state_dict()) for optimizer in self.optimizers],
            }


@final
class Plain(Run):
    """Data parallelism without an engine."""

    def __init__(self) -> None:
        super().__init__()
        self._reduction = "mean"
        self._is_unsynced = False
        self._held: dict[nn.Parameter, Tensor] | None = None  # what was accumulated before an open no_sync

    def shard(self, model: nn.Module, *optimizers: Optimizer, **options: Any) -> None:
        self._reduction = options.get("reduction", "mean")
        for p in model.parameters():
            if self.world > 1:
                dist.broadcast(p.data, 0)
        self.models.append(model)
        self.optimizers.extend(optimizers)

    def attach(self, optimizer: Optimizer) -> None:
        self.optimizers.append(optimizer)

    def backward(self, loss: Tensor, **options: Any) -> None:
        if self.world == 1:
            loss.backward(**options)
            return
        if self._held is None:
            self._held = {p: p.grad for p in self._parameters() if p.grad is not None}
            for p in self._parameters():
                p.grad = None
        try:
            loss.backward(**options)
        except Exception:
            self._held = None
            raise
        if self._is_unsynced:
            return
        parameters = list(self._parameters())
        for p, reduced in zip(parameters, reduce_in_rank_order(parameters, self._reduction), strict=True):
            held = self._held.get(p)
            p.grad = held if reduced is None else reduced if held is None else held + reduced
        self._held = None
        for buffer in (one for model in self.models for one in model.buffers()):
            dist.broadcast(buffer.data, 0)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_unsynced = True
        try:
            yield
        finally:
            self._is_unsynced = False

    @contextlib.contextmanager
    def gathered(self, *, writeback: bool = False, states: bool = False) -> Iterator[None]:
        yield

    def forget(self, parameter: nn.Parameter) -> None:
        super().forget(parameter)
        (self._held or {}).pop(parameter, None)

    def grad_norm(self, p: float = 2.0) -> Tensor:
        grads = [q.grad for q in self.models[-1].parameters() if q.grad is not None]
        return nn.utils.get_total_norm(grads, p)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for model in self.models:
            yield from model.parameters()


def reduce_in_rank_order(parameters: Sequence[nn.Parameter], reduction: str) -> list[Tensor | None]:
    """Sum gradients over the ranks, in rank order; None for a parameter of which no rank has one."""
    mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    is_used = _on_all_ranks(torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8))
    reduced: list[Tensor | None] = [None] * len(parameters)
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        places = [place for place, p in enumerate(parameters) if p.dtype == dtype]
        flat = torch.cat([mine[place].reshape(-1) for place in places])
        total = sum_in_order(_on_all_ranks(flat), reduction)
        for place, part in zip(places, total.split([mine[place].numel() for place in places]), strict=True):
            if any(used[place] for used in is_used):
                p = parameters[place]
                reduced[place] = torch.empty_like(p, requires_grad=False).copy_(part.view(p.shape))
    return reduced


def _on_all_ranks(tensor: Tensor) -> list[Tensor]:
    received = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(received, tensor)
    return received


def sum_in_order(grads: Sequence[Tensor], reduction: str = "mean") -> Tensor:
    """Sum tensors from the first to the last, then scale by one over their number if the reduction is a mean."""
    total = grads[0].clone()
    for grad in grads[1:]:
        total += grad
    return total * (1 / len(grads)) if reduction == "mean" else total


@final
class Sharded(Run):
    """The engine under test."""

    def __init__(self, stage: int, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.stage = stage
        self.zeros: list[zs.Zero] = []
        self._options = dict(options or {})

    def shard(self, model: nn.Module, *optimizers: Optimizer, **options: Any) -> None:
        which = optimizers[0] if len(optimizers) == 1 else list(optimizers) or None
        options = {"watchdog_s": WATCHDOG_S, **self._options, **options}
        self.zeros.append(zs.shard(model, which, stage=self.stage, **settled(options)))
        assert_heard(self.zeros[-1], model, self.stage, **options)
        self.models.append(model)
        self.optimizers.extend(optimizers)

    def attach(self, optimizer: Optimizer) -> None:
        self.zeros[-1].attach(optimizer)
        self.optimizers.append(optimizer)

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for zero in self.zeros:
                stack.enter_context(zero.no_sync())
            yield

    @contextlib.contextmanager
    def gathered(self, *, writeback: bool = False, states: bool = False) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for zero in self.zeros:
                stack.enter_context(zero.gathered(writeback=writeback, states=states))
            yield

    def grad_norm(self, p: float = 2.0) -> Tensor:
        return self.zeros[-1].grad_norm(p)


def assert_heard(zero: zs.Zero, model: nn.Module, stage: int, **options: Any) -> None:
    """Require options that change no number to have had their effect: a comparison of numbers would not miss them."""
    row = dataclasses.replace(ROWS[stage], activations=activations_of(options.get("activations")))
    row = row_with_parameters(row, options.get("parameters"))
    row = row_with(row, offload_of(options.get("offload")), is_alone=zero.mesh.world_size == 1)
    assert zero.residency == row, f"stage {stage}: {zero.residency}"
    if isinstance(options.get("mesh"), int):
        assert zero.mesh.replicas == options["mesh"], f"{zero.mesh.replicas} copies"
    if "shared_memory" in options and zero.mesh.world_size > 1:
        assert isinstance(zero._engine.comm, HostComm) == options["shared_memory"], type(zero._engine.comm)
    units = {unit.name for unit in zero.units}
    owned = [name for name, _ in model.named_parameters()]  # each under the first of its names
    for name, module in model.named_modules():
        if any(_names(one, module) for one in options.get("units") or ()):
            has_parameters = any(one.startswith(f"{name}." if name else "") for one in owned)
            assert name in units or not has_parameters, f"'{name}' is no unit; units: {sorted(units)}"


def _names(unit: object, module: nn.Module) -> bool:
    return unit is module or type(module) is unit or type(module).__name__ == unit


@dataclasses.dataclass(frozen=True)
class Case:
    """A plain training loop as data, for the oracles that must own the loop themselves.

    Args:
        build: returns the model, always with the same initial parameters.
        loss: of a model and a (step, rank).
        optimizer: of the model.
        steps: number of optimizer steps.
        clip: the norm that gradients are clipped to before each step, if any.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    steps: int = 10
    clip: float | None = None


@dataclasses.dataclass(frozen=True)
class Casts:
    """Mixed precision in one process.

    Args:
        param: dtype of the parameters and inputs of forward and backward; outputs are float32, and buffers stay.
        wire: dtype that each rank's gradients are rounded to before they are summed in float32.
        scale: factor of the loss. The engine scales where gradients enter the model's outputs; a power of two is exact
            in the loss, too.
    """

    param: torch.dtype
    wire: torch.dtype = torch.float32
    scale: float = 1.0

    def model_of(self, masters: nn.Module) -> nn.Module:
        """Return a copy that computes in `param`."""
        model = copy.deepcopy(masters)
        for p in model.parameters():
            p.data = p.data.to(self.param)
        model.register_forward_pre_hook(lambda _, inputs: tuple(x.to(self.param) for x in inputs))
        model.register_forward_hook(lambda _, inputs, output: output.float())
        return model


def single_run(
    case: Case, world: int, casts: Casts | None = None, after_step: Callable[[nn.Module], None] = lambda _: None
) -> dict[str, Any]:
    """Train in this process alone: the ranks' gradients in turn, summed in rank order, scaled by one over N.

    Args:
        casts: train in mixed precision; the parameters returned are those of forward and backward.
        after_step: called with the model after each step.
    """
    masters = case.build()
    model = masters if casts is None else casts.model_of(masters)
    optimizer = case.optimizer(masters)
    losses: list[list[float]] = [[] for _ in range(world)]
    norms: list[float] = []
    for step in range(case.steps):
        grads: list[dict[str, Tensor]] = []
        for rank in range(world):
            loss = case.loss(model, step, rank)
            (loss if casts is None else loss * casts.scale).backward()
            losses[rank].append(loss.item())
            grads.append({name: _sent(p.grad, casts) for name, p in model.named_parameters() if p.grad is not None})
            model.zero_grad()
        for name, p in masters.named_parameters():
            held = [grad.get(name) for grad in grads]
            if any(grad is not None for grad in held):
                p.grad = sum_in_order([torch.zeros_like(p) if grad is None else grad for grad in held])
        if case.clip is not None:
            norms.append(nn.utils.clip_grad_norm_(masters.parameters(), case.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for low, high in zip(model.parameters(), masters.parameters(), strict=True):
                if low is not high:
                    low.copy_(high)
        after_step(model)
    states = _copied(optimizer.state_dict())
    return {"losses": losses, "norms": norms, "parameters": _parameters(model), "states": states}


def _sent(grad: Tensor, casts: Casts | None) -> Tensor:
    return grad if casts is None else (grad.float() / casts.scale).to(casts.wire).float()


def ddp_run(case: Case, **options: Any) -> dict[str, Any]:
    """Train this rank under torch's DistributedDataParallel."""
    model = case.build()
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    optimizer = case.optimizer(model)
    losses = _loop(case, ddp, optimizer)
    return {"losses": losses, "parameters": _parameters(model), "states": _copied(optimizer.state_dict())}


def engine_run(case: Case, stage: int, **options: Any) -> dict[str, Any]:
    """Train this rank through the engine."""
    model = case.build()
    optimizer = case.optimizer(model)
    zero = zs.shard(model, optimizer, stage=stage, **settled({"watchdog_s": WATCHDOG_S, **options}))
    assert_heard(zero, model, stage, **options)
    losses = _loop(case, model, optimizer)
    with zero.gathered(states=True):
        return {"losses": losses, "parameters": _parameters(model), "states": _copied(optimizer.state_dict())}


def _loop(case: Case, model: nn.Module, optimizer: Optimizer) -> list[float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(case.steps):
        loss = case.loss(model, step, rank)
        loss.backward()
        losses.append(loss.item())
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _copied(value: Any) -> Any:
    """Copy an observation so that later steps do not change it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(entry) for entry in value]
    return value


def assert_close(found: Mapping[str, Any], plain: Mapping[str, Any], *numbers: str) -> None:
    """Require these numbers of a run, and its "model", to be those of a plain run, but for rounding."""
    for key in numbers:
        assert found[key] == pytest.approx(plain[key], rel=1e-5), key
    for name, value in found["model"].items():
        torch.testing.assert_close(value, plain["model"][name], rtol=1e-5, atol=1e-6)


def assert_same(expected: Any, actual: Any, where: str = "", relative: float = 0.0) -> None:
    """Require two observations to be equal, and name the first place where they are not.

    Args:
        relative: 0 for bit for bit; else how far apart two tensors may be in the 2-norm, relative to the expected one.
    """
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: expected a tensor, got {type(actual).__name__}"
        assert expected.dtype == actual.dtype, f"{where}: dtype {actual.dtype}, expected {expected.dtype}"
        assert expected.shape == actual.shape, f"{where}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        assert _is_same(expected, actual, relative), f"{where}: {_difference(expected, actual)}"
    elif isinstance(expected, Mapping):
        assert set(expected) == set(actual), f"{where}: keys {list(actual)}, expected {list(expected)}"
        for key in expected:
            assert_same(expected[key], actual[key], f"{where}.{key}", relative)
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual), f"{where}: {len(actual)} entries, expected {len(expected)}"
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert_same(one, other, f"{where}[{index}]", relative)
    else:
        assert expected == actual, f"{where}: {actual!r}, expected {expected!r}"


def _is_same(expected: Tensor, actual: Tensor, relative: float) -> bool:
    if relative == 0.0 or torch.equal(expected, actual):
        return torch.equal(expected, actual)
    error, size = torch.linalg.vector_norm(actual - expected), torch.linalg.vector_norm(expected)
    return bool(error <= relative * size)


def _difference(expected: Tensor, actual: Tensor) -> str:
    difference = (expected.double() - actual.double()).abs()
    wrong = int((expected != actual).sum())
    return f"{wrong} of {expected.numel()} elements differ, by at most {difference.max().item():.3e}"


def assert_matches(
    script: Script,
    world: int,
    stages: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    relative: float = 0.0,
) -> list[dict[int, Any]]:
    """Run a script plainly and at several stages on `world` ranks and require every observation to be equal.

    A rotation runs the highest stage and a third of the others (`third`).

    Args:
        stages: by default those of `stages_of`.
        relative: as for `assert_same`; a test that gives it says why.

    Returns:
        By rank, then by stage: the engine's result, for what a test looks at besides. Lower stages may be missing.
    """
    stages = third(sorted(stages or stages_of(script), reverse=True))
    by_rank = run_ranks(
        both, world, script, tuple(stages), dict(options or {}), timeout_s=TIMEOUT_S, process_group=world > 1
    )
    for rank, (expected, actual) in enumerate(by_rank):
        for stage in stages:
            assert_same(expected, actual[stage], f"[rank {rank}/{world}] stage {stage}", relative)
    return [actual for _, actual in by_rank]


def both(script: Script, stages: Sequence[int], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, Any]]:
    """Run a script on this rank plainly, then at each stage."""
    expected = _execute(Plain(), script)
    actual = {}
    for stage in stages:
        try:
            actual[stage] = _execute(Sharded(stage, options), script)
        except Exception as error:
            error.add_note(f"at stage {stage}")
            raise
    return expected, actual


def _execute(run: Run, script: Script) -> dict[str, Any]:
    seed(0)
    script(run)
    return run.result()
