"""The training loop: the README's loop, with bookkeeping.

Owns the order of events in a run. It must not know the terminal (it calls a `Reporter`), the launch of ranks
(`launch.py`) or the meaning of a stage: model, optimizer and loop are those of a single process, and the one line
`zs.shard` shards them. Read `train` first, then `_step`.

Note: what ranks agree on
    A signal reaches the ranks at different times, and their clocks differ. Therefore, after each step, ranks agree
    whether a rank wants to stop or a checkpoint is due, and all act after the same step. A checkpoint is also due when
    rank 0 cannot write files of the run; before each checkpoint, ranks agree whether rank 0 has such a problem.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

import zeroshard as zs
from zeroshard.join.arrival import ends_by_signal
from zeroshard.train.account import describe_start, summarize, tokens_per_step
from zeroshard.train.config import Config, SettingsError, to_toml
from zeroshard.train.data import IGNORED, count_scored, heldout_batches, training_batch
from zeroshard.train.lease import Lease
from zeroshard.train.metrics import EvalRecord, Reporter, Reporters, RunFiles, StepRecord, Summary
from zeroshard.train.models.language import generate
from zeroshard.train.models.piped import summed_loss
from zeroshard.train.resume import Saver, check_settings, keep_export_files, resume
from zeroshard.train.run import Run, check_equal, check_files
from zeroshard.train.speed import utilization
from zeroshard.train.trackers import make_trackers

__all__ = ["train"]

_EVAL_WINDOWS: Final = 8
_UNPROFILED_STEPS: Final = 2
"""In the first steps after a start, ranks agree on an order and first touch memory."""
_PROFILE: Final = "profile.json"


def train(
    config: Config,
    reporter: Reporter,
    is_stop_wanted: Callable[[], bool] = lambda: False,
    *,
    start_s: float | None = None,
) -> Summary:
    """Train a model as configured, from the newest checkpoint of the run, and write the run's files.

    Args:
        config: resolved; equal on all ranks.
        reporter: receives the events of the run, on rank 0.
        is_stop_wanted: called after each step; True on one rank ends the run on all ranks.
        start_s: when the command began, by `time.perf_counter`; now by default.

    Returns:
        The summary, on every rank.

    Raises:
        SettingsError: the text, the model or the treatments do not match, or the folder is in use, or has a run with
            other settings.
        CheckpointError: the run cannot be saved, or all of its checkpoints are damaged.
        RankMismatchError: settings differ between ranks, or a rank failed.
        RuntimeError: the folder of the run was removed, moved or replaced, or a write to it failed.

    Collective: joins the process group of torchrun's environment and destroys it at the end, unless a process group
    exists; every rank must call.
    """
    start_s = time.perf_counter() if start_s is None else start_s
    is_joined = torch.distributed.is_initialized()
    mesh = zs.init(config.run.seed, watchdog_s=config.zero.watchdog_s)
    try:
        with contextlib.ExitStack() as stack:
            # There is nothing to save yet, and a rank may wait long for ranks that prepare data.
            with ends_by_signal():
                check_equal(config, mesh)
                run = _begin(config, mesh, start_s, stack)
            reporters: list[Reporter] = []
            files = None
            if mesh.rank == 0:
                files = stack.enter_context(RunFiles(config.folder, to_toml(config), run.tally.steps))
                keep_export_files(run)
                trackers = make_trackers(config.run.log_to, config.folder, config.run.name, config.model_dump())
                reporters = [files, *trackers, reporter]
            stack.enter_context(run.language.around_steps())
            return _train(run, Reporters(reporters), files, is_stop_wanted)
    finally:
        if torch.distributed.is_initialized() and not is_joined:
            torch.distributed.destroy_process_group()


def _begin(config: Config, mesh: zs.Mesh, start_s: float, stack: contextlib.ExitStack) -> Run:
    """Return the run, resumed, whose folder rank 0 holds until the end of the stack. Collective: as `Run`, `resume`."""
    try:
        check_settings(config)
        if mesh.rank == 0:
            stack.enter_context(Lease(config.folder))
        run = Run(config, mesh, start_s)
        resume(run)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return run


def _train(run: Run, tell: Reporters, files: RunFiles | None, is_stop_wanted: Callable[[], bool]) -> Summary:
    """Run the loop with its evaluations and checkpoints, then generate the sample.

    Args:
        files: the files of the run, on rank 0.
    """
    tally, steps = run.tally, run.config.train.steps
    tell.started(describe_start(run))
    saver, is_interrupted = Saver(run, tell, files), False
    _evaluate_if_due(run, tell)
    while tally.steps < steps and not is_interrupted:
        with _profile_if_wanted(run):
            record, is_interrupted, is_due = _step(run, is_stop_wanted, saver.is_due)
        tell.stepped(record)
        if run.config.zero.check_every and tally.steps % run.config.zero.check_every == 0:
            run.zero.check_copies()
        if not is_interrupted:
            _evaluate_if_due(run, tell)
        if is_due or is_interrupted or tally.steps == steps:
            saver.save()
    sample = "" if is_interrupted else _sample(run)
    summary = summarize(run, sample, _tell_profile(run), is_interrupted)
    tell.finished(summary)
    check_files(run, files)
    return summary


def _profile_if_wanted(run: Run) -> contextlib.AbstractContextManager[object]:
    """Return the context of one step: the profile, or a null context."""
    made = run.tally.steps_of_start - _UNPROFILED_STEPS
    return run.profile if 0 <= made < run.config.run.profile_steps else contextlib.nullcontext()


def _tell_profile(run: Run) -> str:
    """Write the trace of the profiled steps, and return their table.

    Collective: all-gathers of some bytes per event, if steps were profiled; every rank must call.
    """
    if not run.config.run.profile_steps:
        return ""
    if not run.profile.steps:
        return (
            f"no step was profiled: this start made {run.tally.steps_of_start}, and the first "
            f"{_UNPROFILED_STEPS} are not profiled"
        )
    run.profile.save(run.config.folder / _PROFILE)
    return run.profile.table()


def _step(
    run: Run, is_stop_wanted: Callable[[], bool], is_save_due: Callable[[int], bool]
) -> tuple[StepRecord, bool, bool]:
    """Run one step.

    Returns:
        The record, whether any rank wants to stop, and whether a checkpoint is due on any rank.

    Collective: the engine's, one or two agreements, and a mean of two numbers; every rank must call.
    """
    before, start_s = Counter(run.zero.traffic().sent_bytes), time.perf_counter()
    learning_rate = float(run.optimizer.param_groups[0]["lr"])
    loss = _backward(run)
    norm = _clip(run)
    run.optimizer.step()
    run.scheduler.step()
    memory = run.zero.memory()
    run.optimizer.zero_grad()
    step, own_s = run.tally.steps + 1, time.perf_counter() - start_s
    is_told = is_stop_wanted()
    is_due = is_interrupted = False
    if meets := run.meets(step):
        if step == run.config.train.steps:
            run.zero.finish()
        # A run that stops also saves, so most steps need only the first vote.
        is_due = not _agree(run, not (is_told or is_save_due(step)), "continue without a checkpoint?")
        is_interrupted = is_due and not _agree(run, not is_told, "continue?")
    own = torch.stack([loss, torch.tensor(own_s).to(loss)])
    mean_loss, step_s = zs.mean_across_ranks(own, None if meets else run.zero.mesh).tolist()
    _count(run, before, mean_loss, step_s, memory)
    rate = tokens_per_step(run.config) / step_s
    record = StepRecord(
        step=step,
        loss=mean_loss,
        learning_rate=learning_rate,
        grad_norm=float(norm),
        step_s=step_s,
        tokens_per_s=rate,
        resident_bytes=memory.resident_bytes,
        peak_bytes=memory.peak_bytes,
        time=time.time(),
        tokens=step * tokens_per_step(run.config),
        mfu=utilization(rate, run.flops, run.peak_flops, run.mesh.world_size),
    )
    return record, is_interrupted, is_due


def _agree(run: Run, value: bool, what: str) -> bool:
    """Return whether `value` is true on all ranks, of all islands. Collective: every rank must call."""
    if not run.config.run.has_islands:
        return run.zero.agree(value, what)
    return bool(zs.mean_across_ranks(torch.tensor(float(value), device=run.mesh.device)) == 1.0)


def _backward(run: Run) -> Tensor:
    """Accumulate the gradients of this rank's part of the global batch.

    Each micro-batch is weighted by its windows, so the mean over ranks is the mean over all windows, even if the
    numbers of windows differ between ranks. Ranks along the axis "tensor" have the same part.

    Returns:
        The loss of this part in nats, 0-d; its mean over ranks is the loss of the global batch.
    """
    train, mesh = run.config.train, run.mesh
    # Islands that are launches of their own read parts of a batch as large as all of theirs.
    place, islands = run.config.run.place
    inputs, targets = training_batch(
        run.corpus.train,
        seed=run.config.run.seed,
        step=run.tally.steps,
        batch=train.batch * islands,
        context=run.config.model.context,
        rank=run.reader + place * run.readers,
        world_size=run.readers * islands,
    )
    if run.pipe is not None:
        return run.pipe.step(inputs.to(mesh.device), targets.to(mesh.device))
    total = torch.zeros((), device=mesh.device)
    parts = train.accumulation
    micro_batches = zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
    for number, (micro_inputs, micro_targets) in enumerate(micro_batches, start=1):
        with _reduction(run, is_last=number == train.accumulation):
            loss = run.language.compute_loss(micro_inputs.to(mesh.device), micro_targets.to(mesh.device))
            loss = loss / (train.batch / (len(micro_inputs) * run.readers))
            loss.backward()
        total += loss.detach()
    return total


def _reduction(run: Run, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
    """Return the context of one micro-batch: without a reduction if configured so and more micro-batches follow."""
    if run.config.zero.no_sync and not is_last:
        return run.zero.no_sync()
    return contextlib.nullcontext()


def _clip(run: Run) -> Tensor:
    """Clip the gradients if configured, and return their 2-norm before clipping, 0-d."""
    if clip := run.config.train.clip:
        return torch.nn.utils.clip_grad_norm_(run.model.parameters(), clip)
    return run.zero.grad_norm()


def _count(run: Run, before: Counter[str], loss: float, step_s: float, memory: zs.Memory) -> None:
    """Add one step to the counters of the run."""
    tally = run.tally
    tally.steps += 1
    tally.losses.append(loss)
    if run.pipe is not None and (idle := run.pipe.idle) is not None:
        tally.idle.append(idle)
    tally.train_s += step_s
    tally.memory = memory
    tally.sent_bytes += Counter(run.zero.traffic().sent_bytes) - before
    if tally.predicted_step_bytes is None and not tally.follows_pass:
        tally.predicted_step_bytes = Counter()
        for event in run.zero.trace.predicted():
            tally.predicted_step_bytes["reduce" if event.kind == "reduce" else "gather"] += event.nbytes
    tally.follows_pass = False


def _evaluate_if_due(run: Run, tell: Reporters) -> None:
    """Evaluate, once, if the step count calls for an evaluation. Collective: as `_evaluate`."""
    tally, wanted = run.tally, run.config.train
    is_due = tally.steps == wanted.steps or (wanted.eval_every and tally.steps % wanted.eval_every == 0)
    is_done = tally.last_eval is not None and tally.last_eval.step == tally.steps
    if tally.steps and is_due and not is_done:
        tally.last_eval = _evaluate(run)
        tally.follows_pass = True
        tell.evaluated(tally.last_eval)


@torch.no_grad()
def _evaluate(run: Run) -> EvalRecord:
    """Score the held-out text.

    Collective: those of the forward passes, and a mean of three numbers; every rank must call.
    """
    start_s = time.perf_counter()
    scored, scored_bytes = count_scored(run.corpus.heldout_ends, run.config.train.eval_bytes)
    batches = heldout_batches(
        run.corpus.heldout,
        batch=_EVAL_WINDOWS,
        context=run.config.model.context,
        scored=scored,
        rank=run.reader,
        world_size=run.readers,
    )
    nats = torch.zeros((), dtype=torch.float64, device=run.mesh.device)
    run.model.eval()
    for inputs, targets in batches:
        nats += _score(run, inputs.to(run.mesh.device), targets.to(run.mesh.device))
    run.model.train()
    # One moment for all ranks, which save the record.
    own = torch.tensor([time.perf_counter() - start_s, time.time()], dtype=torch.float64, device=run.mesh.device)
    mean, eval_s, moment = zs.mean_across_ranks(torch.cat([nats[None], own])).tolist()
    total = mean * run.readers
    return EvalRecord(
        step=run.tally.steps,
        loss=total / scored,
        bits_per_byte=total / scored_bytes / math.log(2),
        scored_bytes=scored_bytes,
        eval_s=eval_s,
        time=moment,
        tokens=run.tally.steps * tokens_per_step(run.config),
    )


def _score(run: Run, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the nats of all targets of a batch, 0-d; of a pipeline, the mean of those of all readers."""
    if run.pipe is not None:
        return run.pipe.evaluate(inputs, targets, loss=summed_loss) * len(inputs)
    logits = run.language.compute_logits(inputs).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def _sample(run: Run) -> str:
    """Generate the sample on rank 0 and those along its axis "tensor", with the full parameters gathered on all ranks.

    With a pipeline all ranks generate it together.

    Collective: `gathered()`; every rank must call.
    """
    wanted = run.config.run
    if not wanted.sample_bytes:
        return ""
    [(prompt, _)] = run.tokenizer.encode([wanted.prompt])
    tokens_per_byte = run.corpus.train.numel() / run.corpus.train_bytes
    with run.zero.gathered():
        if run.reader and run.pipe is None:
            return ""
        run.model.eval()
        tokens = generate(
            run.language,
            torch.from_numpy(prompt).to(run.mesh.device),
            numel=math.ceil(wanted.sample_bytes * tokens_per_byte),
            temperature=wanted.temperature,
            seed=wanted.seed,
        )
    return run.tokenizer.decode(tokens.tolist())
