"""What ranks along "tensor" must have alike: the model's inputs, and the random numbers of whole activations.

Split activations draw other numbers on each rank, and a run that resumes draws those of one that never stopped.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zeroshard as zs
from tests.oracle import TIMEOUT_S, WATCHDOG_S, assert_same, randn, run_cases
from tests.rotation import third
from zeroshard.parallel.alike import Alike
from zeroshard.parallel.streams import Streams, is_output_split
from zeroshard.testing import run_ranks

WORLD = 4
WIDTH, HEADS, VOCABULARY = 8, 4, 11
AXES = ("shard", "tensor")


class Block(nn.Module):
    """Attention and an MLP with dropout of split activations, each before dropout of whole ones."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.norm = p, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(p), nn.Dropout(p)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in self.qkv)
        p = self.p if self.training else 0.0
        x = x + self.outer(self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)))
        h = self.inner(F.softplus(self.up(x)))
        y = self.outer(self.down(h))
        self.masks += [h.detach() != 0, y.detach() != 0]
        return x + y


class Net(nn.Module):
    def __init__(self, p: float = 0.0, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding, self.recomputes = nn.Embedding(VOCABULARY, WIDTH), recomputes
        self.blocks = nn.ModuleList(Block(p) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, extra: Any = None, *, tokens: Tensor | None = None) -> Tensor:
        if tokens is not None:
            x = x + self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


PLAN = {name: ColwiseParallel() for name in ("qkv.0", "qkv.1", "qkv.2", "up")} | {
    name: RowwiseParallel() for name in ("out", "down")
}


class Run:
    """A model that is split over two of four ranks."""

    def __init__(self, stage: int, p: float = 0.0, recomputes: bool = False, seed: int = 0, **settings: Any) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        torch.manual_seed(seed)
        self.model = Net(p, recomputes)
        for block in self.model.blocks:
            parallelize_module(block, self.mesh["tensor"], PLAN)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        given = zs.Settings(watchdog_s=WATCHDOG_S, **settings)
        self.zero = zs.shard(self.model, self.optimizer, stage=stage, mesh=self.mesh, settings=given)
        self.place = self.mesh.get_local_rank("shard")

    def inputs(self, step: int = 0) -> tuple[Tensor, Any, Tensor]:
        tokens = (torch.arange(15).view(3, 5) + step + self.place) % VOCABULARY
        return randn(3, 5, WIDTH, key=(step, self.place)), {"mask": [torch.ones(3, dtype=torch.bool)]}, tokens

    def step(self, x: Tensor, extra: Any = None, tokens: Tensor | None = None) -> float:
        loss = self.model(x, extra, tokens=tokens).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def whole(self) -> dict[str, Tensor]:
        with self.zero.gathered():
            return {
                name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
                for name, p in self.model.named_parameters()
            }


# -- inputs ----------------------------------------------------------------------------------------------------------


def spoil(what: str, x: Tensor, extra: Any, tokens: Tensor) -> tuple[Tensor, Any, Tensor]:
    """Return inputs of which one is other than those of the rank's neighbour along "tensor"."""
    if what == "x":
        x = x.flip(-1)  # the same numbers in another order
    elif what == "tokens":
        tokens = tokens.roll(1)
    elif what == "extra['mask'][0]":
        extra = {"mask": [~extra["mask"][0]]}
    elif what == "shape":
        x, tokens = x[:2], tokens[:2]
    return x, extra, tokens


def other_inputs(stage: int, what: str, shared_memory: bool, first: int) -> tuple[str, float]:
    """Give rank 3 another input in one step; return the error of that step, and how long it took."""
    run = Run(stage, shared_memory=shared_memory)
    for step in range(first):
        run.step(*run.inputs(step))
    before, (x, extra, tokens) = run.whole(), run.inputs(first)
    if first:  # another shape than those of the first steps
        x, tokens = x[:1], tokens[:1]
    if dist.get_rank() == 3:
        x, extra, tokens = spoil(what, x, extra, tokens)
    start = time.monotonic()
    with pytest.raises(zs.RankMismatchError) as error:
        run.step(x, extra, tokens)
    seconds = time.monotonic() - start
    if what != "shape":
        run.optimizer.zero_grad()
        assert_same(before, run.whole())
        run.step(*run.inputs(first))  # equal inputs train on
    return str(error.value), seconds


INPUTS = {
    "float": (0, "x", True, 0),
    "integer": (3, "tokens", False, 0),
    "nested": (2, "extra['mask'][0]", True, 0),
    "later": (1, "x", False, 1),
    "later, sharded": (3, "x", True, 1),
}


@pytest.mark.product
@pytest.mark.parametrize("case", INPUTS.values(), ids=INPUTS)
def test_other_values_on_one_rank_are_an_error_of_all_ranks_in_that_step(case: tuple[Any, ...]) -> None:
    for text, seconds in run_ranks(other_inputs, WORLD, *case, timeout_s=TIMEOUT_S):
        assert f"Argument '{case[1]}' (" in text, text
        assert "has other values on rank 3 (tensor 1) than on rank 2 (tensor 0)" in text
        assert "mesh.get_local_rank('shard') instead of the rank" in text
        assert "Nothing was changed on any rank" in text
        assert seconds < 10.0


@pytest.mark.product
@pytest.mark.parametrize("case", [(0, "shape", True, 0), (3, "shape", False, 0), (2, "shape", False, 0)], ids="abc")
def test_other_shapes_on_one_rank_are_an_error_of_all_ranks(case: tuple[Any, ...]) -> None:
    for text, seconds in run_ranks(other_inputs, WORLD, *case, timeout_s=TIMEOUT_S):
        assert "Net.forward() got inputs of other shapes along the axis 'tensor'" in text, text
        assert "rank 3 (tensor 1) in training, with inputs\nx (2, 5, 8) torch.float32" in text
        assert "rank 2 (tensor 0) in training, with inputs\nx (3, 5, 8) torch.float32" in text
        assert seconds < 10.0


def evaluate(stage: int) -> str:
    """Give rank 3 another input in a forward without gradients, which ranks 0 and 1 do not make."""
    run = Run(stage)
    x, extra, tokens = run.inputs()
    with pytest.raises(zs.RankMismatchError) as error, torch.no_grad():
        if run.place == 1 or stage == 3:
            run.model(spoil("x", x, extra, tokens)[0] if dist.get_rank() == 3 else x, extra, tokens=tokens)
        run.zero.agree(True)
    return str(error.value)


def test_other_values_in_an_evaluation_are_an_error_of_the_forward() -> None:
    for by_rank in run_cases(evaluate, WORLD, [(2,), (3,)], timeout_s=2 * TIMEOUT_S).values():
        assert all("has other values on rank 3 (tensor 1) than on rank 2 (tensor 0)" in text for text in by_rank)


def count_messages(stage: int) -> list[int]:
    """Return how often the ranks along "tensor" exchange something, up to each forward."""
    run, counts, count, gather = Run(stage), [], 0, Alike._gather

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return gather(*args)

    Alike._gather = counted  # type: ignore[method-assign]
    x, extra, tokens = run.inputs()
    for given in (x, x, 2 * x, x[:2], x[:2], x):
        run.step(given, extra)
        counts.append(count)
    run.step(x, extra, tokens)
    counts.append(count)
    run.model.eval()
    run.model(x, extra)
    run.model(x, extra)
    Alike._gather = gather  # type: ignore[method-assign]
    return [*counts, count]


@pytest.mark.rotates
def test_only_the_first_forward_of_each_shape_compares() -> None:
    for by_rank in run_cases(count_messages, WORLD, third([(3,), (0,)]), timeout_s=2 * TIMEOUT_S).values():
        assert by_rank == [[1, 1, 1, 2, 2, 2, 3, 4]] * WORLD


class Ends(nn.Module):
    """A model whose inputs are parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x)))
        return y


def parts_of_a_sequence(kind: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    torch.manual_seed(0)
    model = Ends()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], plan)
    settings = zs.Settings(watchdog_s=WATCHDOG_S, compare_inputs=kind != "not compared")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, mesh=mesh, settings=settings)
    part = randn(2, 6, WIDTH, key=(mesh.get_local_rank("shard"),)).chunk(2, dim=1)[mesh.get_local_rank("tensor")]
    if kind == "DTensor":
        part = DTensor.from_local(part, mesh["tensor"], [Shard(1)])
    try:
        model(part).square().mean().backward()
        optimizer.step()
    except zs.RankMismatchError as error:
        return str(error)
    return ""


def test_inputs_that_are_meant_to_differ_are_told_so() -> None:
    kinds = ("DTensor", "not compared", "plain")
    cases = run_cases(parts_of_a_sequence, WORLD, [(kind,) for kind in kinds], timeout_s=2 * TIMEOUT_S)
    assert cases[("DTensor",)] == cases[("not compared",)] == [""] * WORLD
    assert all("compare_inputs=False" in text for text in cases[("plain",)])


# -- random numbers --------------------------------------------------------------------------------------------------


def masks(stage: int, recomputes: bool) -> list[list[Tensor]]:
    """Return the masks of two steps: of split and whole activations in turn."""
    run = Run(stage, 0.5, recomputes)
    torch.manual_seed(7 + run.place)
    with set_checkpoint_early_stop(False):
        for step in range(2):
            run.step(*run.inputs(step))
    return [block.masks for block in run.model.blocks]


@pytest.mark.rotates
@pytest.mark.parametrize("recomputes", [False, True])
def test_masks_of_split_activations_differ_and_those_of_whole_ones_are_alike(recomputes: bool) -> None:
    for by_rank in run_cases(masks, WORLD, [(stage, recomputes) for stage in third([3, 0])]).values():
        everything = []
        for blocks in zip(*by_rank, strict=True):
            for index, ranks in enumerate(zip(*blocks, strict=True)):
                is_split = index % 2 == 0
                assert torch.equal(ranks[0], ranks[1]) is torch.equal(ranks[2], ranks[3]) is not is_split
                assert not torch.equal(ranks[0], ranks[2])
                everything += [ranks[0], ranks[1]] if is_split else [ranks[0]]
        # Each mask is made once, and again where torch recomputes it.
        like = [sum(a.shape == b.shape and torch.equal(a, b) for b in everything) for a in everything]
        assert set(like) == {1 + recomputes}


def train(stage: int, folder: str, how: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train four steps, in one go or in two."""
    run = Run(stage, 0.5, recomputes=how == "recomputed")
    torch.manual_seed(7 + run.place)
    losses = []
    for step in range(4):
        if step == 2 and how == "resumed":
            run.zero.save(f"{folder}/step-{stage}")
            run = Run(stage, 0.5, seed=1)
            run.zero.load(f"{folder}/step-{stage}")
        losses.append(run.step(*run.inputs(step)))
    return losses, run.whole()


def move(folder: str) -> None:
    """Load a checkpoint of four ranks with streams of their own; ranks along "tensor" share that of the first."""
    model = Net(0.5)
    zero = zs.shard(model, torch.optim.AdamW(model.parameters()), settings=zs.Settings(watchdog_s=WATCHDOG_S))
    torch.manual_seed(dist.get_rank())
    zero.save(f"{folder}/step-1")
    drawn = torch.rand(())
    run = Run(3, 0.5)
    run.zero.load(f"{folder}/step-1")
    state = torch.get_rng_state()
    numbers = zs.gather_across_ranks(torch.stack([drawn, torch.rand(())]))
    assert numbers[:, 1].tolist() == [float(numbers[2 * (rank // 2), 0]) for rank in range(WORLD)]
    torch.set_rng_state(state)
    run.step(*run.inputs())


def test_a_checkpoint_of_another_layout_gives_ranks_along_the_axis_one_stream(tmp_path: Path) -> None:
    run_ranks(move, WORLD, str(tmp_path), timeout_s=2 * TIMEOUT_S)


def fail_once() -> Any:
    is_over = False

    def fail(*args: Any) -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            raise KeyboardInterrupt

    return fail


def test_resumed_and_recomputed_runs_draw_the_same_numbers(tmp_path: Path) -> None:
    for stage in third([3, 1]):
        cases = [(stage, str(tmp_path), how) for how in ("whole", "resumed", "recomputed")]
        found = run_cases(train, WORLD, cases, timeout_s=3 * TIMEOUT_S)
        for case in cases[1:]:
            for rank in range(WORLD):
                assert_same(list(found[cases[0]][rank]), list(found[case][rank]), f"{case[2]}, rank {rank}")


def after_an_exception(stage: int) -> None:
    """Interrupt a forward where activations are split; the next forward draws from the common stream."""
    run = Run(stage, 0.5)
    torch.manual_seed(7 + run.place)
    run.step(*run.inputs())
    hook = run.model.blocks[1].inner.register_forward_pre_hook(fail_once())
    with pytest.raises(KeyboardInterrupt):
        run.model(*run.inputs()[:2])
    hook.remove()
    run.zero.agree(True)
    run.step(*run.inputs())
    number = torch.rand(()).item()
    numbers = [float(one) for one in zs.gather_across_ranks(torch.tensor(number))]
    assert (numbers[0] == numbers[1]) and (numbers[2] == numbers[3]) and (numbers[0] != numbers[2])


def test_an_interrupted_forward_leaves_no_stream_of_a_rank_behind() -> None:
    run_cases(after_an_exception, WORLD, third([(3,), (0,)]), timeout_s=2 * TIMEOUT_S)


def seeded_apart(stage: int, p: float, grads: bool) -> str:
    """Seed each rank differently, as `zs.init(seed)` does."""
    run = Run(stage, p)
    torch.manual_seed(dist.get_rank())
    before = run.whole()
    try:
        with torch.set_grad_enabled(grads):
            run.step(*run.inputs()) if grads else run.model(*run.inputs()[:1])
    except zs.RankMismatchError as error:
        if grads:
            run.optimizer.zero_grad()
            assert_same(before, run.whole())
        return str(error)
    return ""


def test_whole_activations_with_random_numbers_need_one_stream() -> None:
    cases = [(3, 0.5, True), (0, 0.5, True), (1, 0.5, False), (2, 0.0, True)]
    for case, texts in run_cases(seeded_apart, WORLD, cases, timeout_s=3 * TIMEOUT_S).items():
        if not case[1]:
            assert texts == [""] * WORLD  # nothing is drawn
            continue
        for text in texts:
            assert "draws random numbers, but rank " in text, (case, text)
            assert "torch.manual_seed(seed + mesh.get_local_rank('shard'))" in text


def drawn_on_one_rank() -> str:
    """Draw a number outside of the model on one rank, after a step."""
    run = Run(1, p=0.5)
    torch.manual_seed(run.mesh.get_local_rank("shard"))
    run.step(*run.inputs())
    if dist.get_rank() == 0:
        torch.rand(1)
    before = run.whole()
    with pytest.raises(zs.RankMismatchError) as raised:
        run.step(*run.inputs())
    run.optimizer.zero_grad()
    assert_same(before, run.whole())
    return str(raised.value)


def test_a_number_that_one_rank_draws_between_steps_is_an_error_at_the_next() -> None:
    for text in run_ranks(drawn_on_one_rank, WORLD, timeout_s=TIMEOUT_S):
        assert "Net.forward() draws random numbers, but rank 0 (tensor 0) and rank 1 (tensor 1) have different" in text


class Sequence(nn.Module):
    """Dropout of a split sequence, and then of whole activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.whole = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.inner(x), 0.5)
        return self.end(F.dropout(self.whole(h), 0.5))


def of_an_empty_part() -> None:
    """Train on a sequence of which the last rank has no part: 4 over 3 ranks are 2, 2 and 0."""
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=AXES)
    torch.manual_seed(0)
    model = Sequence()
    to_parts = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    to_whole = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], {"inner": to_parts, "whole": to_whole})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zero = zs.shard(model, optimizer, mesh=mesh)
    for _ in range(2):
        model(torch.ones(3, 4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.check_copies()


def test_a_rank_with_an_empty_part_draws_the_masks_of_whole_activations() -> None:
    run_ranks(of_an_empty_part, 3, timeout_s=TIMEOUT_S)


def without_dropout(stage: int) -> None:
    """A model that draws nothing leaves the program's random numbers as they are."""
    run = Run(stage)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    run.step(*run.inputs())
    assert torch.equal(torch.rand(3), expected)


def test_a_model_without_random_numbers_moves_no_stream() -> None:
    run_ranks(without_dropout, WORLD, 3, timeout_s=TIMEOUT_S)


def layouts() -> dict[str, bool | None]:
    """Return, for layers of torch's styles, whether their outputs are known to be split."""
    mesh, found, x = init_device_mesh("cpu", (2,)), dict[str, bool | None](), randn(2, 6, WIDTH, key=(1,))
    part, place = x.chunk(2, dim=1), mesh.get_local_rank()
    ids = torch.ones(2, 6, dtype=torch.int64)
    cases = {
        "column": (nn.Linear(WIDTH, WIDTH), ColwiseParallel(), x),
        "column, a DTensor": (nn.Linear(WIDTH, WIDTH), ColwiseParallel(use_local_output=False), x),
        "column, gathered": (nn.Linear(WIDTH, WIDTH), ColwiseParallel(output_layouts=Replicate()), x),
        "column, of a sequence": (nn.Linear(WIDTH, WIDTH), ColwiseParallel(input_layouts=Shard(1)), part[place]),
        "row": (nn.Linear(WIDTH, WIDTH), RowwiseParallel(), x.chunk(2, -1)[place]),
        "row, to a sequence": (
            nn.Linear(WIDTH, WIDTH),
            RowwiseParallel(output_layouts=Shard(1)),
            x.chunk(2, -1)[place],
        ),
        "embedding": (nn.Embedding(10, WIDTH), RowwiseParallel(input_layouts=Replicate()), ids),
        "embedding, to a sequence": (
            nn.Embedding(10, WIDTH),
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            ids,
        ),
        "embedding, columns": (nn.Embedding(10, WIDTH), ColwiseParallel(), ids),
        "norm of a sequence": (nn.LayerNorm(WIDTH), SequenceParallel(use_local_output=True), part[place]),
        "norm": (nn.LayerNorm(WIDTH), None, x),
    }
    for name, (layer, style, given) in cases.items():
        model = nn.Sequential(layer)
        if style is not None:
            parallelize_module(model, mesh, {"0": style})
        layer.register_forward_hook(lambda m, i, o, name=name: found.update({name: is_output_split(m, i, o)}))
        model(given)
    return found


def test_split_outputs_are_told_from_whole_ones() -> None:
    for found in run_ranks(layouts, 2, timeout_s=TIMEOUT_S):
        assert found == {
            "column": True,
            "column, a DTensor": True,
            "column, gathered": False,
            "column, of a sequence": True,
            "row": False,
            "row, to a sequence": True,
            "embedding": False,
            "embedding, to a sequence": True,
            "embedding, columns": True,
            "norm of a sequence": True,
            "norm": None,
        }


def numbers(generator: torch.Generator) -> list[float]:
    return torch.rand(3, generator=generator).tolist()


def test_streams_begin_with_the_common_one_and_give_it_back() -> None:
    found = []
    for place in (0, 1):
        generator = torch.Generator()
        generator.manual_seed(5)
        streams = Streams(generator, place, f"[rank {place}/2]")
        streams.begin()
        drawn = [numbers(generator)]
        streams.enter(1)
        streams.enter(2)  # a second column-wise layer changes nothing
        drawn.append(numbers(generator))
        streams.leave("out")
        drawn.append(numbers(generator))
        streams.enter(1)
        drawn.append(numbers(generator))
        streams.end()
        streams.enter(1)  # a layer that user code calls by itself
        drawn.append(numbers(generator))
        found.append(drawn)
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        assert (one == other) is (index in (0, 2, 4))
    assert len({tuple(one) for drawn in found for one in drawn}) == 7


def test_a_region_moves_the_common_stream_whether_this_rank_draws_or_not() -> None:
    """A rank whose part is empty draws nothing there, and other ranks do."""
    states = []
    for draws in (0, 1):
        generator = torch.Generator()
        generator.manual_seed(5)
        streams = Streams(generator, draws, "")
        first = generator.get_state()
        streams.begin()
        for number in (1, 2):
            streams.enter(number)
            torch.rand(draws, generator=generator)
            streams.leave("out")
        streams.end()
        assert streams.has_drawn is bool(draws)
        states.append(generator.get_state())
        streams.take_back()
        assert torch.equal(generator.get_state(), first)
    assert torch.equal(*states)
    assert not torch.equal(states[0], first)


def test_a_recomputation_that_begins_between_split_layers_is_refused() -> None:
    generator = torch.Generator()
    streams = Streams(generator, 0, "[rank 0/2]")
    streams.begin()
    streams.enter(1)
    inside = generator.get_state()
    streams.leave("down")
    streams.end()
    generator.set_state(inside)  # as torch.utils.checkpoint does
    with pytest.raises(RuntimeError, match="A recomputation that includes 'down' began after the layer that splits"):
        streams.leave("down")
