"""A model that `parallelize_module` has split on the meta device starts with the values of one process.

Each rank keeps its part of what initializers draw, and holds no more than one unit whole.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard as zs
from benchmarks.peaks import measure_peak
from tests.oracle import TIMEOUT_S, WATCHDOG_S, assert_same
from tests.packed import Packed, split_packed
from tests.rotation import third
from zeroshard.testing import run_ranks

WIDTH, WORDS = 6, 11
SEED = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Text(nn.Module):
    """A tied embedding of an odd number of words, blocks with plain norms, a packed layer, one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.packed = Packed(WIDTH, 6)
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.fixed(self.packed(x)))


def split(model: Text, mesh: Any) -> None:
    whole_in, whole_out = {"input_layouts": Replicate()}, {"output_layouts": Replicate()}
    plan = {f"blocks.{n}.{name}": style() for n in range(3) for name, style in
            (("up", ColwiseParallel), ("down", RowwiseParallel))}  # fmt: skip
    plan |= {"words": RowwiseParallel(**whole_in, **whole_out), "head": ColwiseParallel(**whole_out)}
    parallelize_module(model, mesh, {**plan, "fixed": ColwiseParallel(**whole_out)})
    split_packed(model.packed, mesh)
    model.head.weight = model.words.weight


def scaled(module: nn.Module) -> None:
    """Initialize a module's own parameters by another rule than its class; a block scales a weight of its child."""
    for name in ("weight", "bias", "into", "out"):
        if isinstance(one := getattr(module, name, None), Tensor):
            nn.init.normal_(one, std=0.5)
    if isinstance(module, Block):
        with torch.no_grad():
            module.down.weight.mul_(0.25)


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


SOURCES: dict[str, Callable[[nn.Module], None]] = {"own": reset, "function": scaled, "files": reset}


def expected(source: str) -> Text:
    with torch.device("meta"):
        model = Text()
    model.to_empty(device="cpu")
    model.head.weight = model.words.weight
    torch.manual_seed(SEED)
    model.apply(SOURCES[source])
    return model


def start(sizes: tuple[int, ...], cases: list[tuple[int, str, bool]], folder: str) -> list[dict[str, Tensor]]:
    mesh, found = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tensor")), []
    for stage, source, is_ignored in cases:
        with torch.device("meta"):
            model = Text()
        split(model, mesh["tensor"])
        before = dict(model.named_parameters(remove_duplicate=False))
        ignored = ["fixed.weight", "fixed.bias"] if is_ignored else []
        trained = [p for name, p in model.named_parameters() if name not in ignored]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        weights = {"own": None, "function": scaled, "files": folder}[source]
        torch.manual_seed(SEED + mesh.get_rank())
        zero = zs.shard(
            model, optimizer, stage=stage, mesh=mesh, weights=weights, ignored=ignored,
            settings=zs.Settings(watchdog_s=WATCHDOG_S),
        )  # fmt: skip
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert parameter is before[name]
            assert isinstance(parameter, DTensor) == ("norm" not in name)
        with zero.gathered():
            found.append({n: whole(p) for n, p in model.named_parameters(remove_duplicate=False)})
        model(torch.arange(WORDS)[None]).square().mean().backward()
        optimizer.step()
    return found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.product
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (1, 1, 3)], ids=str)
def test_values_are_those_of_one_process(sizes: tuple[int, int, int], tmp_path: Any) -> None:
    save_file(dict(expected("files").named_parameters()), tmp_path / "model.safetensors")
    cases = third([(stage, source, stage % 2 == 1) for stage in range(4) for source in SOURCES])
    world = sizes[0] * sizes[1] * sizes[2]
    for by_case in run_ranks(start, world, sizes, cases, str(tmp_path), timeout_s=2 * TIMEOUT_S):
        for (_, source, _), actual in zip(cases, by_case, strict=True):
            assert_same(dict(expected(source).named_parameters(remove_duplicate=False)), actual)


def start_large(stage: int) -> tuple[int, int]:
    """Return the most that the allocator gave, and the most that it may: the rank's part, and one unit."""
    mesh, bound = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor")), 0

    def run() -> Any:
        nonlocal bound
        with torch.device("meta"):
            model = nn.Sequential(
                *(nn.Linear(256, 512 if n % 2 else 256) if n else nn.Embedding(4001, 256) for n in range(9))
            )
        whole_in, whole_out = {"input_layouts": Replicate()}, {"output_layouts": Replicate()}
        styles = ColwiseParallel(**whole_out), RowwiseParallel(**whole_in, **whole_out)
        parallelize_module(model, mesh["tensor"], {str(n): styles[n % 2 == 0] for n in range(9)})
        # Buffers of host memory that ranks share are none of the allocator's.
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=False)
        zero = zs.shard(model, stage=stage, mesh=mesh, weights=scaled, settings=settings)
        bound = sum(zero.memory().resident_bytes.values()) + max(p.nbytes for p in model.parameters())
        return model, zero

    return measure_peak(run).peak_bytes, bound


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_holds_its_part_and_one_unit(stage: int) -> None:
    for peak, bound in run_ranks(start_large, 2, stage, timeout_s=TIMEOUT_S):
        assert bound / 2 < peak <= bound


def forget(module: nn.Module) -> None:
    """Leave out the weights of one layer."""
    if not (isinstance(module, nn.Linear) and module.out_features == 24):
        scaled(module)


def start_incomplete() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    with torch.device("meta"):
        model = Text()
    split(model, mesh["tensor"])
    before = dict(model.named_parameters())
    with pytest.raises(ValueError) as error:
        zs.shard(model, mesh=mesh, weights=forget, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    return str(error.value)


def test_what_is_not_written_is_named_with_its_whole_shape() -> None:
    for text in run_ranks(start_incomplete, 2, timeout_s=TIMEOUT_S):
        assert "'blocks.0.up.weight'" in text or "'weight' of 'blocks.0.up'" in text
        assert "(24, 6)" in text
