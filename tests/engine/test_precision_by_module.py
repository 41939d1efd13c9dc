"""Modules with a precision of their own, against a single process that casts at the same places, bit for bit."""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S, Case, Casts, assert_same, engine_run, run_cases, single_run

BF16, FP32 = torch.bfloat16, torch.float32
ASKED = {"": "bf16", nn.LayerNorm: "fp32", "blocks.1.down": "fp32", "blocks.2": zs.Precision(param=torch.float16)}
# Of a model in fp32, one block in bf16 whose outputs stay so, and in it one layer in fp32.
INSIDE = {"": "fp32", "blocks.1": zs.Precision(param=BF16, output=BF16), "blocks.1.up": "fp32"}


@dataclasses.dataclass(frozen=True)
class ByModule(Casts):
    """Casts by the names of modules: what each is computed in, and what its outputs are."""

    own: tuple[tuple[str, torch.dtype, torch.dtype], ...] = ()
    output: torch.dtype = FP32

    def model_of(self, masters: nn.Module) -> nn.Module:
        model = copy.deepcopy(masters)
        for name, p in model.named_parameters():
            dtypes = [inside for module, inside, _ in self.own if name.startswith(f"{module}.")]
            p.data = p.data.to(dtypes[-1] if dtypes else self.param)
        for name, inside, outside in self.own:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda _, inputs, inside=inside: tuple(x.to(inside) for x in inputs))
            module.register_forward_hook(lambda _, inputs, output, outside=outside: output.to(outside))
        model.register_forward_pre_hook(lambda _, inputs: tuple(x.to(self.param) for x in inputs))
        model.register_forward_hook(lambda _, inputs, output: output.to(self.output))
        return model


NORMS = tuple((f"blocks.{n}.norm", FP32, BF16) for n in range(2))
F16 = torch.float16
EXPECTED = {
    "asked": (
        ASKED,
        ByModule(
            BF16, own=(("blocks.2", F16, BF16), *NORMS, ("blocks.2.norm", FP32, F16), ("blocks.1.down", FP32, BF16))
        ),
    ),
    "inside": (INSIDE, ByModule(FP32, own=(("blocks.1", BF16, BF16), ("blocks.1.up", FP32, BF16)))),
}


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(models.features(step, rank)).float().square().mean()


CASE = Case(functools.partial(models.build, models.Stack), loss_of, models.adamw, steps=3)


class Loose(models.Stack):
    """A stack that takes what a block returns for what it computes with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).to(self.stem.weight.dtype)
        return self.head(x)


LOOSE = dataclasses.replace(CASE, build=functools.partial(models.build, Loose))


def trained(name: str, stage: int, activations: str, shared_memory: bool) -> Any:
    case = LOOSE if name == "inside" else CASE
    return engine_run(case, stage, precision=EXPECTED[name][0], activations=activations, shared_memory=shared_memory)


@functools.cache
def results() -> Mapping[tuple[Any, ...], list[Any]]:
    cases = [("asked", stage, "keep", stage % 2 == 1) for stage in range(4)]
    cases += [("asked", 3, "recompute", False), ("inside", 1, "keep", True), ("inside", 3, "recompute", False)]
    return run_cases(trained, 2, cases, timeout_s=2 * TIMEOUT_S)


@pytest.mark.parametrize("name", EXPECTED)
def test_numbers_are_those_of_one_process_with_the_same_casts(name: str) -> None:
    expected = single_run(LOOSE if name == "inside" else CASE, 2, EXPECTED[name][1])
    found = {case: by_rank for case, by_rank in results().items() if case[0] == name}
    for case, by_rank in found.items():
        for rank, actual in enumerate(by_rank):
            assert actual["losses"] == expected["losses"][rank], f"[rank {rank}/2] {case}"
            assert_same(expected["parameters"], actual["parameters"], f"[rank {rank}/2] {case}")


def test_a_module_may_be_called_alone_and_the_output_may_have_another_dtype() -> None:
    model = models.build(models.Stack)
    half = zs.Precision(param=BF16, output=BF16)
    zero = zs.shard(model, models.adamw(model), precision={"": half, "blocks.1": "fp32"}, units=[models.Block])
    assert model(torch.ones(2, 5)).dtype == BF16
    assert model.blocks[1](torch.ones(2, models.WIDTH)).dtype == BF16
    with zero.gathered():
        assert {p.dtype for p in model.blocks[1].parameters()} == {FP32}
        assert model.stem.weight.dtype == BF16


def test_what_cannot_be_is_refused() -> None:
    def shard(precision: Any, kind: Any = models.Stack) -> None:
        model = models.build(kind)
        zs.shard(model, models.adamw(model), precision=precision)

    with pytest.raises(ValueError, match=r"names 'layers\.\*', which matches no module; modules: stem, blocks"):
        shard({"": "bf16", "layers.*": "fp32"})
    with pytest.raises(ValueError, match='needs the key "" for the model itself'):
        shard({"blocks.0": "fp32"})
    with pytest.raises(ValueError, match="loss_scale and modules belong to the precision of the whole model"):
        shard({"": "bf16", "blocks.0": "fp16"})
    with pytest.raises(TypeError, match="takes pairs of a name or class and a Precision"):
        shard({"": "bf16", 3: "fp32"})
    with pytest.raises(ValueError, match=r"'embedding\.weight' and 'head\.weight' are one parameter"):
        shard({"": "bf16", "head": "fp32"}, models.GPT)
