"""Plans of optimizers that need whole matrices: states by owner, the exchange, and its time, beside real runs."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, WATCHDOG_S, run_cases
from tests.rotation import third
from zeroshard.describe.rows import row_of
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.named import PRECISIONS, specs_of
from zeroshard.plan.shape.shapes import shape_of_config
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.simulate import make_film
from zeroshard.plan.step.turns import KINDS
from zeroshard.table.bytes import Owned
from zeroshard.table.whole import make_updates
from zeroshard.table.wires import Native

FP32 = PRECISIONS["fp32"]
CPU = zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1)
COLUMNS = ("parameters", "gradients", "states", "padding", "transient")


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return torch's Muon for the matrices inside, and AdamW for the rest."""
    inside, rest = zs.optim.muon_groups(model)
    return [torch.optim.Muon(inside["params"], lr=0.02), torch.optim.AdamW(rest["params"])]


def adam_of_matrices(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that is marked by hand, with a group of slices."""
    groups: list[dict[str, Any]] = [
        {"params": [*model.parameters()][2:]},
        {"params": [*model.parameters()][:2], "whole": False},
    ]
    return zs.optim.whole_matrix(torch.optim.Adam(groups), takes=lambda shape: len(shape) == 2)


MAKES: dict[str, Callable[[nn.Module], Any]] = {
    "muon": lambda model: zs.optim.Muon(zs.optim.muon_groups(model)),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "torch's Muon": muon_and_adamw,
    "Adafactor with a moment": lambda model: zs.optim.Adafactor(model.parameters(), beta1=0.9),
    "whole_matrix": adam_of_matrices,
}
NAMED = ("muon", "adafactor")


def cases_at(world: int) -> list[tuple[str, int, str, bool]]:
    """Return (optimizer, stage, precision, shared memory): names at each stage, and each optimizer itself at one."""
    found = [(name, stage, "fp32", bool(stage % 2)) for name in NAMED for stage in STAGES]
    others = {
        1: ("whole_matrix",),
        2: ("torch's Muon", "Adafactor with a moment", "whole_matrix"),
        3: ("torch's Muon",),
    }
    return [*found, *((name, world % 3 + 1, "bf16", False) for name in others[world])]


def hold(name: str, stage: int, precision: str, shared_memory: bool) -> tuple[dict[str, int], int]:
    """Train two steps; return what lies where between steps, and what the last update sent. Runs on a rank."""
    model = models.build(models.GPT, 3)
    optimizer = MAKES[name](model)
    settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared_memory)
    zero = zs.shard(model, optimizer, stage=stage, precision=precision, settings=settings)
    for step in range(3):
        before = zero.traffic().sent_bytes.get("update", 0)
        models.gpt_loss(model, step, zero.mesh.rank).backward()
        for one in zero.optimizers:
            one.step()
            one.zero_grad()
    held = zero.memory().resident_bytes
    return {column: held[column] for column in COLUMNS}, zero.traffic().sent_bytes.get("update", 0) - before


def plan_at(world: int, name: str, stage: int, precision: str, shared_memory: bool) -> zs.Plan:
    with torch.device("meta"):
        model = models.GPT(3)
    return zs.plan(
        model,
        world_size=world,
        stage=stage,
        precision=precision,
        device=CPU,
        optimizer=name if precision == "fp32" else MAKES[name](model),
        shared_memory=shared_memory,
        inputs=[models.tokens(0, 0)[:, :-1]],
        loss=lambda out: torch.nn.functional.cross_entropy(out.flatten(0, 1), torch.zeros(16, dtype=torch.int64)),
    )


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2, 3])
def test_resident_bytes_of_each_rank_are_those_of_a_run(world: int) -> None:
    cases = cases_at(world)
    for case, by_rank in run_cases(hold, world, third(cases)).items():
        plan = plan_at(world, *case)
        classes = [one for one in plan.ranks for _ in range(one.count)]
        for rank, ((held, _), planned) in enumerate(zip(by_rank, classes, strict=True)):
            assert held == {column: planned.resident_bytes[column] for column in COLUMNS}, f"{case}, rank {rank}"
        assert by_rank[plan.shown][1] == plan.film.sent_bytes.get("shard update", 0), case


@pytest.mark.rotates
def test_a_plan_of_many_ranks_takes_seconds() -> None:
    start_s = time.perf_counter()
    zs.plan("llama-3-70b", world_size=64, stage=3, optimizer="muon", seq=4096, activations="recompute")
    assert time.perf_counter() - start_s < 20


def test_a_plan_says_what_each_rank_owns() -> None:
    plan = zs.plan("gpt2", world_size=5, stage=2, optimizer="muon", seq=256, precision="fp32")
    assert len(plan.owned_bytes) == 5
    hidden = 12 * (768 * 3 * 768 + 768 * 768 + 2 * 768 * 3072)
    assert sum(plan.owned_bytes) == 4 * hidden
    # Beside it a rank has AdamW's states of about a fifth of the rest.
    slices = plan.ranks[0].resident_bytes["states"] - plan.owned_bytes[0]
    assert slices == pytest.approx(8 * (plan.parameters_numel - hidden) / 5, rel=0.01)
    assert sum(one.count for one in plan.ranks) == 5
    assert plan.reserved_bytes == max(one.reserved_bytes for one in plan.ranks)


MIXED: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 96},
    "DeepseekV3": {"n_routed_experts": 4, "moe_intermediate_size": 96, "n_group": 2, "topk_group": 1}
    | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    | {"n_shared_experts": 1, "first_k_dense_replace": 0, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("kind", MIXED)
def test_experts_are_stacks_of_matrices_as_in_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 40, "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes | MIXED[kind])
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    shape = shape_of_config(config.to_dict(), kind)
    stacks = {
        name.rpartition(".mlp.")[2]: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if ".0.mlp.experts." in name
    }
    units = shape.block_parameters(0)
    assert {n: shape.sides_of(n, numel) for n, numel in units if n.startswith("experts.")} == stacks
    asked: dict[str, Any] = {"world_size": 4, "stage": 3, "seq": 16, "precision": "fp32", "optimizer": "muon"}
    plan, traced = zs.plan(shape, **asked), zs.plan(model, **asked)
    assert plan.parameters_numel == traced.parameters_numel
    # One rank owns what all experts of a block have in one parameter.
    assert max(plan.owned_bytes) == max(traced.owned_bytes) >= 4 * 4 * 2 * 96 * 64


def test_all_ranks_wait_for_the_slowest_owner() -> None:
    """One matrix of many ranks: the step takes as long as its owner, which computes what one rank alone does."""
    device = DEVICES["h100-80"]
    films = []
    for rank in range(4):
        (unit,) = specs_of({"": (("weight", 4096 * 4096),)}, row_of(3, None, None), FP32, 4, rank=rank)
        owned = Owned(unit.buckets[0], 0, (4096, 4096), 0, 0, 1.0, "newton-schulz")
        job = Job([unit], (), [make_updates([owned])], Native(), device, "float32", {"shard": device.spread(4)})
        ((turn,),) = job.sums.turns
        films.append(make_film(job))
        assert films[-1].sent_bytes["shard update"] == turn.sent_bytes
    alone_s = sum(device.kernel_s(cost, "bfloat16") for cost in KINDS["newton-schulz"].kernels((4096, 4096)))
    assert sorted(turn.update_s) == [0, 0, 0, pytest.approx(alone_s)]
    assert alone_s > 5 * 6 * 4096**3 / device.peak_flops["bfloat16"]
    sent_s = [device.collective_s("all-to-all", turn.most_numel * 4, device.spread(4))] * 3
    for film in films:
        assert film.update_s == pytest.approx(alone_s + sum(sent_s), rel=0.01)
    # Waits of the update are a part of the update, and of nothing else.
    waited = [sum(span.stop_s - span.start_s for span in film.lanes if span.is_exposed) for film in films]
    assert waited[1] == pytest.approx(waited[0] + alone_s, rel=0.01)
    assert all(film.compute_s >= 0 and film.exposed_s + film.update_s <= film.step_s for film in films)


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        ("gpt2", {"optimizer": "muon", "tensor": 2}, "optimizer='muon' needs whole matrices, and tensor=2 splits them"),
        ("gpt2", {"optimizer": [1]}, "optimizer= of a shape takes a name"),
        (nn.Linear(4, 4), {"optimizer": 3}, "optimizer must be a torch.optim.Optimizer or a list of them; got int"),
        (nn.Linear(4, 4), {"optimizer": torch.optim.SGD(nn.Linear(4, 4).parameters())}, "is not in the model"),
    ],
)
def test_optimizers_that_cannot_be_planned_are_refused(model: Any, asked: dict[str, Any], said: str) -> None:
    inputs: Any = {} if model == "gpt2" else {"inputs": [torch.ones(2, 4)]}
    with pytest.raises((ValueError, TypeError), match=said):
        zs.plan(model, world_size=2, **asked, **inputs)
