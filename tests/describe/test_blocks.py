"""Blocks are found in any model: no unit besides a single leaf is large, whatever the model is built of."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from tests import models
from zeroshard.describe.blocks import LARGE_BYTES, LARGE_PART
from zeroshard.describe.units import UnitPlan, plan_units


class Layer(nn.Module):
    """A block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Part(nn.Module):
    """Some blocks and a layer after them, as vision models have several of."""

    def __init__(self, depth: int, width: int, kind: type[nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        self.layers = kind()
        for number in range(depth):
            self.layers.add_module(str(number), Layer(width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x)
        return self.norm(x)


class Named(nn.Module):
    """A model that names whole parts as what must not be split."""

    _no_split_modules = ("Part",)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(2, 64), Part(2, 128), Part(6, 256), Part(2, 512)])


class Attributes(nn.Module):
    """Layers by name, in no container."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for number in range(12):
            setattr(self, f"mixed{number}", Layer(width))


class Backbone(nn.Module):
    """A part that is most of the model, beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Layer(64), Part(20, 256), Layer(64), Layer(96)])


class Translator(nn.Module):
    """Few blocks, each far more than an eighth of a large model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part(1, 2048) for _ in range(2))
        self.embedding = nn.Embedding(100, 2048)


class Heads(nn.Module):
    """Blocks with a list inside that is a small part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(32) for _ in range(3))
        for block in self.blocks:
            block.heads = nn.ModuleList(Layer(4) for _ in range(8))


def nested(outer: type[nn.Module], inner: type[nn.Module]) -> nn.Module:
    return outer([inner([Layer(512) for _ in range(n)]) for n in (1, 3, 4, 1)])


def make_on_meta(make: Callable[[], nn.Module]) -> list[UnitPlan]:
    with torch.device("meta"):
        return plan_units(make(), None)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "sequence": (lambda: nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)]), 25),
    "sequence-of-blocks": (lambda: nn.Sequential(*[Layer(256) for _ in range(12)]), 13),
    "mixed-sequence": (lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), Layer(512), nn.Linear(512, 512)), 4),
    "dictionary": (lambda: Part(12, 256, nn.ModuleDict), 13),
    "list-of-lists": (lambda: nested(nn.ModuleList, nn.ModuleList), 10),
    "list-of-sequences": (lambda: nn.Sequential(*[Part(4, 256, nn.Sequential) for _ in range(3)]), 13),
    "parts-of-blocks": (lambda: nn.Sequential(*[Part(2, width) for width in (64, 128, 256, 512)]), None),
    "named-parts": (Named, None),
    "backbone": (Backbone, None),
    "attributes": (lambda: Attributes(256), 13),
    "large-blocks": (Translator, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_unit_is_large(name: str) -> None:
    make, count = MODELS[name]
    plans = make_on_meta(make)
    total = sum(plan.nbytes for plan in plans)
    assert len(plans) >= (count or 5), [plan.name for plan in plans]
    for plan in plans:
        is_leaf = not [*plan.module.children()] and not plan.blocks
        assert is_leaf or plan.nbytes <= max(LARGE_BYTES, total / LARGE_PART), plan.name
        is_container = isinstance(plan.module, (nn.ModuleList, nn.ModuleDict))
        assert not plan.name or not is_container, f"{plan.name} is never called"


@pytest.mark.parametrize("name", ["list-of-lists", "list-of-sequences", "dictionary", "sequence-of-blocks"])
def test_equal_blocks_are_units_of_their_own(name: str) -> None:
    plans = make_on_meta(MODELS[name][0])
    assert max(sum(type(m) is Layer for m in plan.module.modules()) for plan in plans[1:]) == 1
    assert sum(type(plan.module) is Layer for plan in plans) >= 8


def test_a_list_inside_a_block_does_not_divide_the_block() -> None:
    assert [plan.name for plan in make_on_meta(Heads)] == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_the_layers_of_a_block_stay_in_the_block() -> None:
    """Also where the block is a sequence, or has one inside: a compiled block is one graph."""
    plans = make_on_meta(
        lambda: nn.ModuleList(nn.Sequential(nn.Linear(300, 300), nn.GELU(), nn.Linear(300, 300)) for _ in range(4))
    )
    assert [plan.name for plan in plans] == ["", "0", "1", "2", "3"]


def test_a_member_that_is_a_small_neighbour_is_joined_unless_that_makes_a_large_leaf_larger() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 300_000), nn.LayerNorm(64), nn.Linear(64, 20_000))
    assert [plan.name for plan in plan_units(model, None)] == ["", "0", "1", "2-3"]


def test_blocks_that_list_their_layers_stay_whole() -> None:
    """T5's blocks hold a list of two or three layers; the first one has a table besides."""
    plans = make_on_meta(lambda: transformers.AutoModel.from_config(transformers.T5Config()))
    halves = [f"{half}.block.{number}" for half in ("encoder", "decoder") for number in range(6)]
    assert [plan.name for plan in plans] == ["", "shared", *halves]


def test_what_is_read_and_not_called_is_no_unit() -> None:
    """torch's attention reads its projection; a parametrization is called where its parameter is read."""
    with torch.device("meta"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(2048, 8, 8192), 2, enable_nested_tensor=False)
    names = [plan.name for plan in plan_units(model, None)]
    assert "layers.0.self_attn" in names
    assert not [name for name in names if name.endswith("out_proj")]
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(2048, 2048))
    plans = plan_units(nn.Sequential(linear, nn.utils.parametrizations.weight_norm(nn.Linear(2048, 2048))), None)
    assert [plan.name for plan in plans] == ["", "0", "1"]


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (transformers.SwinConfig(embed_dim=128, depths=[2, 2, 18, 2]), 0.15),
        (transformers.ConvNextConfig(depths=[3, 3, 27, 3], hidden_sizes=[192, 384, 768, 1536]), 0.11),
        (transformers.SegformerConfig(depths=[3, 6, 40, 3], hidden_sizes=[64, 128, 320, 512]), 0.11),
        (transformers.Mask2FormerConfig(), 0.12),
        (transformers.LlamaConfig(), 0.04),
        (transformers.AlbertConfig(), 0.33),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, float) else "",
)
def test_units_of_published_models(config: transformers.PretrainedConfig, most: float) -> None:
    plans = make_on_meta(lambda: transformers.AutoModel.from_config(config))
    total = sum(plan.nbytes for plan in plans)
    assert max(plan.nbytes for plan in plans) <= most * total
    assert sum(plan.numel for plan in plans) == sum(p.numel() for plan in plans for _, p in plan.parameters)


def test_units_are_found_alike_each_time() -> None:
    """No set, identity or address decides: ranks compare the units that they found."""

    def described() -> list[tuple[str, list[str], list[str]]]:
        plans = make_on_meta(lambda: transformers.AutoModel.from_config(transformers.Mask2FormerConfig()))
        return [(plan.name, [name for name, _ in plan.parameters], [*plan.entries.values()]) for plan in plans]

    first = described()
    padding = [nn.Linear(1, 1) for _ in range(100)]  # other addresses
    assert first == described()
    assert len(padding) == 100


def test_every_parameter_is_in_one_unit() -> None:
    shared = Layer(256)
    model = nn.Sequential(shared, Part(3, 256), nn.Sequential(shared, Layer(256)), models.build(models.GPT))
    held = [parameter for plan in plan_units(model, None) for _, parameter in plan.parameters]
    assert len(held) == len(set(held))
    assert set(held) == set(model.parameters())


class Outside(nn.Module):
    """Blocks, and a large and a small table beside them."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(rows, width), nn.Embedding(8, width)
        self.blocks = nn.Sequential(*[Layer(width) for _ in range(6)])


@pytest.mark.parametrize(("width", "rows"), [(64, 1000), (2048, 4096)], ids=["larger than a block", "above 16 MiB"])
def test_a_large_parameter_outside_blocks_leaves_the_root(width: int, rows: int) -> None:
    """As large as a block is enough in a small model, and 16 MiB in one of larger blocks."""
    units = make_on_meta(lambda: Outside(width, rows))
    place_of = {name: place for place, plan in enumerate(units) for name, _ in plan.parameters}
    assert place_of["words.weight"] != place_of["places.weight"]
