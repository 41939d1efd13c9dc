"""The optimizers of `zeroshard train` against AdamW: held-out bits per byte, each at the best of five learning rates.

    python -m benchmarks.optimizers --depth 2 --context 64 --batch 16 --steps 250 --seeds 3

Owns the comparison and its table in docs/optimizers.md. One process, one thread, no engine: given equal gradients, a
sharded run makes the same updates (`tests/optim`), so what is compared is the optimizers themselves. The model, the
text, the schedule and the defaults are those of `zeroshard train`. The learning rates are five multiples of each one's
default. Optimizers named with `--shorter` also make whole runs, with schedules of their own, of fewer steps.

The result file keeps every run; a run that is in it is not made again, so an interrupted comparison goes on.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

from benchmarks.machine import circumstances, put_table, write_result
from zeroshard.train.config import Config, load_config
from zeroshard.train.corpus import Corpus, open_corpus, prepare_corpus
from zeroshard.train.data import IGNORED, count_scored, heldout_batches, training_batch
from zeroshard.train.models.language import LanguageModel, make_gpt
from zeroshard.train.optimizers import make_optimizer
from zeroshard.train.run import learning_rate_factor
from zeroshard.train.text import DEFAULT_NAME, open_source
from zeroshard.train.tokenizer import load_tokenizer

OPTIMIZERS: Final = ("adamw", "muon", "adafactor", "adamw8bit", "lion", "sgd")
MULTIPLES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
SHORTER: Final = (0.8,)
EVALUATIONS: Final = 5
"""Points of a curve."""
EVAL_WINDOWS: Final = 32
RESULT: Final = Path(__file__).parent / "results" / "optimizers.json"
PAGE: Final = Path(__file__).parent / "results" / "optimizers.md"


def config_of(options: argparse.Namespace, optimizer: str, multiple: float, steps: int) -> Config:
    """Return the settings of one run."""
    base = [f"model.depth={options.depth}", f"model.context={options.context}", f"train.optimizer={optimizer}"]
    base += [f"train.steps={steps}", f"train.batch={options.batch}", f"train.eval_bytes={options.eval_bytes}"]
    base.append("run.ranks=1")
    default = load_config(overrides=base).train.learning_rate
    return load_config(overrides=[*base, f"train.learning_rate={default * multiple!r}"])


def open_text(folder: Path) -> Corpus:
    """Return the text that `zeroshard train` reads by default."""
    config = Config()
    fraction = config.data.heldout_fraction
    key = prepare_corpus(open_source("", "text"), load_tokenizer(""), heldout_fraction=fraction, folder=folder)
    return open_corpus(folder, key, DEFAULT_NAME)


@torch.no_grad()
def evaluate(language: LanguageModel, corpus: Corpus, config: Config) -> float:
    """Return bits per byte of held-out text."""
    scored, scored_bytes = count_scored(corpus.heldout_ends, config.train.eval_bytes)
    nats = 0.0
    batches = heldout_batches(corpus.heldout, batch=EVAL_WINDOWS, context=config.model.context, scored=scored)
    for inputs, targets in batches:
        logits = language.compute_logits(inputs).flatten(0, 1)
        nats += float(F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"))
    return nats / scored_bytes / math.log(2)


def train(config: Config, corpus: Corpus, seed: int) -> dict[str, Any]:
    """Make one run; return its curve, as (step, bits per byte), and the median time of a step."""
    settings = config.train
    torch.manual_seed(seed)
    language = make_gpt(config.gpt)
    optimizer = make_optimizer(settings, language)
    parameters = [*language.module.parameters()]
    base = [group["lr"] for group in optimizer.param_groups]
    times, curve = [], []
    marks = {round(settings.steps * (place + 1) / EVALUATIONS) for place in range(EVALUATIONS)}
    for step in range(settings.steps):
        inputs, targets = training_batch(
            corpus.train, seed=seed, step=step, batch=settings.batch, context=config.model.context
        )
        start_s = time.perf_counter()
        factor = learning_rate_factor(
            step, steps=settings.steps, warmup_fraction=settings.warmup_fraction, final_fraction=settings.final_fraction
        )
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * factor
        loss = language.compute_loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start_s)
        if not loss.isfinite():
            return {"curve": [*curve, [step + 1, None]], "step_s": statistics.median(times)}
        if step + 1 in marks:
            curve.append([step + 1, evaluate(language, corpus, config)])
    return {"curve": curve, "step_s": statistics.median(times)}


def runs_of(options: argparse.Namespace) -> Iterator[tuple[str, float, int, int]]:
    """Yield what is to be run: optimizer, multiple of its learning rate, steps, seed; the default rates come first."""
    order = sorted(options.multiples, key=lambda multiple: abs(math.log(multiple)))
    for seed in range(1, options.seeds + 1):
        for multiple in order:
            for optimizer in options.optimizers:
                parts = SHORTER if optimizer in options.shorter else ()
                for part in (1.0, *parts):
                    yield optimizer, multiple, round(options.steps * part), seed


def best_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the learning rate at which the mean over seeds is best, with that mean and each seed's value."""
    by_multiple: dict[float, list[float]] = {}
    for run in runs:
        last = run["curve"][-1][1]
        by_multiple.setdefault(run["multiple"], []).append(math.inf if last is None else last)
    if not by_multiple:
        return None
    most = max(map(len, by_multiple.values()))
    means = {multiple: statistics.mean(found) for multiple, found in by_multiple.items() if len(found) == most}
    best = min(means, key=lambda multiple: means[multiple])
    rates = [run["learning_rate"] for run in runs if run["multiple"] == best]
    return {"multiple": best, "learning_rate": rates[0], "mean": means[best], "values": by_multiple[best]}


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return the best of each optimizer and number of steps, and how it stands against AdamW's full run."""
    runs = result["runs"]
    found: dict[str, Any] = {}
    keys = sorted({(run["optimizer"], run["steps"]) for run in runs}, key=lambda key: (runs_place(key[0]), -key[1]))
    full = result["settings"]["steps"]
    reference = best_of([run for run in runs if (run["optimizer"], run["steps"]) == ("adamw", full)])
    for optimizer, steps in keys:
        some = [run for run in runs if (run["optimizer"], run["steps"]) == (optimizer, steps)]
        best = best_of(some)
        assert best is not None
        chosen = [run for run in some if run["multiple"] == best["multiple"]]
        step_s = statistics.median(run["step_s"] for run in some)
        ratio = best["mean"] / reference["mean"] if reference else math.nan
        found[f"{optimizer}, {steps} steps"] = best | {
            "step_s": step_s,
            "against_adamw": ratio,
            "reached_at": reached_at(chosen, reference["mean"]) if reference else None,
        }
    return found


def reached_at(runs: Sequence[dict[str, Any]], target: float) -> int | None:
    """Return the first evaluation at which the mean over seeds is at most `target`."""
    curves = zip(*(run["curve"] for run in runs), strict=False)
    finite = (at for at in curves if all(value is not None for _, value in at))
    return next((at[0][0] for at in finite if statistics.mean(value for _, value in at) <= target), None)


def multiples_in(result: dict[str, Any]) -> list[float]:
    """Return the multiples of default rates that were run, in order."""
    return sorted({run["multiple"] for run in result["runs"]})


def runs_place(optimizer: str) -> int:
    """Return where an optimizer stands in the table."""
    return OPTIMIZERS.index(optimizer)


def table_of(result: dict[str, Any]) -> str:
    """Return the table for the page."""
    lines = [
        "| optimizer | steps | learning rate | held-out bits per byte | range over seeds | against AdamW | "
        "AdamW's reached after | ms a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in summarize(result).items():
        optimizer, steps = name.removesuffix(" steps").split(", ")
        spread = f"{min(one['values']):.3f} to {max(one['values']):.3f}"
        ratio = f"{one['against_adamw'] - 1:+.1%}"
        rate = f"{one['learning_rate']:.2g} ({one['multiple']:g} times the default)"
        reached = "not" if one["reached_at"] is None else f"{one['reached_at']} steps"
        lines.append(
            f"| {optimizer} | {steps} | {rate} | {one['mean']:.3f} | {spread}, {len(one['values'])} seeds | {ratio} | "
            f"{reached} | {1e3 * one['step_s']:.1f} |"
        )
    settings, machine = result["settings"], result["circumstances"]["machine"]
    seeds = {m: len({run["seed"] for run in result["runs"] if run["multiple"] == m}) for m in multiples_in(result)}
    compared = ", ".join(f"{multiple:g} ({count})" for multiple, count in seeds.items())
    lines += [
        "",
        f"GPT of depth {settings['depth']}, {settings['context']} tokens of context, batch {settings['batch']}; one "
        f"thread of {machine['cpu']}, with other work on the machine, so the times are upper bounds. Learning rates at "
        f"so many times the default were run with (so many) seeds: {compared}. Each row is at the rate with the best "
        "mean over the rates that have most seeds. Fewer steps than AdamW's are runs with a schedule of that length; "
        f"evaluations are {EVALUATIONS} a run.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="windows of a step")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eval-bytes", type=int, default=16_384)
    parser.add_argument("--multiples", type=float, nargs="+", default=MULTIPLES)
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS)
    parser.add_argument("--shorter", nargs="*", default=("muon",), choices=OPTIMIZERS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cache", type=Path, default=Path("runs/.cache"))
    parser.add_argument("--table", action="store_true", help="write the table into the page from the file, and stop")
    options = parser.parse_args()
    settings = {key: getattr(options, key) for key in ("depth", "context", "batch", "steps", "seeds", "eval_bytes")}
    settings["multiples"] = [*options.multiples]
    result: dict[str, Any] = {"settings": settings, "runs": []}
    if options.out.exists():
        before = json.loads(options.out.read_text())
        is_same = all(before["settings"][key] == settings[key] for key in ("depth", "context", "eval_bytes", "batch"))
        if options.table:
            PAGE.write_text(put_table(PAGE.read_text(), "optimizers", table_of(before)))
            return
        result["runs"] = before["runs"] if is_same else []
    torch.set_num_threads(1)
    corpus = open_text(options.cache)
    made = {(run["optimizer"], run["multiple"], run["steps"], run["seed"]) for run in result["runs"]}
    start_s = time.monotonic()
    for optimizer, multiple, steps, seed in runs_of(options):
        if (optimizer, multiple, steps, seed) in made or time.monotonic() - start_s > 60 * options.minutes:
            continue
        config = config_of(options, optimizer, multiple, steps)
        run = train(config, corpus, seed)
        rate = config.train.learning_rate
        about = {"optimizer": optimizer, "multiple": multiple, "learning_rate": rate, "steps": steps, "seed": seed}
        result["runs"].append(about | run)
        last = run["curve"][-1][1]
        print(f"{optimizer} x{multiple:g} {steps} steps seed {seed}: {last} {1e3 * run['step_s']:.1f} ms", flush=True)
        result["circumstances"] = circumstances("benchmarks.optimizers")
        result["summary"] = summarize(result)
        write_result(options.out, result)


if __name__ == "__main__":
    main()
