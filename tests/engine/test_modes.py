"""Between the steps: evaluation, generation, BatchNorm, and exceptions out of which a clean step follows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.models import WIDTH
from tests.oracle import STAGES, Run, assert_matches, at_worlds


def step_once(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take one ordinary step."""
    loss = models.stack_loss(model, step, run.rank)
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    run.record(loss=loss)


def evaluated_between_steps(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        model.eval()
        with torch.no_grad():
            for micro in range(2):
                run.record(evaluated=models.stack_loss(model, 100 + step, run.rank, micro))
        model.train()
        step_once(run, model, optimizer, step)


def evaluated_first(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    with torch.no_grad():
        run.record(evaluated=models.stack_loss(model, 100, run.rank))
    for step in range(3):
        step_once(run, model, optimizer, step)


def evaluated_in_inference_mode(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        step_once(run, model, optimizer, step)
        with torch.inference_mode():
            run.record(evaluated=models.stack_loss(model, 100 + step, run.rank).clone())


def calls_in_inference_mode(run: Run) -> None:
    """What ends a backward, reduces or gathers in inference mode leaves memory that later steps can change."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        for micro in range(2):
            with torch.inference_mode():
                models.stack_loss(model, 100 + step, run.rank)
            run.backward(models.stack_loss(model, step, run.rank, micro))
            with torch.inference_mode():
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                run.record(norm=run.grad_norm().clone())
                with run.gathered(states=True):
                    assert model.state_dict()
        run.record(norm=nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()


def evaluated_between_forward_and_backward(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank)
        with torch.no_grad():
            run.record(evaluated=models.stack_loss(model, 100 + step, run.rank))
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def evaluated_with_gradients_enabled(run: Run) -> None:
    """An evaluation that forgot `no_grad`: its graph is dropped."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        run.record(evaluated=models.stack_loss(model, 100 + step, run.rank))
        step_once(run, model, optimizer, step)


def generate(model: nn.Module, length: int) -> Tensor:
    """Continue a prompt greedily, one whole forward a token."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    while ids.shape[1] < length:
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids


def generated_with_uneven_lengths(run: Run) -> None:
    """Each rank generates a text of its own length while the parameters are whole; nothing is sent for it."""
    model = models.build(models.GPT)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(models.gpt_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()
        with run.gathered(), torch.no_grad():
            run.record(text=generate(model, 4 + 3 * run.rank))


def generated_on_one_rank(run: Run) -> None:
    model = models.build(models.GPT)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        with run.gathered(), torch.no_grad():
            if run.rank == 0:
                run.record(text=generate(model, 6))
        run.backward(models.gpt_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


class Normalized(nn.Module):
    """A stack of linear layers with BatchNorm, whose buffers are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_norm(run: Run) -> None:
    model = models.build(Normalized)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        step_once(run, model, optimizer, step)
    model.eval()
    with torch.no_grad():
        run.record(evaluated=models.stack_loss(model, 100, run.rank))


class Failing(nn.Module):
    """A block that raises when told to, in its forward or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block()
        self.fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails_in == "forward":
            raise ArithmeticError("planted in forward")
        y = self.block(x)
        if self.fails_in == "backward":
            y.register_hook(self._raise)
        return y

    @staticmethod
    def _raise(grad: Tensor) -> Tensor:
        raise ArithmeticError("planted in backward")


def failing(run: Run, where: str, index: int) -> None:
    """Fail in one block on every rank, then go on: losses and parameters as if it had not been."""
    model = models.build(models.Stack, depth=0)
    model.blocks.extend(models.build(Failing) for _ in range(3))
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(4):
        if step % 2:
            model.blocks[index].fails_in = where
            with pytest.raises(ArithmeticError, match=f"planted in {where}"):
                run.backward(models.stack_loss(model, step, run.rank, 1))
            model.blocks[index].fails_in = ""
            optimizer.zero_grad()
        step_once(run, model, optimizer, step)


def fails_in_the_first_forward(run: Run) -> None:
    """Fail before any order was recorded."""
    model = models.build(models.Stack, depth=0)
    model.blocks.extend(models.build(Failing) for _ in range(3))
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    model.blocks[1].fails_in = "forward"
    with pytest.raises(ArithmeticError):
        models.stack_loss(model, 0, run.rank)
    model.blocks[1].fails_in = ""
    for step in range(2):
        step_once(run, model, optimizer, step)


def fails_in_a_first_block_forward(run: Run) -> None:
    failing(run, "forward", 0)


def fails_in_a_last_block_forward(run: Run) -> None:
    failing(run, "forward", 2)


def fails_in_a_first_block_backward(run: Run) -> None:
    failing(run, "backward", 0)


def fails_in_a_middle_block_backward(run: Run) -> None:
    failing(run, "backward", 1)


def fails_in_a_last_block_backward(run: Run) -> None:
    failing(run, "backward", 2)


def fails_in_evaluation(run: Run) -> None:
    model = models.build(models.Stack, depth=0)
    model.blocks.extend(models.build(Failing) for _ in range(3))
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        model.blocks[1].fails_in = "forward"
        with torch.no_grad(), pytest.raises(ArithmeticError):
            models.stack_loss(model, step, run.rank)
        model.blocks[1].fails_in = ""
        step_once(run, model, optimizer, step)


def fails_under_gathered(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        with pytest.raises(ArithmeticError), run.gathered():
            raise ArithmeticError("planted under gathered")
        step_once(run, model, optimizer, step)


SCRIPTS = [
    evaluated_between_steps,
    evaluated_first,
    evaluated_in_inference_mode,
    calls_in_inference_mode,
    evaluated_between_forward_and_backward,
    evaluated_with_gradients_enabled,
    generated_with_uneven_lengths,
    generated_on_one_rank,
    batch_norm,
    fails_in_the_first_forward,
    fails_in_a_first_block_forward,
    fails_in_a_last_block_forward,
    fails_in_a_first_block_backward,
    fails_in_a_middle_block_backward,
    fails_in_a_last_block_backward,
    fails_in_evaluation,
    fails_under_gathered,
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS))
def test_modes(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


def silent_generation(run: Run) -> None:
    """Under `gathered` a forward sends nothing."""
    model = models.build(models.GPT)
    run.shard(model, models.adamw(model))
    traffic = run.zeros[0].traffic if hasattr(run, "zeros") else None
    with run.gathered(), torch.no_grad():
        before = dict(traffic().sent_bytes) if traffic else {}
        run.record(text=generate(model, 5))
        after = dict(traffic().sent_bytes) if traffic else {}
    assert before == after, f"sent {after} after, {before} before"


def test_forwards_under_gathered_send_nothing() -> None:
    assert_matches(silent_generation, 2, STAGES)
