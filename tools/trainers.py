"""Other people's trainers with zeroshard beside their own DDP: what is equal, what resumes, with which releases.

    python -m tools.trainers --output benchmarks/results/trainers.json              # the installed releases
    python -m tools.trainers --only trainer fabric --kills 10 --output trainers.json
    python -m tools.trainers --write                                                # the table of docs/trainers.md

Each trainer runs 20 steps on two ranks, in fp32, with accumulation over two micro-batches and an evaluation every five
steps: with the library's own DDP, and at stages 0 to 3. Without clipping, losses, evaluations and parameters must be
equal bit for bit; with clipping they and the norms must be within 1e-5, and the table says how far clipping moves the
results of DDP. Then rank 1 is killed after step 10, and the library's own resume must end with the bits of an
undisturbed run. Last come kills of a rank at random moments, each followed by a resume, until the training ends.

Owns the runs, their comparison, the result files and the table. The loops are those of the tests in tests/integrations.
"""

import argparse
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch
import transformers

from benchmarks.machine import circumstances, put_table, write_result
from tests.integrations import test_accelerate, test_lightning, test_trainers, test_trl
from tests.oracle import STAGES, seed
from zeroshard.testing import RankFailure, run_ranks

__all__ = ["CASES", "Case", "Job", "farthest", "main", "table", "try_case"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/trainers.md"
RESULTS = ROOT / "benchmarks/results"
FILES = ("trainers.json", "trainers-oldest.json")
"""Results of the newest releases, and of the oldest."""
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "lightning")
RANKS: Final = 2
STEPS: Final = 20
MIDDLE: Final = 10
CLIP: Final = 0.02
"""Norms of all cases are larger in most steps."""
WITHIN: Final = 1e-5
TIMEOUT_S: Final = 400.0


@dataclass(frozen=True)
class Job:
    """A training, of which every rank has a copy.

    Args:
        stage: None for the library's own DDP.
        clip: the largest norm of gradients, 0 for none.
        saves: steps from one checkpoint to the next, 0 for none.
        resumes: begin from the newest checkpoint of the folder, if there is one.
        killed_after: the step after which rank 1 is killed, 0 for none.
        killed_in_s: seconds after which `killed_rank` is killed, wherever it is, 0 for never.
    """

    stage: int | None
    folder: Path
    clip: float = 0.0
    saves: int = 0
    resumes: bool = False
    killed_after: int = 0
    killed_in_s: float = 0.0
    killed_rank: int = 0


Found = dict[str, Any]
"""What a rank was told, as lists of numbers by name, and "model": parameters by name."""


class Case(NamedTuple):
    """A trainer of a library.

    Args:
        library: whose release counts.
        train: runs a job on a rank.
        lines: what a script of that library changes, a line each.
        is_resumed: whether the library resumes by itself; a loop of Accelerate is its user's.
    """

    library: str
    train: Callable[[Job], Found]
    lines: tuple[str, ...]
    is_resumed: bool = True


# -- trainers of Transformers and TRL ---------------------------------------------------------------------------------


def _arguments(job: Job) -> dict[str, Any]:
    options = {"max_steps": STEPS, "max_grad_norm": job.clip, "eval_strategy": "steps", "eval_steps": 5}
    if job.saves:
        options |= {"save_strategy": "steps", "save_steps": job.saves, "save_total_limit": 2}
    return options


def _train_trainer(job: Job) -> Found:
    return _run_trainer(test_trainers.trainer_of(job.stage, job.folder, **_arguments(job)), job)


def _train_trl(kind: str, job: Job) -> Found:
    os.environ["HF_HUB_OFFLINE"] = "1"
    seed(5)
    options = _arguments(job) | {"per_device_eval_batch_size": 4}
    return _run_trainer(test_trl.trainer_of(kind, job.stage, job.folder, **options), job)


def _run_trainer(trainer: transformers.Trainer, job: Job) -> Found:
    if job.killed_after:
        trainer.add_callback(test_trainers.Killing(1, job.killed_after))
    # A kill before the end of the first save leaves a folder that is no checkpoint.
    has_checkpoint = any(job.folder.glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=True if job.resumes and has_checkpoint else None)
    return test_trainers.found_in(trainer)


# -- loops of Accelerate and Fabric, the Trainer of Lightning ---------------------------------------------------------


def _train_accelerate(job: Job) -> Found:
    accelerator = test_accelerate.fresh(gradient_accumulation_steps=2)
    things = test_accelerate.made(job.stage, accelerator, shuffles=True)
    return test_accelerate.train(accelerator, things, STEPS, max_norm=job.clip)


def _train_fabric(job: Job) -> Found:
    resumes = job.resumes and (job.folder / "middle").exists()
    *told, model = test_lightning.run_fabric(
        job.stage, str(job.folder), job.clip or None, resumes, STEPS, job.killed_after
    )
    return {"told": told, "model": model}


def _train_lightning(job: Job) -> Found:
    resumes = job.resumes and any(job.folder.glob("last*.ckpt"))
    return test_lightning.run_trainer(
        job.stage, str(job.folder), job.clip or None, STEPS, resumes, MIDDLE // 2, job.killed_after
    )


_MIXIN = ("from zeroshard.integrations.transformers import ZeroMixin", 'zero={"stage": 3}')
CASES: Mapping[str, Case] = {
    "accelerate": Case(
        "accelerate", _train_accelerate, ("import zeroshard as zs", "zs.shard(model, optimizer, stage=3)"), False
    ),
    "trainer": Case(
        "transformers",
        _train_trainer,
        ("from zeroshard.integrations.transformers import Trainer", 'zero={"stage": 3}'),
    ),
    "sft": Case("trl", partial(_train_trl, "sft"), (*_MIXIN, "class SFTTrainer(ZeroMixin, trl.SFTTrainer): pass")),
    "dpo": Case("trl", partial(_train_trl, "dpo"), (*_MIXIN, "class DPOTrainer(ZeroMixin, trl.DPOTrainer): pass")),
    "reward": Case(
        "trl", partial(_train_trl, "reward"), (*_MIXIN, "class RewardTrainer(ZeroMixin, trl.RewardTrainer): pass")
    ),
    "grpo": Case("trl", partial(_train_trl, "grpo"), (*_MIXIN, "class GRPOTrainer(ZeroMixin, trl.GRPOTrainer): pass")),
    "rloo": Case("trl", partial(_train_trl, "rloo"), (*_MIXIN, "class RLOOTrainer(ZeroMixin, trl.RLOOTrainer): pass")),
    "fabric": Case(
        "lightning",
        _train_fabric,
        ("from zeroshard.integrations.lightning import FabricStrategy", 'strategy=FabricStrategy({"stage": 3})'),
    ),
    "lightning": Case(
        "lightning",
        _train_lightning,
        ("from zeroshard.integrations.lightning import ZeroStrategy", 'strategy=ZeroStrategy({"stage": 3})'),
    ),
}


# -- runs and comparisons ---------------------------------------------------------------------------------------------


def train(name: str, job: Job) -> tuple[Found, float]:
    """Run a job on this rank; return what it found, and its seconds."""
    rank = int(os.environ["RANK"])
    if job.killed_in_s and rank == job.killed_rank:
        timer = threading.Timer(job.killed_in_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    torch.manual_seed(0)
    begin_s = time.monotonic()
    return CASES[name].train(job), time.monotonic() - begin_s


def _run(name: str, job: Job) -> list[Found]:
    return [found for found, _ in _run_timed(name, job)]


def _run_timed(name: str, job: Job) -> list[tuple[Found, float]]:
    if name in ("grpo", "rloo"):  # their trainers read the reference from a folder
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        test_trl.built().save_pretrained(job.folder.parent / "start")
    return run_ranks(train, RANKS, name, job, timeout_s=TIMEOUT_S)


def _numbers(found: Found) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in found.items():
        if key == "model":
            yield from value.items()
        elif value:
            yield key, torch.tensor(value, dtype=torch.float64)


def farthest(one: Sequence[Found], other: Sequence[Found], *, skips: Sequence[str] = ()) -> float:
    """Return the largest distance of what ranks were told and of their parameters: 0 for equal bits.

    Distances are relative to the largest number under a name. A name or a number that one run lacks is infinitely far.
    """
    worst = 0.0
    for here, there in zip(one, other, strict=True):
        ours, theirs = ({k: v for k, v in _numbers(one) if k not in skips} for one in (here, there))
        if ours.keys() != theirs.keys():
            return float("inf")
        for name in ours:
            if ours[name].shape != theirs[name].shape or not ours[name].isfinite().all():
                return float("inf")
            if ours[name].numel():
                apart = float((ours[name] - theirs[name]).abs().max())
                worst = max(worst, apart / max(float(theirs[name].abs().max()), 1e-30) if apart else 0.0)
    return worst


def _ends(found: Sequence[Found], expected: Sequence[Found]) -> tuple[list[Found], list[Found]]:
    """Return two runs with what both were told: one that resumed may have told the steps after it alone."""
    cut: list[Found] = []
    for resumed, whole in zip(found, expected, strict=True):
        lengths = {key: len(value) for key, value in resumed.items() if key != "model"}
        cut.append(
            {key: value[len(value) - lengths[key] :] if key in lengths else value for key, value in whole.items()}
        )
    return [*found], cut


def try_case(name: str, folder: Path, kills: int, stages: Sequence[int] = STAGES) -> dict[str, Any]:
    """Run everything of one trainer; return distances by stage, and what came of kills. An error is a text."""
    case, begin_s = CASES[name], time.monotonic()
    result: dict[str, Any] = {"library": case.library, "lines": case.lines, "unclipped": {}, "clipped": {}}
    plain: list[Found] = []
    for key, clip in (("unclipped", 0.0), ("clipped", CLIP)):
        before, plain = plain, _run(name, Job(None, folder / f"{key}-ddp", clip))
        for stage in stages:
            try:
                found = _run(name, Job(stage, folder / f"{key}-{stage}", clip))
                # The norm of sharded gradients is added up in another order.
                skips = ("grad_norm", "norm") if not clip else ()
                result[key][str(stage)] = farthest(found, plain, skips=skips)
            except RankFailure as error:
                result[key][str(stage)] = _last_line(error)
    # Fabric's loop tells losses and norms in one list.
    result["clipping_changes"] = farthest(plain, before, skips=("grad_norm", "norm", "told"))
    if case.is_resumed:
        saving = Job(3, folder / "whole", saves=MIDDLE // 2)
        whole = _run(name, saving)
        result["resumed"] = _resume_after(name, replace(saving, folder=folder / "killed", killed_after=MIDDLE), whole)
        result["kills"] = _kill_often(name, folder, saving, whole, kills)
    return result | {"seconds": round(time.monotonic() - begin_s, 1)}


def _last_line(error: RankFailure) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip()[:300]


def _resume_after(name: str, killed: Job, whole: Sequence[Found]) -> float | str:
    try:
        _run(name, killed)
        return "rank 1 was not killed"
    except RankFailure as error:
        if "SIGKILL" not in str(error):
            return _last_line(error)
    try:
        found = _run(name, replace(killed, killed_after=0, resumes=True))
    except RankFailure as error:
        return _last_line(error)
    return farthest(*_ends(found, whole))


def _kill_often(name: str, folder: Path, job: Job, whole: Sequence[Found], kills: int) -> dict[str, Any]:
    """Kill a rank at a random moment of each start, and resume, until so many kills; trainings end in between."""
    rng, number = random.Random(name), 0
    told: dict[str, Any] = {"kills": 0, "ended": 0, "lost": 0, "errors": []}
    whole_s = max(took_s for _, took_s in _run_timed(name, replace(job, folder=folder / "timed")))
    # A kill after the last save resumes at the last step, where stock Trainers make one step more.
    ends = whole, _run(name, replace(job, resumes=True))
    while told["kills"] < kills:
        killed = replace(job, folder=folder / f"kills-{number}", resumes=True)
        found: list[Found] | None = None
        for _ in range(3):
            moment = replace(killed, killed_in_s=rng.uniform(0.1, whole_s), killed_rank=rng.randrange(RANKS))
            try:
                found = _run(name, moment)
                break  # the training ended before the moment
            except RankFailure as error:
                if "SIGKILL" not in str(error):
                    told["errors"].append(_last_line(error))
                told["kills"] += 1
        number += 1
        try:
            found = found or _run(name, killed)
        except RankFailure as error:
            told["errors"].append(_last_line(error))
            told["lost"] += 1
            continue
        told["ended"] += 1
        told["lost"] += all(farthest(*_ends(found, end)) for end in ends)
    return told


# -- the table --------------------------------------------------------------------------------------------------------


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of some result files, a row for each trainer and release."""
    rows = [
        "| trainer | release | new lines | bits of DDP at stages | with clipping | after `kill -9` | kills |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CASES:
        for result in results:
            if (one := result["trainers"].get(name)) is None:
                continue
            clipped = [value for value in one["clipped"].values() if not isinstance(value, str)]
            kills = one.get("kills")
            cells = [
                name if name in ("accelerate", "trainer", "fabric", "lightning") else f"trl, {name}",
                f"{one['library']} {result['versions'][one['library']]}",
                str(len(one["lines"])),
                _stages(one["unclipped"], 0.0),
                f"{_stages(one['clipped'], WITHIN)}; {max(clipped, default=float('nan')):.1g} "
                f"of {one['clipping_changes']:.1g}",
                "" if "resumed" not in one else "same bits" if one["resumed"] == 0 else f"**{one['resumed']}**",
                "" if kills is None else f"{kills['kills']}, {kills['lost']} lost",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _stages(found: Mapping[str, float | str], limit: float) -> str:
    right = [stage for stage, value in found.items() if not isinstance(value, str) and value <= limit]
    wrong = [f"**{stage}: {value}**" for stage, value in found.items() if stage not in right]
    return ", ".join([*right, *wrong])


def committed() -> list[dict[str, Any]]:
    """Return the result files that there are."""
    return [json.loads((RESULTS / name).read_text()) for name in FILES if (RESULTS / name).exists()]


def main() -> None:
    """Run the trainers, or write the table."""
    parser = argparse.ArgumentParser(description="Train with other people's trainers, beside their own DDP.")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--kills", type=int, default=50, help="kills at random moments, of all trainers together")
    parser.add_argument("--output", type=Path, help="the result file; trainers that it has already are kept")
    parser.add_argument(
        "--write", action="store_true", help=f"write the table of {PAGE.relative_to(ROOT)}, run nothing"
    )
    arguments = parser.parse_args()
    if arguments.write:
        PAGE.write_text(put_table(PAGE.read_text(), "trainers", table(committed())))
        return
    found: dict[str, Any] = {}
    if arguments.output and arguments.output.exists():
        found = json.loads(arguments.output.read_text())["trainers"]
    resumed = [name for name in arguments.only if CASES[name].is_resumed]
    each = -(-arguments.kills // max(len(resumed), 1))
    here = circumstances("tools.trainers", PACKAGES)
    for name in arguments.only:
        with TemporaryDirectory(prefix="zeroshard-trainers-") as folder:
            found[name] = try_case(name, Path(folder), each) | {"commit": here["commit"]}
        print(name, json.dumps(found[name]), flush=True)
        if arguments.output:
            write_result(arguments.output, here | {"trainers": found})


if __name__ == "__main__":
    main()
