"""zeroshard: train PyTorch models that do not fit, by ZeRO, in one call.

`zs.shard(model, optimizer)` replaces the copies that data parallelism keeps with shards; the training loop does not
change. Start with `shard` and `Zero`; `docs/design.md` explains the design. Public names are imported on first use,
because the planner reads `zeroshard.table` without torch.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from zeroshard import optim
    from zeroshard.checkpoint.load import Loaded
    from zeroshard.checkpoint.verify import latest, list_checkpoints
    from zeroshard.core.version import VERSION as __version__
    from zeroshard.describe.offload import Offload
    from zeroshard.describe.precision import Precision
    from zeroshard.handle import Zero
    from zeroshard.join.start import init
    from zeroshard.loader import Resumable
    from zeroshard.outer.options import Outer
    from zeroshard.pipes import Pipeline, pipeline
    from zeroshard.plan.machine.hardware import Device
    from zeroshard.plan.planning import make_plan as plan
    from zeroshard.plan.result import Plan
    from zeroshard.plan.search import search
    from zeroshard.plan.shape.shapes import Transformer
    from zeroshard.report.profile import Profile
    from zeroshard.sharding import shard
    from zeroshard.table.activations import Activations, Compressed, Offloaded, Partitioned, Recomputed
    from zeroshard.table.cells import Replicated, Residency, Sharded
    from zeroshard.table.errors import CheckpointError, RankMismatchError
    from zeroshard.table.settings import Settings
    from zeroshard.table.trace import Event, Memory, Trace, Traffic
    from zeroshard.whole.average import Average
    from zeroshard.wire.comm import gather_across_ranks, mean_across_ranks
    from zeroshard.wire.mesh import Mesh

    from_deepspeed: Callable[..., Any]
    """Of `integrations/deepspeed.py`, which stands above this module."""

__all__ = [
    "Activations",
    "Average",
    "CheckpointError",
    "Compressed",
    "Device",
    "Event",
    "Loaded",
    "Memory",
    "Mesh",
    "Offload",
    "Offloaded",
    "Outer",
    "Partitioned",
    "Pipeline",
    "Plan",
    "Precision",
    "Profile",
    "RankMismatchError",
    "Recomputed",
    "Replicated",
    "Residency",
    "Resumable",
    "Settings",
    "Sharded",
    "Trace",
    "Traffic",
    "Transformer",
    "Zero",
    "__version__",
    "gather_across_ranks",
    "init",
    "latest",
    "list_checkpoints",
    "mean_across_ranks",
    "optim",
    "pipeline",
    "plan",
    "search",
    "shard",
]

_MODULES = MappingProxyType(
    {
        "Activations": "zeroshard.table.activations",
        "Average": "zeroshard.whole.average",
        "CheckpointError": "zeroshard.table.errors",
        "Compressed": "zeroshard.table.activations",
        "Device": "zeroshard.plan.machine.hardware",
        "Event": "zeroshard.table.trace",
        "Loaded": "zeroshard.checkpoint.load",
        "Memory": "zeroshard.table.trace",
        "Mesh": "zeroshard.wire.mesh",
        "Offload": "zeroshard.describe.offload",
        "Offloaded": "zeroshard.table.activations",
        "Outer": "zeroshard.outer.options",
        "Partitioned": "zeroshard.table.activations",
        "Pipeline": "zeroshard.pipes",
        "Plan": "zeroshard.plan.result",
        "Precision": "zeroshard.describe.precision",
        "Profile": "zeroshard.report.profile",
        "RankMismatchError": "zeroshard.table.errors",
        "Recomputed": "zeroshard.table.activations",
        "Replicated": "zeroshard.table.cells",
        "Residency": "zeroshard.table.cells",
        "Resumable": "zeroshard.loader",
        "Settings": "zeroshard.table.settings",
        "Sharded": "zeroshard.table.cells",
        "Trace": "zeroshard.table.trace",
        "Traffic": "zeroshard.table.trace",
        "Transformer": "zeroshard.plan.shape.shapes",
        "Zero": "zeroshard.handle",
        "gather_across_ranks": "zeroshard.wire.comm",
        "init": "zeroshard.join.start",
        "latest": "zeroshard.checkpoint.verify",
        "list_checkpoints": "zeroshard.checkpoint.verify",
        "mean_across_ranks": "zeroshard.wire.comm",
        "optim": "zeroshard.optim",
        "pipeline": "zeroshard.pipes",
        "plan": "zeroshard.plan",
        "search": "zeroshard.plan.search",
        "shard": "zeroshard.sharding",
    }
)


if not TYPE_CHECKING:  # for a type checker, names that the package does not have are mistakes

    def __getattr__(name: str) -> Any:
        """Import a public name from the module that defines it."""
        if name == "__version__":
            value = importlib.import_module("zeroshard.core.version").VERSION
        elif name == "integrations":  # not in `__all__`: it needs other libraries, and stands above this module
            value = importlib.import_module("zeroshard.integrations")
        elif name == "from_deepspeed":
            value = importlib.import_module("zeroshard.integrations.deepspeed").from_deepspeed
        elif name in _MODULES:
            module = importlib.import_module(_MODULES[name])
            value = getattr(module, name, module)  # `plan` is a package that can be called
        else:
            functions = importlib.import_module("zeroshard.peers").FUNCTIONS
            hint = f". Write {functions[name]}" if name in functions else ""
            raise AttributeError(f"module 'zeroshard' has no attribute {name!r}{hint}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
