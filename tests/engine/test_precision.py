"""Mixed precision against a single process that casts by the same rules, bit for bit."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import Case, Casts, assert_same, single_run
from zeroshard.core.dtypes import LossScale
from zeroshard.describe.precision import precision_of
from zeroshard.setup.casts import CastIn
from zeroshard.testing import RankFailure, run_ranks

STEPS = 4
FIXED_SCALE = 256.0


class Block(models.Block):
    """A block with a buffer, which no cast of the parameters may round."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("shift", torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift.to(x.dtype)


def build() -> models.Stack:
    return models.build(models.Stack, kind=Block)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(models.features(step, rank)).square().mean()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sharded(stage: int, precision: str | zs.Precision) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    rank, _ = world()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer, stage=stage, precision=precision, settings=zs.Settings(watchdog_s=5))
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    reduced = sorted({e.dtype for e in zero.trace.events if e.kind == "reduce"})
    with zero.gathered():
        return losses, {n: p.detach().clone() for n, p in model.named_parameters()}, reduced


CASE = Case(build, loss_of, adamw, STEPS)


def all_stages(precision: str | zs.Precision) -> list[tuple[list[float], dict[str, torch.Tensor], list[str]]]:
    return [sharded(stage, precision) for stage in range(4)]


@pytest.mark.product
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_training_equals_a_single_process_that_casts_alike(name: str, world_size: int) -> None:
    param = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    expected = single_run(CASE, world_size, Casts(param, scale=FIXED_SCALE if name == "fp16" else 1.0))
    choice = zs.Precision(param=param, loss_scale=FIXED_SCALE) if name == "fp16" else name
    results = run_ranks(all_stages, world_size, choice, process_group=world_size > 1)
    for rank, by_stage in enumerate(results):
        for losses, parameters, wire in by_stage:
            assert losses == expected["losses"][rank]
            assert wire == ["float32"]
            assert_same(expected["parameters"], parameters)


def test_the_wire_has_the_dtype_asked_for() -> None:
    choice = zs.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
    expected = single_run(CASE, 2, Casts(torch.bfloat16, wire=torch.bfloat16))
    for rank, by_stage in enumerate(run_ranks(all_stages, 2, choice)):
        for losses, parameters, wire in by_stage:
            assert wire == ["bfloat16"]
            assert losses == expected["losses"][rank]
            assert_same(expected["parameters"], parameters)


PAPER = zs.Precision(param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32)
SIDE = 96  # 96 * 96 elements are whole cache lines for 1 to 4 ranks alike


def held_bytes(stage: int, choice: str | zs.Precision) -> tuple[dict[str, int], dict[str, int]]:
    model = nn.Linear(SIDE, SIDE, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zs.shard(model, optimizer, stage=stage, precision=choice, settings=zs.Settings(watchdog_s=5))
    model(torch.ones(1, SIDE)).sum().backward()
    optimizer.step()
    memory = zero.memory()
    return memory.resident_bytes, memory.predicted_bytes


def all_held_bytes() -> list[list[tuple[dict[str, int], dict[str, int]]]]:
    return [[held_bytes(stage, choice) for stage in range(4)] for choice in (PAPER, "bf16")]


@pytest.mark.product
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_are_the_papers_and_two_more_where_gradients_are_held_in_fp32(world_size: int) -> None:
    n = world_size
    # Bytes a parameter. Source: Rajbhandari et al. 2020, figure 1; by default gradients take 4 bytes and not 2.
    expected = [
        [16, 4 + 12 / n, 2 + 14 / n, 16 / n],
        [18, 6 + 12 / n, 2 + 16 / n, 18 / n],
    ]
    for by_choice in run_ranks(all_held_bytes, world_size, process_group=world_size > 1):
        for factors, by_stage in zip(expected, by_choice, strict=True):
            for factor, (resident, predicted) in zip(factors, by_stage, strict=True):
                held = sum(resident[column] for column in ("parameters", "gradients", "states"))
                assert held == pytest.approx(factor * SIDE * SIDE, rel=1e-12)  # a third is no binary fraction
                assert {c: resident[c] for c in resident if c != "transient"} == {
                    c: predicted[c] for c in predicted if c != "transient"
                }


def crafted_sum(stage: int) -> float:
    """Send 256, 1 and -256 through a bf16 parameter's gradient as three micro-batches."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zero = zs.shard(model, optimizer, stage=stage, precision="bf16", settings=zs.Settings(watchdog_s=5))
    for value in (256.0, 1.0, -256.0):
        model(torch.tensor([[value]])).sum().backward()
    return float(zero.grad_norm())


def crafted_sums() -> list[float]:
    return [crafted_sum(stage) for stage in range(4)]


def test_small_gradients_survive_large_ones() -> None:
    assert torch.tensor(256.0, dtype=torch.bfloat16) + 1 - 256 == 0  # what bf16 alone would do
    assert run_ranks(crafted_sums, 2) == [[1.0] * 4] * 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


PHASES = ("forward", "backward", "first micro-batch", "micro-batch under no_sync")


def overflow_in(phase: str, stage: int) -> list[tuple[bool, bool, float]]:
    """Let each parameter overflow on each rank in turn; return whether the step was skipped, the next not, the scale.

    In the forward phase the output of the parameter's layer overflows, else its gradient: in the only micro-batch or in
    the first of two.
    """
    rank, size = world()
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    names = [name for name, _ in model.named_parameters()]
    spoiled = ""

    def spoil(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor * float("inf") if name == spoiled else None

    for name, parameter in model.named_parameters():
        if phase == "forward":
            layer = model.get_submodule(name.rpartition(".")[0])
            layer.register_forward_hook(lambda module, inputs, output, name=name: spoil(name, output))
        else:
            parameter.register_hook(lambda grad, name=name: spoil(name, grad))
    zero = zs.shard(model, optimizer, stage=stage, precision="fp16", settings=zs.Settings(watchdog_s=5))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))

    def step(bad: str) -> list[torch.Tensor]:
        nonlocal spoiled
        spoiled = bad
        if "micro-batch" in phase:
            with zero.no_sync() if "no_sync" in phase else contextlib.nullcontext():
                (1e-2 * model(x).square().mean()).backward()
            spoiled = ""
        (1e-2 * model(x).square().mean()).backward()  # far from overflow at the first scale
        optimizer.step()
        optimizer.zero_grad()
        with zero.gathered(states=True):
            states = [v.clone() for s in optimizer.state_dict()["state"].values() for v in s.values()]
            return states + [p.detach().clone() for p in model.parameters()]

    seen = []
    after = step("")
    for bad_rank in range(size):
        for name in names:
            before, scale = after, zero.loss_scale
            skipped, halved = step(name if rank == bad_rank else ""), zero.loss_scale
            after = step("")
            is_skipped = all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
            has_moved = not any(torch.equal(a, b) for a, b in zip(skipped, after, strict=True))
            seen.append((is_skipped, has_moved, halved / scale))
    return seen


def overflows(phase: str) -> list[list[tuple[bool, bool, float]]]:
    return [overflow_in(phase, stage) for stage in range(4)]


@pytest.mark.product
@pytest.mark.parametrize(("phase", "world_size"), [(phase, 3 - place % 2) for place, phase in enumerate(PHASES)])
def test_an_overflow_of_any_parameter_on_any_rank_skips_the_step_on_all(phase: str, world_size: int) -> None:
    for by_stage in run_ranks(overflows, world_size, phase):
        assert by_stage == [[(True, True, 0.5)] * (4 * world_size)] * 4


def test_the_loss_scale_doubles_after_enough_good_steps() -> None:
    from zeroshard.core.dtypes import LossScale

    ours = LossScale("dynamic")
    torchs = torch.amp.GradScaler("cpu")
    torchs.scale(torch.ones(()))  # torch makes its scale at the first use
    for step in range(4100):
        overflows_now = step == 7
        ours.step(has_overflowed=overflows_now, backwards=step, optimizer=0)
        torchs._found_inf_per_device = lambda _, flag=overflows_now: {0: torch.full((), float(flag))}
        torchs._per_optimizer_states[0]["found_inf_per_device"] = {0: torch.full((), float(overflows_now))}
        torchs.update()
        assert ours.value == torchs.get_scale(), step


@pytest.mark.parametrize("count", [1, 2, 4])
def test_several_optimizers_adapt_the_loss_scale_once_for_each_backward(count: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    parameters, each = list(model.parameters()), 8 // count
    optimizers = [torch.optim.SGD(parameters[first : first + each], lr=0.1) for first in range(0, 8, each)]
    zero = zs.shard(model, optimizers, stage=2, precision="fp16")
    scale = zero._engine.loss_scale
    assert scale is not None
    for step, expected in enumerate([(2**15, 0), (2**15, 1), (2**15, 2), (2**14, 0), (2**14, 1)]):
        (model(torch.ones(2, 4)).mean() * (torch.inf if step in (0, 3) else 1.0)).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        assert (scale.value, scale._good_steps) == expected
    assert scale.history == [2**16, 2**15]


def at_the_floor() -> None:
    rank, _ = world()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(
        model,
        optimizer,
        stage=3,
        precision=zs.Precision(param=torch.float16, loss_scale=1.0),
        settings=zs.Settings(watchdog_s=5),
    )
    loss = model(torch.ones(1, 2)).sum() * (float("inf") if rank == 1 else 1.0)
    loss.backward()
    optimizer.step()


def test_overflow_at_the_floor_names_the_parameter() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(at_the_floor, 2)
    for error in failure.value.errors.values():
        assert "not finite at the smallest loss scale, 1" in error.message
        assert "'weight'" in error.message or "'bias'" in error.message


def with_grad_scaler(stage: int) -> tuple[list[float], list[float]]:
    rank, _ = world()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=5))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses, scales = [], []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(models.features(step, rank)).float().square().mean()
        scaler.scale(loss * (float("inf") if (step, rank) == (1, 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def grad_scaler_all_stages() -> list[tuple[list[float], list[float]]]:
    return [with_grad_scaler(stage) for stage in range(4)]


def test_the_users_grad_scaler_agrees_across_ranks() -> None:
    for by_stage in run_ranks(grad_scaler_all_stages, 2):
        assert all(run == by_stage[0] for run in by_stage)
        assert by_stage[0][1] == [1024.0, 512.0, 512.0, 512.0]


def both_scales() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, stage=3, precision="fp16", settings=zs.Settings(watchdog_s=5))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)


def test_two_loss_scales_at_once_are_refused() -> None:
    with pytest.raises(RankFailure, match="would both divide the gradients"):
        run_ranks(both_scales, 2)


def batch_norm_kept() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, stage=3, precision="bf16", settings=zs.Settings(watchdog_s=5))
    out = model(torch.randn(3, 4))
    out.sum().backward()
    optimizer.step()
    return model[0].weight.dtype, model[1].weight.dtype, out.dtype


def test_batch_norm_stays_in_fp32_and_outputs_are_fp32() -> None:
    assert run_ranks(batch_norm_kept, 2) == [(torch.bfloat16, torch.float32, torch.float32)] * 2


def writeback_keeps_masters() -> bool:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    zero = zs.shard(model, optimizer, stage=3, precision="bf16", settings=zs.Settings(watchdog_s=5))
    before = [m.detach().clone() for g in optimizer.param_groups for m in g["params"]]
    with zero.gathered(writeback=True), torch.no_grad():
        model.head.bias.fill_(2.0)
    after = [m.detach() for g in optimizer.param_groups for m in g["params"]]
    names = [n for n, _ in build().named_parameters()]
    with zero.gathered():
        is_written = bool((model.head.bias == 2.0).all())
    return is_written and all(
        torch.equal(a, b) or n == "head.bias" for n, a, b in zip(names, before, after, strict=True)
    )


def test_writing_back_rounds_no_master_that_was_not_changed() -> None:
    assert run_ranks(writeback_keeps_masters, 2) == [True, True]


def test_precision_names_and_dtypes_are_checked() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="precision must be one of fp32"):
        zs.shard(model, precision="half")
    assert precision_of(torch.bfloat16) == precision_of("bfloat16") == precision_of("bf16")
    with pytest.raises(TypeError, match="floating-point torch"):
        zs.Precision(param=torch.int8)
    assert copy.deepcopy(zs.Precision()) == zs.Precision()


def test_gradients_of_inputs_are_divided_in_the_dtype_of_the_inputs() -> None:
    """Divided in fp16, the smallest would become zero."""
    x = torch.ones(3, requires_grad=True)
    ((cast,), _) = CastIn(torch.float16, LossScale("dynamic"))(nn.Identity(), (x,), {})
    cast.backward(torch.full((3,), 2.0**-10, dtype=torch.float16))
    assert_same(x.grad, torch.full((3,), 2.0**-26))
