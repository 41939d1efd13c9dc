"""Trainers of other libraries that shard by themselves: `zs.integrations.transformers.Trainer`.

Owns the import of each module on its first use, since each needs another library.
"""

import importlib
from types import ModuleType

__all__ = ["accelerate", "deepspeed", "lightning", "transformers"]


def __getattr__(name: str) -> ModuleType:
    """Import the module for a library."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return importlib.import_module(f"{__name__}.{name}")
