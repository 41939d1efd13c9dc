"""The values of "auto" in DeepSpeed's JSON, which TrainingArguments of Transformers give.

Owns which argument belongs to which key, as in `transformers/integrations/deepspeed.py` of 5.23. Needs no DeepSpeed,
and no Transformers.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

__all__ = ["filled"]


def _steps(args: Any) -> int | None:
    return args.max_steps if args.max_steps > 0 else None


def _warmup(args: Any) -> int | None:
    steps = _steps(args)
    return None if steps is None else args.get_warmup_steps(steps)


VALUES: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "train_micro_batch_size_per_gpu": lambda args: args.per_device_train_batch_size,
        "gradient_accumulation_steps": lambda args: args.gradient_accumulation_steps,
        "gradient_clipping": lambda args: args.max_grad_norm,
        "optimizer.params.lr": lambda args: args.learning_rate,
        "optimizer.params.betas": lambda args: [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": lambda args: args.adam_epsilon,
        "optimizer.params.weight_decay": lambda args: args.weight_decay,
        "scheduler.params.warmup_max_lr": lambda args: args.learning_rate,
        "fp16.enabled": lambda args: args.fp16,
        "bf16.enabled": lambda args: args.bf16,
        "bfloat16.enabled": lambda args: args.bf16,
    }
)
"""What must be equal in both; None where an argument leaves it open."""
ALONE: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "scheduler.params.warmup_min_lr": lambda args: 0,
        "scheduler.params.warmup_num_steps": _warmup,
        "scheduler.params.total_num_steps": _steps,
    }
)
"""What fills "auto" alone."""


def filled(config: Mapping[str, Any], args: Any, ranks: int) -> Mapping[str, Any]:
    """Return a configuration with values in the place of "auto", where arguments have them, and with their batches.

    Raises:
        ValueError: a value is not that of the arguments; all are listed.
    """
    batch = ranks * args.per_device_train_batch_size * args.gradient_accumulation_steps
    equal = {key: value(args) for key, value in VALUES.items()} | {"train_batch_size": batch}
    known, wrong = equal | {key: value(args) for key, value in ALONE.items()}, list[str]()

    def fill(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found = dict[str, Any]()
        for name, value in section.items():
            key = prefix + str(name)
            if isinstance(value, Mapping):
                found[name] = fill(value, f"{key}.")
                continue
            found[name] = known[key] if value == "auto" and known.get(key) is not None else value
            if value != "auto" and key in equal and (list(value) if isinstance(value, tuple) else value) != equal[key]:
                wrong.append(
                    f"{key} is {value!r}, and the arguments say {equal[key]!r}: write 'auto', or the same in both"
                )
        return found

    result = fill({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"} | dict(config))
    if wrong:
        raise ValueError(
            "DeepSpeed's configuration, with its defaults, is not that of TrainingArguments:\n  " + "\n  ".join(wrong)
        )
    return result
