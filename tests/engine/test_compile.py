"""torch.compile around blocks and around the model: the same numbers, one graph a block, no recompilation later."""

from typing import Any

import pytest
import torch

import zeroshard as zs
from tests import models
from tests.oracle import run_cases
from tests.rotation import third
from zeroshard.testing import run_ranks

STEPS = 5


def train(stage: int, what: str, when: str) -> tuple[list[float], list[int]]:
    """Return losses, and the number of graphs compiled after each step."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = models.build(models.Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # The inductor backend would need a C++ compiler; graphs and guards are Dynamo's and the same with any backend.
    targets = {"nothing": [], "blocks": list(model.blocks), "model": [model]}[what]

    def compile_targets() -> None:
        for module in targets:
            module.compile(backend="aot_eager")

    if when == "before":
        compile_targets()
    zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=20))
    if when == "after":
        compile_targets()
    losses, graphs = [], []
    for step in range(STEPS):
        loss = model(models.features(step, rank=0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(int(counters["stats"]["unique_graphs"]))
    return losses, graphs


def compare(stage: int) -> dict[tuple[str, str], tuple[list[float], list[int]]]:
    runs = {("nothing", "never"): train(stage, "nothing", "never")}
    for what in ("blocks", "model"):
        for when in ("before", "after"):
            runs[what, when] = train(stage, what, when)
    return runs


@pytest.mark.product
@pytest.mark.parametrize("stage", [3, 0])
def test_compiled_training_equals_eager_and_settles(stage: int) -> None:
    for runs in run_ranks(compare, 2, stage, timeout_s=110):
        eager, none = runs.pop(("nothing", "never"))
        assert none == [0] * STEPS
        for (what, when), (losses, graphs) in runs.items():
            # aot_eager runs the same kernels as eager, so there is nothing to tolerate.
            assert losses == eager, (what, when)
            assert graphs[0] > 0
            assert graphs[2:] == [graphs[1]] * (STEPS - 2), (what, when, graphs)
            if what == "blocks":
                assert graphs[-1] == 1, "equal blocks share one graph"


class Registers(models.Stack):
    """A model whose forward registers a module that it already has, as models of Transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first = self.blocks[0]
        found: torch.Tensor = super().forward(x)
        return found


def train_compiled_first(stage: int, is_compiled: bool) -> list[float]:
    """Hand `zs.shard` what `torch.compile(model)` returns; return losses."""
    import torch._dynamo

    torch._dynamo.reset()
    model: Any = models.build(Registers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if is_compiled:
        model = torch.compile(model, backend="aot_eager")
    zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=20))
    losses = []
    for step in range(STEPS):
        loss = model(models.features(step, rank=0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.rotates
def test_a_model_is_compiled_before_it_is_sharded() -> None:
    stages = third((3, 0))
    cases = [(stage, is_compiled) for stage in stages for is_compiled in (False, True)]
    found = run_cases(train_compiled_first, 2, cases, timeout_s=60)
    for stage in stages:
        assert found[stage, True] == found[stage, False]


def accumulate(stage: int, is_compiled: bool) -> list[float]:
    """Train on micro-batches of two sizes, so that torch compiles the second while gradients of the first are held."""
    import torch._dynamo

    torch._dynamo.reset()
    model = models.build(models.Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=20))
    for block in model.blocks if is_compiled else []:
        block.compile(backend="aot_eager")
    losses = []
    for step in range(2):
        for micro in range(2):
            loss = model(models.features(step, 0, micro, rows=4 - micro)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.rotates
def test_gradients_are_held_while_torch_compiles_for_another_shape() -> None:
    stages = third((3, 2, 0))
    cases = [(stage, is_compiled) for stage in stages for is_compiled in (False, True)]
    found = run_cases(accumulate, 2, cases, timeout_s=60)
    for stage in stages:
        assert found[stage, True] == found[stage, False]


def read_compiled() -> None:
    model = models.build(models.Stack)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, settings=zs.Settings(watchdog_s=20))
    model(models.features(0, rank=0)).square().mean().backward()
    first = model.stem.weight

    @torch.compile(backend="eager")
    def double() -> torch.Tensor:
        return torch.zeros(()) if first.grad is None else first.grad * first.grad

    with pytest.raises(Exception, match=r"gradient of 'stem.weight' \(\d+, \d+\) is distributed over ranks"):
        double()


def test_compiled_code_that_reads_a_distributed_gradient_raises() -> None:
    run_ranks(read_compiled, 2, timeout_s=60)


def train_inside_compiled(stage: int, what: str, activations: Any = None) -> list[float]:
    """Train with a backward or a step inside a compiled function, beside a schedule; return losses."""
    import torch._dynamo

    torch._dynamo.reset()
    model = models.build(models.Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) if "early" in what else None
    zs.shard(model, optimizer, stage=stage, activations=activations, settings=zs.Settings(watchdog_s=20))
    schedule = early or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

    def run(step: int) -> torch.Tensor:
        loss: torch.Tensor = model(models.features(step, rank=0)).square().mean()
        loss.backward()
        return loss

    forward_backward = torch.compile(run, backend="eager") if "backward" in what else run
    update = torch.compile(lambda: optimizer.step(), backend="eager") if "step" in what else optimizer.step
    losses = []
    for step in range(3):
        losses.append(forward_backward(step).item())
        update()
        optimizer.zero_grad()
        schedule.step()
    return losses


@pytest.mark.parametrize("activations", [None, "offload"])
def test_a_backward_runs_inside_a_compiled_function(activations: Any) -> None:
    stages = third((3, 0))
    cases = [(stage, what, activations) for stage in stages for what in ("nothing", "a backward")]
    found = run_cases(train_inside_compiled, 2, cases, timeout_s=60)
    for stage in stages:
        assert found[stage, "a backward", activations] == found[stage, "nothing", activations]


@pytest.mark.parametrize("what", ["a step", "a step, early schedule"])
def test_a_step_runs_inside_a_compiled_function(what: str) -> None:
    stages = third((3, 0))
    cases = [(stage, how) for stage in stages for how in ("nothing", what)]
    found = run_cases(train_inside_compiled, 2, cases, timeout_s=60)
    for stage in stages:
        assert found[stage, what] == found[stage, "nothing"]


def test_the_step_of_an_optimizer_is_its_own_again_after_detach() -> None:
    model = models.build(models.Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer)
    assert "step" in vars(optimizer)
    zero.detach()
    assert "step" not in vars(optimizer)


def train_below_the_limit() -> None:
    """Compile a model of more kinds of units than one function may have compiled forms, and train."""
    import torch._dynamo

    torch._dynamo.reset()
    width = models.WIDTH
    layers = [torch.nn.Linear(5, width), models.Block(width), torch.nn.LayerNorm(width), torch.nn.PReLU(width)]
    model = torch.nn.Sequential(*layers)
    settings = zs.Settings(watchdog_s=20)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, units=layers, settings=settings)
    compiled = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for step in range(2):
            compiled(models.features(step, rank=0)).square().mean().backward()


def test_the_hooks_of_a_compiled_model_are_not_compiled() -> None:
    run_ranks(train_below_the_limit, 2, timeout_s=60)


def compile_as_one_graph() -> str:
    model = models.build(models.Stack)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, settings=zs.Settings(watchdog_s=20))
    with pytest.raises(Exception, match="disable") as error:
        torch.compile(model, backend="eager", fullgraph=True)(models.features(0, rank=0))
    return str(error.value)


def test_a_sharded_model_as_one_graph_is_refused_with_the_remedy() -> None:
    for text in run_ranks(compile_as_one_graph, 2, timeout_s=60):
        assert "use fullgraph=False, or compile blocks instead of the sharded model" in text
