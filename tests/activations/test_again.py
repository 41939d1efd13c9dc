"""What a recomputation finds is what the forward found, and what it leaves behind is nothing."""

import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from zeroshard.activations.surroundings import Surroundings

WIDTH, DEPTH, ROWS = 8, 5, 4
TREATMENTS: dict[str, Any] = {
    "every unit": "recompute",
    "every second": zs.Recomputed(every=2),
    "every third": zs.Recomputed(every=3),
    "but for products": "recompute-rest",
}


class Block(nn.Module):
    """A block; subclasses say what is particular about it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.more()

    def more(self) -> None:
        """Add to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(self.norm(x))), 0.2, self.training)


class Normed(Block):
    """Running statistics."""

    def more(self) -> None:
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


class Spectral(Block):
    """A weight that depends on vectors that change in forward."""

    def more(self) -> None:
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.second(x))


class Average(Block):
    """A buffer that is read and replaced."""

    average: Tensor

    def more(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return super().forward(x - self.average)


class Drawn(Block):
    """Random numbers from a generator of its own."""

    def more(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(x.shape, generator=self.generator))


class Score(Block):
    """Differentiates its own output, twice, in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                (score,) = torch.autograd.grad(torch.tanh(self.linear(inner)).sum(), inner)
            x = super().forward(x + score)
        return x


class Stack(nn.Module):
    """Blocks one after another, and something between them."""

    def __init__(self, kind: type[Block], between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(kind() for _ in range(DEPTH)), nn.Linear(WIDTH, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)


def train(make: Callable[[], nn.Module], activations: Any, is_evaluated: bool = False) -> dict[str, Tensor]:
    """Return losses, gradients and buffers of a few steps, each graph used twice."""
    torch.manual_seed(0)
    model, found = make(), {}
    zs.shard(model, stage=1, activations=activations, units=list(model.blocks))  # type: ignore[call-overload]
    for step in range(2):
        torch.manual_seed(step)
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        model.train(not is_evaluated)
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        model.train()
        found[f"loss {step}"] = loss.detach()
        found |= {f"{name} {step}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found |= {f"{name} {step}": one.clone() for name, one in model.named_buffers()}
        model.zero_grad()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.product
@pytest.mark.parametrize("kind", [Block, Normed, Spectral, Average, Drawn])
@pytest.mark.parametrize("name", TREATMENTS)
def test_state_of_modules_is_that_of_the_forward(name: str, kind: type[Block]) -> None:
    assert_same(train(lambda: Stack(kind), TREATMENTS[name]), train(lambda: Stack(kind), None))


@pytest.mark.parametrize("name", [name for name in TREATMENTS if name != "but for products"])
def test_a_forward_may_differentiate(name: str) -> None:
    assert_same(train(lambda: Stack(Score), TREATMENTS[name]), train(lambda: Stack(Score), None))


@pytest.mark.parametrize("name", TREATMENTS)
def test_modes_are_those_of_the_forward(name: str) -> None:
    found = train(lambda: Stack(Normed), TREATMENTS[name], is_evaluated=True)
    assert_same(found, train(lambda: Stack(Normed), None))


def test_generators_are_found_whenever_they_appear() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, last = vars(module[0]), module[1]
    last.own = None
    surroundings = Surroundings(module, "[rank 0/1] A forward", weakref.WeakSet())

    def draws() -> list[float]:
        found = [one for part in module for one in vars(part).values() if isinstance(one, torch.Generator)]
        return [float(torch.rand((), generator=one)) for one in found]

    changes: list[Callable[[], None]] = [
        lambda: setattr(last, "own", torch.Generator().manual_seed(1)),
        lambda: setattr(last, "own", torch.Generator().manual_seed(2)),
        lambda: setattr(module[0], "more", torch.Generator().manual_seed(3)),
        lambda: first.pop("more"),
        lambda: setattr(last, "own", None),
    ]
    counts = []
    for change in changes:
        change()
        for _ in range(2):
            kept = surroundings.keep()
            before = draws()
            surroundings.note(kept)
            with kept.restored():
                assert draws() == before
            assert not before or draws() != before
        counts.append(len(before))
    assert counts == [1, 1, 2, 1, 0]


def test_buffers_that_change_only_later_are_an_error() -> None:
    class Later(Average):
        """Its buffer changes from the second time on."""

        has_run = False

        def forward(self, x: Tensor) -> Tensor:
            if self.has_run:
                self.average.add_(1.0)
            self.has_run = True
            return Block.forward(self, x + self.average.clone())

    model = Stack(Later)
    zs.shard(model, stage=1, activations="recompute", units=list(model.blocks))
    with torch.no_grad():
        model(torch.ones(ROWS, WIDTH))
    for block in model.blocks:
        block.has_run = False  # type: ignore[assignment]
    model(torch.ones(ROWS, WIDTH))
    loss = model(torch.ones(ROWS, WIDTH)).sum()
    with pytest.raises(
        RuntimeError, match=r"\[rank 0/1\] A forward of .*, which is recomputed, changed buffers \(average\) of a Later"
    ):
        loss.backward()


def double(x: Tensor) -> Tensor:
    return x.mul_(2.0)


def put(x: Tensor) -> Tensor:
    x[:, 0] = 0.5
    return x


def detached(x: Tensor) -> Tensor:
    return x.detach_() if x.sum() > 0 else x


@pytest.mark.product
@pytest.mark.parametrize("between", [double, put, detached])
@pytest.mark.parametrize("name", TREATMENTS)
def test_outputs_may_be_changed_in_place(name: str, between: Callable[[Tensor], Tensor]) -> None:
    assert_same(train(lambda: Stack(Block, between), TREATMENTS[name]), train(lambda: Stack(Block, between), None))


@dataclasses.dataclass
class Fields:
    """A record that counts how often it was made."""

    x: Tensor
    count: int = 0
    twice: Tensor | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.count += 1


class Recorded(Block):
    """Takes and returns records."""

    def forward(self, x: Any) -> Any:
        fields = x if isinstance(x, Fields) else Fields(x)
        y = super().forward(fields.x * fields.count)
        made = Fields(y if fields.twice is None else y + fields.twice)
        made.twice = 2 * y
        return made


@pytest.mark.parametrize("name", TREATMENTS)
def test_records_are_not_made_anew(name: str) -> None:
    def make() -> nn.Module:
        model = Stack(Recorded)
        model.head = nn.Sequential(nn.Linear(WIDTH, 2))
        model.head.register_forward_pre_hook(lambda module, args: (args[0].x + args[0].twice,))
        return model

    assert_same(train(make, TREATMENTS[name]), train(make, None))


class Pair(tuple[Tensor, Tensor]):
    """A tuple that is made of two arguments, and has an attribute."""

    name: str

    def __new__(cls, first: Tensor, second: Tensor) -> "Pair":
        made = super().__new__(cls, (first, second))
        made.name = "a pair"
        return made


class Paired(Block):
    """Takes and returns pairs."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            x = Pair(x, 2 * x)
        assert type(x) is Pair and x.name == "a pair" and len(x) == 2
        return Pair(super().forward(x[0]), x[1] + x[0])


@pytest.mark.parametrize("name", TREATMENTS)
def test_tuples_with_a_constructor_of_their_own_are_inputs(name: str) -> None:
    def make() -> nn.Module:
        model = Stack(Paired)
        model.head = nn.Sequential(nn.Linear(WIDTH, 2))
        model.head.register_forward_pre_hook(lambda module, args: (args[0][0] + args[0][1],))
        return model

    assert_same(train(make, TREATMENTS[name]), train(make, None))


@pytest.mark.parametrize("name", TREATMENTS)
def test_a_graph_that_is_dropped_leaves_nothing(name: str) -> None:
    model = Stack(Block)
    zero = zs.shard(model, stage=1, activations=TREATMENTS[name], units=list(model.blocks))
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    gone = weakref.ref(x)
    loss = model(x).sum()
    del x, loss
    gc.collect()
    assert gone() is None
    assert zero.memory().resident_bytes["activations"] == 0


@pytest.mark.parametrize("name", TREATMENTS)
def test_a_pickled_block_computes(name: str) -> None:
    model = Stack(Block)
    zero = zs.shard(model, stage=1, activations=TREATMENTS[name], units=list(model.blocks))
    x = torch.ones(ROWS, WIDTH)
    with zero.gathered(), torch.no_grad():
        block = model.blocks[0].eval()
        assert torch.equal(pickle.loads(pickle.dumps(block))(x), block(x))


@pytest.mark.parametrize("name", [*TREATMENTS, "compress"])
def test_vmap_over_recomputed_modules_is_refused_by_name(name: str) -> None:
    model = Stack(Block).eval()
    zs.shard(model, stage=0, activations=TREATMENTS.get(name, name), units=list(model.blocks))
    x = torch.randn(2, ROWS, WIDTH)
    with torch.no_grad():
        expected = model(x)
        assert torch.allclose(torch.vmap(model)(x), expected, atol=1e-6)
    if name == "compress":
        torch.vmap(model)(x).sum().backward()
    else:
        with pytest.raises(
            RuntimeError, match=r"\[rank 0/1\] torch\.vmap.* over 'blocks\.0', which is recomputed.*exclude its unit"
        ):
            torch.vmap(model)(x)
    model(x).sum().backward()


class Counting(models.Block):
    """A block that computes with how often it was called."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.called = 0

    def forward(self, x: Tensor) -> Tensor:
        self.called += 1
        return super().forward(x) * self.called


@pytest.mark.parametrize("activations", ["recompute", "recompute-rest", zs.Recomputed(every=2)])
def test_a_recomputation_that_differs_is_refused_by_name(activations: Any) -> None:
    model = models.build(models.Stack, kind=Counting)
    zs.shard(model, stage=0, activations=activations, units=[Counting])
    with pytest.raises(RuntimeError, match=r"\[rank 0/1\] The recomputation of '.*' \(Counting\) (gave|saved) other"):
        models.stack_loss(model, 0, 0).backward()


class Cache:
    """Keys of earlier tokens, as Transformers has them."""

    def __init__(self, length: int = 0) -> None:
        self.keys = [0] * length

    def get_seq_length(self) -> int:
        return len(self.keys)

    def update(self) -> None:
        self.keys.append(0)


class Caching(models.Block):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            cache.update()
        return super().forward(x)


def test_an_empty_cache_is_left_out_and_a_full_one_refused() -> None:
    x, cache = torch.ones(2, WIDTH), Cache()

    class Run(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            return self.block(x, cache=cache)

    model = Run(Caching(WIDTH))
    zs.shard(model, stage=0, activations="recompute", units=[Caching])
    model(x, cache).sum().backward()
    assert cache.get_seq_length() == 0
    with pytest.raises(RuntimeError, match=r"received a Cache with contents.*model\.config\.use_cache = False"):
        model(x, Cache(3))
