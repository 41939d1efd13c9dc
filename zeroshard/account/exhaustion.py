"""The message when memory runs out: the memory that this library holds, by column.

Owns the recognition of such errors, and the text. It must not know the recipients: `watch/watchdog.py` informs the
other ranks.
"""

import torch

from zeroshard.table.trace import Memory
from zeroshard.wire.mesh import Mesh

__all__ = ["describe_exhaustion", "is_exhaustion"]

# torch's host allocator raises plain RuntimeErrors.
_HOST_WORDS = ("not enough memory", "can't allocate memory")


def is_exhaustion(error: BaseException) -> bool:
    """Return whether an error means that memory of the device or the host is exhausted."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _HOST_WORDS)


def describe_exhaustion(mesh: Mesh, memory: Memory) -> str:
    """Return this rank's current and peak bytes by column, and torch's bytes on the rank's GPU."""
    columns = [f"{key} {now:,} ({memory.peak_bytes[key]:,})" for key, now in memory.resident_bytes.items()]
    text = f"{mesh} held by zeroshard, in bytes now (at most): {', '.join(columns)}."
    if mesh.device.type == "cuda":
        held, most = torch.cuda.memory_allocated(mesh.device), torch.cuda.max_memory_allocated(mesh.device)
        text += f" All tensors on {mesh.device}, activations included: {held:,} ({most:,})."
    return text
