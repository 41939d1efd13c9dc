"""Programs drawn from a seed: a model, optimizers, options and a training loop, as data that JSON can hold.

Owns what programs may consist of, and which orders of operations mean something. Must not know how they run.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from .blocks import KINDS

__all__ = ["FILES", "draw", "draw_pair", "is_valid", "on_ranks", "with_faults", "with_offload"]

Spec = dict[str, Any]

LINEAR = ("Plain", "Twice", "Side", "Nested", "Stop")
"""Blocks that have a square layer at `.linear`."""
FILES = "/folder"
"""Stands for a folder of the run."""


def draw(seed: int, processes: int) -> Spec:
    """Return the program of a seed at a number of rank processes."""
    r = random.Random(f"{seed} {processes}")
    # Ranks of the program may outnumber processes, which then run several in turn, as accumulation.
    world = processes * (1 if r.random() < 0.9 else 2)
    spec: Spec = {"seed": seed, "processes": processes, "world": world}
    _draw_model(r, spec)
    _draw_options(r, spec)
    spec["optimizers"] = _draw_optimizers(r, spec)
    spec["ops"] = _draw_ops(r, spec)
    _draw_kept(random.Random(f"kept {seed} {processes}"), spec)
    _draw_own(random.Random(f"own {seed} {processes}"), spec)
    if not is_valid(spec):
        raise AssertionError(f"seed {seed} at {processes} processes is not a valid program")
    return spec


def draw_pair(seed: int, processes: int) -> tuple[Spec, Spec]:
    """Return two programs that must agree bit for bit: another stage, another transport, no resume, or the same.

    Programs that take norms are not paired between stage 0 and another, also where a resume would change it: stage 0
    hands out plain whole gradients, whose norm is torch's own, equal to DistributedDataParallel's bits; stages 1 to 3
    add fp64 parts, which may differ in the last bit.
    """
    r = random.Random(f"pair {seed} {processes}")
    first = draw(seed, processes)
    options = first["options"]
    stages = [stage for stage in range(4) if stage != options["stage"]]
    resumes = [op["options"].get("stage", options["stage"]) for op in first["ops"] if op["op"] == "resume"]
    takes_norms = any(op["op"] == "norm" or op.get("kind") == "norm" for op in first["ops"])
    if takes_norms:
        stages = [stage for stage in stages if stage and options["stage"]]
    kinds = [*["stage"] * (3 if stages else 0), "transport", "transport", "again"]
    kind = "resume" if resumes and r.random() < 0.7 else r.choice(kinds)
    if kind == "resume" and takes_norms and any(bool(stage) != bool(options["stage"]) for stage in resumes):
        kind = "transport"
    if kind == "stage":
        return first, first | {"options": options | {"stage": r.choice(stages)}}
    if kind == "transport":
        return first, first | {"options": options | {"shared_memory": not options["shared_memory"]}}
    if kind == "resume":
        return first, first | {"resumes": False}
    return first, dict(first)


def with_offload(spec: Spec) -> Spec:
    """Return a program at stage 3 with states and parameters on the host, in other parts after each resume."""
    r = random.Random(f"offload {spec['seed']}")

    def options() -> Spec:
        states, parameters = (r.choice([0.0, 0.3, 1.0]) for _ in range(2))
        return {"stage": 3, "offload": f"states={states},parameters={parameters}"}

    ops = [op | {"options": op["options"] | options()} if op["op"] == "resume" else op for op in spec["ops"]]
    return spec | {"options": spec["options"] | options(), "ops": ops}


def with_faults(spec: Spec) -> Spec:
    """Return a program with steps that its ranks have to leave out: a gradient is not finite, on one rank or on all.

    Such a step begins and ends without gradients, so plain torch does nothing in its place. With two optimizers all
    ranks are at fault, since else the gradients of one optimizer may be finite.
    """
    r = random.Random(f"faults {spec['seed']}")
    world, one_optimizer = spec["world"], len(spec["optimizers"]) == 1
    ops: list[Spec] = []
    has_grads, trained = False, [op for op in spec["ops"] if op["op"] == "train"]
    for op in [None, *spec["ops"]]:
        if op is not None:
            ops.append(op)
            has_grads = op["op"] == "train" or (has_grads and not (op["op"] == "zero" and op["to_none"]))
        if not has_grads and r.random() < 0.6:
            like = r.choice(trained)
            bad = [r.randrange(world)] if one_optimizer else list(range(world))
            key = len(spec["ops"]) + len(ops)
            ops.append({"op": "fault", "paths": like["paths"], "choices": like["choices"], "bad": bad, "key": key})
    return spec | {"ops": ops, "options": spec["options"] | {"non_finite": "skip"}}


def on_ranks(spec: Spec, world: int) -> Spec:
    """Return the program on its first ranks alone."""
    ops = [
        op | {"paths": op["paths"][:world], "choices": op["choices"][:world]} if "paths" in op else op
        for op in spec["ops"]
    ]
    return spec | {"world": world, "ops": ops}


# ---- the model


def _draw_model(r: random.Random, spec: Spec) -> None:
    count = r.choice([1, 2, 2, 3, 3, 4, 5, 6])
    if r.random() < 0.25:
        blocks = [r.choice(list(KINDS))] * count
    else:
        blocks = [r.choice(list(KINDS)) for _ in range(count)]
    takes_ids = r.random() < 0.4
    spec |= {
        "width": r.choice([4, 5, 7, 8, 8, 12]),
        "blocks": blocks,
        "shared": [],
        "ties": [],
        "frozen": [],
        "container": r.choice(["list", "list", "sequential", "dict", "stages"]),
        "takes_ids": takes_ids,
        "is_tied": takes_ids and r.random() < 0.5,
        "dtype": "float64" if r.random() < 0.5 else "float32",
    }
    if count > 1 and r.random() < 0.15:
        to, of = r.sample(range(count), 2)
        blocks[to] = blocks[of]
        spec["shared"].append([to, of])
    linear = [at for at, kind in enumerate(blocks) if kind in LINEAR and not spec["shared"]]
    if len(linear) > 1 and r.random() < 0.4:
        spec["ties"].append(r.sample(linear, 2))
    if r.random() < 0.25:
        spec["frozen"] = r.sample(_may_freeze(spec), r.choice([1, 1, 2]) if count > 1 else 1)


def _parts(spec: Spec) -> list[str]:
    """Return the parts of a model by name."""
    return ["stem", *map(str, range(len(spec["blocks"]))), "head"]


def _may_freeze(spec: Spec) -> list[str]:
    """Return the parts without which a loss still needs gradients."""
    return _parts(spec)[int(spec["is_tied"]) : -1]


def _draw_options(r: random.Random, spec: Spec) -> None:
    options: Spec = {"stage": r.randrange(4), "shared_memory": r.random() < 0.5}
    if r.random() < 0.15:
        options["precision"] = "bf16"
        spec["dtype"] = "float32"
    if r.random() < 0.25:
        options["reduction"] = r.choice([3.0, 1.5])
    if r.random() < 0.15:
        options["reduction"] = "sum"
    if spec["processes"] == 4 and r.random() < 0.4:
        options["mesh"] = 2
    if r.random() < 0.6:
        parts = list(_parts(spec))
        chosen = parts[1:-1] if r.random() < 0.5 else r.sample(parts, r.randint(1, len(parts)))
        inner = [f"{at}:inner.0" for at, kind in enumerate(spec["blocks"]) if kind == "Nested"]
        options["units"] = chosen + (inner if r.random() < 0.5 else [])
    spec["options"] = options


def _draw_kept(r: random.Random, spec: Spec) -> None:
    """Have units of some programs keep their parameters whole: always, from forward to backward, or until the step.

    Which units there are is found at the run; "(root)" is always one, and "*" means all.
    """
    if r.random() < 0.35:
        until, always = "until-backward", "replicated"
        spec["options"]["parameters"] = r.choice(
            [until, "until-step", {"(root)": until}, {"(root)": always}, {"(root)": always, "*": until}]
        )


def _draw_own(r: random.Random, spec: Spec) -> None:
    """Give parts of some programs a way of their own: ignored; of those in bf16 computed in fp32, or bf16 outputs.

    Such a part shares nothing with another, and an ignored part is in no other operation.
    """
    options = spec["options"]
    bound = {str(at) for pair in spec["shared"] + spec["ties"] for at in pair}
    free = [part for part in _parts(spec) if part not in bound | ({"stem", "head"} if spec["is_tied"] else set())]
    if options.get("precision") == "bf16":
        inner = [f"{at}:inner.0" for at, kind in enumerate(spec["blocks"]) if kind == "Nested" and str(at) in free]
        if (free := free + inner) and r.random() < 0.7:
            options["fp32"] = r.sample(free, r.randint(1, min(2, len(free))))
        if r.random() < 0.4:
            options["output"] = "bfloat16"
    elif r.random() < 0.25:
        used = {"head", *(op.get("of") for op in spec["ops"])}
        may = [part for part in free if part not in used]
        options["ignored"] = r.sample(may, r.randint(1, min(2, len(may)))) if may else []
        if not options["ignored"] or not _all_own(spec, [one["parts"] for one in spec["optimizers"]]):
            del options["ignored"]


# ---- optimizers


def _draw_optimizers(r: random.Random, spec: Spec) -> list[Spec]:
    parts = _parts(spec)
    count = 2 if r.random() < 0.25 else 1
    if count == 2 and not _all_own(spec, [parts[0::2], parts[1::2]]):
        count = 1
    made = []
    for at in range(count):
        kind = r.choice(["SGD", "SGD", "AdamW", "AdamW", "Adam", "RMSprop", "Adagrad", "NAdam"])
        options: Spec = {"lr": r.choice([0.02, 0.05])}
        if kind == "SGD":
            options |= {"lr": 0.1, "momentum": r.choice([0.0, 0.9])}
        elif kind == "NAdam":
            options |= {"eps": 0.01}
        else:
            options |= {"eps": 0.01}
        if r.random() < 0.5:
            options["weight_decay"] = 0.1
        if r.random() < 0.4:
            options["foreach"] = r.random() < 0.5
        elif kind in ("SGD", "AdamW", "Adam") and r.random() < 0.3:
            # torch's fused SGD fails on a parameter whose first gradient comes later than the others'.
            options |= {"fused": True} if not options.get("momentum") else {}
        made.append(
            {"kind": kind, "options": options, "groups": r.random() < 0.3, "parts": parts[at::2] if count == 2 else []}
        )
    return made


def _all_own(spec: Mapping[str, Any], owners: Sequence[Sequence[str]]) -> bool:
    """Tell whether each optimizer has a parameter; what modules share is the first owner's, the rest is the first's."""
    same = {str(to): str(of) for to, of in spec["shared"]} | ({"head": "stem"} if spec["is_tied"] else {})
    of_parts = [{same.get(part, part) for part in parts} for parts in owners]
    rest = {same.get(part, part) for part in _parts(spec)} - set().union(*of_parts)
    taken = set(spec["options"].get("ignored", ()))  # they have an optimizer of their own
    rest -= taken
    for at, some in enumerate(of_parts):
        if not (some - taken) | (rest if at == 0 else set()):
            return False
        taken |= some
    return True


# ---- the loop


def _draw_ops(r: random.Random, spec: Spec) -> list[Spec]:
    habits = _Habits(r, spec)
    ops: list[Spec] = []
    for _ in range(r.choice([1, 2, 2, 3, 3, 4])):
        ops += habits.step()
    has_summed = False
    for key, op in enumerate(ops):
        op["key"] = key
        if op.get("sync") == "replicate" and has_summed:
            # Refused after a sum over all copies.
            op["sync"] = "no"
        has_summed = (has_summed or op.get("sync") == "yes") and not op.get("to_none")
    return ops


class _Habits:
    """How one program's loop tends to go: programs that do everything would be all alike."""

    def __init__(self, r: random.Random, spec: Spec) -> None:
        self.r, self.spec = r, spec
        self.by_rank = r.random() < 0.4
        self.by_step = r.random() < 0.5
        self.skips = r.random() < 0.5
        self.accumulates = r.random() < 0.4
        self.clips = r.choice(["", "", "norm", "norm", "part", "value"])
        self.freezes = r.random() < 0.2
        self.resumes = r.random() < 0.12
        self.recomputes = r.random() < 0.2
        self.odd_zeros = r.random() < 0.25
        self.odd_backward = r.random() < 0.3
        self.path = self.draw_path()
        self.choice = r.randrange(5)

    def draw_path(self) -> list[int]:
        r, count = self.r, len(self.spec["blocks"])
        if not self.skips:
            return list(range(count))
        if r.random() < 0.15:
            return [r.randrange(count) for _ in range(r.randint(0, count + 1))]
        return sorted(r.sample(range(count), r.randint(0, count)))

    def call(self) -> Spec:
        """Draw what each rank runs."""
        r, world = self.r, self.spec["world"]
        if self.by_step:
            self.path, self.choice = self.draw_path(), r.randrange(5)
        paths, choices = [self.path] * world, [self.choice] * world
        if self.by_rank and r.random() < 0.8:
            paths = [self.draw_path() for _ in range(world)]
            choices = [r.randrange(5) for _ in range(world)]
        call: Spec = {"paths": paths, "choices": choices}
        if self.recomputes:
            blocks = range(len(self.spec["blocks"]))
            call["recomputed"] = r.sample(blocks, r.randint(0, len(blocks)))
        return call

    def train(self, sync: str) -> Spec:
        """Draw one micro-batch."""
        r = self.r
        how, forwards = "together", 1
        if self.odd_backward and r.random() < 0.6:
            how, forwards = r.choice(
                [("together", 2), ("in order", 2), ("reversed", 2), ("retained", 1), ("together", 3)]
            )
        return {"op": "train", **self.call(), "forwards": forwards, "backward": how, "sync": sync}

    def look(self) -> Spec:
        """Draw a forward without a backward."""
        mode = self.r.choice(["no_grad", "no_grad", "inference", "grad"])
        return {"op": "look", **self.call(), "mode": mode}

    def step(self) -> list[Spec]:
        """Draw the operations of one step."""
        r, ops = self.r, []
        is_first_zero = r.random() < 0.2
        zero = {"op": "zero", "to_none": not (self.odd_zeros and r.random() < 0.5), "by": r.choice(["all", "model"])}
        if is_first_zero:
            ops.append(dict(zero))
        micros = r.choice([2, 2, 3]) if self.accumulates else 1
        for micro in range(micros):
            is_last = micro == micros - 1
            sync = "yes"
            if not is_last and r.random() < 0.7:
                sync = "replicate" if self.spec["options"].get("mesh") and r.random() < 0.5 else "no"
            ops.append(self.train(sync))
            if r.random() < 0.12:
                ops.append(self.look())
            if self.odd_zeros and r.random() < 0.1 and not is_last:
                ops.append({"op": "zero", "to_none": r.random() < 0.5, "by": "model"})
        if self.clips and r.random() < 0.8:
            of = r.choice(_parts(self.spec)) if self.clips == "part" else ""
            if self.clips == "value":
                ops.append({"op": "clip", "kind": "value", "limit": 0.05, "of": of})
            else:
                limit = r.choice([0.1, 0.5])
                # torch has no infinity norm of a tensor without elements, and `Bare` has one.
                p = r.choice([2.0, 2.0, 1.0, 3.0, "inf"] if "Bare" not in self.spec["blocks"] else [2.0, 1.0])
                ops.append({"op": "clip", "kind": "norm", "limit": limit, "p": p, "of": of})
        elif r.random() < 0.15:
            ops.append({"op": "norm", "p": 2.0})
        count = len(self.spec["optimizers"])
        which = list(range(count)) if r.random() < 0.85 else [r.randrange(count)]
        ops.append({"op": "step", "which": which})
        has_none = False
        if not is_first_zero and r.random() < 0.95:
            ops.append(zero)
            has_none = zero["to_none"]
        if r.random() < 0.1:
            ops.append({"op": "rate", "which": r.randrange(count), "factor": 0.7})
        if has_none and self.freezes and r.random() < 0.6:
            part = r.choice(_may_freeze(self.spec))
            ops.append({"op": "freeze", "of": part, "is_frozen": r.random() < 0.6})
        if has_none and self.resumes and r.random() < 0.5:
            options: Spec = {}
            if r.random() < 0.4:
                options = {"stage": r.randrange(4), "shared_memory": r.random() < 0.5}
            ops.append({"op": "resume", "options": options})
        if r.random() < 0.08:
            ops.append({"op": "edit", "of": r.choice(_parts(self.spec)), "factor": 0.9})
        if r.random() < 0.08:
            ops.append({"op": "read"})
        if r.random() < 0.08:
            ops.append(self.look())
        return ops


# ---- what means something


def is_valid(spec: Mapping[str, Any]) -> bool:
    """Tell whether a program is one that plain torch runs and zeroshard promises to run alike.

    Norms and steps need reduced gradients, a checkpoint holds none, a loss that needs no gradient has no backward, and
    an optimizer has parameters.
    """
    if not _all_own(spec, [one["parts"] for one in spec["optimizers"]]):
        return False
    is_waiting, has_grads, has_summed = False, False, False
    for op in spec["ops"]:
        kind = op["op"]
        if kind == "train":
            if op["sync"] == "replicate" and has_summed:
                return False
            is_waiting = op["sync"] != "yes"
            has_grads = True
            has_summed |= not is_waiting
            if not all(_can_train(spec, path) for path in op["paths"]):
                return False
        elif kind == "zero":
            # Zeros of a gradient that waits for its reduction still wait for it.
            has_grads &= not (op["to_none"])
            if op["to_none"]:
                is_waiting, has_summed = False, False
        elif (kind in ("clip", "norm", "step") and is_waiting) or (kind in ("resume", "detach") and has_grads):
            return False
    return any(op["op"] == "step" for op in spec["ops"])


def _can_train(spec: Mapping[str, Any], path: Sequence[int]) -> bool:
    """Tell whether the loss of a path depends on a parameter that is never frozen."""
    frozen = {*spec["frozen"], *(op["of"] for op in spec["ops"] if op["op"] == "freeze")}
    if spec["is_tied"]:
        return not frozen & {"stem", "head"}
    return "head" not in frozen
