"""Updates with gradients that are not finite: nothing changes, on the host's memory and where the answer is a device's.

A device is played by the CPU: its guard is forced, and what it reads back is read late. torch's fused kernels take the
same flag on both.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard as zs
from tests.rotation import third
from zeroshard.core import guard as guards
from zeroshard.core.dtypes import LossScale
from zeroshard.testing import run_ranks
from zeroshard.wire.comm import Comm
from zeroshard.wire.readback import Readback

STAGES = (0, 1, 2, 3)
TIMEOUT_S = 300.0
BAD_STEPS = (0, 2, 5)
"""In the second of these some states are made, and others are there."""
STEPS = 7

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam, fused by the user": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "AdamW, a loop": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.01}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD, Nesterov": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "SGD, dampening": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    "SGD, dampening, fused": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5, "fused": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
}
TAKE_FLAGS = ("Adam", "Adam, fused by the user", "AdamW, amsgrad", "Adagrad", "SGD", "SGD, momentum", "SGD, Nesterov")
"""Those whose updates a flag on the device can stop."""


class Model(nn.Module):
    """A few layers; the last is used only from step 2 on, so its states are made later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.late = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.late(x) if step >= 2 else x


class Watched(Readback):  # type: ignore[misc]
    """A copy to the host that passes late: its values are those of when it was made, and all that happens is noted."""

    log: ClassVar[list[str]] = []

    def __init__(self, values: Tensor) -> None:
        super().__init__(values)
        Watched.log.append("copied")

    def read(self) -> list[float]:
        Watched.log.append("read")
        return super().read()


@contextlib.contextmanager
def memory_of(kind: str) -> Iterator[list[str]]:
    """Have models that are sharded inside take their memory for the host's, or for a device's."""
    Watched.log = []
    with mock.patch.object(Comm, "is_on_host", kind == "host"), mock.patch.object(guards, "Readback", Watched):
        yield Watched.log


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Trained:
    """A small model on its way, with a gradient that is spoiled on the last rank when asked for."""

    def __init__(self, stage: int, make: Callable[..., Any], **options: Any) -> None:
        self.rank, self.size = world()
        torch.manual_seed(0)
        self.model = Model()
        made = make(self.model.parameters())
        self.optimizers = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        self.optimizer = self.optimizers[0]
        self.is_bad, self.spoils = False, float("nan" if stage % 2 else "-inf")
        self.model.second.weight.register_hook(self._spoil)
        options = {"settings": zs.Settings(watchdog_s=20.0), **options}
        self.zero = zs.shard(self.model, self.optimizers, stage=stage, **options)

    def _spoil(self, grad: Tensor) -> Tensor:
        if not (self.is_bad and self.rank == self.size - 1):
            return grad
        spoiled = grad.clone()
        spoiled[0, 0] = self.spoils
        return spoiled

    def backward(self, step: int, *, is_bad: bool = False) -> Tensor:
        self.is_bad = is_bad
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(17 * step + self.rank))
        loss = self.model(x, step).square().mean()
        loss.backward()
        self.is_bad = False
        return loss.detach()

    def state(self) -> dict[str, Any]:
        """Return everything that a step changes, by value."""
        with self.zero.gathered(states=True):
            held = copy.deepcopy(self.optimizer.state_dict()["state"])
            parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        counts = [one.steps for one in self.zero._sharded]
        return {"state": held, "parameters": parameters, "steps": counts, "scale": self.zero.loss_scale}


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Name where two nested values differ in a bit."""
    if isinstance(expected, Tensor):
        same = isinstance(found, Tensor) and found.dtype == expected.dtype and found.shape == expected.shape
        return [] if same and bytes_of(found) == bytes_of(expected) else [f"{path}: {found}, not {expected}"]
    if isinstance(expected, dict):
        keys = [] if found.keys() == expected.keys() else [f"{path}: keys {[*found]}, not {[*expected]}"]
        both = expected.keys() & found.keys()
        return keys + [one for key in both for one in differences(found[key], expected[key], f"{path}/{key}")]
    return [] if found == expected else [f"{path}: {found}, not {expected}"]


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def refused(kind: str, stage: int, name: str) -> list[str]:
    """Make steps, two of which fail at first; return what was wrong, beside a run in which none failed."""
    cls, options = OPTIMIZERS[name]
    wrong: list[str] = []
    ends = []
    for spoils in (True, False):
        with memory_of(kind) as log:
            run = Trained(stage, lambda params: cls(params, **options))
            # torch's own fused SGD cannot begin a momentum beside others.
            for step in range(STEPS) if name != "SGD, dampening, fused" else range(2, STEPS + 2):
                if spoils and step in BAD_STEPS:
                    before = run.state()
                    run.backward(step, is_bad=True)
                    log.clear()
                    place, text = "step", ""
                    try:
                        run.optimizer.step()
                        place = "zero_grad"
                        run.optimizer.zero_grad()
                        place = "backward"
                        run.backward(step)
                        wrong.append(f"step {step}: no error")
                    except RuntimeError as error:
                        text = str(error)
                    is_late = kind == "device" and name in TAKE_FLAGS
                    if place != ("backward" if is_late else "step"):
                        wrong.append(f"step {step}: the error came in {place}")
                    if "The gradient of 'second.weight' is not finite; nothing was changed on any rank" not in text:
                        wrong.append(f"step {step}: {text}")
                    if log != (["copied", "read"] if kind == "device" else []):
                        wrong.append(f"step {step}: {log}")
                    run.optimizer.zero_grad()
                    wrong += [f"step {step}: {d}" for d in differences(run.state(), before)]
                run.backward(step)
                run.optimizer.step()
                run.optimizer.zero_grad()
            ends.append(run.state())
    return wrong + [f"at the end: {d}" for d in differences(*ends)]


def refused_everywhere(kind: str, cases: list[tuple[str, int]]) -> dict[str, list[str]]:
    found = {f"{name}, stage {stage}": refused(kind, stage, name) for name, stage in cases}
    return {case: wrong for case, wrong in found.items() if wrong}


@pytest.mark.product
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_step_that_is_not_finite_changes_no_bit(kind: str, world_size: int) -> None:
    cases = third(itertools.product(OPTIMIZERS, STAGES))
    assert run_ranks(refused_everywhere, world_size, kind, cases, timeout_s=TIMEOUT_S) == [{}] * world_size


def test_a_momentum_that_is_not_restored_is_found() -> None:
    original = guards.make_buffers

    def make(optimizer: torch.optim.Optimizer) -> None:
        is_first = not any("momentum_buffer" in state for state in optimizer.state.values())
        original(optimizer)
        for state in optimizer.state.values() if is_first else ():
            state["momentum_buffer"].fill_(7.0)

    with mock.patch.object(guards, "make_buffers", make):
        # Both runs begin with another momentum then, and the bits of torch's own first step are not theirs.
        assert first_steps("device", 0.0) != first_steps("plain", 0.0)


class Scale(nn.Module):
    """One vector, whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def first_steps(kind: str, dampening: float) -> list[bytes]:
    """Return the bits of parameters and momenta after each step of fused SGD, by torch alone or on a device."""
    model, found = Scale(), list[bytes]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening, fused=True)
    with memory_of(kind):
        zero = None if kind == "plain" else zs.shard(model, optimizer, stage=2)
    for x in (torch.tensor([0.0, -1.0, 2.0, 1e-42]), torch.tensor([3.0, 0.5, -0.0, 1.0])):
        (-model(x)).sum().backward()  # a gradient of -0.0 is among them
        optimizer.step()
        optimizer.zero_grad()
        with contextlib.nullcontext() if zero is None else zero.gathered(states=True):
            states = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
            found += [bytes_of(one) for one in (*model.parameters(), *states)]
    return found


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_the_first_step_of_sgd_has_the_bits_of_torch(dampening: float) -> None:
    assert first_steps("device", dampening) == first_steps("plain", dampening)


class Mixed(nn.Module):
    """Parameters of several dtypes, one of which has no elements and another no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.single, self.wide = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.empty, self.unused = nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.narrow.double() + self.single.double() + self.wide) * x + self.empty.sum()


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_large_gradients_of_any_dtype_are_finite(stage: int) -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-39)
    with memory_of("device"):
        zero = zs.shard(model, optimizer, stage=stage)
    # Their squares and sums are beyond fp32.
    for factor, is_fine in ((3.3e38, True), (1e39, False)):
        model(torch.full((3,), factor, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with contextlib.nullcontext() if is_fine else pytest.raises(RuntimeError, match="'narrow' is not finite"):
            zero.agree(True)
    with zero.gathered():
        assert float(model.wide[0].detach()) == pytest.approx(0.67)


# -- the loss scale ---------------------------------------------------------------------------------------------------


def overflowing(kind: str, stage: int, name: str, clips: bool) -> dict[str, Any]:
    """Train in fp16 over overflows, in the first step and later, in either micro-batch; return all there is."""
    cls, options = OPTIMIZERS[name]
    options = options | ({"fused": True} if name in TAKE_FLAGS else {})
    seen = []
    with memory_of(kind) as log, mock.patch.object(LossScale, "GROWTH_STEPS", 3):
        run = Trained(stage, lambda params: cls(params, **options), precision="fp16")
        for step, bad in enumerate(["first", "", "second", "", "", "", "", "no_sync", "first", "", ""]):
            with run.zero.no_sync() if bad == "no_sync" else contextlib.nullcontext():
                run.backward(step, is_bad=bad in ("first", "no_sync"))
            loss = run.backward(step + 50, is_bad=bad == "second")
            if clips and stage < 2:
                # Whole gradients are plain tensors, and this hides what has overflowed.
                nn.utils.clip_grad_value_(run.model.parameters(), 0.5)
            log.clear()
            run.optimizer.step()
            run.optimizer.zero_grad()
            seen.append([loss.item(), run.zero.loss_scale])
            assert log.count("read") == (kind == "device"), log
        scale = run.zero._engine.loss_scale
        return run.state() | {"seen": seen, "history": scale.history, "good": scale._good_steps}


OVERFLOWING = ("AdamW, amsgrad", "SGD, momentum", "Adagrad", "RMSprop")


def overflows_differ(cases: list[tuple[str, int, bool]]) -> list[str]:
    wrong = []
    for name, stage, clips in cases:
        host, device = (overflowing(kind, stage, name, clips) for kind in ("host", "device"))
        wrong += [f"{name}, stage {stage}, {clips}: {d}" for d in differences(device, host)]
        if host["history"] != [65536.0, 32768.0, 32768.0, 16384.0]:
            wrong.append(f"{name}: {host['history']}")
    return wrong


@pytest.mark.product
@pytest.mark.parametrize("world_size", [2, 1])
def test_an_overflow_on_a_device_is_what_it_is_on_the_host(world_size: int) -> None:
    cases = third(itertools.product(OVERFLOWING, STAGES, (False, True)))
    assert run_ranks(overflows_differ, world_size, cases, timeout_s=TIMEOUT_S) == [[]] * world_size


def at_the_floor(kind: str) -> list[str]:
    texts = []
    precision = zs.Precision(param=torch.float16, loss_scale=1.0)
    for stage in STAGES:
        with memory_of(kind):
            run = Trained(stage, lambda params: torch.optim.AdamW(params, fused=True), precision=precision)
        run.backward(0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        before = run.state()
        run.backward(1, is_bad=True)
        with pytest.raises(RuntimeError) as error:
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.optimizer.zero_grad()
        texts += [str(error.value), *differences(run.state(), before)]
    return texts


def test_an_overflow_at_the_floor_has_one_text() -> None:
    host, device = (run_ranks(at_the_floor, 2, kind) for kind in ("host", "device"))
    assert host == device
    assert all("'second.weight' is not finite at the smallest loss scale, 1" in text for text in host[0])
    assert len(host[0]) == len(STAGES)


# -- GradScaler -------------------------------------------------------------------------------------------------------


def with_scaler(kind: str, stage: int, name: str, unscales: bool) -> dict[str, Any]:
    cls, options = OPTIMIZERS[name]
    scales = []
    with memory_of(kind) as log:
        run = Trained(stage, lambda params: cls(params, **options))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        for step in range(5):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(17 * step + run.rank))
            run.is_bad = step in (2, 3)
            scaler.scale(run.model(x, step).square().mean()).backward()
            run.is_bad = False
            if unscales:
                scaler.unscale_(run.optimizer)
            log.clear()
            scaler.step(run.optimizer)
            assert not hasattr(run.optimizer, "found_inf")
            assert "read" not in log or "fused" not in options, log
            scaler.update()
            run.optimizer.zero_grad()
            scales.append(scaler.get_scale())
    return run.state() | {"scales": scales}


def scalers_differ(cases: list[tuple[str, int, bool]]) -> list[str]:
    wrong = []
    for name, stage, unscales in cases:
        host, device = (with_scaler(kind, stage, name, unscales) for kind in ("host", "device"))
        wrong += [f"{name}, stage {stage}: {d}" for d in differences(device, host)]
        if host["scales"] != [1024.0, 1024.0, 512.0, 256.0, 256.0]:
            wrong.append(f"{name}: {host['scales']}")
    return wrong


@pytest.mark.product
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_users_grad_scaler_does_on_a_device_what_it_does_on_the_host(world_size: int) -> None:
    cases = third(itertools.product(("Adam, fused by the user", "AdamW, a loop", "RMSprop"), STAGES, (False, True)))
    assert run_ranks(scalers_differ, world_size, cases, timeout_s=TIMEOUT_S) == [[]] * world_size


# -- what is read when ------------------------------------------------------------------------------------------------


def reads(tmp_path: Path) -> dict[str, Callable[[Trained], Any]]:
    """Return what reads states, changes gradients or begins something new, by name."""
    return {
        "optimizer.zero_grad()": lambda run: run.optimizer.zero_grad(),
        "optimizer.zero_grad(set_to_none=False)": lambda run: run.optimizer.zero_grad(set_to_none=False),
        "model.zero_grad()": lambda run: run.model.zero_grad(),
        "model.zero_grad(set_to_none=False)": lambda run: run.model.zero_grad(set_to_none=False),
        "p.grad": lambda run: run.model.first.weight.grad,
        "p.grad = None": lambda run: setattr(run.model.first.weight, "grad", None),
        "forward": lambda run: run.model(torch.ones(2, 5), 0),
        "no-grad forward": lambda run: torch.no_grad()(run.model)(torch.ones(2, 5), 0),
        "backward": lambda run: run.model.first.bias.sum().backward(),
        "step": lambda run: run.optimizer.step(),
        "attach": lambda run: run.zero.attach(torch.optim.SGD([run.model.first.weight], lr=0.1)),
        "save": lambda run: run.zero.save(tmp_path / "step-1"),
        "gathered": lambda run: run.zero.gathered().__enter__(),
        "ema": lambda run: run.zero.ema(0.9),
        "state_dict": lambda run: run.optimizer.state_dict(),
        "loss_scale": lambda run: run.zero.loss_scale,
        "norm": lambda run: run.zero.grad_norm(),
        "agree": lambda run: run.zero.agree(True),
    }


READS = tuple(reads(Path()))
LATER = (*(name for name in READS if "zero_grad" in name), "p.grad", "p.grad = None", "forward", "no-grad forward")
"""What needs no answer before the next backward: a device would have to wait for the host after it."""


# A graph from before a step cannot be used after it, and at stage 3 no parameter can be read outside one.
@pytest.mark.product
@pytest.mark.parametrize(("what", "stage"), [(w, s) for w in READS for s in (0, 3) if (w, s) != ("backward", 3)])
def test_what_reads_state_learns_of_a_skipped_step_first(tmp_path: Path, what: str, stage: int) -> None:
    with memory_of("device") as log:
        run = Trained(stage, lambda params: torch.optim.AdamW(params, lr=0.01))
    run.backward(0, is_bad=True)
    run.optimizer.step()
    assert log == ["copied"]
    if what in LATER:
        reads(tmp_path)[what](run)
        assert log == ["copied"]
    with pytest.raises(RuntimeError, match=r"'second\.weight' is not finite; nothing was changed"):
        run.backward(1) if what in LATER else reads(tmp_path)[what](run)
    assert log == ["copied", "read"]


@pytest.mark.product
@pytest.mark.parametrize(("what", "stage"), [(what, stage) for what in LATER for stage in (0, 3)])
def test_with_a_loss_scale_what_follows_reads_it_first(tmp_path: Path, what: str, stage: int) -> None:
    with memory_of("device") as log:
        run = Trained(stage, lambda params: torch.optim.AdamW(params, lr=0.01), precision="fp16")
    run.backward(0, is_bad=True)
    run.optimizer.step()
    before = run.zero._engine.loss_scale.value
    assert log == ["copied"]
    reads(tmp_path)[what](run)
    assert log == ["copied", "read"]
    assert run.zero._engine.loss_scale.value == before / 2


def test_an_average_is_not_moved_by_a_skipped_step() -> None:
    with memory_of("device"):
        run = Trained(2, lambda params: torch.optim.AdamW(params, lr=0.01))
    average = run.zero.ema(0.5)
    run.backward(0, is_bad=True)
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="nothing was changed"):
        average.update()
    assert average._updates == 0


class Launches(TorchDispatchMode):
    """Counts what makes a host wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in self.WAITS:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.product
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_waits_for_nothing_before_the_update(stage: int, precision: str) -> None:
    with memory_of("device") as log:
        run = Trained(stage, lambda params: torch.optim.AdamW(params, lr=0.01), precision=precision)
    run.optimizer.register_step_post_hook(lambda *_: log.append("updated"))
    for step in range(4):
        log.clear()
        # With a loss scale, the next forward follows from the answer; otherwise the next backward is soon enough.
        first, last = (["read"] if step else [], []) if precision == "fp32" else ([], ["read"])
        with Launches() as launches:
            run.backward(step)
            assert log == first
            run.optimizer.step()
            assert log == [*first, "copied", "updated"]
            run.optimizer.zero_grad()
        assert log == [*first, "copied", "updated", *last]
        assert launches.waits == []
    assert run.zero._engine.guard.waits == 0


def test_a_host_that_must_wait_waits_once_and_says_so() -> None:
    with memory_of("device") as log:
        run = Trained(2, lambda params: torch.optim.RMSprop(params, lr=0.01))
    run.optimizer.register_step_post_hook(lambda *_: log.append("updated"))
    assert "RMSprop: before each update the host waits once for the device" in run.zero.summary()
    for step in range(3):
        run.backward(step)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert log == ["copied", "read", "updated"] * 3
    assert "(3 times so far)" in run.zero.summary()


def test_the_host_asks_nothing_of_a_device() -> None:
    with memory_of("host") as log:
        run = Trained(2, lambda params: torch.optim.AdamW(params, lr=0.01))
    run.backward(0)
    run.optimizer.step()
    assert log == []
    assert run.optimizer.param_groups[0]["fused"] is None
    assert "fused" not in run.zero.summary()
    assert "waits" not in run.zero.summary()


# -- the choice of kernels --------------------------------------------------------------------------------------------


def chosen(**options: Any) -> tuple[Trained, Any]:
    with memory_of("device"):
        run = Trained(2, lambda params: torch.optim.AdamW(params, lr=0.01, **options))
    return run, run.optimizer.param_groups[0]["fused"]


def test_fused_kernels_are_chosen_where_the_user_left_that_open() -> None:
    run, fused = chosen()
    assert fused is True
    assert "AdamW: fused=True was set, since fused and foreach were None" in run.zero.summary()
    for options in ({"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": False, "fused": True}):
        run, fused = chosen(**options)
        assert fused is options.get("fused")
        assert "was set" not in run.zero.summary()


def test_a_group_that_is_added_gets_the_same_kernels() -> None:
    model = Model()
    optimizer = torch.optim.AdamW([model.first.weight, model.first.bias], lr=0.01)
    with memory_of("device"):
        for p in (*model.second.parameters(), *model.late.parameters()):
            p.requires_grad_(False)
        zero = zs.shard(model, optimizer, stage=2)
    optimizer.add_param_group({"params": list(model.second.parameters())})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    assert not zero._engine.guard.is_awaited(optimizer)


def test_a_state_of_other_kernels_is_taken_over() -> None:
    plain = Model()
    saved = torch.optim.AdamW(plain.parameters(), lr=0.01)
    plain(torch.ones(2, 5), 2).sum().backward()
    saved.step()
    run, _ = chosen()
    with run.zero.gathered(states=True, writeback=True):
        run.optimizer.load_state_dict(saved.state_dict())
    assert run.optimizer.param_groups[0]["fused"] is True
    run.backward(2)
    run.optimizer.step()
    run.optimizer.zero_grad()
    with run.zero.gathered(states=True):
        assert all(state["step"] == 2 for state in run.optimizer.state_dict()["state"].values())


def test_kernels_are_not_changed_where_states_have_another_dtype_than_masters() -> None:
    model = Model().bfloat16()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)  # its states are of the parameters' dtype
    with memory_of("device"):
        zs.shard(model, optimizer, stage=2, precision="bf16")
        model(torch.ones(2, 5), 0).sum().backward()
        optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None
