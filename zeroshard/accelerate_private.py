"""Names that Accelerate does not publish: what makes it take sharded models and optimizers, and what it was asked for.

Owns these names; `tests/integrations/test_accelerate.py` holds them against the installed release. It must not know
engines. Imports nothing of Accelerate: where nobody has imported it, nobody has asked it for anything.

Note: the mark
    `Accelerator.prepare` returns a model with the mark unchanged: without DistributedDataParallel, but also without its
    autocast and its compilation, which `setup/autocast.py` therefore looks at. A model gets the mark where there is a
    process group. One process without a group gets none: Accelerate wraps nothing in DistributedDataParallel there, and
    its autocast and its compilation take effect. A release that does not know the mark wraps the model, which raises:
    before 1.14 optimizers, loaders and schedules had it, but not models.
"""

import functools
import sys
import warnings
from collections.abc import Callable, MutableMapping
from types import FrameType
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from zeroshard.torch_private import is_called_by_compiled, is_compiled

__all__ = ["AUTOCAST", "NO_SYNC", "PREPARED", "asked", "is_placing", "mark", "refuse_plugins", "warn_if_uncompiled"]

PREPARED: Final = "_is_accelerate_prepared"
"""The attribute of what `Accelerator.prepare` returns as it is."""
NO_SYNC: Final = "no_sync"
"""The method of a model that `Accelerator.no_sync` and `Accelerator.accumulate` enter."""
AUTOCAST: Final = "_original_forward"
"""The attribute of a model whose forward Accelerate runs under autocast."""
PLUGINS: Final = frozenset(["DEEPSPEED", "FSDP", "MEGATRON_LM"])
"""Values of `Accelerator.distributed_type` with which Accelerate shards models itself."""
_STATE: Final = "accelerate.state"
_WRAPPER: Final = "accelerate.optimizer"
_COPIED: Final = "__getstate__"
"""What copies and pickles of an object are made of."""


def mark(
    model: nn.Module, no_sync: Callable[..., Any], put: Callable[[MutableMapping[str, Any], str, Any], None]
) -> None:
    """Let `Accelerator.prepare` return a sharded model unchanged, and `Accelerator.no_sync` delay its reductions.

    Copies and pickles of the model have neither: they are plain models, which Accelerate must wrap.

    Args:
        no_sync: `zero.no_sync` of the model. A method of the user's with that name stays.
        put: replaces a value of a mapping until `zero.detach()`.
    """
    if dist.is_available() and dist.is_initialized():
        put(vars(model), PREPARED, True)
    if not hasattr(model, NO_SYNC):
        put(vars(model), NO_SYNC, no_sync)
    put(vars(model), _COPIED, functools.partial(_plain_state, model))


def _plain_state(model: nn.Module) -> Any:
    """Return what a copy of a marked model is made of."""
    state = type(model).__getstate__(model)
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name not in (PREPARED, NO_SYNC, _COPIED)}


def asked(name: str) -> Any:
    """Return a value of the Accelerator of this process, such as "_mixed_precision"; None without one."""
    state = getattr(sys.modules.get(_STATE), "AcceleratorState", None)
    return getattr(state, "_shared_state", {}).get(name)


def is_placing(caller: FrameType) -> bool:
    """Return whether the caller of `state_dict` or `load_state_dict` is the constructor of Accelerate's optimizer.

    It copies states to its device; those of shards are where they must be.
    """
    return caller.f_code.co_name == "__init__" and caller.f_globals.get("__name__") == _WRAPPER


def refuse_plugins() -> None:
    """Raise if this process's Accelerator shards models by itself.

    Raises:
        ValueError: it has a plugin for DeepSpeed, FSDP or Megatron-LM.
    """
    kind = asked("distributed_type")
    if (name := getattr(kind, "value", kind)) in PLUGINS:
        raise ValueError(
            f"zs.shard() of a model for an Accelerator with distributed_type {name}, which shards, too: leave the "
            "plugin out of Accelerator(), and choose multi-GPU in `accelerate config`. zs.shard(stage=, offload=, "
            "precision=) has what the plugin sets."
        )


def warn_if_uncompiled(model: nn.Module) -> None:
    """Warn in a model's forward if this process's Accelerator was asked to compile models, and the model is not."""
    backend = getattr(getattr(asked("dynamo_plugin"), "backend", None), "value", "NO")
    if backend != "NO" and not is_compiled(model) and not is_called_by_compiled():
        warnings.warn(
            f"Accelerate has dynamo_backend={backend!r}, but does not compile a sharded model on several ranks. Call "
            "model.compile() after zs.shard().",
            stacklevel=2,
        )
