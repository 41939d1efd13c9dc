"""A failing program made smaller, as long as it fails in the same way.

Owns what may be left out of a program. Each round tries all that can be left out of the smallest so far, on one set of
ranks, and keeps the first that still fails alike.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .draw import is_valid, on_ranks
from .ranks import Task, Verdict, examine, reason_of

__all__ = ["shrink"]

Spec = dict[str, Any]
ROUNDS = 60
PLAINEST = {
    "container": "list",
    "takes_ids": False,
    "is_tied": False,
    "width": 4,
    "dtype": "float64",
    "shared": [],
    "ties": [],
    "frozen": [],
}
SIMPLEST = {
    "forwards": 1,
    "backward": "together",
    "sync": "yes",
    "recomputed": [],
    "by": "all",
    "to_none": True,
    "of": "",
    "closure": False,
}
GREEDY = 8
"""Smaller programs that are tried at once."""


def shrink(task: Task, verdict: Verdict, rounds: int = ROUNDS) -> tuple[Task, Verdict]:
    """Return the smallest task found that fails as `task` did, and its verdict."""
    task = [json.loads(json.dumps(spec)) for spec in task]
    tried = {json.dumps(task)}
    for _ in range(rounds):
        candidates = []
        for smaller in zip(*map(_smaller, task), strict=True):
            text = json.dumps(smaller)
            if text not in tried and all(map(is_valid, smaller)):
                tried.add(text)
                candidates.append(list(smaller))
        for start in range(0, len(candidates), GREEDY):
            some = candidates[start : start + GREEDY]
            found = examine(some, task[0]["processes"])
            alike = [(one, v) for one, v in zip(some, found, strict=True) if _is_alike(verdict, v)]
            if alike:
                task, verdict = alike[0]
                break
        else:
            return task, verdict
    return task, verdict


def _is_alike(one: Verdict, other: Verdict) -> bool:
    if one.kind in ("wrong", "bits"):
        return one.kind == other.kind and one.text.split(":")[0] == other.text.split(":")[0]
    return one.kind == other.kind and reason_of(one.text) == reason_of(other.text)


def _smaller(spec: Spec) -> Iterator[Spec]:
    """Yield programs with one thing less, those that lose most first; the same number for programs of one shape."""
    ops, count = spec["ops"], len(spec["blocks"])
    for size in (len(ops) // 2, len(ops) // 4, 2, 1):
        if size:
            for start in range(0, len(ops), size):
                yield spec | {"ops": ops[:start] + ops[start + size :]}
    for at in range(count):
        if count > 1:
            yield _without_block(spec, at)
    for name, value in PLAINEST.items():
        if spec[name] != value:
            yield spec | {name: value}
    options = spec["options"]
    for name in (
        "units",
        "precision",
        "reduction",
        "mesh",
        "parameters",
        "ignored",
        "fp32",
        "output",
        "buffers",
        "offload",
        "activations",
    ):
        # One that a program lacks may be in its pair, whose programs are cut alike.
        gone = {name, "fp32", "output"} if name == "precision" else {name}
        yield spec | {"options": {key: value for key, value in options.items() if key not in gone}}
    for unit in options.get("units") or []:
        yield spec | {"options": options | {"units": [one for one in options["units"] if one != unit]}}
    if spec["world"] > spec["processes"]:
        yield on_ranks(spec, spec["processes"])
    first = spec["optimizers"][0]
    if len(spec["optimizers"]) > 1:
        yield _with_one_optimizer(spec)
    plain = {"kind": "SGD", "options": {"lr": 0.1}, "groups": False, "parts": first["parts"]}
    for at, one in enumerate(spec["optimizers"]):
        smallest = plain | {"parts": one["parts"]}
        if one != smallest:
            yield spec | {"optimizers": [*spec["optimizers"][:at], smallest, *spec["optimizers"][at + 1 :]]}
    for at, kind in enumerate(spec["blocks"]):
        if kind != "Plain":
            units = [unit for unit in options.get("units") or [] if not unit.startswith(f"{at}:")]
            less = options | {"units": units} if "units" in options else options
            blocks = [*spec["blocks"][:at], "Plain", *spec["blocks"][at + 1 :]]
            yield spec | {"blocks": blocks, "options": less}
    for at, op in enumerate(ops):
        for smaller in _smaller_op(op):
            yield spec | {"ops": [*ops[:at], smaller, *ops[at + 1 :]]}


def _smaller_op(op: Spec) -> Iterator[Spec]:
    for name, value in SIMPLEST.items():
        if name in op and op[name] != value and (name != "of" or op["op"] == "clip"):
            yield op | {name: value}
    if op["op"] == "resume" and op["options"]:
        yield op | {"options": {}}
    if "paths" in op:
        if len(set(map(tuple, op["paths"]))) > 1 or len(set(op["choices"])) > 1:
            for rank in range(len(op["paths"])):
                world = len(op["paths"])
                yield op | {"paths": [op["paths"][rank]] * world, "choices": [op["choices"][rank]] * world}
        for rank, path in enumerate(op["paths"]):
            for at in range(len(path)):
                less = path[:at] + path[at + 1 :]
                yield op | {"paths": [*op["paths"][:rank], less, *op["paths"][rank + 1 :]]}
        if any(op["choices"]):
            yield op | {"choices": [0] * len(op["choices"])}


def _without_block(spec: Spec, at: int) -> Spec:
    """Leave out one block; what comes after it moves up."""

    def moved(name: str) -> str:
        block, colon, inner = name.partition(":")
        return f"{int(block) - (int(block) > at)}{colon}{inner}" if block.isdigit() else name

    def names(values: list[str]) -> list[str]:
        return [moved(name) for name in values if name.partition(":")[0] != str(at)]

    def numbers(values: list[int]) -> list[int]:
        return [value - (value > at) for value in values if value != at]

    def pairs(values: list[list[int]]) -> list[list[int]]:
        return [numbers(pair) for pair in values if at not in pair]

    def op_without(op: Spec) -> Spec | None:
        if op.get("of") == str(at):
            return None
        less = dict(op)
        if "paths" in op:
            less["paths"] = [numbers(path) for path in op["paths"]]
        if "recomputed" in op:
            less["recomputed"] = numbers(op["recomputed"])
        if op.get("of"):
            less["of"] = moved(op["of"])
        if (changed := less.pop("changes", at)) != at:
            less["changes"] = changed - (changed > at)
        return less

    options = dict(spec["options"])
    for name in ("units", "ignored", "fp32"):
        if options.get(name) is not None:
            options[name] = names(options[name])
    return spec | {
        "blocks": spec["blocks"][:at] + spec["blocks"][at + 1 :],
        "shared": pairs(spec["shared"]),
        "ties": pairs(spec["ties"]),
        "frozen": names(spec["frozen"]),
        "options": options,
        "optimizers": [one | {"parts": names(one["parts"])} for one in spec["optimizers"]],
        "ops": [less for op in spec["ops"] if (less := op_without(op)) is not None],
    }


def _with_one_optimizer(spec: Spec) -> Spec:
    def op_with(op: Mapping[str, Any]) -> Spec:
        which = {"step": [0], "rate": 0}.get(op["op"])
        return {**op, "which": which} if which is not None else dict(op)

    return spec | {"optimizers": [spec["optimizers"][0] | {"parts": []}], "ops": [op_with(op) for op in spec["ops"]]}
