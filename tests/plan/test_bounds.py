"""Bounds in closed form, and the configurations that a search does not simulate because of them."""

import dataclasses
import random
from typing import Any

import pytest

import zeroshard as zs
from zeroshard.describe.asked import Asked, resolve
from zeroshard.plan.bounds import bound_of
from zeroshard.plan.job import Options, check_options, check_shape
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.named import PRECISIONS
from zeroshard.plan.trying import candidate_of

SIZES: dict[str, Any] = {"hidden": 2048, "heads": 16, "kv_heads": 8, "inner": 8192, "vocabulary": 32000}
DENSE = zs.Transformer(name="dense", layers=11, sequence=2048, **SIZES)
TIED = dataclasses.replace(DENSE, name="tied", layers=8, is_tied=True, block="gpt2", kv_heads=16)
EXPERTS = dataclasses.replace(
    DENSE, name="experts", inner=1024, experts=8, experts_used=2, dense_layers=2, dense_inner=8192
)
SHAPES = {one.name: one for one in (DENSE, TIED, EXPERTS)}


def drawn(r: random.Random, shape: zs.Transformer) -> Options:
    """Return a possible configuration."""
    while True:
        stage, treatment = r.choice((0, 1, 2, 3)), r.choice(("keep", "recompute-rest", "recompute"))
        precision, pipe = r.choice(("bf16", "fp32", "bf16-grads")), r.choice((1, 1, 2, 4))
        asked = Asked(stage=stage, activations=treatment, precision=precision)
        options = Options(
            world_size=r.choice((1, 8, 16, 64, 256)),
            device=DEVICES[r.choice(("h100-80", "a100-40", "rtx4090"))],
            batch=r.choice((1, 2, 8)),
            sequence=2048,
            row=resolve(asked, 1, precisions=PRECISIONS).rows[0],
            precision=precision,
            optimizer=r.choice(("adamw", "adamw", "sgd", "muon", "adamw8bit")),
            replicas=r.choice((1, 1, 2)),
            tensor=r.choice((1, 1, 2, 4)),
            micro_batches=r.choice((1, 2, 3)) * pipe,
            no_sync=pipe > 1 or r.random() < 0.3,
            pipe=pipe,
        )
        try:
            check_options(options)
            check_shape(shape, options)
        except ValueError:
            continue
        return options


@pytest.mark.parametrize("name", [*SHAPES])
def test_no_simulation_is_below_its_bound(name: str) -> None:
    r, shape, tight = random.Random(f"bounds {name}"), SHAPES[name], list[float]()
    for _ in range(40):
        options = drawn(r, shape)
        bound, one = bound_of(shape, options), candidate_of(shape, options)
        assert bound.peak_bytes <= one.peak_bytes, options.words()
        assert bound.movable_bytes >= one.movable_bytes or options.states.whole, options.words()
        assert bound.gradient_bytes >= one.gradient_bytes, options.words()
        for least, simulated in (
            (bound.passes_s, one.passes_s),
            (bound.step_s, one.step_s),
            (bound.backward_s, one.backward_s),
            (bound.host_s, one.host_s),
        ):
            assert least <= simulated * (1 + 1e-9), options.words()
        tight += [bound.peak_bytes / one.peak_bytes, bound.step_s / one.step_s]
    assert sorted(tight)[len(tight) // 2] > 0.85  # a bound that is far below leaves out nothing


@pytest.mark.parametrize("name", [*SHAPES])
def test_no_offload_takes_less_than_what_it_cannot_move(name: str) -> None:
    r, shape, near = random.Random(f"offload {name}"), SHAPES[name], list[float]()
    while len(near) < 25:
        options = drawn(r, shape)
        if options.pipe > 1:
            continue
        part = r.choice((1.0, 1.0, 0.6)) * options.row.cuts_parameters
        offload = zs.Offload(states=r.choice((0.3, 1.0)), parameters=part)
        bound, one = bound_of(shape, options), candidate_of(shape, options)
        moved = candidate_of(shape, dataclasses.replace(options, offload=offload))
        assert one.least_bytes <= moved.peak_bytes, (options.words(), offload)
        assert bound.least_bytes <= moved.peak_bytes, (options.words(), offload)
        near.append(one.least_bytes / moved.peak_bytes)
    assert max(near) > 0.9  # the search would look at each configuration in vain


FEW = {"seq": 1024, "batches": (1, 4), "tensors": (1, 2), "pipes": (1,), "activations": ("keep", "recompute")}
SEARCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "eight ranks": ("dense", {"world_size": 8, "device": "a100-40", "offload": ()}),
    "places of a pipe": ("dense", {"world_size": 8, "device": "h100-80", "stages": (1,), "pipes": (1, 2, 4)}),
    "several nodes": ("dense", {"world_size": [16, 64], "device": "h100-80", "stages": (1, 3), "tensors": (1,)}),
    "a tied embedding": ("tied", {"world_size": 8, "device": "rtx4090", "optimizer": "sgd", "stages": (0, 3)}),
    "experts": ("experts", {"world_size": [8, 16], "device": "h100-80", "stages": (2, 3), "batches": (2,)}),
    "only with offload": ("dense", {"world_size": 1, "device": "rtx4090", "stages": (0, 3), "tensors": (1,)}),
    "no room": ("dense", {"world_size": 2, "device": "t4", "stages": (0, 2), "offload": ()}),
}


@pytest.mark.parametrize("name", [*SEARCHES])
def test_a_search_finds_what_it_finds_with_all_simulated(name: str) -> None:
    shape, asked = SEARCHES[name]
    sizes: dict[str, Any] = FEW | asked
    pruned, whole = (zs.search(SHAPES[shape], **sizes, prune=prune) for prune in (True, False))
    assert len(pruned.candidates) <= whole.count == pruned.count
    assert pruned.frontier == whole.frontier
    assert pruned.reasons == whole.reasons
    for ranks, plan in whole.best.items():
        same = pruned.best[ranks]
        assert (plan and (plan.asked, plan.step_s)) == (same and (same.asked, same.step_s))
