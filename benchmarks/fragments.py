"""How much of the memory that torch's allocator reserves is fragments, and how much arenas leave of them.

    python -m benchmarks.fragments --output benchmarks/results/fragments.json

Owns the trainings, the policies that are compared and the goals; `zeroshard/plan/` owns the recorder and the
simulation. A trace is the allocations of real training steps, forward, backward and update, with fake tensors and the
kernels of a GPU: when the storage of each tensor comes and goes. It takes some ten minutes.

The excess of a run is the memory reserved at its peak over the memory needed at its peak, less 1. Needed is what is
alive, in sizes rounded to 512 bytes, without any arena: an arena that is larger than its tensors, or idle at the peak,
is excess. A policy is planned on another trace than it is judged on: three steps, of the longest, the shortest and the
longest sequences.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.arena import Arena, Lifetime, Replay, needed_bytes, place_events, plan_arena, replay
from benchmarks.machine import circumstances, write_result
from zeroshard.plan.machine.allocator import Action, Event
from zeroshard.plan.trace.events import Phase
from zeroshard.plan.trace.personality import PERSONALITIES
from zeroshard.plan.trace.recorder import Recorder
from zeroshard.table.activations import PRODUCTS
from zeroshard.torch_checks import check_tracing
from zeroshard.torch_private import fake_tensors, run_backward
from zeroshard.train.models.gpt import GPT, GPTConfig

__all__ = ["main"]


@final
@dataclass(frozen=True)
class Case:
    """A training whose allocations are recorded.

    Args:
        treatment: kept, block (each block is recomputed), sqrt (groups of blocks are), or selective (each block is,
            but for its matrix products and its attention).
        times: tokens of a sequence, by step.
        precision: fp32, or bf16 for parameters in bf16 with masters in fp32.
        update: foreach or fused, of torch's AdamW.
        is_mixed: whether every other block has an MLP of half the width.
    """

    depth: int
    batch: int
    vocabulary: int
    treatment: str
    times: tuple[int, ...]
    precision: str = "fp32"
    update: str = "foreach"
    is_mixed: bool = False

    @property
    def name(self) -> str:
        """Return what tells this case from the others."""
        parts = [f"gpt-{self.depth}", f"batch {self.batch}", f"vocabulary {self.vocabulary}", self.treatment]
        parts += [self.precision, self.update, "mixed" if self.is_mixed else "equal"]
        return ", ".join([*parts, "times " + " ".join(map(str, self.times))])


@final
@dataclass
class Trace:
    """What was recorded.

    Args:
        events: allocations and frees, in order; keys are numbers of storages.
        kinds: what the long-lived allocations are: parameter, state, gradient or checkpoint.
        steps: number of events before each step, and at the end.
        ends: by key of a gradient or checkpoint, the number of events when a copy of it could have been made, and the
            tensor itself dropped.
        roles: by key of a long-lived allocation, what it is in each step: its kind, and a parameter or a block.
    """

    events: list[Event] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)


@final
class Notes:
    """What the benchmark notes beside the planner's recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.trace = recorder, Trace()

    def note(self, tensor: Tensor, kind: str, role: str) -> int:
        """Say what a tensor is."""
        key = self.recorder.number_of(tensor)
        assert key is not None
        self.trace.kinds.setdefault(key, kind)
        self.trace.roles.setdefault(key, f"{kind} {role}")
        return key

    def role_of(self, tensor: Tensor) -> str:
        """Return what was said of a tensor."""
        key = self.recorder.number_of(tensor)
        assert key is not None
        return self.trace.roles[key]

    def end(self, key: int) -> None:
        """Note that a tensor could be dropped now, if a copy was kept elsewhere."""
        self.trace.ends.setdefault(key, self.recorder.count)

    def result(self) -> Trace:
        """Return what was recorded; a storage's first event is its allocation, its second the end."""
        seen: set[int] = set()
        for event in self.recorder.result().events:
            is_end = event.storage in seen
            seen.add(event.storage)
            one = Event(event.storage, 0, 0, Action.FREE) if is_end else Event(event.storage, event.nbytes)
            self.trace.events.append(one)
        return self.trace


def record(case: Case) -> Trace:
    """Train with fake tensors and a GPU's kernels; return what was allocated."""
    check_tracing()
    kernels = PERSONALITIES["cuda"]()
    notes = Notes(Recorder(kernels, (), None))
    recorder = notes.recorder
    with fake_tensors():
        config = GPTConfig(case.depth, max(case.times), case.vocabulary)
        with default_dtype(torch.bfloat16 if case.precision == "bf16" else torch.float32):
            model = GPT(config)
            for block in list(model.blocks)[::2] if case.is_mixed else []:
                block.mlp.up = nn.Linear(config.width, 2 * config.width, bias=False)
                block.mlp.down = nn.Linear(2 * config.width, config.width, bias=False)
        recorder.begin(model, ())
        with recorder, kernels.rewriting():
            recorder.calibrate()
            kept = train(case, model, notes)
            trace = notes.result()  # what is still there is not freed
            del kept
            return trace


def train(case: Case, model: GPT, notes: Notes) -> Any:
    """Take all steps; return what lives on."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    masters = [p.detach().float() for p in names] if case.precision == "bf16" else list(names)
    for parameter, name in names.items():
        notes.note(parameter, "parameter", name)
        parameter.register_post_accumulate_grad_hook(lambda p: notes.end(notes.note(p.grad, "gradient", names[p])))
    for master, name in zip(masters, names.values(), strict=True):
        notes.note(master, "parameter", f"master of {name}")
    optimizer = torch.optim.AdamW(masters, foreach=case.update == "foreach", fused=case.update == "fused")
    for time_ in case.times:
        notes.trace.steps.append(notes.recorder.count)
        train_step(case, model, optimizer, masters, notes, time_)
        for number, state in enumerate(optimizer.state.values()):
            for name, value in state.items():
                if isinstance(value, Tensor):
                    notes.note(value, "state", f"{name} {number}")
    notes.trace.steps.append(notes.recorder.count)
    return optimizer, masters


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have new tensors in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_step(case: Case, model: GPT, optimizer: Any, masters: list[Tensor], notes: Notes, time_: int) -> None:
    """Forward, backward and update."""
    notes.recorder.phase = Phase.FORWARD
    tokens = torch.zeros(case.batch, time_, dtype=torch.int64)
    targets = torch.zeros(case.batch, time_, dtype=torch.int64)
    loss = forward(case, model, tokens, targets, notes)
    notes.recorder.phase = Phase.BACKWARD
    run_backward(loss)
    del loss
    notes.recorder.phase = Phase.UPDATE
    parameters = list(model.parameters())
    if case.precision == "bf16":
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            notes.note(master.grad, "gradient", f"of {notes.role_of(master)}")
            parameter.grad = None
    optimizer.step()
    if case.precision == "bf16":
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    optimizer.zero_grad()


def forward(case: Case, model: GPT, tokens: Tensor, targets: Tensor, notes: Notes) -> Tensor:
    """Return the loss; as `GPT.forward`, with checkpoints."""
    time_ = tokens.shape[1]
    x, cosine, sine = model.embedding(tokens), model.cosine[:time_], model.sine[:time_]
    blocks = list(model.blocks)
    group = max(1, round(math.sqrt(len(blocks)))) if case.treatment == "sqrt" else 1
    kept = [getattr(torch.ops.aten, name).default for name in PRODUCTS]
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, kept)}
    for start in range(0, len(blocks), group):
        run = partial(run_blocks, blocks[start : start + group])
        if case.treatment == "kept":
            x = run(x, cosine, sine)
            continue
        key = notes.note(x, "checkpoint", f"input {start}")
        extra = contexts if case.treatment == "selective" else {}
        x = checkpoint(run, x, cosine, sine, use_reentrant=False, preserve_rng_state=False, **extra)
        notes.end(key)
    logits = model.head(model.norm(x)).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def run_blocks(blocks: Sequence[nn.Module], x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Pass the stream through blocks."""
    for block in blocks:
        x = block(x, cosine, sine)
    return x


# -- policies ---------------------------------------------------------------------------------------------------------

STATIC, PASSING = ("parameter", "state"), ("checkpoint", "gradient")
KINDS = ((), STATIC, (*STATIC, "checkpoint"), (*STATIC, "gradient"), (*STATIC, *PASSING))
"""What may be put in arenas; the first is none, the last is all that lives long."""
RESERVES = (0.0, 1.0, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.16, 1.2)
"""Sizes of the segment that is made for all the rest, over what the rest needs; 0 for no such segment."""
PAGE_BYTES = 2 * 2**20


@final
@dataclass(frozen=True)
class Policy:
    """What is done before a run begins: arenas for kinds of tensors, and one segment for the rest.

    Args:
        arenas: by name.
        roles: the place of each tensor, by its role.
        is_copied: whether what passes is copied to its place, or written there by whoever makes it.
    """

    kinds: tuple[str, ...]
    arenas: dict[str, Arena]
    roles: dict[str, tuple[str, int]]
    reserve_bytes: int = 0
    is_copied: bool = True

    def run(self, trace: Trace, device_bytes: int | None = None) -> Replay:
        """Replay a trace."""
        places = {key: self.roles[role] for key, role in trace.roles.items() if role in self.roles}
        copied = trace.ends if self.is_copied else {}
        room = self.reserve_bytes
        if device_bytes is not None:  # it must leave room for a segment of small tensors
            arenas = sum(arena.total_bytes + PAGE_BYTES for arena in self.arenas.values())
            room = max(0, min(room, device_bytes - arenas - 4 * PAGE_BYTES) // PAGE_BYTES * PAGE_BYTES)
        return replay(trace.events, self.arenas, places, device_bytes, copied, room)

    def rest_bytes(self, trace: Trace) -> int:
        """Return what is needed beside the arenas."""
        places = {key: self.roles[role] for key, role in trace.roles.items() if role in self.roles}
        return needed_bytes(list(place_events(trace.events, self.arenas, places, trace.ends)))


def plan(trace: Trace, kinds: tuple[str, ...]) -> Policy:
    """Plan arenas from the last step of a trace: one for what is always there, one for what passes."""
    events = trace.events
    made = {event.key: place for place, event in enumerate(events) if event.action is Action.ALLOC}
    gone = {event.key: place for place, event in enumerate(events) if event.action is Action.FREE}
    begin, end = trace.steps[-2], trace.steps[-1]
    found: dict[str, dict[str, Lifetime]] = {"static": {}, "passing": {}}
    for key, kind in trace.kinds.items():
        if kind not in kinds:
            continue
        num_bytes, role = events[made[key]].num_bytes, trace.roles[key]
        if kind in STATIC:
            found["static"][role] = Lifetime(num_bytes, 0, 0)
        elif made[key] >= begin:
            # A copy is made before the event of that number, and a place is free after the event that frees it.
            start = trace.ends.get(key, made[key])
            found["passing"][role] = Lifetime(num_bytes, start - begin, max(gone.get(key, end), start) + 1 - begin)
    arenas = {name: plan_arena(list(tensors.values())) for name, tensors in found.items() if tensors}
    return Policy(kinds, arenas, {role: (name, i) for name in arenas for i, role in enumerate(found[name])})


def choose(trace: Trace, policies: Sequence[Policy]) -> Policy:
    """Return the policy, and the segment for the rest, by which a planned trace reserves least."""
    candidates = []
    for policy in policies:
        rest = policy.rest_bytes(trace)
        candidates += [
            replace(policy, reserve_bytes=-(-int(rest * share) // PAGE_BYTES) * PAGE_BYTES) for share in RESERVES
        ]
    return min(candidates, key=lambda policy: policy.run(trace).outcome.peak_reserved_bytes)


def judge(case: Case, trace: Trace, planned: Trace) -> dict[str, Any]:
    """Return what each policy comes to in one run."""
    plans = [plan(planned, kinds) for kinds in KINDS]
    none, static, everything = plans[0], plans[1], plans[-1]
    rest = -(-everything.rest_bytes(planned) // PAGE_BYTES) * PAGE_BYTES
    chosen = choose(planned, plans)
    policies = {
        "none": none,
        "static first": static,
        "arenas": everything,
        "arenas written directly": replace(everything, is_copied=False),
        "arenas and reserve": replace(everything, reserve_bytes=rest),
        "chosen": chosen,
    }
    needed = needed_bytes(trace.events)
    tight = needed + needed // 20
    excess, out_of_memory, retries = {}, {}, {}
    for name, policy in policies.items():
        excess[name] = round(policy.run(trace).excess, 4)
        outcome = policy.run(trace, tight).outcome
        out_of_memory[name], retries[name] = outcome.failed is not None, outcome.retries
    without = none.run(trace).outcome
    return {
        "case": case.name,
        "events": len(trace.events),
        "needed_bytes": needed,
        "allocated_bytes": without.peak_allocated_bytes,
        "reserved_bytes": without.peak_reserved_bytes,
        "arena_bytes": {name: arena.total_bytes for name, arena in everything.arenas.items()},
        "arena_excess": {name: round(arena.excess, 4) for name, arena in everything.arenas.items()},
        "least_excess": round(
            (sum(arena.total_bytes for arena in everything.arenas.values()) + everything.rest_bytes(trace)) / needed
            - 1,
            4,
        ),
        "chosen": {"kinds": chosen.kinds, "reserve_bytes": chosen.reserve_bytes},
        "excess": excess,
        "out_of_memory_at_105": out_of_memory,
        "retries_at_105": retries,
    }


# -- the benchmark ----------------------------------------------------------------------------------------------------

TREATMENTS = ("kept", "block", "sqrt", "selective")
SHAPES = (
    # depth, batch, vocabulary, precision, update, is_mixed, times
    (12, 8, 8192, "fp32", "foreach", False, (512, 1024, 768, 1024, 640)),
    (8, 16, 1024, "bf16", "fused", True, (300, 900, 450, 1000, 700)),
    (16, 4, 8192, "bf16", "foreach", False, (300, 900, 450, 1000, 700)),
    (12, 8, 32000, "fp32", "fused", True, (600, 1000, 800, 1000)),
    (16, 8, 1024, "fp32", "foreach", True, (256, 512, 1024, 2048)),
    (24, 2, 8192, "bf16", "fused", False, (512, 1024, 768, 1024, 640)),
    (12, 4, 1024, "fp32", "fused", False, (1024, 1024, 1024)),
    (20, 4, 32000, "bf16", "foreach", True, (600, 1000, 800, 1000)),
)


def cases() -> Iterator[Case]:
    """Yield what is recorded."""
    for treatment in TREATMENTS:
        for depth, batch, vocabulary, precision, update, is_mixed, times in SHAPES:
            yield Case(depth, batch, vocabulary, treatment, times, precision, update, is_mixed)


def measure(case: Case) -> dict[str, Any]:
    """Record a run and the one that it is planned on, and judge."""
    longest, shortest = max(case.times), min(case.times)
    row = judge(case, record(case), record(replace(case, times=(longest, shortest, longest))))
    print(row["case"], row["excess"], flush=True)
    return row


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers that the goals speak of."""
    worst = sorted(rows, key=lambda row: -row["excess"]["none"])[:5]
    names = list(rows[0]["excess"])
    return {
        "worst_five": [
            {"case": row["case"], "needed_bytes": row["needed_bytes"], "excess": row["excess"]} for row in worst
        ],
        "goal_met_of_worst_five": {
            name: sum(row["excess"][name] <= min(0.05, row["excess"]["none"] / 3) for row in worst) for name in names
        },
        "excess_median": {name: round(statistics.median(row["excess"][name] for row in rows), 4) for name in names},
        "excess_worst": {name: max(row["excess"][name] for row in rows) for name in names},
        "within_5_percent": {name: sum(row["excess"][name] <= 0.05 for row in rows) for name in names},
        "out_of_memory_at_105": {name: sum(row["out_of_memory_at_105"][name] for row in rows) for name in names},
    }


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fragments.json")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases; all without")
    arguments = parser.parse_args()
    wanted = [case for number, case in enumerate(cases()) if not arguments.cases or number in arguments.cases]
    rows = [measure(case) for case in wanted]
    result = {**circumstances("benchmarks.fragments", ("torch",)), "summary": summarize(rows), "rows": rows}
    write_result(arguments.output, result)
    for name, value in result["summary"]["excess_median"].items():
        worst = result["summary"]["excess_worst"][name]
        print(f"{name:26s} median {value:.1%}, worst {worst:.1%}")


if __name__ == "__main__":
    main()
