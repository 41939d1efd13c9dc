"""The plan of a run, before its start and next to its measurements.

Owns the conversion of a configuration into arguments of `zs.plan`, and the text. It must not know how plans are made.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh

import zeroshard as zs
from zeroshard.plan.machine.profiles import device_for, host_device
from zeroshard.table.sizes import size_text
from zeroshard.table.stages import row_of_stage
from zeroshard.train.config import AUTO, Config
from zeroshard.train.models.piped import logits_of, mean_loss
from zeroshard.train.run import make_model, outer_of
from zeroshard.train.text import open_source
from zeroshard.train.tokenizer import load_tokenizer

__all__ = ["choose_sharding", "compare_plan", "describe_plan", "describe_text", "plan_run"]

UNTIMED: Final = "no profile of this machine is stored, so time is not predicted; run `zeroshard doctor` to measure it"
_READ_BYTES: Final = 1 << 28
"""How much of a text is read before a run that only describes itself."""


def plan_run(config: Config, axes: DeviceMesh | None = None) -> tuple[zs.Plan, bool]:
    """Return the plan of a run, and whether its times are meaningful: whether a profile of this machine is stored.

    Args:
        axes: the mesh of the run if it has an axis "tensor" and this process is one of its ranks: a plan cannot emulate
            a second process group.

    Raises:
        ValueError, TypeError, RuntimeError, ImportError: the model cannot be planned.
    """
    try:
        device, is_timed = device_for("this"), True
    except ValueError:
        device, is_timed = host_device(), False
    if device.is_cpu:  # ranks of a run share the memory of this host, also where they are more than its cores
        device = replace(device, node_ranks=max(device.node_ranks, config.run.ranks))
    train, zero, tensor, pipe = config.train, config.zero, config.run.tensor, config.run.pipe
    micro_batches = config.run.micro_batches if pipe > 1 else train.accumulation
    # On the rank with the most windows.
    batch = -(-train.batch // (config.run.ranks // (tensor * pipe) * micro_batches))
    asked: dict[str, Any] = {"batch": batch, "seq": config.model.context}
    if not config.hf_folder:
        with torch.device("meta"):
            # The model of a pipe returns logits.
            asked = {"inputs": [torch.zeros((batch, config.model.context), dtype=torch.int64)] * (1 if pipe > 1 else 2)}
    model, split, around = _model_of(config, axes)
    row: dict[str, Any] = {"stage": zero.stage, "activations": zero.activations}
    if zero.residency:  # it replaces the default stage, not a choice
        row = {"residency": zero.residency, "stage": zero.stage if zero.stage == AUTO else None}
    with around:
        plan = zs.plan(
            model,
            world_size=config.run.ranks,
            device=device,
            **asked,
            **row,
            precision=train.precision,
            offload=zero.offload or None,
            micro_batches=micro_batches,
            no_sync=zero.no_sync and pipe == 1,
            mesh=config.run.replicas if config.run.replicas > 1 else None,
            outer=outer_of(config),
            tensor=tensor,
            pipe=pipe,
            schedule=config.run.schedule,
            **split,
            loss=_loss_of_logits if pipe > 1 else None,
            optimizer="momentum" if train.optimizer == "sgd" and train.beta1 else train.optimizer,
            fused=train.optimizer in ("adamw", "sgd"),
        )
    return plan, is_timed


def _loss_of_logits(output: Any) -> torch.Tensor:
    logits = logits_of(output)
    return mean_loss(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device))


def _model_of(
    config: Config, axes: DeviceMesh | None
) -> tuple[Any, Mapping[str, Any], contextlib.AbstractContextManager[object]]:
    """Return what `zs.plan` takes as the model, its arguments for a split, and the context of the plan."""
    if config.hf_folder and not (Path(config.hf_folder) / "config.json").is_file():
        raise ValueError(f"{config.hf_folder} is not a folder with a config.json; give the folder of the model.")
    if config.run.tensor > 1:
        model = make_model(config, load_tokenizer(config.tokenizer), axes).module
        if axes is not None:
            return model, {}, contextlib.nullcontext()  # the run is in the context already
        from torch.distributed.tensor.parallel import loss_parallel

        from zeroshard.train.models.split import split  # imports torch's DTensor, which is slow

        def split_apart(module: Any, mesh: DeviceMesh) -> None:
            # torch keeps what it inferred by mesh, and the ranks of a run may be an equal mesh of this process.
            split(module, DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("planned",)))

        return model, {"parallelize": split_apart}, loss_parallel()
    if not config.hf_folder:
        return make_model(config, load_tokenizer(config.tokenizer)).module, {}, contextlib.nullcontext()
    import transformers

    found = transformers.AutoConfig.from_pretrained(config.hf_folder, local_files_only=True)
    return found, {}, contextlib.nullcontext()


def choose_sharding(config: Config) -> Config:
    """Return the settings with "auto" in `zero.stage` and `zero.offload` replaced by the choices of a plan.

    The stage is the lowest whose plan fits this machine, the offload the fastest. All ranks choose alike, because a
    plan depends only on the settings and the host's memory.

    Raises:
        ValueError: the model cannot be planned, or no offload fits.
    """
    zero = config.zero
    automatic = [name for name in ("stage", "offload") if getattr(zero, name) == AUTO]
    if not automatic:
        return config
    try:
        plan, _ = plan_run(config)
    except (TypeError, RuntimeError, ImportError, OSError) as error:
        names = ", ".join(f"zero.{name}=auto" for name in automatic)
        raise ValueError(f"{names}: {str(error).splitlines()[0]} Give a value.") from error
    found: dict[str, Any] = {}
    if zero.stage == AUTO:
        rows = {replace(row_of_stage(n), activations=plan.asked.row.activations): n for n in range(4)}
        found["stage"] = rows[plan.asked.row]
    if zero.offload == AUTO:
        chosen = plan.asked.offload
        if chosen is not None and plan.verdict == "no":
            raise ValueError(
                f"zero.offload=auto: with {_text_of(chosen)} a rank needs {size_text(plan.total_bytes)} of a device "
                f"with {size_text(plan.asked.room_bytes)}, and a host {size_text(plan.host_bytes)} of "
                f"{size_text(plan.asked.device.host_bytes)}. Use more ranks, stage 3, a smaller batch, or recompute."
            )
        found["offload"] = "" if chosen is None else _text_of(chosen)
    return config.model_copy(update={"zero": zero.model_copy(update=found)})


def describe_text(config: Config) -> str:
    """Return one line with the text of a run and its size; raise ValueError if what is read of it is no text."""
    source = open_source(config.data.path, config.data.column)
    read_bytes = 0
    for document in source.documents():
        read_bytes += len(document)
        if read_bytes > _READ_BYTES:
            break
    if read_bytes <= 2 * config.model.context and read_bytes <= _READ_BYTES:  # no token is shorter than a byte
        raise ValueError(
            f"data.path: {source.name!r} has {read_bytes} bytes; with model.context={config.model.context}, the "
            "training and the held-out part each need more than that many tokens. Provide more text"
        )
    if not source.files:
        return f"data: {source.name}, {sum(map(len, source.documents())):,} bytes"
    nbytes, left = sum(size for _, size in source.layout()), source.describe_left_out()
    return f"data: {source.name}, {nbytes:,} bytes in {len(source.files):,} file(s)" + f"; {left}" * bool(left)


def _text_of(offload: zs.Offload) -> str:
    """Return the text that `offload_of` parses as this offload."""
    parts = {"states": offload.states, "gradients": offload.gradients, "parameters": offload.parameters}
    return ",".join([*(f"{name}={part:g}" for name, part in parts.items() if part is not None), f"to={offload.to}"])


def describe_plan(config: Config) -> Sequence[str]:
    """Return the plan of a run in lines, or the reason why the run cannot be planned."""
    try:
        plan, is_timed = plan_run(config)
    except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
        return [f"plan: none, since {str(error).splitlines()[0]}"]
    held = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in plan.resident_bytes.items() if nbytes)
    lines = [
        f"model: {plan.parameters_numel:,} parameters, {size_text(4 * plan.parameters_numel)} in fp32",
        f"plan of a rank: {held}",
        f"at most {size_text(plan.allocated_bytes)} from torch's allocator ({plan.film.peak_phase})"
        + f", {size_text(plan.mapped_bytes)} in memory that the ranks share" * bool(plan.mapped_bytes),
    ]
    lines.append(f"{plan.step_s:,.3f} s a step, {plan.tokens_per_s:,.0f} tokens/s" if is_timed else UNTIMED)
    return [*lines, *plan.notes]


def compare_plan(
    config: Config,
    axes: DeviceMesh | None,
    resident_bytes: Mapping[str, int],
    step_s: float,
    tokens_per_s: float,
    peak_bytes: int | None,
) -> Mapping[str, Any]:
    """Return the prediction for rank 0 and its measurements, or the reason why there is no prediction.

    Args:
        axes: as in `plan_run`.
        resident_bytes: bytes between steps, by column.
        peak_bytes: peak of torch's allocator; None if it has no statistics, as on a CPU.
    """
    try:
        plan, is_timed = plan_run(config, axes)
    except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
        return {"problem": str(error).splitlines()[0]}
    first = plan.ranks[0]
    kept = {**first.resident_bytes, **first.elsewhere_bytes}
    return {
        "device": plan.asked.device.name,
        "predicted": {
            "step_s": plan.step_s if is_timed else None,
            "tokens_per_s": plan.tokens_per_s if is_timed else None,
            "resident_bytes": {name: kept.get(name, 0) for name in resident_bytes},
            "peak_bytes": first.allocator_bytes,
            "mapped_bytes": plan.mapped_bytes,
            "idle": list(plan.idle) if is_timed else [],
        },
        "measured": {
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "resident_bytes": dict(resident_bytes),
            "peak_bytes": peak_bytes,
        },
        "notes": [*plan.notes, *([] if is_timed else [UNTIMED])],
    }
