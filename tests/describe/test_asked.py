"""`zs.shard`, `zs.plan`, `zs.search`, `zeroshard plan` and `zeroshard train` resolve arguments by the same function."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import zeroshard as zs
from zeroshard.describe.asked import Asked, Resolved, choose, resolve
from zeroshard.describe.axes import ranks_of
from zeroshard.describe.offload import Offload, choices_for, first_of, row_with
from zeroshard.describe.treatments import activations_of
from zeroshard.plan.plan_commands import add_commands
from zeroshard.plan.search import Search
from zeroshard.table.cells import Residency
from zeroshard.table.stages import row_of_stage
from zeroshard.train.config import load_config
from zeroshard.train.planned import choose_sharding

TREATED = zs.Residency(activations=activations_of("recompute"))
SGD_OF_ANOTHER = torch.optim.SGD(nn.Linear(3, 7).parameters())
Refusal = tuple[type[Exception], str]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def refusal_of(call: Callable[[], object]) -> Refusal:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return caught.type, str(caught.value)


def shard(**asked: Any) -> zs.Zero:
    made = model()
    return zs.shard(made, **{"optimizer": torch.optim.AdamW(made.parameters()), **asked})


def plan(**asked: Any) -> zs.Plan:
    return zs.plan(model(), **{"world_size": 1, "inputs": [torch.ones(2, 4)], "optimizer": "adamw", **asked})


def plan_shape(**asked: Any) -> zs.Plan:
    return zs.plan("gpt2", **{"world_size": 1, "seq": 64, **asked})


def search(**asked: Any) -> Search:
    lists = {"stage": "stages", "activations": "activations"}
    given = {lists.get(name, name): [value] if name in lists else value for name, value in asked.items()}
    return zs.search("gpt2", **{"world_size": 1, "seq": 64, "batches": (1,), **given})


def command(**asked: Any) -> str:
    """Run `zeroshard plan`; raise what it says with the class of the error, which a command does not show."""
    app, said, shown = typer.Typer(), list[str](), list[str]()
    add_commands(app, shown.append, said.append, lambda *_: None)
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    CliRunner().invoke(app, ["gpt2", "--ranks", "1", "--seq", "64", *words])
    if said:
        raise ValueError(said[0])
    return shown[0]


TEXTS = ("stage", "residency", "activations", "offload", "precision", "mesh")

EVERYWHERE: list[dict[str, Any]] = [
    {"stage": 1, "residency": "C1"},
    {"stage": "auto", "residency": "C1"},
    {"stage": 4},
    {"stage": "zero2"},
    {"stage": True},
    {"residency": "C9"},
    {"residency": 3},
    {"residency": TREATED, "activations": "compress"},
    {"activations": "none"},
    {"activations": ["recompute", "recompute"]},
    {"offload": 0.5},
    {"offload": "states=much"},
    {"offload": "disk"},
    {"offload": "parameters=1", "stage": 2},
    {"parameters": "whole"},
    {"parameters": "sharded", "stage": 1},
    {"precision": "int3"},
    {"precision": ""},
    {"mesh": 3},
    {"mesh": 0},
    {"mesh": "two"},
]
"""Arguments that no entrance takes."""


@pytest.mark.parametrize("asked", EVERYWHERE, ids=str)
def test_a_refusal_has_one_text(asked: dict[str, Any]) -> None:
    refused = refusal_of(lambda: shard(**asked))
    assert refusal_of(lambda: plan(**asked)) == refused
    assert refusal_of(lambda: plan_shape(**asked)) == refused
    if asked.keys() <= {"stage", "activations", "precision"}:
        assert refusal_of(lambda: search(**asked)) == refused
    is_text = all(isinstance(value, str) or type(value) is int for value in asked.values())
    if is_text and asked.keys() <= set(TEXTS) and asked not in ({"residency": 3}, {"mesh": "two"}):
        assert refusal_of(lambda: command(**asked))[1] == refused[1]


OF_MODULES: list[dict[str, Any]] = [
    {"precision": {"0": "fp32"}},
    {"precision": 3},
    {"precision": {"": "bf16", "nowhere": "fp32"}},
    {"parameters": {"nothing": "replicated"}},
    {"optimizer": 3},
    {"optimizer": [3]},
    {"optimizer": {"lr": 1}},
    {"optimizer": []},
    {"optimizer": SGD_OF_ANOTHER},
]


@pytest.mark.parametrize("asked", OF_MODULES, ids=str)
def test_a_refusal_of_modules_has_one_text(asked: dict[str, Any]) -> None:
    assert refusal_of(lambda: plan(**asked)) == refusal_of(lambda: shard(**asked))


class Shifting(torch.optim.SGD):
    """Updates an element by what stands before it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.flatten().cumsum(0).view_as(parameter))


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.LBFGS,
        torch.optim.SparseAdam,
        lambda params: torch.optim.SGD(params, differentiable=True),
        lambda params: Shifting(params, lr=1.0),
        lambda params: zs.optim.whole_matrix(torch.optim.Adam(params), cost=lambda shape: -1.0),
    ],
)
def test_optimizers_that_cannot_be_sharded_have_one_text(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    made = model()
    optimizer = make([*made.parameters()])
    asked: dict[str, Any] = {"world_size": 2, "stage": 1, "inputs": [torch.ones(2, 4)], "optimizer": optimizer}
    assert refusal_of(lambda: zs.plan(made, **asked)) == refusal_of(lambda: zs.shard(made, optimizer, stage=1))
    if isinstance(optimizer, Shifting):
        assert zs.plan(made, elementwise=True, **asked).verdict == "fits"


def test_optimizers_with_wrong_entries_have_one_text() -> None:
    made = model()
    first, *others = made.parameters()
    all_of_it = torch.optim.SGD(made.parameters())
    for optimizer in (torch.optim.SGD(others), [all_of_it, torch.optim.Adam([first])]):
        refused = refusal_of(lambda one=optimizer: zs.shard(made, one))  # type: ignore[misc]
        planned = refusal_of(
            lambda one=optimizer: zs.plan(made, world_size=1, inputs=[torch.ones(2, 4)], optimizer=one)  # type: ignore[misc]
        )
        assert planned == refused
    ignored = {"ignored": [first], "optimizer": all_of_it}
    planned = refusal_of(lambda: zs.plan(made, world_size=1, inputs=[torch.ones(2, 4)], **ignored))  # type: ignore[arg-type]
    assert planned == refusal_of(lambda: zs.shard(made, **ignored))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["stage=4", "activations=none", "offload=states=much", "offload=disk"])
def test_a_training_refuses_alike(text: str) -> None:
    name, _, value = text.partition("=")
    refused = refusal_of(lambda: shard(**{name: int(value) if value.isdecimal() else value}))
    assert refused[1] in refusal_of(lambda: load_config(None, [f"zero.{text}"]))[1]


def test_a_training_with_two_rows_is_refused_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["zero.stage=auto", "zero.residency=C1", "run.ranks=2"])
    refused = refusal_of(lambda: shard(stage="auto", residency="C1"))
    assert refused[1] in refusal_of(lambda: choose_sharding(config))[1]


# -- answers ----------------------------------------------------------------------------------------------------------

TAKEN: list[dict[str, Any]] = [
    {},
    {"stage": 0},
    {"residency": "C3"},
    {"residency": TREATED},
    {"residency": row_of_stage(2), "activations": "recompute"},
    {"stage": 2, "activations": {"nothing.*": "recompute"}},
    {"stage": 3, "parameters": "until-backward"},
    {"stage": "auto"},
    {"stage": 3, "offload": "states=0.5"},
    {"stage": "auto", "offload": zs.Offload(parameters=1.0)},
]


@pytest.mark.parametrize("asked", TAKEN, ids=str)
def test_the_row_is_the_same(asked: dict[str, Any]) -> None:
    rows = resolve(Asked(**asked), 1).rows
    if "nothing.*" in str(asked):  # the units of each model are checked by its own names
        assert str(rows[0].activations) == "nothing.*: recompute" or rows[0].activations.units
        return
    names = {name: asked[name] for name in asked.keys() - {"activations", "residency"}}
    row = plan(**names).asked.row
    assert row in resolve(Asked(**names), 1).rows
    zero = shard(**names)
    assert (zero.residency.parameters.plain, zero.residency.units) == (row.parameters.plain, row.units)
    assert plan_shape(**asked).asked.row in rows


@pytest.mark.parametrize("asked", ["bf16", "bfloat16", torch.bfloat16, "torch.bfloat16", zs.Precision(torch.bfloat16)])
def test_the_precision_is_the_same(asked: Any) -> None:
    formats = {plan(precision=asked).asked.formats, plan_shape(precision=asked).asked.formats}
    if isinstance(asked, str):
        formats.add(next(iter(search(precision=asked).candidates)).options.formats)
    assert [one.param for one in formats] == ["bfloat16"]
    made = model()
    zs.shard(made, precision=asked)
    assert {one.dtype for one in made.parameters()} == {torch.bfloat16}


def test_axes_are_the_same() -> None:
    assert resolve(Asked(mesh=2), 8).axes == (("replicate", 2), ("shard", 4))
    assert resolve(Asked(mesh=2), 8, tensor=2).axes == (("replicate", 2), ("shard", 2), ("tensor", 2))
    found = zs.plan("gpt2", world_size=8, mesh=2, tensor=2, seq=64).asked
    assert (found.replicas, found.shard_ranks, found.tensor) == (2, 2, 2)
    with pytest.raises(ValueError, match="leave one rank per replica, so nothing would be sharded"):
        zs.plan("gpt2", world_size=8, mesh=8, seq=64)


@pytest.mark.parametrize(
    ("names", "ranks", "said"),
    [
        (("data",), [[0]], "axes named replicate, shard, tensor, pipe; got"),
        (None, [[0]], "got no names"),
    ],
)
def test_a_mesh_of_torch_is_refused_alike(names: Any, ranks: Any, said: str) -> None:
    mesh = SimpleNamespace(mesh_dim_names=names, mesh=torch.tensor(ranks))  # what is read of a DeviceMesh
    refused = refusal_of(lambda: shard(mesh=mesh))
    assert said in refused[1]
    assert refusal_of(lambda: plan(mesh=mesh)) == refusal_of(lambda: plan_shape(mesh=mesh)) == refused


def test_a_mesh_has_ranks_that_are_there_and_a_plan_as_many() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("shard",), mesh=torch.tensor([4, 6]))
    with pytest.raises(ValueError, match=r"mesh= has rank 4, and the process group has the ranks 0 to 0"):
        shard(mesh=mesh)
    # A plan is of any ranks.
    assert resolve(Asked(mesh=mesh), 2).axes == (("shard", 2),)
    refused = refusal_of(lambda: plan(mesh=mesh))
    assert refused == refusal_of(lambda: plan_shape(mesh=mesh))
    assert "must have as many ranks as the run, 1; got axes ('shard',) of sizes (2,), 2 ranks" in refused[1]


def test_two_numbers_of_places_or_of_tensor_ranks_are_refused() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("pipe",), mesh=torch.tensor([0, 1]))
    assert resolve(Asked(mesh=mesh), 2).axes == (("pipe", 2),)
    with pytest.raises(ValueError, match=r"pipe=4, but mesh= has 2 rank\(s\) along 'pipe'"):
        zs.plan("gpt2", mesh=mesh, world_size=2, pipe=4)
    mesh = SimpleNamespace(mesh_dim_names=("tensor",), mesh=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"Leave tensor="):
        resolve(Asked(mesh=mesh), 2, tensor=4)


# -- "auto" -----------------------------------------------------------------------------------------------------------


def chosen(fitting: set[tuple[Residency, Offload | None]], **asked: Any) -> tuple[Residency, Offload | None, bool]:
    def fits(row: Residency, offload: Offload | None) -> bool:
        return (row, offload) in fitting

    def offload_for(row: Residency) -> tuple[Offload | None, bool]:
        return first_of(choices_for(row), lambda offload: fits(row, offload))

    return choose(resolve(Asked(**asked), 4), fits, offload_for, shares_memory=False)


def test_the_first_row_that_fits_is_chosen_and_then_the_least_offload() -> None:
    rows = [row_of_stage(stage) for stage in range(4)]
    assert chosen({(rows[1], None), (rows[3], None)}, stage="auto")[0] == rows[1]
    assert chosen(set(), stage="auto") == (rows[3], None, True)
    kept, moved, also = choices_for(rows[3])
    assert (kept[0], kept[-1], moved[0]) == (None, Offload(gradients=0), Offload(gradients=0))
    assert (moved[-1], also[0], also[-1]) == (Offload(), Offload(), Offload(parameters=1.0))
    choices = [*kept, *moved[1:], *also[1:]]
    for least in (1, 50, 150, 200, 250, 300):
        fitting = {(rows[3], one) for one in choices[least:]}
        assert chosen(fitting, stage="auto", offload="auto") == (rows[3], choices[least], True)
    assert chosen(set(), stage="auto", offload="auto") == (rows[3], choices[-1], False)
    # The offload is for the stage, not the stage for the offload.
    everything = {(row, one) for row in rows for chain in choices_for(row) for one in chain if one is not None}
    assert chosen(everything, stage="auto", offload="auto") == (rows[3], choices[1], True)


def test_rows_that_cannot_have_what_is_asked_are_not_tried() -> None:
    resolved = resolve(Asked(stage="auto", offload=zs.Offload(parameters=0.5)), 4)
    assert resolved.rows == (row_of_stage(3),)
    assert len(resolve(Asked(stage="auto", parameters="until-backward"), 4).rows) == 1
    assert isinstance(resolved, Resolved)


def test_one_memory_of_device_and_host_moves_nothing() -> None:
    resolved = resolve(Asked(stage=3, offload="auto"), 4)
    assert choose(resolved, lambda *_: False, lambda row: (Offload(), True), shares_memory=True) == (
        row_of_stage(3),
        None,
        True,
    )


def test_the_rank_behind_the_last_one_is_not_there() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("shard",), mesh=torch.tensor([1, 0]))
    assert ranks_of(mesh, 2) == (1, 0)
    mesh.mesh = torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"mesh= has rank 2, and the process group has the ranks 0 to 1"):
        ranks_of(mesh, 2)


@pytest.mark.parametrize(("stage", "gradients", "memory"), [(1, None, "device"), (1, 1.0, "host"), (2, None, "host")])
def test_gradients_go_with_their_states_where_a_rank_keeps_no_others_or_asks_for_it(
    stage: int, gradients: float | None, memory: str
) -> None:
    row = row_with(row_of_stage(stage), Offload(gradients=gradients), is_alone=False)
    assert (row.states.memory, row.gradients.memory) == ("host", memory)
