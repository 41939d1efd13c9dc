"""Many programs on one set of ranks, each judged: right, refused, or wrong.

Owns the rank processes and the judgement. `examine` starts ranks, hands them programs, and starts them again after a
program that crashed or hung, which it finds by what each rank wrote before it began.

Note: the tolerance
    fp64 programs agree with the oracle to 1e-9 of a value, fp32 ones to 2e-4: blocks are smooth, optimizers divide by
    no less than 1e-3, and few steps are made, so that rounding stays near 1e-6, and a lost gradient is far above. With
    precision "bf16" the oracle rounds where zeroshard does, and the same 2e-4 holds. The order of a sum still shows in
    the last place of fp32, which seldom decides how a master is rounded to bf16, and what is computed from then on.
    Such a program is right if it agrees as closely with one of `NUDGES` oracles whose gradients are off by that place.
    Treatments that round activations have the bounds of `LOSSY`, which steps exceed that carry errors far, such as
    those of SGD with Nesterov momentum at a rate of 0.1, or with `maximize=True`. What they carry is measured: such a
    program diverges, and is not wrong, if one of `ROUGH` oracles is as far off, whose backwards read saved tensors
    with errors drawn from the bounds of the encodings.
"""

import faulthandler
import gc
import json
import logging
import math
import os
import re
import resource
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from zeroshard.testing import RankFailure, run_ranks

from .job import run_oracle, run_plain, run_sharded

__all__ = ["BAD", "Task", "Verdict", "examine", "judge_alone", "reason_of", "show", "work"]

Spec = Mapping[str, Any]
Task = Sequence[Spec]
"""One program to be compared with the oracle, or two that must agree bit for bit."""

BATCH = 16
CHUNK = 250
LIMIT_S = 60.0
"""For one program; what is left of the ranks ends within five seconds more."""
START_S = 60.0
STARTS = 3
"""Of ranks that end before a program begins, in a row."""
TOLERANCES = {"float64": 1e-9, "float32": 2e-4}
LOSSY = {"compress-bf16": 0.02, "compress-fp8": 0.2, "compress-int8": 0.1}
"""What treatments that round activations may change, relative to 1 + |expected|."""
AS_TORCH = ("Tensors of the same index must be on the same device and the same dtype",)
"""What plain torch says of Adagrad, whose sums have the default dtype that it was made under."""
ARGUMENT = re.compile(r"ValueError: \w+=|ValueError: Offload\(")
"""Errors that name an argument, which are alike on all ranks."""
NUDGES = 8
ROUGH = 32
"""Oracles with errors of rounded activations: how far these carry differs by a factor of five between draws."""
BAD = ("wrong", "bits", "error", "hang", "crash", "invalid")
"""Verdicts that are somebody's fault: zeroshard's, or, if "invalid", the drawing's."""
AMPLIFIED = 4.0
"""Times as far from fp64 as plain torch in fp32 is may ranks be beyond the tolerance: such a program diverges, and
carries its rounding far; a sum that is wrong by one term is a thousand times as far."""
NOT_FINITE = "is not finite; nothing was changed"
"""What zeroshard says of gradients, rightly where plain torch in fp32 trains to values that are not finite either."""
ROUNDING = 1e-6
"""Differences of a pair below this are of the order of a sum ("bits"), above they are of its terms ("wrong")."""


@dataclass(frozen=True)
class Verdict:
    """What came of a task.

    Args:
        kind: "right", "refused" (an error that names its reason, the same on all ranks), "diverging" (right but for its
            rounding, which plain torch in fp32, or with rounded activations, carries as far), or one of `BAD`.
        text: the reason, or the first difference.
        error: the greatest difference from the oracle, as a share of the tolerance.
        digest: of all that the ranks computed, or of why it was refused, for a comparison with another checkout.
    """

    kind: str
    text: str = ""
    error: float = 0.0
    digest: int = 0


# ---- on the ranks


def work(tasks: Sequence[tuple[int, Task]], folder: str) -> None:
    """Run tasks on this rank, together with the others; rank 0 writes verdicts to `folder`, line by line."""
    rank, place = dist.get_rank(), Path(folder)
    # Ranks that use units in different orders are warned of it; programs do so on purpose.
    logging.getLogger("zeroshard").setLevel(logging.ERROR)
    _allow_many_files()
    stacks = open(place / f"stacks-{rank}", "w")  # noqa: SIM115
    waiting: list[tuple[int, Task, list[Any]]] = []
    with open(place / f"at-{rank}", "w") as at, open(place / f"verdicts-{rank}", "a") as verdicts:
        for count, (number, task) in enumerate(tasks):
            _say(at, number)
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=stacks)
            results, error = _run_task(task, place)
            texts = _all_texts(error)
            faulthandler.cancel_dump_traceback_later()
            if any(texts):
                if rank == 0:
                    reasons = sorted(map(reason_of, texts))
                    _write(verdicts, number, replace(_verdict_of_errors(texts, task[0]), digest=_digest(reasons)))
                if len(set(map(reason_of, texts))) > 1:
                    _judge(waiting, verdicts)
                    return
            else:
                waiting.append((number, task, results))
            if count == 1:
                # What torch imported is never garbage; looking at it takes far longer than a program.
                gc.collect()
                gc.freeze()
            if count % 4 == 3:
                gc.collect()
            if len(waiting) == BATCH:
                _judge(waiting, verdicts)
                waiting = []
        _judge(waiting, verdicts)


def _allow_many_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(at: TextIO, number: int) -> None:
    os.pwrite(at.fileno(), f"{number:12d}".encode(), 0)


def _run_task(task: Task, place: Path) -> tuple[list[Any], str]:
    results = []
    try:
        for spec in task:
            results.append(run_sharded(spec, place))
    except Exception as error:
        return [], f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return results, ""


def _all_texts(text: str) -> list[str]:
    """Return every rank's text, by rank."""
    flag = torch.tensor([int(bool(text))])
    dist.all_reduce(flag)
    if not flag:
        return [""] * dist.get_world_size()
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def _verdict_of_errors(texts: Sequence[str], spec: Spec) -> Verdict:
    raised = [text for text in texts if text]
    is_overflow = spec["dtype"] == "float32" and all(NOT_FINITE in text for text in raised)
    if is_overflow and not all(value.isfinite().all() for value in run_plain(spec)["parameters"].values()):
        return Verdict("diverging", raised[0])
    if not all(texts):
        which = [rank for rank, text in enumerate(texts) if text]
        return Verdict("error", f"only ranks {which} raise: {raised[0]}")
    named = ("RuntimeError", "ValueError", "TypeError", "RankMismatchError")
    is_waiting = any("while it waited for" in text for text in texts)
    if is_waiting:
        return Verdict("hang", "\n".join(texts))
    heads = [text.split("Traceback")[0] for text in texts]
    is_named = all(text.startswith(named) and ("[rank" in text or ARGUMENT.match(text)) for text in heads)
    if all(any(told in text for told in AS_TORCH) for text in texts):
        return Verdict("refused", f"as torch: {texts[0]}")
    return Verdict("refused" if is_named else "error", texts[0])


def _judge(waiting: Sequence[tuple[int, Task, list[Any]]], verdicts: TextIO) -> None:
    """Judge what all ranks have run, each rank a part of it."""
    if not waiting:
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [results for _, _, results in waiting])
    for place, (number, task, _) in enumerate(waiting):
        if place % dist.get_world_size() == dist.get_rank():
            results = [by_rank[place] for by_rank in found]
            _write(verdicts, number, replace(judge(task, results), digest=_digest(results)))
    # A rank that judges for long must not use up the time of the next program, in which others would wait for it.
    dist.barrier()


def _write(verdicts: TextIO, number: int, verdict: Verdict) -> None:
    verdicts.write(json.dumps({"number": number, **asdict(verdict)}) + "\n")
    verdicts.flush()


def _digest(value: Any, crc: int = 0) -> int:
    """Return the CRC-32 of all bits in a value."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().flatten()
        return zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), zlib.crc32(f"{flat.dtype}".encode(), crc))
    if isinstance(value, Mapping):
        value = [part for item in sorted(value.items(), key=lambda item: str(item[0])) for part in item]
    if isinstance(value, list | tuple):
        for item in value:
            crc = _digest(item, crc)
        return crc
    return zlib.crc32(repr(value).encode(), crc)


# ---- judging


def judge(task: Task, found: Sequence[Sequence[dict[str, Any]]]) -> Verdict:
    """Compare what ranks have: with the oracle, one another, and the pair's other program.

    Args:
        found: by rank, the results of the task's programs.
    """
    whole = [results for results in found if "parameters" in results[0]]
    for rank, results in enumerate(whole):
        for other, of in zip(results, whole[0], strict=True):
            for what in ("parameters", "states"):
                if (text := first_difference(of[what], other[what], 0.0)[0]) is not None:
                    return Verdict("wrong", f"rank {rank} differs from rank 0: {what} {text}")
    for rank, results in enumerate(found):
        if len(results) == 2:
            text, error = first_difference(results[0], results[1], 0.0)
            if text is not None:
                kind = "bits" if error < ROUNDING else "wrong"
                return Verdict(kind, f"rank {rank}: the pair differs, by at most {error:.2g}, first {text}")
    spec = task[0]
    notes: dict[int, Any] = {}
    for results in found:
        notes |= results[0]["notes"]
    actual, tolerance = {**whole[0][0], "notes": notes}, _tolerance_of(spec)
    wrong, is_rounded = None, spec["options"].get("precision") in ("bf16", "fp16")
    for nudge in range(1 + NUDGES * is_rounded):
        try:
            expected = run_oracle(spec, nudge)
        except Exception as error:
            return Verdict("invalid", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        text, error = first_difference(expected, actual, tolerance)
        if text is None:
            return Verdict("right", error=error / tolerance)
        wrong = wrong or Verdict("wrong", f"oracle: {text}", error / tolerance)
    assert wrong is not None
    if not is_rounded and spec["dtype"] == "float32":
        _, plain = first_difference(expected, run_plain(spec), tolerance)
        if wrong.error * tolerance <= AMPLIFIED * plain:
            return Verdict("diverging", wrong.text, wrong.error)
    if (codes := _lossy_of(spec)) and math.isfinite(wrong.error):
        exact = run_oracle(spec)
        rough = (first_difference(exact, run_oracle(spec, nudge, codes), tolerance)[1] for nudge in range(ROUGH))
        if any(wrong.error * tolerance <= one for one in rough):
            return Verdict("diverging", wrong.text, wrong.error)
    return wrong


def _tolerance_of(spec: Spec) -> float:
    return max([TOLERANCES[spec["dtype"]], *(LOSSY[name] for name in _lossy_of(spec))])


def _lossy_of(spec: Spec) -> list[str]:
    """Return the treatments of a program that round activations."""
    chains = [spec["options"].get("activations"), *(op.get("options", {}).get("activations") for op in spec["ops"])]
    return sorted({name for chain in chains for name in (chain or "").split("+") if name in LOSSY})


def first_difference(expected: Any, actual: Any, tolerance: float, where: str = "") -> tuple[str | None, float]:
    """Return the first difference of two results, or None, and the greatest relative error.

    Args:
        tolerance: what elements may differ by, relative to 1 + |expected|; with 0, all bits must agree.
    """
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(expected, actual, tolerance, where)
    if isinstance(expected, Mapping):
        if set(expected) != set(actual):
            return f"{where}: keys {sorted(set(expected) ^ set(actual), key=str)} are in one only", float("inf")
        pairs = [(f"{where}/{key}", expected[key], actual[key]) for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return f"{where}: {expected!r:.200} and {actual!r:.200}", float("inf")
        pairs = [(f"{where}/{at}", *both) for at, both in enumerate(zip(expected, actual, strict=True))]
    else:
        return (None, 0.0) if expected == actual else (f"{where}: {expected!r} and {actual!r}", float("inf"))
    first, most = None, 0.0
    for name, one, other in pairs:
        text, error = first_difference(one, other, tolerance, name)
        first, most = first or text, max(most, error)
    return first, most


def _tensor_difference(expected: Any, actual: Any, tolerance: float, where: str) -> tuple[str | None, float]:
    if expected.shape != actual.shape:
        return f"{where}: shape {tuple(expected.shape)} and {tuple(actual.shape)}", float("inf")
    if tolerance == 0.0 and (expected.dtype != actual.dtype or _digest(expected) == _digest(actual)):
        same = expected.dtype == actual.dtype
        return (None, 0.0) if same else (f"{where}: {expected.dtype} and {actual.dtype}", float("inf"))
    if not expected.numel():
        return None, 0.0
    one, other = expected.double(), actual.double()
    # Of a step that is left out, both may be not finite.
    errors = ((one - other).abs() / (1.0 + one.abs())).masked_fill(~one.isfinite() & ~other.isfinite(), 0.0)
    error = float(errors.max())
    # Written so that NaN is a difference.
    if tolerance > 0.0 and error <= tolerance:
        return None, error
    return f"{where}: relative error {error:.3g}, of {tuple(expected.shape)}", error


# ---- the caller's side


def examine(
    tasks: Sequence[Task],
    world: int,
    told: Callable[[int, Verdict], None] | None = None,
    chunk: int = CHUNK,
    target: Callable[..., None] | None = None,
) -> list[Verdict]:
    """Run tasks on `world` ranks and return their verdicts.

    Args:
        told: is called with each verdict as it becomes known, by the task's place.
        chunk: tasks that one set of processes runs.
        target: what each rank runs instead of `work`, such as one that plants a bug first.
    """
    verdicts: dict[int, Verdict] = {}
    starts = 0
    while todo := [number for number in range(len(tasks)) if number not in verdicts]:
        with tempfile.TemporaryDirectory(prefix="zeroshard-programs-") as name:
            some = [(number, tasks[number]) for number in todo[:chunk]]
            try:
                new = _launch(some, world, Path(name), target or work)
            except RankFailure:
                # No program had begun: a machine that is short of something for a moment must not end a long run.
                starts += 1
                if starts == STARTS:
                    raise
                continue
        starts = 0
        verdicts |= new
        for number, verdict in sorted(new.items()):
            if told is not None:
                told(number, verdict)
    return [verdicts[number] for number in range(len(tasks))]


def _launch(
    tasks: Sequence[tuple[int, Task]], world: int, folder: Path, target: Callable[..., None]
) -> dict[int, Verdict]:
    """Run tasks in one set of processes, until one crashes; return what became known."""
    failure = None
    try:
        run_ranks(target, world, list(tasks), str(folder), timeout_s=START_S + LIMIT_S * len(tasks))
    except RankFailure as error:
        failure = error
    known = {}
    for rank in range(world):
        for line in _lines(folder / f"verdicts-{rank}"):
            found = json.loads(line)
            number = found.pop("number")
            known[number] = Verdict(**found)
    if failure is not None:
        known |= _blame(failure, folder, tasks, known)
    return known


def _blame(
    failure: RankFailure, folder: Path, tasks: Sequence[tuple[int, Task]], known: Mapping[int, Verdict]
) -> dict[int, Verdict]:
    """Return the verdict of the program at which a rank died."""
    rank = next(iter(failure.errors))
    text = "".join(_lines(folder / f"at-{rank}"))
    if not text:
        raise failure
    stacks = {r: "".join(_lines(folder / f"stacks-{r}")) for r in range(failure.world_size)}
    kind = "hang" if any(stacks.values()) else "crash"
    return {int(text): Verdict(kind, f"{failure}\n" + "\n".join(stacks.values()))}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def reason_of(text: str) -> str:
    """Return an error's first line without what is particular to the program."""
    line = text.split("\n", 1)[0].split("] ", 1)[-1]
    return re.sub(r"'[^']*'|\d+(\.\d+)?", "_", line)[:120]


def judge_alone(spec: Spec) -> Verdict:
    """Run one program in processes of its own."""
    return examine([[spec]], spec["processes"])[0]


def show(spec: Spec) -> None:
    """Run one program in processes of its own and print what came of it."""
    verdict = judge_alone(spec)
    print(f"{verdict.kind} ({verdict.error:.3g} of the tolerance) {verdict.text}")
    sys.exit(verdict.kind in BAD)
