"""Questions about all elements of a gradient: torch's answers at each stage; if one rank asks alone, a named error."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, WATCHDOG_S, assert_same, run_cases
from zeroshard.table.errors import RankMismatchError
from zeroshard.testing import run_ranks

TRANSPORTS = (True, False)


def questions(grad: Any) -> dict[str, Any]:
    """Ask what training loops ask; each answer is a plain tensor or a number."""
    return {
        "largest": grad.abs().max(),
        "least": grad.min().item(),
        "mean": grad.mean(),
        "mean of magnitudes": torch.abs(grad).mean(),
        "std": grad.std(),
        "biased": grad.var(unbiased=False),
        "nan": grad.isnan().any(),
        "finite": torch.isfinite(grad).all(),
        "zeros": (grad == 0).sum(),
        "small": (grad.abs() < 1e-3).count_nonzero(),
        "squares": grad.square().sum().sqrt(),
        "alias": grad.detach().abs().amax() + grad.data.abs().amax(),
        "histogram": torch.histc(grad, bins=7),
        "histogram of a range": grad.histc(5, -0.01, 0.01),
    }


def answers(stage: int, shared_memory: bool) -> dict[str, dict[str, Any]]:
    """Return by parameter what the sharded model answered. Runs on a rank."""
    model = models.build(models.Stack)
    settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared_memory)
    zs.shard(model, models.adamw(model), stage=stage, settings=settings)
    models.stack_loss(model, 0, dist.get_rank()).backward()
    return {name: questions(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, 3])
def test_all_elements_are_asked(world: int, stage: int, shared_memory: bool) -> None:
    plain = models.build(models.Stack)
    sums: dict[str, torch.Tensor] = {}
    for rank in range(world):
        plain.zero_grad()
        models.stack_loss(plain, 0, rank).backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.grad / world
    for found in run_ranks(answers, world, stage, shared_memory):
        assert found.keys() == sums.keys()
        for name, answered in found.items():
            for question, expected in questions(sums[name]).items():
                torch.testing.assert_close(
                    torch.as_tensor(answered[question]),
                    torch.as_tensor(expected),
                    rtol=1e-5,
                    atol=1e-7,
                    msg=f"{name}: {question}",
                )


def ask_alone(what: str) -> str:
    """Ask on rank 0 alone; return the error. Runs on a rank."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zs.shard(model, optimizer, stage=3, settings=zs.Settings(watchdog_s=60.0))
    models.stack_loss(model, 0, dist.get_rank()).backward()
    try:
        if dist.get_rank() == 0:
            questions(next(model.parameters()).grad)[what]
        optimizer.step()
    except RankMismatchError as error:
        return str(error)
    return "no error"


def test_one_rank_that_asks_alone_is_named() -> None:
    for text in run_cases(ask_alone, 2, [("largest",)])["largest",]:
        assert "max of the gradient of 'stem.weight'" in text, text
        assert "step 0 of optimizer 0" in text, text


def not_answered() -> list[str]:
    """Ask for what is not one number; return the errors. Runs on a rank."""
    model = models.build(models.Stack)
    zs.shard(model, models.adamw(model), stage=3, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    models.stack_loss(model, 0, dist.get_rank()).backward()
    grad = next(model.parameters()).grad
    texts = []
    for ask in (
        lambda: grad.max(0),
        lambda: grad.abs().sum(dim=0),
        lambda: grad.abs().tolist(),
        lambda: grad.isnan() & 1,
    ):
        with pytest.raises(RuntimeError, match="full_tensor") as caught:
            ask()
        texts.append(str(caught.value))
    return texts


def test_what_is_no_question_about_all_elements_is_refused() -> None:
    texts = run_cases(not_answered, 2, [()])[()][0]
    assert len(texts) == 4
    assert all("'stem.weight'" in text for text in texts)


def equal_gradients() -> tuple[torch.Tensor, torch.Tensor]:
    """Return histograms of a gradient of ones. Runs on a rank."""
    model = torch.nn.Linear(4, 3, bias=False)
    zs.shard(model, models.adamw(model), stage=3, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    model(torch.ones(1, 4)).sum().backward()
    grad: Any = model.weight.grad
    return torch.histc(grad, bins=5), grad.histc(5, 3.0, 3.0)


def test_a_histogram_of_equal_elements_has_them_in_the_middle() -> None:
    ones = torch.ones(3, 4)
    for found in run_ranks(equal_gradients, 2):
        assert_same(list(found), [torch.histc(ones, bins=5), torch.histc(ones, 5, 3.0, 3.0)], "histograms")
