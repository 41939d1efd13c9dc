"""DeepSpeed's JSON beside TrainingArguments of Transformers, which give the values of "auto".

Owns which argument belongs to which key, as in `transformers/integrations/deepspeed.py` of 5.23, and that a Trainer,
which makes its optimizer and schedule of the arguments, makes those of the configuration. Needs no DeepSpeed, and
imports Transformers where an optimizer is compared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from zeroshard.integrations.deepspeed_optimizers import SCHEDULES

__all__ = ["check_trainer", "filled"]


def _steps(args: Any) -> int | None:
    return args.max_steps if args.max_steps > 0 else None


def _warmup(args: Any) -> int | None:
    steps = _steps(args)
    return None if steps is None and 0 < args.warmup_steps < 1 else args.get_warmup_steps(steps or 0)


VALUES: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "train_micro_batch_size_per_gpu": lambda args: args.per_device_train_batch_size,
        "gradient_accumulation_steps": lambda args: args.gradient_accumulation_steps,
        "gradient_clipping": lambda args: args.max_grad_norm,
        "optimizer.params.lr": lambda args: args.learning_rate,
        "optimizer.params.betas": lambda args: [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": lambda args: args.adam_epsilon,
        "optimizer.params.weight_decay": lambda args: args.weight_decay,
        "scheduler.params.warmup_min_lr": lambda args: 0,
        "scheduler.params.warmup_max_lr": lambda args: args.learning_rate,
        "scheduler.params.warmup_num_steps": _warmup,
        "scheduler.params.warmup_type": lambda args: "linear",
        "scheduler.params.total_num_steps": _steps,
        "fp16.enabled": lambda args: args.fp16,
        "bf16.enabled": lambda args: args.bf16,
        "bfloat16.enabled": lambda args: args.bf16,
    }
)
"""What must be equal in both; None where an argument leaves it open."""
ALIKE: Final = MappingProxyType({"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear"})
"""Schedules of the Trainer that Transformers' documentation gives for DeepSpeed's."""
KERNELS: Final = frozenset(["params", "foreach", "fused"])


def filled(config: Mapping[str, Any], args: Any, ranks: int) -> Mapping[str, Any]:
    """Return a configuration with values in the place of "auto", where arguments have them, and with their batches.

    Raises:
        ValueError: a value is not that of the arguments; all are listed.
    """
    batch = ranks * args.per_device_train_batch_size * args.gradient_accumulation_steps
    equal = {key: value(args) for key, value in VALUES.items()} | {"train_batch_size": batch}
    wrong = list[str]()

    def fill(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found = dict[str, Any]()
        for name, value in section.items():
            key = prefix + str(name)
            if isinstance(value, Mapping):
                found[name] = fill(value, f"{key}.")
                continue
            value, said = list(value) if isinstance(value, tuple) else value, equal.get(key)
            found[name] = said if value == "auto" and said is not None else value
            if said is not None and value not in ("auto", said):
                wrong.append(f"{key} is {value!r}, and the arguments say {said!r}: write 'auto', or the same in both")
        return found

    result = fill({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", **config})
    if wrong:
        raise ValueError(
            "DeepSpeed's configuration, with its defaults, is not that of TrainingArguments:\n  " + "\n  ".join(wrong)
        )
    return result


def check_trainer(
    make: Callable[[Iterable[Any]], torch.optim.Optimizer] | None,
    schedule: str | None,
    given: Mapping[str, Any],
    args: Any,
) -> None:
    """Raise unless the optimizer and the schedule of a Trainer with these arguments are those of a configuration.

    Args:
        make: makes the configuration's optimizer; None if it has none.
        schedule, given: "type" and "params" of its schedule; None if it has none.

    Raises:
        ValueError: the arguments make others; all differences are listed.
    """
    wrong = [] if make is None else [*_other_optimizer(make, args)]
    wrong += [] if schedule is None else [*_other_schedule(schedule, given, args)]
    if wrong:
        raise ValueError("A Trainer makes its optimizer and schedule of TrainingArguments:\n  " + "\n  ".join(wrong))


def _other_optimizer(make: Callable[[Iterable[Any]], torch.optim.Optimizer], args: Any) -> Iterator[str]:
    from transformers import Trainer

    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    probe = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    mine, name = make([probe]), getattr(args.optim, "value", args.optim)
    if kind is not type(mine):
        yield (
            f"the file has {type(mine).__name__}, and optim={name!r} makes {kind.__name__}: write the optim= of the "
            "former, or leave the section out"
        )
        return
    theirs = kind([{"params": [probe], "weight_decay": args.weight_decay}], **options).param_groups[0]
    for key, value in mine.param_groups[0].items():
        value, said = (tuple(one) if isinstance(one, list) else one for one in (value, theirs[key]))
        if key not in KERNELS and value != said:
            yield f"{kind.__name__} of the file has {key}={value!r}, and that of the arguments {said!r}"


def _other_schedule(schedule: str, given: Mapping[str, Any], args: Any) -> Iterator[str]:
    name, alike = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type), ALIKE.get(schedule)
    if name != alike:
        remedy = "" if alike is None else f"write lr_scheduler_type={alike!r}, or "
        yield f"the file has {schedule}, and lr_scheduler_type={name!r} is another: {remedy}leave the section out"
        return
    for key, default in SCHEDULES[schedule].items():
        said = VALUES[f"scheduler.params.{key}"](args)
        if key not in given and isinstance(default, int | float) and said not in (None, default):
            yield f"{schedule} without {key} has {default}, and the arguments say {said}: write {key}: 'auto'"
