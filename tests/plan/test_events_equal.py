"""The plan's events are those of the engine's trace: of runs of `make train`, and of models that use units otherwise.

The events of a plan are those of its film, which is what `zs.plan` plays; the trace is what the engine wrote as it
acted, with the bytes that the wire counted.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests import models
from tests.emulated import cases, cuda
from tests.oracle import STAGES, TIMEOUT_S, Sharded
from tests.rotation import third
from zeroshard.table.trace import Event
from zeroshard.testing import run_ranks
from zeroshard.train.config import Config, load_config
from zeroshard.train.loop import train
from zeroshard.train.planned import plan_run

STEPS = 5
CPU = zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1)
SHRUNK = [f"train.steps={STEPS}", "train.eval_bytes=2000", "run.sample_bytes=8", "zero.watchdog_s=20"]
SHRUNK += ["model.context=32", "train.batch=4"]
"""The configuration of `make train` but for its steps, its batches and what is evaluated. Events are those of units."""


class Silent:
    """A reporter that tells nobody."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


# -- `make train` -----------------------------------------------------------------------------------------------------


def traced_runs(folder: str, variants: Sequence[Sequence[str]]) -> list[list[Event]]:
    """Train once for each list of overrides; return the events of the last step that was made. Runs on a rank."""
    found, shard = [], zs.shard
    for number, overrides in enumerate(variants):
        handles: list[zs.Zero] = []

        def kept(*args: Any, handles: list[zs.Zero] = handles, **options: Any) -> zs.Zero:
            handles.append(shard(*args, **options))
            handles[0].trace.is_detailed = True
            return handles[0]

        zs.shard = kept
        train(configured(folder, [*overrides, f"run.name={number}"]), Silent())
        found.append(handles[0].trace.step_events(STEPS - 1))
    return found


def configured(folder: str, overrides: Sequence[str]) -> Config:
    return load_config(overrides=[*SHRUNK, f"run.folder={folder}", *overrides])


def planned_run(config: Config, world: int) -> list[Event]:
    """Return the plan's events of the last step of a run, from its configuration alone."""
    plan, _ = plan_run(config.model_copy(update={"run": config.run.model_copy(update={"ranks": world})}))
    events = events_of(plan)
    # Every step but the last is followed by an evaluation, of 2,000 bytes in batches of 8 windows.
    batches = -(-2000 // (8 * config.model.context * world)) if config.train.eval_every == 1 else 0
    forward = list(itertools.takewhile(lambda event: event.phase == "forward", events))
    # An evaluation keeps nothing for a backward.
    kept = [event for event in forward if event.kind == "gather" and event.is_pinned]
    released = [replace(event, kind="release", nbytes=0, is_pinned=False, dtype="") for event in reversed(kept)]
    return [*(replace(event, is_pinned=False) for event in forward), *released] * batches + events


def events_of(plan: zs.Plan) -> list[Event]:
    """Return the events of a planned step: of several micro-batches, the film plays those between once."""
    film, found = plan.film, list[list[Event]]()
    backwards = [one for one in film.phases if one.name == "backward"]
    for tick in film.ticks:
        # A tick between two micro-batches belongs to the one whose pass it names.
        ended = [one.stop_s < tick.at_s or (one.stop_s == tick.at_s and tick.phase != "backward") for one in backwards]
        found += [[] for _ in range(sum(ended) - len(found) + 1)]
        found[sum(ended)].append(Event(STEPS - 1, tick.phase, *tick[1:4], tick.is_pinned, tick.dtype))
    for _ in range(plan.asked.micro_batches - len(backwards)):
        found.insert(1, found[1])
    return [event for some in found for event in some]


VARIANTS = {
    "as it is": [],
    "recomputed": ["zero.activations=recompute"],
    "compressed": ["zero.activations=compress"],
    "bf16": ["train.precision=bf16"],
    "fp16": ["train.precision=fp16"],
    "accumulated": ["train.accumulation=2"],
    "accumulated without a reduction": ["train.accumulation=2", "zero.no_sync=true"],
    "accumulated five times": ["train.batch=10", "train.accumulation=5"],
    "accumulated three times without a reduction": ["train.batch=6", "train.accumulation=3", "zero.no_sync=true"],
    "after an evaluation": ["train.eval_every=1"],
    "all": ["zero.activations=recompute", "train.precision=bf16", "train.accumulation=2", "train.eval_every=1"],
}


LANES = ("copy out", "copy in", "read", "write")
"""Kinds of events that have an order among themselves alone, as other threads and streams have. The rest has one."""


def lanes_of(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Return the events of each lane, in order; "" is the program's."""
    found: dict[str, list[Event]] = {"": []}
    for event in events:
        found.setdefault(event.kind if event.kind in LANES else "", []).append(event)
    return found


def compare(planned: Sequence[Event], traced: Sequence[Event], where: str) -> None:
    one, other = lanes_of(planned), lanes_of(traced)
    for lane in {**one, **other}:
        expected, came = one.get(lane, []), other.get(lane, [])
        for index, (a, b) in enumerate(zip(expected, came, strict=False)):
            assert a == b, f"{where}, {lane} event {index}: {b}, planned {a}"
        assert len(expected) == len(came), f"{where}: {len(came)} {lane} events, planned {len(expected)}"
    assert traced, where


def variants_at(stage: int, world: int) -> dict[str, list[str]]:
    """Return the variants that run there: all where nothing is sharded and where all is, else half of them each."""
    names = [*VARIANTS]
    if (stage, world) not in ((0, 2), (3, 2)):
        names = names[stage % 2 :: 2]
    return {name: [f"zero.stage={stage}", *VARIANTS[name]] for name in names}


@pytest.mark.product
@pytest.mark.parametrize(("stage", "world"), [*((stage, 2) for stage in STAGES), (3, 1)])
def test_the_plan_of_make_train_is_the_trace(stage: int, world: int, tmp_path: Path) -> None:
    variants = dict(third(variants_at(stage, world).items()))
    by_rank = run_ranks(traced_runs, world, str(tmp_path), list(variants.values()), timeout_s=120.0)
    plans = {name: planned_run(configured("", overrides), world) for name, overrides in variants.items()}
    for rank, runs in enumerate(by_rank):
        for (name, planned), traced in zip(plans.items(), runs, strict=True):
            compare(planned, traced, f"{name}, [rank {rank}/{world}]")
            assert [event.kind for event in traced].count("gather") == 0 or (stage, world) == (3, 2)


@pytest.mark.product
@pytest.mark.parametrize("stage", [3, 2])
def test_one_run_of_make_train_is_as_planned(stage: int, tmp_path: Path) -> None:
    """One of these variants alone, for planted bugs."""
    overrides = [f"zero.stage={stage}"]
    planned = planned_run(configured("", overrides), 2)
    for rank, (traced,) in enumerate(run_ranks(traced_runs, 2, str(tmp_path), [overrides], timeout_s=60.0)):
        compare(planned, traced, f"[rank {rank}/2]")


# -- models that use units otherwise ----------------------------------------------------------------------------------


class Twice(models.Stack):
    """A stack that runs its first block again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(x)


class Skipping(models.Stack):
    """A stack whose middle block runs on no rank."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[0](self.stem(x))))


class Checkpointed(models.Stack):
    """A stack that recomputes all its blocks by itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Frozen(models.Stack):
    """A stack with a frozen stem, a frozen block and a partly frozen one."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        for part in (self.stem, self.blocks[1], self.blocks[2].norm):
            part.requires_grad_(False)


class Spare(models.Block):
    """A block with a layer that gets no gradient."""

    def __init__(self, width: int = models.WIDTH) -> None:
        super().__init__(width)
        self.spare = nn.Linear(width, width)


class Across(models.Stack):
    """A stack whose blocks are used one beside the other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.stack([block(x) for block in self.blocks]).sum(0))


def units_of(kinds: Sequence[type[nn.Module]], loss: Callable[..., Tensor] = models.stack_loss) -> dict[str, Any]:
    return {"units": list(kinds), "loss": loss}


TIED = units_of([models.Attention, nn.Embedding], models.gpt_loss)
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "one after the other": (models.Stack, {}),
    "ten blocks": (functools.partial(models.Stack, depth=10), {}),
    "joined blocks": (functools.partial(models.Stack, depth=40), {}),
    "a block called twice": (Twice, {}),
    "a block that is skipped": (Skipping, {}),
    "recomputed by the model": (Checkpointed, {}),
    "frozen parts": (Frozen, {}),
    "frozen parts, recomputed": (Frozen, {"activations": "recompute"}),
    "parameters without gradients, recomputed by the model": (functools.partial(Checkpointed, kind=Spare), {}),
    "parameters without gradients": (functools.partial(models.Stack, kind=Spare), {}),
    "blocks beside one another": (Across, {}),
    "units inside units": (models.Stack, units_of([models.Block, nn.LayerNorm])),
    "a tied head": (models.GPT, TIED),
    "a tied head, recomputed": (models.GPT, TIED | {"activations": "recompute"}),
    "a head of its own": (functools.partial(models.GPT, tied=False), TIED | {"activations": "offload"}),
    "a first block without inputs that want gradients": (
        functools.partial(models.Stack, depth=3),
        units_of([nn.Linear, models.Block]),
    ),
}


ARGUMENTS = ("units", "activations", "parameters", "offload", "mesh")


def follow(build: Callable[[], nn.Module], stage: int, options: dict[str, Any]) -> list[Event]:
    """Train, and return the events of the last step. Runs on a rank."""
    run = Sharded(stage, {"shared_memory": options.get("shared_memory", True)})
    model = models.build(build)
    optimizer = models.adamw(model)
    passed = {name: options.get(name) for name in ARGUMENTS}
    run.shard(model, optimizer, **passed)
    run.zeros[0].trace.is_detailed = True
    for step in range(STEPS):
        options.get("loss", models.stack_loss)(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.zeros[0].trace.step_events(STEPS - 1)


def planned(build: Callable[[], nn.Module], stage: int, options: dict[str, Any], world: int) -> list[Event]:
    is_gpt = options.get("loss") is models.gpt_loss
    inputs = [models.tokens(0, 0)[:, :-1]] if is_gpt else [models.features(0, 0)]
    passed = {name: options.get(name) for name in ARGUMENTS}
    plan = zs.plan(
        models.build(build),
        world_size=world,
        device=CPU,
        stage=stage,
        precision="fp32",
        inputs=inputs,
        loss=gpt_loss if is_gpt else stack_loss,
        shared_memory=options.get("shared_memory", True),
        **passed,
    )
    return events_of(plan)


def stack_loss(out: Tensor) -> Tensor:
    return F.mse_loss(out, models.targets(0, 0))


def gpt_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, models.VOCABULARY), models.tokens(0, 0)[:, 1:].reshape(-1))


@pytest.mark.product
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_the_trace_however_units_are_used(case: str, stage: int) -> None:
    build, options = CASES[case]
    for rank, traced in enumerate(run_ranks(follow, 2, build, stage, options, timeout_s=TIMEOUT_S)):
        compare(planned(build, stage, options, 2), traced, f"{case}, stage {stage}, [rank {rank}/2]")


@pytest.mark.product
@pytest.mark.parametrize("activations", [None, "recompute"])
def test_the_plan_of_a_tied_shape_exchanges_its_units_as_the_trace_does(activations: str | None) -> None:
    names = {"embedding": "transformer.wte", "blocks.0": "transformer.h.0", "blocks.1": "transformer.h.1"}
    shape = zs.Transformer(name="tied", layers=2, hidden=64, heads=4, vocabulary=512, block="gpt2", is_tied=True)
    plan = zs.plan(shape, world_size=2, stage=3, device=CPU, precision="fp32", activations=activations, seq=32)

    def sent(events: Sequence[Event]) -> list[tuple[str, str, str]]:
        # Without the root, whose parameters the two models use at other places.
        return [
            (e.phase, e.kind, names.get(e.unit, e.unit)) for e in events if e.unit and e.kind in ("gather", "reduce")
        ]

    traced = run_ranks(follow, 2, models.GPT, 3, TIED | {"activations": activations}, timeout_s=TIMEOUT_S)
    for rank, events in enumerate(traced):
        assert sent(events) == sent(events_of(plan)), f"[rank {rank}/2]"


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_the_plan_is_the_trace_where_ranks_send_messages(stage: int) -> None:
    options = {"shared_memory": False}
    for rank, traced in enumerate(run_ranks(follow, 3, models.Stack, stage, options, timeout_s=TIMEOUT_S)):
        compare(planned(models.Stack, stage, options, 3), traced, f"stage {stage}, [rank {rank}/3]")


@pytest.mark.product
@pytest.mark.parametrize(("stage", "is_shared"), [*((stage, True) for stage in STAGES), (0, False), (3, False)])
def test_the_plan_is_the_trace_of_replicas(stage: int, is_shared: bool) -> None:
    options = {"shared_memory": is_shared, "mesh": 2}
    for rank, traced in enumerate(run_ranks(follow, 4, models.Stack, stage, options, timeout_s=TIMEOUT_S)):
        assert "all-reduce" in {event.kind for event in traced}
        compare(planned(models.Stack, stage, options, 4), traced, f"stage {stage}, [rank {rank}/4]")


@pytest.mark.product
@pytest.mark.parametrize(
    ("case", "parameters"),
    [
        ("a tied head", {"blocks.0": "replicated", "*": "until-backward"}),
        ("a tied head", {"embedding": "until-backward"}),
        ("a block that is skipped", "until-backward"),
        ("a tied head", "until-step"),
        ("units inside units", {"blocks.0": "replicated", "blocks.2": "until-backward"}),
    ],
)
def test_the_plan_is_the_trace_of_units_that_stay_whole(case: str, parameters: Any) -> None:
    build, options = CASES[case]
    options = options | {"parameters": parameters}
    for rank, traced in enumerate(run_ranks(follow, 2, build, 3, options, timeout_s=TIMEOUT_S)):
        compare(planned(build, 3, options, 2), traced, f"{case}, {parameters}, [rank {rank}/2]")


@pytest.mark.product
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "offload", [zs.Offload(states=0.3), zs.Offload(gradients=0), zs.Offload(parameters=0.5)], ids=str
)
def test_the_plan_is_the_trace_where_state_is_offloaded(offload: zs.Offload, stage: int) -> None:
    options = {"offload": offload}
    if offload.parameters and stage < 3:
        pytest.skip("replicated parameters are not offloaded")
    for rank, traced in enumerate(run_ranks(follow, 2, Frozen, stage, options, timeout_s=TIMEOUT_S)):
        compare(planned(Frozen, stage, options, 2), traced, f"{offload}, stage {stage}, [rank {rank}/2]")


# -- on a device ------------------------------------------------------------------------------------------------------


@functools.cache
def moved() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = cuda.run("tests.emulated.cases:moves")
    return found


@pytest.mark.timeout(300)
@pytest.mark.product
@pytest.mark.parametrize("ranks", [1, cases.RANKS])
@pytest.mark.parametrize("place", cases.PLACES)
def test_the_plan_is_the_trace_of_copies_between_a_device_and_other_memories(
    place: str, ranks: int, tmp_path: Path
) -> None:
    if not isinstance(why := cuda.build(), Path):
        pytest.skip(why)
    given = cases.PLACES[place]
    plan = zs.plan(
        cases.plain_blocks(),
        world_size=ranks,
        device="h100-80",
        stage=3,
        precision="bf16",
        micro_batches=2,
        offload=zs.Offload(**{**given, **({"to": str(tmp_path)} if "to" in given else {})}),
        inputs=[torch.ones(3, cases.WIDTH)],
        loss=lambda out: out.square().mean(),
    )
    traced = [Event(STEPS - 1, *one) for one in moved()[f"{place}, {ranks}"]]
    assert {"copy out", "copy in"} & {event.kind for event in traced}
    compare(events_of(plan), traced, f"{place}, {ranks} ranks")
