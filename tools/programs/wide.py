"""Programs of a wider drawing: features that seldom meet are added to a drawn program, each with its own chance.

Owns the features, and which of them exclude each other. Must not know how programs run. A program names its features in
`spec["features"]`, so that the command can count them and their pairs.
"""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from .draw import FILES, draw, is_valid, on_ranks
from .write import inside

__all__ = ["APART", "FEATURES", "draw_wide", "excluded", "lacking", "table_of", "with_untreated"]

Spec = dict[str, Any]

ROWS: Final = 160
"""Rows of an input whose saved tensors have the 1,024 elements from which on treatments round or divide them."""

TAKEN_BY: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "nesterov": frozenset({"SGD"}),
        "amsgrad": frozenset({"Adam", "AdamW"}),
        "fused": frozenset({"SGD", "Adam", "AdamW"}),
        "capturable": frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop"}),
        "foreach": frozenset(
            {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Adagrad", "Adafactor"}
        ),
        "differentiable": frozenset(
            {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Adagrad"}
        ),
        "maximize": frozenset(
            {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Adagrad", "Adafactor"}
        ),
    }
)
"""For each option, the optimizers of torch that have it. Rprop is left out, since the signs of rounding decide, and
fused Adagrad, whose sums are made with the optimizer, before a program changes the dtype of its model."""
EXCLUSIVE: Final = (frozenset({"foreach", "fused"}), frozenset({"fused", "differentiable"}))
"""Options that torch refuses together in one optimizer."""

APART: Final[Mapping[frozenset[str], str]] = MappingProxyType(
    {
        frozenset({"states in files", "whole matrices"}): "refused by name",
        frozenset({"states on the host", "states in files"}): "one memory at a time",
        frozenset({"partition", "other ranks"}): "no checkpoint with an axis for tensors yet",
        frozenset({"partition", "resume"}): "no checkpoint with an axis for tensors yet",
        frozenset({"compress", "lossy"}): "one code at a time",
        frozenset({"recomputed otherwise", "lossy"}): "rounded inputs: not compared",
        frozenset({"buffers of rank 0", "own buffers"}): "one rule at a time",
        frozenset({"buffers of rank 0", "means of buffers"}): "one rule at a time",
        frozenset({"own buffers", "means of buffers"}): "one rule at a time",
    }
)
"""Pairs of features that no program has, and why."""


def draw_wide(seed: int, processes: int) -> Spec:
    """Return the program of a seed, with features that the plain drawing lacks."""
    spec = draw(seed, processes) | {"features": []}
    spec["ops"] = [dict(op) for op in spec["ops"]]
    for name, feature in FEATURES.items():
        r = random.Random(f"{name} {seed} {processes}")
        if r.random() >= feature.chance or any(frozenset({name, one}) in APART for one in spec["features"]):
            continue
        wider = feature.add(r, spec | {"options": dict(spec["options"])})
        if wider is not None and is_valid(wider):
            spec = wider | {"features": [*spec["features"], name]}
    for key, op in enumerate(spec["ops"]):
        op["key"] = key
    return spec


def with_untreated(spec: Spec) -> tuple[Spec, ...]:
    """Return a program and, where its activations are treated without loss, its twin without treatments."""
    if "activations" not in spec["options"] or "lossy" in spec["features"]:
        return (spec,)
    options = {name: value for name, value in spec["options"].items() if name != "activations"}
    return spec, spec | {"options": options}


def excluded(one: str, other: str) -> str:
    """Return why no program has both features; "" if programs may."""
    return APART.get(frozenset({one, other}), "")


def table_of(counts: Counter[str], pairs: Counter[tuple[str, str]]) -> str:
    """Return a table of the features and of their pairs: how many programs have both.

    Args:
        pairs: by (earlier, later) in the order of `FEATURES`.
    """
    names = list(FEATURES)
    lines = [f"{'':22} {'':>4} {'all':>6}" + "".join(f"{at:6}" for at in range(1, len(names) + 1))]
    for at, name in enumerate(names):
        cells = [
            "     -" if excluded(other, name) else f"{pairs[other, name]:6}" if other != name else ""
            for other in names[: at + 1]
        ]
        lines.append(f"{name:22} {at + 1:4} {counts[name]:6}" + "".join(cells))
    return "\n".join(lines)


def lacking(counts: Counter[str], pairs: Counter[tuple[str, str]], each: int, pair: int) -> list[str]:
    """Return the features and pairs that too few programs have.

    Args:
        each, pair: the least numbers of programs.
    """
    few = [f"{name} {counts[name]}" for name in FEATURES if counts[name] < each]
    couples = [both for both in itertools.combinations(FEATURES, 2) if not excluded(*both)]
    return few + [f"{one} + {other} {pairs[one, other]}" for one, other in couples if pairs[one, other] < pair]


@dataclasses.dataclass(frozen=True)
class Feature:
    """One kind of thing that a program may have.

    Args:
        chance: that a program gets the feature, where nothing speaks against it.
        add: returns the program with the feature, or None if the program cannot have it.
    """

    chance: float
    add: Callable[[random.Random, Spec], Spec | None]


# ---- modules


def _block_of(*kinds: str) -> Callable[[random.Random, Spec], Spec | None]:
    """Return a feature that replaces a block of which no other part of the program names an inner module."""

    def add(r: random.Random, spec: Spec) -> Spec | None:
        bound = {at for pair in spec["shared"] + spec["ties"] for at in pair}
        options = spec["options"]
        own = [*options.get("ignored", ()), *options.get("fp32", ())]
        own += [name.partition(":")[0] for name in options.get("units", ()) if ":" in name]
        bound |= {int(name) for name in (one.partition(":")[0] for one in own) if name.isdigit()}
        free = [at for at, kind in enumerate(spec["blocks"]) if at not in bound and kind not in NEW_BLOCKS]
        if not free:
            return None
        at = r.choice(free)
        ops = [dict(op) for op in spec["ops"]]
        for op in ops:
            # A recomputation by the program's own checkpoint changes buffers a second time, as in plain torch.
            if "recomputed" in op:
                op["recomputed"] = [one for one in op["recomputed"] if one != at]
        return spec | {"blocks": [*spec["blocks"][:at], r.choice(kinds), *spec["blocks"][at + 1 :]], "ops": ops}

    return add


NEW_BLOCKS: Final = frozenset({"Gru", "Lstm", "Rnn", "Norms", "Modes", "Buffers", "Fickle"})


def _with_buffers(*kinds: str) -> Callable[[random.Random, Spec], Spec | None]:
    """Return a feature that adds a block with buffers, in a program whose ranks each have a process."""
    block = _block_of(*kinds)

    def add(r: random.Random, spec: Spec) -> Spec | None:
        wider = block(r, spec)
        if wider is None or "ignored" in wider["options"]:
            return None
        if wider["world"] > wider["processes"]:
            wider = on_ranks(wider, wider["processes"])
        if "Modes" in wider["blocks"]:
            # torch's backward of a norm in eval mode reads statistics, which a second forward would change.
            wider["ops"] = [
                op | {"forwards": 1, "backward": "together", "paths": [[*dict.fromkeys(path)] for path in op["paths"]]}
                if op["op"] == "train"
                else op
                for op in wider["ops"]
            ]
        return wider | {"has_buffers": True}

    return add


def _rule(buffers: str) -> Callable[[random.Random, Spec], Spec | None]:
    """Return a feature that says what becomes of buffers that forwards change."""

    def add(r: random.Random, spec: Spec) -> Spec | None:
        return spec | {"options": spec["options"] | {"buffers": buffers}} if "has_buffers" in spec else None

    return add


def _modes(r: random.Random, spec: Spec) -> Spec | None:
    """Change between training and evaluation, of the model or of a block, before some forwards."""
    ops: list[Spec] = []
    for op in spec["ops"]:
        if op["op"] in ("train", "look") and r.random() < 0.5:
            of = str(r.randrange(len(spec["blocks"]))) if r.random() < 0.4 else ""
            ops.append({"op": "mode", "of": of, "trains": r.random() < 0.5})
        ops.append(op)
    return spec | {"ops": ops} if len(ops) > len(spec["ops"]) else None


def _default_dtype(r: random.Random, spec: Spec) -> Spec | None:
    return spec | {"default": r.choice(["float64", "float64", "float16", "bfloat16"])}


def _fp16(r: random.Random, spec: Spec) -> Spec | None:
    """Compute in fp16, with a loss scale that may overflow at first."""
    if len(spec["optimizers"]) > 1:
        return None
    options = {key: value for key, value in spec["options"].items() if key not in ("fp32", "output", "ignored")}
    options |= {"precision": "fp16", "loss_scale": r.choice(["dynamic", 1024.0, 32.0])}
    return spec | {"options": options, "dtype": "float32"}


# ---- optimizers


def _option(name: str) -> Callable[[random.Random, Spec], Spec | None]:
    """Return a feature that gives one optimizer an option."""

    def add(r: random.Random, spec: Spec) -> Spec | None:
        for at in r.sample(range(len(spec["optimizers"])), len(spec["optimizers"])):
            one = spec["optimizers"][at]
            wanted = {*one.get("wanted", ()), name}
            kinds = sorted(frozenset.intersection(*(TAKEN_BY[each] for each in wanted)))
            if one.get("is_whole"):
                kinds = [kind for kind in kinds if kind == "Adafactor"]
            else:
                kinds = [kind for kind in kinds if kind != "Adafactor"]
            if not kinds or any(pair <= wanted for pair in EXCLUSIVE):
                continue
            kind = one["kind"] if one["kind"] in kinds else r.choice(kinds)
            made = one | {"kind": kind, "wanted": sorted(wanted), "options": _options_of(r, kind, wanted)}
            return spec | {"optimizers": [*spec["optimizers"][:at], made, *spec["optimizers"][at + 1 :]]}
        return None

    return add


def _options_of(r: random.Random, kind: str, wanted: set[str]) -> Spec:
    """Draw the options of an optimizer that has to have some."""
    options: Spec = {"lr": 0.02, **dict.fromkeys(sorted(wanted), True)}
    if kind == "SGD":
        options |= {"lr": 0.1, "momentum": 0.9 if "nesterov" in wanted else r.choice([0.0, 0.9])}
        if "fused" in wanted and "nesterov" not in wanted:
            # torch's fused SGD fails on a parameter whose first gradient comes later than the others'.
            options["momentum"] = 0.0
    elif kind == "Adafactor":
        options["eps"] = [0.01, 0.01]
    elif kind != "ASGD":
        options["eps"] = 0.01
    if "foreach" in wanted and r.random() < 0.3:
        options["foreach"] = False
    if r.random() < 0.5 and kind != "Adafactor":
        options["weight_decay"] = 0.1
    if kind == "RMSprop":
        options |= {"centered": r.random() < 0.5, "momentum": r.choice([0.0, 0.9])}
    return options


def _whole(r: random.Random, spec: Spec) -> Spec | None:
    """Update with torch's Adafactor, whose parameters go to owners whole; it divides by their elements."""
    if "Bare" in spec["blocks"]:
        return None
    at = r.randrange(len(spec["optimizers"]))
    one = spec["optimizers"][at]
    made = one | {"kind": "Adafactor", "options": {"lr": 0.02, "eps": [0.01, 0.01]}, "is_whole": True, "groups": False}
    return spec | {"optimizers": [*spec["optimizers"][:at], made, *spec["optimizers"][at + 1 :]]}


# ---- where state lies


def _elsewhere(spec: Spec, stages: Sequence[int], r: random.Random, **parts: str) -> Spec | None:
    """Return the program with parts of `offload=`, at one of the stages; a later resume keeps its stage."""
    stage = spec["options"]["stage"]
    if stage not in stages:
        stage = r.choice(stages)
    given = dict(part.split("=") for part in spec["options"].get("offload", "").split(",") if part) | parts
    offload = {"offload": ",".join(f"{name}={value}" for name, value in given.items()), "stage": stage}
    ops = [
        op | {"options": {name: value for name, value in op["options"].items() if name not in ("stage", "offload")}}
        if op["op"] == "resume"
        else op
        for op in spec["ops"]
    ]
    return spec | {"options": spec["options"] | offload, "ops": ops}


def _on_host(r: random.Random, spec: Spec) -> Spec | None:
    return _elsewhere(spec, range(4), r, states=r.choice(["0.3", "1.0"]))


def _in_files(r: random.Random, spec: Spec) -> Spec | None:
    return _elsewhere(spec, range(4), r, states=r.choice(["0.3", "1.0"]), to=FILES, staging_bytes="65536")


def _parameters_elsewhere(r: random.Random, spec: Spec) -> Spec | None:
    states = {} if "states=" in spec["options"].get("offload", "") else {"states": "0.0"}
    return _elsewhere(spec, (3,), r, parameters=r.choice(["0.3", "1.0"]), **states)


# ---- activations


def _treated(*names: str) -> Callable[[random.Random, Spec], Spec | None]:
    """Return a feature that adds a treatment to the chain, which keeps the order of the treatments."""

    def add(r: random.Random, spec: Spec) -> Spec | None:
        chain = [*spec["options"].get("activations", "").split("+"), r.choice(names)]
        chain = sorted({one.partition("-")[0]: one for one in chain if one}.values(), key=_place_of)
        return spec | {"options": spec["options"] | {"activations": "+".join(chain)}}

    return add


CHAIN: Final = ("recompute", "partition", "compress", "offload")


def _place_of(treatment: str) -> int:
    return CHAIN.index(treatment.partition("-")[0])


def _large(spec: Spec) -> Spec:
    return spec | {"rows": ROWS, "width": max(8, spec["width"])}


def _lossy(r: random.Random, spec: Spec) -> Spec | None:
    wider = _treated("compress-bf16", "compress-fp8", "compress-int8")(r, spec)
    return wider and _large(wider)


def _partition(r: random.Random, spec: Spec) -> Spec | None:
    """Divide the inputs of recomputed modules over two ranks that train on the same data."""
    if any(op["op"] == "resume" for op in spec["ops"]):
        return None
    if spec["processes"] % 2 or "mesh" in spec["options"] or "ignored" in spec["options"]:
        return None
    wider = _treated("partition")(r, _treated("recompute")(r, spec))
    assert wider is not None
    return _large(on_ranks(wider, max(1, spec["processes"] // 2))) | {"tensor": 2}


# ---- the loop


def _skipped(r: random.Random, spec: Spec) -> Spec | None:
    """Skip steps whose gradients are kept: nothing is cleared between them, and more gradients are added."""
    steps = [at for at, op in enumerate(spec["ops"]) if op["op"] == "step"]
    if len(spec["optimizers"]) > 1 or not steps or "ignored" in spec["options"]:
        return None
    at = r.choice(steps)
    like = r.choice([op for op in spec["ops"] if op["op"] == "train"])
    plain = like | {"sync": "yes", "backward": "together", "forwards": 1}
    step = {"op": "step", "which": [0]}
    added: list[Spec] = [plain | {"bad": [r.randrange(spec["world"])]}, dict(step)]
    for _ in range(r.choice([0, 1, 1, 2])):
        added += [dict(plain), dict(step)]
    rest = [dict(op) for op in spec["ops"][at + 1 :]]
    if r.random() < 0.5 or not any(op["op"] == "zero" for op in rest):
        added += [{"op": "zero", "to_none": r.random() < 0.7, "by": "all"}, dict(plain), dict(step)]
    else:
        # The norm of a gradient that is not finite is not a number, which equals nothing.
        cleared = next(place for place, op in enumerate(rest) if op["op"] == "zero")
        rest = [op for place, op in enumerate(rest) if place > cleared or op["op"] not in ("clip", "norm")]
    return spec | {
        "ops": [*spec["ops"][: at + 1], *added, *rest],
        "options": spec["options"] | {"non_finite": "skip"},
    }


def _again(op: str, spec: Spec, options: Spec, **more: Any) -> Spec:
    """Return the program with a break at its end, and a step after the break."""
    like = next(one for one in reversed(spec["ops"]) if one["op"] == "train" and "bad" not in one)
    train = dict(like) | {"sync": "yes"}
    after = [
        {"op": "step", "which": list(range(len(spec["optimizers"])))},
        {"op": "zero", "to_none": True, "by": "all"},
    ]
    zero = {"op": "zero", "to_none": True, "by": "all"}
    return spec | {"ops": [*spec["ops"], zero, {"op": op, "options": options} | more, train, *after]}


def _changed(r: random.Random, spec: Spec) -> Spec:
    """Draw options of a new start: other treatments, another place for the state, another stage."""
    options: Spec = {}
    if spec["options"].get("activations") and "tensor" not in spec and r.random() < 0.4:
        options["activations"] = None
    if "offload" in spec["options"] and r.random() < 0.4:
        options["offload"] = None
    if "offload" not in spec["options"]:
        options["stage"] = r.randrange(4)
    if r.random() < 0.5:
        options["shared_memory"] = r.random() < 0.5
    return options


def _resumed(r: random.Random, spec: Spec) -> Spec | None:
    return _again("resume", spec, _changed(r, spec))


def _other_ranks(r: random.Random, spec: Spec) -> Spec | None:
    """Resume on fewer ranks, then on all of them again, or the reverse."""
    if "ignored" in spec["options"] or "mesh" in spec["options"]:
        return None
    if "Modes" in spec["blocks"]:
        return None  # a process of several ranks has several forwards before a backward; see `_with_buffers`
    processes = spec["processes"]
    few = r.choice([one for one in range(1, processes) if processes % one == 0])
    spec = _again("resume", spec, _changed(r, spec), ranks=few)
    return _again("resume", spec, _changed(r, spec), ranks=processes) if r.random() < 0.5 else spec


def _detached(r: random.Random, spec: Spec) -> Spec | None:
    """Take the model out, plain, and shard the same objects again: anywhere between two steps, or at the end."""
    if r.random() < 0.3:
        return _again("detach", spec, _changed(r, spec))
    ops = spec["ops"]
    cleared = [at + 1 for at, op in enumerate(ops[:-1]) if op["op"] == "zero" and op["to_none"]]
    options = _changed(r, spec)
    if not cleared:
        return None
    at = r.choice(cleared)
    if any(op["op"] == "resume" for op in ops[at:]) and "stage" in options:
        del options["stage"]  # a resume may name a place for the state that this stage has not
    return spec | {"ops": [*ops[:at], {"op": "detach", "options": options}, *ops[at:]]}


def _kept(r: random.Random, spec: Spec) -> Spec | None:
    """Keep the gradients of a step for the next one."""
    ops = spec["ops"]
    after = ("train", "step", "clip", "norm", "look", "read", "rate")
    cleared = [at for at, op in enumerate(ops[:-1]) if op["op"] == "zero" and ops[at + 1]["op"] in after]
    cleared = [at for at in cleared if at and ops[at - 1]["op"] == "step"]
    if not cleared:
        return None
    at = r.choice(cleared)
    return spec | {"ops": [*ops[:at], *ops[at + 1 :]]}


def _copies(r: random.Random, spec: Spec) -> Spec | None:
    """Compare the copies of the state after some steps."""
    ops: list[Spec] = []
    for op in spec["ops"]:
        ops.append(op)
        if op["op"] == "step" and r.random() < 0.6:
            ops.append({"op": "copies"})
    return spec | {"ops": ops} if len(ops) > len(spec["ops"]) else None


def _closure(r: random.Random, spec: Spec) -> Spec | None:
    """Give steps the micro-batch before them as a closure."""
    steps = [at for at, op in enumerate(spec["ops"]) if op["op"] == "step" and inside(spec, at)]
    if not steps:
        return None
    chosen = {r.choice(steps), *(at for at in steps if r.random() < 0.6)}
    return spec | {"ops": [op | {"closure": True} if at in chosen else op for at, op in enumerate(spec["ops"])]}


def _on_device(r: random.Random, spec: Spec) -> Spec | None:
    """Check gradients by flags on a device, which the host reads later."""
    return spec | {"on_device": True}


def _fickle(r: random.Random, spec: Spec) -> Spec | None:
    """Recompute a module that has changed since its forward, in one micro-batch: to be refused, and never trained."""
    wider = _block_of("Fickle")(r, spec)
    if wider is None:
        return None
    at = wider["blocks"].index("Fickle")
    trained = [place for place, op in enumerate(wider["ops"]) if op["op"] == "train" and "bad" not in op]
    place = r.choice(trained)
    op, world = wider["ops"][place], wider["world"]
    # On all ranks, then and before: a rank that raises alone in a backward leaves the others waiting.
    for each in trained:
        wider["ops"][each]["paths"] = [wider["ops"][each]["paths"][0]] * wider["world"]
    path = [*(one for one in op["paths"][0] if one != at), at]
    wider["ops"][place] = op | {"paths": [path] * world, "choices": [op["choices"][0]] * world, "changes": at}
    chain = wider["options"].get("activations", "").split("+")
    return wider if any(one.startswith("recompute") for one in chain) else _treated("recompute")(r, wider)


FEATURES: Final[Mapping[str, Feature]] = MappingProxyType(
    {
        "recurrent": Feature(0.3, _block_of("Gru", "Lstm", "Rnn")),
        "batch norm": Feature(0.3, _with_buffers("Norms", "Modes")),
        "buffers": Feature(0.25, _with_buffers("Buffers")),
        "buffers of rank 0": Feature(0.36, _rule("rank 0")),
        "own buffers": Feature(0.5, _rule("own")),
        "means of buffers": Feature(1.0, _rule("mean")),
        "default dtype": Feature(0.25, _default_dtype),
        "fp16": Feature(0.3, _fp16),
        "whole matrices": Feature(0.2, _whole),
        "nesterov": Feature(0.3, _option("nesterov")),
        "amsgrad": Feature(0.3, _option("amsgrad")),
        "foreach": Feature(0.3, _option("foreach")),
        "fused": Feature(0.3, _option("fused")),
        "maximize": Feature(0.3, _option("maximize")),
        "capturable": Feature(0.1, _option("capturable")),
        "differentiable": Feature(0.12, _option("differentiable")),
        "states in files": Feature(0.15, _in_files),
        "states on the host": Feature(0.3, _on_host),
        "parameters elsewhere": Feature(0.25, _parameters_elsewhere),
        "recompute": Feature(0.3, _treated("recompute", "recompute-sqrt", "recompute-rest")),
        "compress": Feature(0.25, _treated("compress")),
        "lossy": Feature(0.15, _lossy),
        "activations offloaded": Feature(0.3, _treated("offload")),
        "partition": Feature(0.2, _partition),
        "recomputed otherwise": Feature(0.14, _fickle),
        "flags on a device": Feature(0.25, _on_device),
        "skipped, kept": Feature(0.35, _skipped),
        "modes": Feature(0.35, _modes),
        "resume": Feature(0.3, _resumed),
        "other ranks": Feature(0.25, _other_ranks),
        "detached": Feature(0.3, _detached),
        "gradients kept": Feature(0.4, _kept),
        "copies compared": Feature(0.3, _copies),
        "closure": Feature(0.3, _closure),
    }
)
"""In the order in which they are added."""
