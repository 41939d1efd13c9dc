"""Checkpoints of models that torch split over the axis "tensor": whole tensors, from any layout to any other."""

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard as zs
from tests.oracle import TIMEOUT_S, WATCHDOG_S, assert_same, randn
from tests.packed import Packed, split_packed
from tests.rotation import is_whole, third
from zeroshard.checkpoint.cuts import Cut
from zeroshard.checkpoint.inventory import Item
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

from .faulty import Failing, refuse
from .wholes import mesh_of, whole_of

WORLD = 4
WIDTH = 20
PLANS = (
    {"up": ColwiseParallel(), "down": RowwiseParallel()},
    # Hidden features that no number of ranks divides; torch takes local tensors of split layers for equal parts.
    {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())},
)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "packed": lambda p: zs.optim.AdamW8bit(p, lr=0.01),
}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(3 * WIDTH), Block(3 * WIDTH + 1), Packed(WIDTH, 8), nn.Linear(WIDTH, 2))


def loss_of(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(randn(3, WIDTH, key=(step,))).square().mean()
    return loss


Layout = tuple[tuple[tuple[str, int], ...], int]
"""The axes of a mesh with their sizes, and the stage."""
LAYOUTS: list[Layout] = [
    (axes, stage)
    for axes in (
        (("shard", 2), ("tensor", 2)),
        (("tensor", 2), ("shard", 2)),
        (("replicate", 2), ("tensor", 2)),
        (("shard", 1), ("tensor", 4)),
        (("shard", 4),),
        (("replicate", 2), ("shard", 2)),
    )
    for stage in (0, 1, 2, 3)
]


class Run:
    """A model and its optimizer in a layout."""

    def __init__(self, layout: Layout, kind: str, seed: int, **options: Any) -> None:
        axes, stage = layout
        names, sizes = zip(*axes, strict=True)
        mesh = mesh_of(sizes, names)
        self.model = build(seed)
        if "tensor" in names:
            for block, plan in zip(self.model, PLANS, strict=False):
                parallelize_module(block, mesh["tensor"], plan)
            split_packed(self.model[2], mesh["tensor"])
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        # Each run makes process groups of its own, which takes seconds after a hundred of them.
        settings = zs.Settings(watchdog_s=6 * WATCHDOG_S, **options.pop("settings", {}))
        self.zero = zs.shard(self.model, self.optimizer, stage=stage, mesh=mesh, settings=settings, **options)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(self.model, step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def whole(self) -> dict[str, Any]:
        return whole_of(self.zero, self.model, self.optimizer)


def move(folder: str, kind: str, pairs: list[tuple[Layout, Layout]], options: dict[str, Any]) -> None:
    for number, (first, second) in enumerate(pairs):
        run = Run(first, kind, seed=1, **options)
        run.train(range(2))
        expected, path = run.whole(), f"{folder}/step-{number}"
        run.zero.save(path, asynchronous=bool(number % 2))
        run.zero.wait()
        losses = run.train(range(2, 4))
        other = Run(second, kind, seed=2, **options)
        other.zero.load(path)
        actual = other.whole()
        if kind == "packed":  # its blocks begin where a rank's part begins, so codes are of the layout
            expected, actual = ({k: v for k, v in one.items() if "/" not in k} for one in (expected, actual))
        assert_same(expected, actual, f"{first} to {second}")
        assert other.train(range(2, 4)) == pytest.approx(losses, rel=1e-2 if kind == "packed" else 1e-5), (
            first,
            second,
        )


def drawn(kind: str, count: int) -> list[tuple[Layout, Layout]]:
    """Return pairs of layouts, of which one at least is split."""
    draw = random.Random(kind)
    split = [layout for layout in LAYOUTS if any(name == "tensor" for name, _ in layout[0])]
    pairs = [(draw.choice(split), draw.choice(LAYOUTS)) for _ in range(count)]
    return [pair if draw.random() < 0.6 else (pair[1], pair[0]) for pair in pairs]


@pytest.mark.product
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_layout_is_read_by_any_other(kind: str, tmp_path: Path) -> None:
    """50 moves of each optimizer; a rotation has five of them."""
    pairs = drawn(kind, 50) if is_whole() else third(drawn(kind, 50))[1:6]
    run_ranks(move, WORLD, str(tmp_path), kind, pairs, {}, timeout_s=len(pairs) * TIMEOUT_S)
    for path in sorted(tmp_path.glob("step-*"))[:4]:
        verify(path)


def test_offloaded_states_move_too(tmp_path: Path) -> None:
    pairs = [(LAYOUTS[3], LAYOUTS[18]), (LAYOUTS[7], LAYOUTS[2])]
    run_ranks(move, WORLD, str(tmp_path), "adamw", pairs, {"offload": "host"}, timeout_s=3 * TIMEOUT_S)


def draw(folder: str) -> tuple[float, ...]:
    """Save with the axis "tensor", and load with and without; return what is drawn after the save and after each."""
    rank = dist.get_rank()
    run = Run(LAYOUTS[2], "momentum", seed=1)
    torch.manual_seed(rank // 2)
    path, found = run.zero.save(f"{folder}/step-1"), [torch.rand(()).item()]
    for layout in (LAYOUTS[2], LAYOUTS[18]):
        other = Run(layout, "momentum", seed=2)
        torch.manual_seed(100 + rank)
        other.zero.load(path)
        found.append(torch.rand(()).item())
    return tuple(found)


def test_ranks_that_drew_alike_along_tensor_draw_apart_as_copies(tmp_path: Path) -> None:
    before, after, apart = zip(*run_ranks(draw, WORLD, str(tmp_path), timeout_s=TIMEOUT_S), strict=True)
    assert before == after
    assert len(set(before)) == 2
    assert len(set(apart)) == WORLD
    assert (apart[0], apart[2]) == (before[0], before[2])


def test_messages_move_the_rows(tmp_path: Path) -> None:
    pairs = [(LAYOUTS[3], LAYOUTS[12]), (LAYOUTS[13], LAYOUTS[0])]
    options = {"settings": {"shared_memory": False}}
    run_ranks(move, WORLD, str(tmp_path), "adamw", pairs, options, timeout_s=3 * TIMEOUT_S)


def fail_to_save(folder: str, culprit: int) -> list[str]:
    """Save again and again; the n-th file operation of one rank fails, then each of its first reads of values."""
    run = Run(LAYOUTS[2], "adamw", seed=1)
    run.train(range(1))
    is_culprit, texts, number, original = run.zero.mesh.rank == culprit, [], 0, Item.part
    for is_read in (False, True):
        for place in range(1, 30):

            def part(item: Item, start: int, stop: int, place: int = place) -> Tensor:
                nonlocal reads
                reads += 1
                if reads == place and is_culprit:
                    raise OSError(errno.EIO, "no values")
                return original(item, start, stop)

            number, reads, text, target = number + 1, 0, "", Path(folder, f"step-{number + 1}")
            with Failing(place if is_culprit and not is_read else -1, refuse) as failing:
                Item.part = part if is_read else original
                try:
                    run.zero.save(target, asynchronous=bool(place % 2))
                    run.zero.wait()
                except zs.CheckpointError as error:
                    text = str(error)
                finally:
                    Item.part = original
            dist.barrier()
            assert target.exists() != bool(text) or "committing" in text
            assert not [name for name in os.listdir(folder) if name.startswith(".tmp-step")]
            texts.append(text)
            is_over = is_culprit and (reads if is_read else failing.count) < place
            if run.zero.agree(not is_over, "the end of the test") is False:
                break
    return texts


def test_a_failure_on_one_rank_ends_in_one_error_on_all(tmp_path: Path) -> None:
    """A rank whose disk or memory fails still takes part in the exchange of rows, for which rank 2 waits."""
    by_rank = run_ranks(fail_to_save, WORLD, str(tmp_path), 3, timeout_s=4 * TIMEOUT_S)
    assert all(texts == by_rank[0] for texts in by_rank)
    assert sum("No space left" in text for text in by_rank[0]) > 5
    assert sum("no values" in text for text in by_rank[0]) > 5
    for path in tmp_path.glob("step-*"):
        verify(path)


@pytest.mark.parametrize("seed", range(40))
def test_elements_of_a_split_tensor_are_written_once_and_read_back(seed: int) -> None:
    draw = random.Random(seed)
    rows, count, shards = draw.choice([1, 1, 2, 5, 9]), draw.randint(2, 4), draw.randint(1, 5)
    blocks = tuple(draw.randint(1, 7) for _ in range(count)) if seed % 2 else (draw.randint(1, 7),) * count
    cuts = [Cut(rows, blocks, place) for place in range(count)]
    whole = torch.arange(rows * sum(blocks))
    parts = [part.reshape(-1) for part in whole.view(rows, -1).split(blocks, 1)]
    # Of each rank's part, the range in each shard: the same fractions of all, if parts are equal.
    bounds = [[0, *sorted(draw.choices(range(part.numel() + 1), k=shards - 1)), part.numel()] for part in parts]
    if not seed % 2:
        bounds = bounds[:1] * count
    seen = []
    for shard in range(shards):
        ranges = [(at[shard], at[shard + 1]) for at in bounds]
        for place, first, last in cuts[0].chunks(ranges):
            seen += range(first, last)
            own, (start, stop) = cuts[place], ranges[place]
            if own.is_block(first, last):
                at = own.local(first)
                assert start <= at < at + last - first <= stop
                assert torch.equal(parts[place][at : at + last - first], whole[first:last])
            else:
                assert own.share(own.whole_rows(ranges), place).start * own.row_numel == first
        for own, part, (start, stop) in zip(cuts, parts, ranges, strict=True):
            picked = [own.pick(whole[c:d], c, a, b) for a, b, c, d in own.reads(start, stop)]
            assert torch.equal(torch.cat([whole[:0], *picked]), part[start:stop])
            assert torch.equal(own.part(whole), part)
    assert sorted(seen) == whole.tolist()
