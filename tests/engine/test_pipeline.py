"""Pipelines: the losses and parameters of one process that accumulates the same micro-batches.

The oracle is a plain loop over micro-batches and ranks, in order.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests import models
from tests.contract.blocks import examples, run_block
from tests.contract.source import REPOSITORY
from tests.oracle import run_cases
from tests.rotation import is_whole, third
from zeroshard.testing import run_ranks

TIMEOUT_S = 480
WATCHDOG_S = 60.0
MICRO, STEPS, DEPTH = 4, 4, 8
Case = tuple[str, int, bool, str]
"""A schedule, a stage, whether ranks share memory, when gradients are reduced."""


def whole_model() -> nn.Module:
    torch.manual_seed(7)
    return models.Stack(depth=DEPTH)


def batch(step: int, data: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = range(MICRO)
    return (
        torch.cat([models.features(step, data, micro) for micro in rows]),
        torch.cat([models.targets(step, data, micro) for micro in rows]),
    )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6),
}


def train(places: int, data: int, kind: str, cases: list[Case]) -> list[dict[str, Any]]:
    mesh, found = init_device_mesh("cpu", (places, data), mesh_dim_names=("pipe", "shard")), []
    for schedule, stage, shared, reduce in cases:
        model = whole_model()
        optimizer = OPTIMIZERS[kind](model.parameters())
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared)
        pipe = zs.pipeline(
            model,
            optimizer,
            mesh=mesh,
            micro_batches=MICRO,
            schedule=schedule,
            loss=F.mse_loss,
            reduce=reduce,
            stage=stage,
            settings=settings,
        )
        losses = []
        for step in range(STEPS):
            losses.append(pipe.step(*batch(step, pipe.zero.mesh.rank)).item())
            optimizer.step()
            optimizer.zero_grad()
        evaluated = pipe.evaluate(*batch(STEPS, pipe.zero.mesh.rank)).item()
        pipe.zero.detach()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        found.append({"losses": losses, "evaluated": evaluated, "parameters": parameters})
    return found


def plain(data: int, kind: str, each: bool) -> dict[str, Any]:
    """Train the whole model in this process.

    Args:
        each: whether each backward's gradients are summed over ranks, or the sum of all micro-batches.
    """
    model = whole_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses = []
    for step in range(STEPS):
        rows, summed = [], dict[str, torch.Tensor]()
        for micros in [[micro] for micro in range(MICRO)] if each else [[*range(MICRO)]]:
            by_rank = []
            for rank in range(data):
                for micro in micros:
                    loss = models.stack_loss(model, step, rank, micro) / MICRO
                    loss.backward()
                    rows.append(loss.item())
                by_rank.append([p.grad for p in model.parameters()])
                optimizer.zero_grad()
            for (name, _), *grads in zip(model.named_parameters(), *by_rank, strict=True):
                total = sum(grads[1:], grads[0]).mul_(1 / data)
                summed[name] = summed[name] + total if name in summed else total
        losses.append(sum(rows) / data)
        for name, p in model.named_parameters():
            p.grad = summed[name]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        last = [models.stack_loss(model, STEPS, rank, micro) for rank in range(data) for micro in range(MICRO)]
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return {"losses": losses, "evaluated": sum(last).item() / len(last), "parameters": parameters}


REDUCES = ("last", "each")
CASES = [
    (schedule, stage, shared, reduce)
    for schedule in ("naive", "gpipe", "1f1b", "interleaved")
    for stage in range(4)
    for shared in (True, False)
    for reduce in REDUCES
]
SOME = [
    (schedule, stage, (number + stage) % 2 == 0, REDUCES[(number + stage // 2) % 2])
    for number, schedule in enumerate(("naive", "gpipe", "1f1b", "interleaved"))
    for stage in range(4)
]
"""Each schedule with each stage, and each with each transport and each kind of reduction."""


def cases_of(some: list[Case]) -> list[Case]:
    return CASES if is_whole() else third(some)


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("places", "data", "kind"),
    [(2, 1, "sgd"), (4, 1, "sgd"), (2, 2, "sgd"), (2, 2, "adamw"), (4, 1, "adamw"), (4, 2, "adamw")],
)
def test_a_pipeline_has_the_bits_of_a_plain_loop(places: int, data: int, kind: str) -> None:
    some = SOME if data > 1 else [case for case in SOME if case[1] in (0, 3)]
    cases = cases_of(some) if places * data <= 4 else third(some)
    expected = {reduce: plain(data, kind, reduce == "each") for reduce in ("last", "each")}
    names = set[str]()
    for found in run_ranks(train, places * data, places, data, kind, cases, timeout_s=TIMEOUT_S):
        for case, actual in zip(cases, found, strict=True):
            oracle = expected[case[3]]
            assert actual["losses"] == pytest.approx(oracle["losses"], rel=1e-6), case
            assert actual["evaluated"] == pytest.approx(oracle["evaluated"], rel=1e-6), case
            for name, value in actual["parameters"].items():
                assert torch.equal(value, oracle["parameters"][name]), (case, name)
            names |= actual["parameters"].keys()
    assert names == oracle["parameters"].keys()


# -- a language model: a tied head, a loose parameter, clipping -------------------------------------------------------


def language_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return models.GPT(depth=4).to(dtype)


def tokens(step: int, data: int) -> torch.Tensor:
    return torch.cat([models.tokens(step, data, micro) for micro in range(MICRO)])


def language_optimizer(model: nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    # The gradients of the keys' biases are zeros but for rounding, which AdamW would turn into updates in fp32.
    if dtype is torch.float32:
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)


def language_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train_language(places: int, data: int, cases: list[Case], dtype: torch.dtype) -> list[dict[str, Any]]:
    mesh, found = init_device_mesh("cpu", (places, data), mesh_dim_names=("pipe", "shard")), []
    for schedule, stage, shared, reduce in cases:
        model = language_model(dtype)
        optimizer = language_optimizer(model, dtype)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared)
        options = {"schedule": schedule, "loss": language_loss, "reduce": reduce, "stage": stage, "settings": settings}
        pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, **options)
        losses, norms = [], []
        for step in range(STEPS):
            ids = tokens(step, pipe.zero.mesh.rank)
            losses.append(pipe.step(ids, ids).item())
            half = pipe.zero.grad_norm().item() / 2
            norms += [half, nn.utils.clip_grad_norm_(model.parameters(), half).item()]
            optimizer.step()
            optimizer.zero_grad()
        pipe.zero.check_copies()
        pipe.zero.detach()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        found.append({"losses": losses, "norms": norms, "parameters": parameters})
    return found


def plain_language(data: int, dtype: torch.dtype) -> dict[str, Any]:
    model, losses, norms = language_model(dtype), [], []
    optimizer = language_optimizer(model, dtype)
    for step in range(STEPS):
        batches = [models.tokens(step, rank, micro) for rank in range(data) for micro in range(MICRO)]
        loss = sum(language_loss(model(ids), ids) for ids in batches) / len(batches)
        loss.backward()
        losses.append(loss.item())
        half = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item() / 2
        norms += [half, nn.utils.clip_grad_norm_(model.parameters(), half).item()]
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "parameters": {n: p.detach() for n, p in model.named_parameters()}}


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_tied_head_is_one_parameter(dtype: torch.dtype, tolerance: float) -> None:
    cases = cases_of(SOME)
    expected, names = plain_language(2, dtype), set[str]()
    for found in run_ranks(train_language, 4, 2, 2, cases, dtype, timeout_s=TIMEOUT_S):
        for case, actual in zip(cases, found, strict=True):
            for key in ("losses", "norms"):
                assert actual[key] == pytest.approx(expected[key], rel=tolerance), (case, key)
            for name, value in actual["parameters"].items():
                torch.testing.assert_close(value, expected["parameters"][name], rtol=tolerance, atol=tolerance)
            names |= actual["parameters"].keys()
    assert names == expected["parameters"].keys()


def train_unfrozen(is_piped: bool) -> torch.Tensor:
    """Train a model whose tied weight is frozen at first; return the weight."""
    model = language_model(torch.float64)
    model.embedding.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if is_piped:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "shard"))
        pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, loss=language_loss, stage=1)
    for step in range(3):
        model.embedding.requires_grad_(step > 0)
        ids = tokens(step, 0)
        if is_piped:
            pipe.step(ids, ids)
        else:
            language_loss(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    if is_piped:
        pipe.zero.detach()
    return model.embedding.weight.detach()


def test_a_tied_weight_that_is_trained_later_is_one_parameter() -> None:
    expected = train_unfrozen(False)
    for weight in run_ranks(train_unfrozen, 2, True, timeout_s=TIMEOUT_S):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


def written_back(stage: int) -> tuple[str, str]:
    """Change a tied weight on the first rank of each place, and then of one place; return the errors after the last."""
    model = language_model(torch.float64)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))
    pipe = zs.pipeline(model, mesh=mesh, micro_batches=MICRO, loss=language_loss, stage=stage)

    def scale(ranks: tuple[int, ...]) -> None:
        with pipe.zero.gathered(writeback=True), torch.no_grad():
            if dist.get_rank() in ranks:
                model.embedding.weight.mul_(3)

    scale((0, 2))
    pipe.zero.check_copies()
    with pytest.raises(zs.RankMismatchError) as at_exit:
        scale((0,))
    with pytest.raises(zs.RankMismatchError) as later:
        pipe.zero.check_copies()
    return str(at_exit.value), str(later.value)


def test_a_tied_weight_that_is_written_at_one_place_is_an_error() -> None:
    for stage, by_rank in run_cases(written_back, 4, third([(3,), (0,)]), timeout_s=2 * TIMEOUT_S).items():
        for told in by_rank:
            for text, what in zip(told, ("gathered(writeback=True)", "check_copies()"), strict=True):
                assert f"After {what}: 'embedding.weight', which is tied over places" in text, stage


def names_in_groups() -> tuple[list[str], list[str]]:
    """Return the names that an optimizer of named parameters has at a place, and those of the place's parameters."""
    model = whole_model()
    optimizer = torch.optim.AdamW(model.named_parameters())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "shard"))
    zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, loss=F.mse_loss)
    return optimizer.param_groups[0]["param_names"], [name for name, _ in model.named_parameters()]


def test_an_optimizer_has_the_names_of_its_place() -> None:
    for found, expected in run_ranks(names_in_groups, 2, timeout_s=TIMEOUT_S):
        assert found == expected


def select(options: dict[str, Any]) -> list[str]:
    """Return the units whose activations are offloaded, or that stay whole until the step, at a place."""
    model = whole_model()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "shard"))
    pipe = zs.pipeline(model, mesh=mesh, micro_batches=MICRO, loss=F.mse_loss, units=[*model.blocks], **options)
    units, row = pipe.zero._engine.units, pipe.zero.residency
    return [one.name for one in units if row.activations.of_unit(one.name) or row.of_unit(one.name) != row.of_unit("")]


@pytest.mark.parametrize(("option", "how"), [("activations", "offload"), ("parameters", "until-step")])
def test_patterns_may_select_units_of_other_places(option: str, how: str) -> None:
    options = {option: {"blocks.0": how, "blocks.7": how}}
    assert run_ranks(select, 2, options, timeout_s=TIMEOUT_S) == [["blocks.0"], ["blocks.7"]]


# -- the page ---------------------------------------------------------------------------------------------------------


def run_page() -> None:
    (program,) = examples((REPOSITORY / "docs/pipelines.md").read_text())
    run_block(program, "docs/pipelines.md")


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 4])
def test_the_program_of_the_page_runs(world: int) -> None:
    run_ranks(run_page, world, process_group=False, timeout_s=TIMEOUT_S)


# -- models on the meta device ----------------------------------------------------------------------------------------


def draw(module: nn.Module) -> None:
    """Initialize a module: a block also scales the weights of its layers, after they were drawn."""
    if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
        module.reset_parameters()
    elif isinstance(module, models.Attention):
        with torch.no_grad():
            module.out.weight.mul_(0.5)
    elif isinstance(module, models.GPT):
        nn.init.normal_(module.position, std=0.1)


def start(places: int, data: int, weights: str | None, stage: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (places, data), mesh_dim_names=("pipe", "shard"))
    torch.manual_seed(100 + torch.distributed.get_rank())
    with torch.device("meta"):
        model = models.GPT(depth=4, tied=weights is None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"stage": stage, "weights": draw if weights is None else weights, "loss": language_loss}
    pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, **options)
    ids = tokens(0, pipe.zero.mesh.rank)
    pipe.step(ids, ids)
    with pipe.zero.gathered():
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("from_files", [False, True])
def test_a_model_on_the_meta_device_starts_with_the_values_of_one_process(from_files: bool, tmp_path: Any) -> None:
    whole = models.GPT(depth=4, tied=not from_files)
    torch.manual_seed(100)
    whole.apply(draw)
    expected = dict(whole.state_dict())
    if from_files:
        save_file(expected, str(tmp_path / "model.safetensors"))
    for places, data, stage in third([(2, 2, 3), (4, 1, 0), (2, 1, 2)]):
        names = set[str]()
        weights = str(tmp_path) if from_files else None
        for found in run_ranks(start, places * data, places, data, weights, stage, timeout_s=TIMEOUT_S):
            for name, value in found.items():
                assert torch.equal(value, expected[name]), (places, name)
            names |= found.keys()
        # A tied head has the name of the embedding alone at the first place, and both at the last.
        assert names == expected.keys()


# -- what is refused --------------------------------------------------------------------------------------------------


class Skipping(models.Stack):
    """A stack in which every block gets the output of the stem."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.stem(x)
        for block in self.blocks:
            x = block(x) + first
        return self.head(x)


class Scaled(models.Stack):
    """A stack whose output is scaled by a parameter of its own, which belongs to the first place."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Twice(models.Stack):
    """A stack that calls its stem again at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.stem(x)[:, :3]


class Odd(models.Block):
    """A block that returns no tensor."""

    def forward(self, x: Any) -> Any:
        return range(3)


class Growing(models.Stack):
    """A stack whose activations have another shape in the second micro-batch."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Growing.count += 1
        return super().forward(torch.cat([x, x]) if Growing.count == 2 else x)


def odd_stack(depth: int) -> nn.Module:
    model = models.Stack(depth)
    model.blocks[2] = Odd()
    return model


def try_step(kind: str, stage: int) -> str:
    """Make a pipeline, and a step of it; return the error's class and text."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "shard"))
    rank = torch.distributed.get_rank()
    torch.manual_seed(7)
    kinds = {"skip": Skipping, "scale": Scaled, "twice": Twice, "odd": odd_stack, "growing": Growing}
    model = kinds.get(kind, models.Stack)(DEPTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"micro_batches": MICRO, "schedule": "1f1b", "loss": F.mse_loss, "cut": None}
    changes: dict[str, dict[str, Any]] = {
        "schedule": {"schedule": ("1f1b", "gpipe")[rank]},
        "few": {"micro_batches": 1},
        "other micro-batches": {"micro_batches": (4, 8)[rank]},
        "other cuts": {"cut": [("blocks.4", "blocks.5")[rank]]},
        "a step in the loss": {"loss": lambda output, target: (optimizer.step(), F.mse_loss(output, target))[1]},
        "a step of the pipe in the loss": {"loss": lambda output, target: pipe.evaluate(output, target)},
        "no loss": {"loss": lambda output, target: None},
        "scaler": {"precision": "fp16", "loss": lambda output, target: F.mse_loss(output.float(), target)},
        "many chunks": {"schedule": "interleaved", "chunks": 5},
        "no module": {"cut": ["blocks.11"]},
        "order": {"cut": ["stem"]},
        "no scalar": {"loss": lambda output, target: output},
        "a word": {"reduce": "never"},
        "no unit": {"activations": {"blocks.0": "offload", "blocks.9": "offload"}},
        "unknown": {"overlap": True},
        "other's": {"sharding_strategy": "full"},
    }
    options |= changes.get(kind, {})
    inputs, targets = batch(0, rank if kind == "inputs" else 0)
    if kind == "rows":
        inputs, targets = inputs[:-1], targets[:-1]
    if kind == "shapes" and rank:
        inputs, targets = inputs[:8], targets[:8]
    try:
        settings = zs.Settings(watchdog_s=WATCHDOG_S)
        pipe = zs.pipeline(model, optimizer, mesh=mesh, stage=stage, settings=settings, **options)
        if kind == "mode" and rank:
            model.eval()
        if kind == "call":
            model(inputs)
        loss = pipe.step(inputs, targets)
        if kind == "later inputs":
            loss = pipe.step(*batch(1, rank))
        if kind == "scaler":
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(loss)
            scaler.step(optimizer)
        (loss / 2 if kind == "half of the loss" else loss).backward()
    except (ValueError, TypeError, RuntimeError, zs.RankMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


REFUSED = {
    "skip": ("RankMismatchError", "'blocks.5' needs a value of 'stem'"),
    "scale": ("RankMismatchError", "The output of Scaled needs a value of 'scale'"),
    "twice": ("RankMismatchError", "The forward calls 'stem', of chunk 0, after a module of chunk 1"),
    "odd": ("RankMismatchError", "Module 'blocks.2' returns a range"),
    "growing": ("RankMismatchError", "Micro-batch 1: the chunk sends (8, 12) torch.float32"),
    "schedule": ("RankMismatchError", "zs.pipeline() was given different arguments"),
    "few": ("ValueError", "micro_batches=1 is below the 2 places"),
    "many chunks": ("ValueError", "Stack has 8 blocks, too few for a pipe of 10 chunks"),
    "no module": ("ValueError", "cut= names 'blocks.11', which is not a module of Stack"),
    "order": ("ValueError", "leaves chunk 0 without parameters"),
    "no scalar": ("RankMismatchError", "loss= of zs.pipeline() returned a tensor of shape (4, 3)"),
    "other micro-batches": ("RankMismatchError", "zs.pipeline() was given different arguments"),
    "other cuts": ("RankMismatchError", "zs.pipeline() was given different arguments"),
    "a step in the loss": (
        "RankMismatchError",
        "optimizer.step() inside a pipeline's step, in the forward of chunk 1, micro-batch 0",
    ),
    "a step of the pipe in the loss": (
        "RankMismatchError",
        "A call of the pipeline inside a pipeline's step, in the forward of chunk 1, micro-batch 0",
    ),
    "no loss": ("RankMismatchError", "Micro-batch 0: loss= of zs.pipeline() returned a NoneType"),
    "scaler": ("RuntimeError", "torch.amp.GradScaler and the engine's own loss scale would both divide the gradients"),
    "half of the loss": ("RuntimeError", "pipe.step() has already run the backward"),
    "later inputs": ("RankMismatchError", "The inputs of [rank 1/2] are not those of [rank 0/2]."),
    "a word": ("ValueError", "reduce must be 'auto', 'last' or 'each'"),
    "no unit": ("ValueError", "At every place of the pipe: activations= names 'blocks.9', which matches no unit"),
    "unknown": ("TypeError", "pipeline() has no argument overlap="),
    "other's": ("TypeError", "pipeline() has no argument sharding_strategy=: "),
    "inputs": ("RankMismatchError", "The inputs of [rank 1/2] are not those of [rank 0/2]."),
    "rows": ("ValueError", "A batch of 15 cannot be cut into 4 equal micro-batches"),
    "call": ("RuntimeError", "The model was called by itself, but this place has only a part of it"),
    "loss": ("RuntimeError", "pipe.step() has already run the backward"),
}


@pytest.mark.product
@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_pipeline_cannot_do_is_an_error_on_all_ranks(kind: str) -> None:
    error, text = REFUSED[kind]
    found = run_ranks(try_step, 2, kind, len(kind) % 4, timeout_s=TIMEOUT_S)
    for one in found:
        assert text in one, one
    assert any(one.startswith((error, "RuntimeError", "ValueError")) for one in found), found
