"""Results of products that stay beside recomputation: counted, treated by later links, and there for each backward.

What the user's own activation checkpointing keeps beside its inputs is counted apart.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests import models
from tests.models import WIDTH
from zeroshard.activations import products

KINDS = ("flash_attention", "efficient_attention")
ROWS, DEPTH = 64, 3
ROW_BYTES = ROWS * WIDTH * 4


def build(activations: Any, kind: Any = models.Block) -> tuple[nn.Module, zs.Zero]:
    model = models.build(models.Stack, kind=kind)
    return model, zs.shard(model, units=[kind], activations=activations)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def step(model: nn.Module, backwards: int = 1) -> list[Tensor]:
    """Return gradients of each backward of one graph, and of the input."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, 5, requires_grad=True)
    loss, found = model(x).square().mean(), []
    for number in reversed(range(backwards)):
        loss.backward(retain_graph=number > 0)
        assert x.grad is not None
        found += [*gradients(model), x.grad.clone()]
        x.grad = None
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected))


def test_their_bytes_are_activations() -> None:
    model, zero = build("recompute-rest")
    _, inputs = build("recompute")
    x = torch.randn(ROWS, 5)
    loss = model(x).sum()
    # The stem's input; of each block its input and the results of two products; the head's input.
    products = DEPTH * 3 * ROW_BYTES
    expected = ROWS * 5 * 4 + DEPTH * ROW_BYTES + products + ROW_BYTES
    assert zero.memory().resident_bytes["activations"] == expected
    assert f"results of products kept beside recomputation, before other treatments: {products:,} " in zero.summary()
    assert "results of products" not in inputs.summary()
    loss.backward()
    assert zero.memory().resident_bytes["activations"] == 0
    assert zero.memory().peak_bytes["activations"] == expected


@pytest.mark.parametrize("links", ["compress", "offload", "compress+offload"])
def test_later_links_treat_them(links: str) -> None:
    model, zero = build(f"recompute-rest+{links}")
    expected = step(build(None)[0])
    for _ in range(2):
        assert_equal(step(model), expected)
    if "offload" in links:
        loss = model(torch.randn(ROWS, 5)).sum()
        left = zero.memory().resident_bytes["activations"]
        # Outputs of blocks are inputs of the next, and small tensors stay.
        assert left < DEPTH * ROW_BYTES
        del loss


@pytest.mark.parametrize("activations", ["recompute-rest", "recompute-rest+offload"])
def test_a_graph_serves_several_backwards(activations: str) -> None:
    model, zero = build(activations)
    assert_equal(step(model, backwards=3), step(build(None)[0], backwards=3))
    assert zero.memory().resident_bytes["activations"] == 0


def test_a_backward_that_keeps_no_graph_gives_them_back() -> None:
    model, zero = build("recompute-rest")
    seen: list[int] = []
    resident = functools.partial(lambda: zero.memory().resident_bytes["activations"])
    for keeps in (False, True):
        x = models.build(models.Stack).stem(torch.randn(ROWS, 5)).detach().requires_grad_()
        y = model.blocks[1](model.blocks[0](x))  # type: ignore[index, operator]
        y.register_hook(lambda grad: seen.append(resident()))
        x.register_hook(lambda grad: seen.append(resident()))
        y.sum().backward(retain_graph=keeps)
    assert seen[0] == seen[2] == 8 * ROW_BYTES
    # With its inputs the last block's products are gone, or nothing is.
    assert seen[1] <= ROW_BYTES and seen[3] == 8 * ROW_BYTES


class InPlace(models.Block):
    """Changes the result of a product."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu_()).mul_(0.5)


class Unsafe(models.Block):
    """Changes the result of a product through `_unsafe_view`, whose version counter is another one."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[None] @ self.down.weight[:, :WIDTH]).mul_(0.5)[0]


class Recurrent(models.Block):
    """Changes the results of products as torch's GRU does, through `unsafe_split`."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gru = nn.GRU(width, width, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0][:, ::2]


class Outside(models.Block):
    """Returns a result of `_unsafe_view`, for a change after the module."""

    def forward(self, x: Tensor) -> Tensor:
        return x[None] @ self.down.weight[:, :WIDTH]


class Narrow(models.Block):
    """Returns a view of a result, whose versions it shares."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.wide = nn.Linear(width, width + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x)[:, : x.shape[1]]


class Changed(nn.Module):
    """A block whose output is changed after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Outside(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).mul_(1.5)[0]


@pytest.mark.parametrize("activations", ["recompute-rest", "recompute-rest+compress+offload"])
@pytest.mark.parametrize("kind", [InPlace, Unsafe, Recurrent, Changed])
def test_a_result_that_is_changed_in_place_is_computed_again(kind: type[nn.Module], activations: str) -> None:
    expected = step(build(None, kind)[0], backwards=2)
    assert_equal(step(build(activations, kind)[0], backwards=2), expected)


def scale_inputs(_: nn.Module, inputs: tuple[Tensor]) -> None:
    inputs[0].mul_(0.8)


@pytest.mark.parametrize("activations", ["recompute-rest+offload", "recompute-rest+compress+offload"])
def test_a_result_that_is_changed_during_its_copy_is_computed_again(activations: str) -> None:
    """The copy was refused, on the rank alone whose path had the change."""

    def run(how: str | None) -> list[Tensor]:
        model = models.build(lambda: nn.Sequential(nn.Linear(5, WIDTH), Narrow(WIDTH), nn.Linear(WIDTH, 1)))
        if how is not None:
            zs.shard(model, units=[Narrow], activations=how)
        model[2].register_forward_pre_hook(scale_inputs)
        return step(model, backwards=2)

    assert_equal(run(activations), run(None))


class Attending(models.Block):
    """A block with attention, whose kernel has several results."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(x).view(1, 4, ROWS // 4, WIDTH).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return super().forward(x + mixed.transpose(1, 2).reshape(ROWS, WIDTH))


def test_attention_is_kept() -> None:
    expected = step(build(None, Attending)[0], backwards=2)
    model, zero = build("recompute-rest", Attending)
    assert_equal(step(model, backwards=2), expected)
    _, plain = build("recompute-rest")
    step(_)
    assert zero.memory().peak_bytes["activations"] >= plain.memory().peak_bytes["activations"] + DEPTH * ROW_BYTES


def test_attention_with_dropout_is_computed_again() -> None:
    flash, efficient = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in KINDS)
    x = torch.zeros(1)
    assert products._is_kept(flash, (x, x, x), None)
    assert products._is_kept(flash, (x, x, x, 0.0), {})
    assert products._is_kept(efficient, (x, x, x, None, True), {"scale": 1.0})
    assert not products._is_kept(flash, (x, x, x, 0.1), None)
    assert not products._is_kept(efficient, (x, x, x, None, True), {"dropout_p": 0.1})


class Leaving(models.Block):
    """Has another product in its recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(self.norm(x))
        if torch._C._current_graph_task_id() != -1:
            wide.detach().t().mm(wide.detach())
        return x + self.down(wide)


def test_other_products_in_a_recomputation_are_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"\[rank 0/1\] The recomputation of 'blocks\.2' runs aten\.mm\.default where its forward"
    ):
        step(build("recompute-rest", Leaving)[0])


def closing_over(block: nn.Module, closed: Tensor) -> Any:
    """Return a function whose closure has a tensor."""

    def run(x: Tensor, *, inner: tuple[Tensor], factor: Tensor, offset: Tensor) -> Any:
        return block(x * factor + offset) * inner[0] * closed

    return run


class Keywords(models.Stack):
    """Recomputes its blocks itself, with a tensor by keyword, two that are bound, and one in a closure."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        factor, offset = torch.full((ROWS, 1), 0.5), torch.full((ROWS, WIDTH), 0.1)
        for block in self.blocks:
            run = closing_over(block, torch.full((2 * WIDTH,), 1.5)[:WIDTH])
            bound = functools.partial(run, factor=factor, inner=(torch.full((WIDTH,), 2.0),))
            x = checkpoint(bound, x, offset=offset, use_reentrant=False)
        return self.head(x)


def test_what_checkpointing_of_the_model_keeps_beside_its_inputs_is_counted_apart() -> None:
    def run(activations: Any) -> tuple[nn.Module, zs.Zero]:
        model = models.build(Keywords)
        return model, zs.shard(model, units=[models.Block], activations=activations)

    model, zero = run("compress")
    expected = step(run(None)[0])
    assert_equal(step(model), expected)
    loss = model(torch.randn(ROWS, 5)).sum()
    # One factor and one offset, and for each block the whole memory of the view and a factor for each column.
    captured = ROWS * 4 + ROW_BYTES + DEPTH * (2 * WIDTH * 4 + WIDTH * 4)
    assert zero.memory().resident_bytes["captured"] == captured
    assert (
        f"captured by the model's own checkpointing, beside its inputs and untreated: {captured:,} " in zero.summary()
    )
    loss.backward()
    assert zero.memory().resident_bytes["captured"] == 0
    _, plain = build("compress")
    assert "captured" not in plain.memory().resident_bytes and "captured" not in plain.summary()
