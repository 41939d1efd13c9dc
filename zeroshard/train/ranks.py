"""How the ranks of a run share its batches and its layers: numbers and choices that do not go together.

Owns the texts of these errors. It must not know torch. `models/shape.py` and `models/split_hf.py` have the checks of a
model's own sizes.
"""

import re
from typing import Any, Final

__all__ = ["check_islands", "check_pipe", "check_ranks", "check_replicas", "check_split"]

_ISLAND: Final = re.compile(r"(\d{1,4})/(\d{1,4})")
_WHOLE: Final = ("muon", "adafactor")
"""Optimizers that need whole matrices."""
_PARTITIONED: Final = ("C2", "C4", "C5")
"""Configurations of the ZeRO paper that partition activations."""


def check_ranks(batch: int, *, ranks: int, tensor: int, accumulation: int) -> None:
    """Raise ValueError unless `tensor` divides the ranks, and each part of a batch has a window for each micro-batch.

    Args:
        batch: windows of a step.
        tensor: ranks that split each layer, and read the same part of a batch.
        accumulation: micro-batches of a step.
    """
    if ranks % tensor:
        raise ValueError(
            f"run.tensor={tensor} does not divide run.ranks={ranks}; set run.ranks to a multiple of {tensor}, or "
            f"run.tensor to a divisor of {ranks}"
        )
    least = ranks // tensor * accumulation
    if batch < least:
        split = f" / run.tensor={tensor}" * (tensor > 1)
        raise ValueError(
            f"train.batch={batch} is below run.ranks={ranks}{split} times train.accumulation={accumulation}; set "
            f"train.batch to {least} or more"
        )


def check_split(tensor: int, optimizer: str, treatments: str, *, compiles: bool) -> None:
    """Raise ValueError if something in the settings cannot be used with layers that `tensor` ranks split.

    Args:
        treatments: of the GPT's activations: `zero.residency`, or else `zero.activations`; empty for another model.
    """
    if "partition" in treatments or treatments in _PARTITIONED:
        name = "residency" if treatments in _PARTITIONED else "activations"
        raise ValueError(
            f"zero.{name}={treatments} with run.tensor={tensor}: between layers of gpt each of these ranks has other "
            "positions, so inputs are in parts already; set zero.activations without partition, such as recompute"
        )
    if compiles:
        raise ValueError(
            f"train.compile_blocks=true with run.tensor={tensor}: torch 2.13 fails to compile blocks that are split "
            "this way, also without zeroshard; leave out one of the two"
        )
    if optimizer in _WHOLE:
        raise ValueError(
            f"train.optimizer={optimizer} needs whole matrices, and run.tensor={tensor} splits them; use an "
            "element-wise optimizer, such as adamw, or run.tensor=1"
        )


def check_pipe(batch: int, run: Any, *, accumulation: int) -> None:
    """Raise ValueError if something in the settings cannot be used with a model that is divided over a pipe.

    Args:
        batch: windows of a step.
        run: the section `run` of the settings, resolved.
        accumulation: `train.accumulation`.
    """
    if run.pipe == 1:
        return
    if run.tensor > 1:
        raise ValueError(f"run.pipe={run.pipe} with run.tensor={run.tensor}: use one of the two")
    if run.ranks % run.pipe:
        raise ValueError(
            f"run.pipe={run.pipe} does not divide run.ranks={run.ranks}; set run.ranks to a multiple of {run.pipe}, or "
            f"run.pipe to a divisor of {run.ranks}"
        )
    if accumulation > 1:
        raise ValueError(
            f"train.accumulation={accumulation} with run.pipe={run.pipe}: a pipeline cuts a batch into "
            "run.micro_batches; set that instead"
        )
    if batch % (parts := run.ranks // run.pipe * run.micro_batches):
        raise ValueError(
            f"train.batch={batch} windows cannot be divided into run.micro_batches={run.micro_batches} equal "
            f"micro-batches on each of run.ranks={run.ranks} / run.pipe={run.pipe}; set train.batch to a multiple of "
            f"{parts}"
        )


def check_islands(run: Any) -> None:
    """Raise ValueError if this launch is to be an island of a mailbox, and something is missing or does not fit.

    Args:
        run: the section `run` of the settings, resolved.
    """
    if not run.mailbox:
        for name in ("staleness", "secret_file", "island"):
            if value := getattr(run, name):
                raise ValueError(
                    f"run.{name}={value} needs run.mailbox, the address of a mailbox for islands that are launches of "
                    "their own (docs/mailbox.md)"
                )
        return
    if not run.outer:
        raise ValueError(f"run.mailbox={run.mailbox} needs run.outer, the steps between exchanges, such as 50")
    if not run.secret_file:
        raise ValueError(f"run.mailbox={run.mailbox} needs run.secret_file, the secret that the mailbox has, too")
    found = _ISLAND.fullmatch(run.island)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(
            f"run.island={run.island!r}: with run.mailbox, give the number of this island and how many islands there "
            "are at the start, such as 1/2"
        )
    for name in ("replicas", "tensor", "pipe"):
        if (value := getattr(run, name)) > 1:
            raise ValueError(f"run.{name}={value} with run.mailbox: an island of a mailbox has the axis 'shard' alone")


def check_replicas(batch: int, run: Any) -> None:
    """Raise ValueError if the ranks cannot be divided over the replicas, or a batch over islands.

    Args:
        batch: windows of a step.
        run: the section `run` of the settings, resolved.
    """
    if run.has_islands and run.replicas == 1:
        raise ValueError(f"run.outer={run.outer} needs at least two islands; set run.ranks to 2 or more")
    if run.replicas == 1:
        return
    if run.tensor > 1 or run.pipe > 1:
        raise ValueError(f"run.replicas={run.replicas} with run.tensor or run.pipe: use one of them")
    if run.ranks % run.replicas:
        raise ValueError(
            f"run.replicas={run.replicas} does not divide run.ranks={run.ranks}; set run.ranks to a multiple of "
            f"{run.replicas}, or run.replicas to a divisor of {run.ranks}"
        )
    # Islands average their parameters with equal weights, so each must learn from as many windows.
    if run.has_islands and batch % run.replicas:
        raise ValueError(
            f"train.batch={batch} windows cannot be divided equally over run.replicas={run.replicas} islands; set "
            f"train.batch to a multiple of {run.replicas}"
        )
