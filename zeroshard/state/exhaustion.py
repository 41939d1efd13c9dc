"""What is said when memory runs out: how much of it this library holds, by column.

Owns which errors mean that, and the words. Must not know who is told: `watch/watchdog.py` tells the other ranks.
"""

import torch

from zeroshard.table.trace import Memory
from zeroshard.wire.mesh import Mesh

__all__ = ["describe_exhaustion", "is_exhaustion"]

# torch's allocator for the host raises plain RuntimeErrors.
_HOST_WORDS = ("not enough memory", "can't allocate memory")


def is_exhaustion(error: BaseException) -> bool:
    """Tell whether an error says that the device's or the host's memory is used up."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _HOST_WORDS)


def describe_exhaustion(mesh: Mesh, memory: Memory) -> str:
    """Return what this rank holds and has held at most, by column, and beside that what torch holds on its GPU."""
    columns = [f"{key} {now:,} ({memory.peak_bytes[key]:,})" for key, now in memory.resident_bytes.items()]
    text = f"{mesh} held by zeroshard, in bytes now (at most): {', '.join(columns)}."
    if mesh.device.type == "cuda":
        held, most = torch.cuda.memory_allocated(mesh.device), torch.cuda.max_memory_allocated(mesh.device)
        text += f" All tensors on {mesh.device}, activations included: {held:,} ({most:,})."
    return text
