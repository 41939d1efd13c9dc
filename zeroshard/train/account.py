"""The description of a run before its first step, and its summary at the end.

Owns the contents of both records, and the bytes of every rank. It must not know the loop (`loop.py`) or where records
are written (`metrics.py`). Read `summarize` first.
"""

import platform
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import torch

import zeroshard as zs
from zeroshard.train.config import Config
from zeroshard.train.corpus import Corpus
from zeroshard.train.metrics import RankBytes, Start, Summary
from zeroshard.train.planned import compare_plan
from zeroshard.train.run import Run
from zeroshard.train.speed import utilization
from zeroshard.train.text import open_source
from zeroshard.train.tokenizer import Tokenizer

__all__ = ["describe_data", "describe_start", "summarize", "tokens_per_step"]

_RESIDENT: Final = ("parameters", "gradients", "states", "padding")
_PREDICTED_KINDS: Final = ("gather", "reduce")
_KINDS: Final = (*_PREDICTED_KINDS, "replicate", "pipe", "agree", "start", "state")


def describe_start(run: Run) -> Start:
    """Describe the run before its first step. Collective: an all-gather of predictions; every rank must call."""
    mesh, row = run.mesh, run.zero.residency
    return Start(
        model=f"{run.language.description}, {run.config.train.precision}",
        mesh=f"{mesh.world_size} {'rank' if mesh.world_size == 1 else 'ranks'} on {mesh.device.type}"
        + f", {run.config.run.replicas} {'islands' if run.config.run.outer else 'copies of the sharded state'}"
        * (run.config.run.replicas > 1)
        + f", island {run.config.run.island} of {run.config.run.mailbox}" * bool(run.config.run.mailbox)
        + f", {run.config.run.tensor} of them split a layer" * (run.config.run.tensor > 1)
        + f", {run.config.run.pipe} places of a pipeline ({run.config.run.schedule})" * (run.config.run.pipe > 1),
        data=_name_data(run),
        row=name_row(run.config),
        cells={column: str(getattr(row, column)) for column in ("states", "gradients", "parameters", "activations")},
        predicted_bytes=_by_rank(run, run.zero.memory().predicted_bytes),
        steps=run.config.train.steps,
        done=run.tally.steps,
        folder=run.config.folder,
        changes=run.changes,
    )


def name_row(config: Config) -> str:
    """Return a text for the row of the residency table."""
    stage = config.zero.residency or f"stage {config.zero.stage}"
    is_kept = config.zero.residency or config.zero.activations == "keep"
    return stage if is_kept else f"{stage}, activations {config.zero.activations}"


def summarize(run: Run, sample: str, profile: str, is_interrupted: bool) -> Summary:
    """Summarize the run. Collective: all-gathers of the ranks' bytes; every rank must call."""
    config, tally = run.config, run.tally
    last, tokens = tally.last_eval, tally.steps * tokens_per_step(config)
    has_pipe = config.run.pipe > 1
    return Summary(
        name=config.run.name,
        model=run.language.description,
        is_interrupted=is_interrupted,
        steps=tally.steps,
        resumed_at=tally.resumed_at,
        depth=None if config.hf_folder else config.model.depth,
        parameters_numel=run.parameters_numel,
        world_size=run.mesh.world_size,
        tensor=run.config.run.tensor,
        stage=int(config.zero.stage),
        row=name_row(config),
        final_train_loss=statistics.fmean(tally.losses),
        final_heldout_loss=last.loss if last else None,
        bits_per_byte=last.bits_per_byte if last else None,
        tokens=tokens,
        tokens_per_s=tokens / tally.train_s,
        mfu=utilization(tokens / tally.train_s, run.flops, run.peak_flops, run.mesh.world_size),
        train_s=tally.train_s,
        wall_s=tally.earlier_s + time.perf_counter() - run.start_s,
        ranks=_rank_bytes(run),
        data=describe_data(run.corpus, run.tokenizer),
        sample=sample,
        versions=_versions(),
        profile=profile,
        plan=_compare(run),
        pipe=config.run.pipe,
        schedule=config.run.schedule if has_pipe else "",
        micro_batches=config.run.micro_batches if has_pipe else 0,
        idle=_idle(run) if tally.idle else [],
    )


def _idle(run: Run) -> list[float]:
    """Return the part of the last steps in which each rank waited. Collective: an all-gather of 8 bytes."""
    mine = torch.tensor([statistics.fmean(run.tally.idle)], dtype=torch.float64, device=run.mesh.device)
    return [float(one) for one in zs.gather_across_ranks(mine).flatten()]


def _compare(run: Run) -> Mapping[str, Any]:
    """Return the plan next to the measurements of rank 0; empty on other ranks, and for a run without steps."""
    tally = run.tally
    if run.mesh.rank or not tally.steps_of_start:
        return {}
    held = {column: run.zero.memory().resident_bytes[column] for column in _RESIDENT}
    held["parameters"] += sum(buffer.nbytes for buffer in run.model.buffers())
    peak_bytes = torch.cuda.max_memory_allocated() if run.mesh.device.type == "cuda" else None
    step_s = tally.train_s / tally.steps
    return compare_plan(run.config, run.axes, held, step_s, tokens_per_step(run.config) / step_s, peak_bytes)


def _rank_bytes(run: Run) -> list[RankBytes]:
    """Return every rank's bytes. Collective: six all-gathers; every rank must call."""
    tally = run.tally
    memory = tally.memory or run.zero.memory()
    sent = Counter(run.zero.traffic().sent_bytes)
    steps = tally.steps_of_start
    of_step = tally.predicted_step_bytes
    columns = [
        _by_rank(run, bytes_)
        for bytes_ in (
            memory.predicted_bytes,
            memory.resident_bytes,
            memory.peak_bytes,
            {kind: steps * of_step[kind] for kind in _PREDICTED_KINDS if of_step is not None},
            {kind: tally.sent_bytes[kind] for kind in _KINDS},
            {kind: sent[kind] - tally.sent_bytes[kind] for kind in _KINDS},
        )
    ]
    return [RankBytes(*of_rank) for of_rank in zip(*columns, strict=True)]


def _by_rank(run: Run, nbytes: Mapping[str, int]) -> list[Mapping[str, int]]:
    """Return every rank's byte counts, by rank.

    Collective: an all-gather of 8 bytes per entry; every rank must call, with the same keys.
    """
    keys = sorted(nbytes)
    rows = zs.gather_across_ranks(
        torch.tensor([nbytes[key] for key in keys], dtype=torch.int64, device=run.mesh.device)
    )
    return [dict(zip(keys, row, strict=True)) for row in rows.tolist()]


def tokens_per_step(config: Config) -> int:
    """Return the number of tokens per step, over all ranks."""
    return config.train.batch * config.model.context


def _name_data(run: Run) -> str:
    """Return one line that names the text and its tokenizer."""
    corpus, tokenizer = run.corpus, run.tokenizer
    parts = f"{corpus.train_bytes:,} bytes to train on, {corpus.heldout_bytes:,} held out"
    source = open_source(run.config.data.path, run.config.data.column) if run.mesh.rank == 0 else None
    left = f" ({text})" if source is not None and (text := source.describe_left_out()) else ""
    note = " (the model's folder has no tokenizer)" if run.config.hf_folder and not run.config.tokenizer else ""
    return f"{corpus.name}{left}, {parts}; {tokenizer.name}{note}, vocabulary {tokenizer.vocabulary:,}"


def describe_data(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, str | int]:
    """Return sizes and hashes of the text and its tokens."""
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "train_bytes": corpus.train_bytes,
        "heldout_bytes": corpus.heldout_bytes,
        "train_tokens": corpus.train.numel(),
        "heldout_tokens": corpus.heldout.numel(),
        "tokens_sha256": corpus.tokens_sha256,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocabulary": tokenizer.vocabulary,
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__), "zeroshard": zs.__version__}
