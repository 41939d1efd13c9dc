"""zeroshard: train PyTorch models that do not fit, by ZeRO, in one call.

`zs.shard(model, optimizer)` replaces the copies that data parallelism keeps by shards; the training loop stays as it
is. Start with `shard` and `Zero`; `docs/design.md` explains the whole.
"""

from zeroshard.checkpoint.load import Loaded
from zeroshard.checkpoint.verify import latest
from zeroshard.core.comm import gather_across_ranks, mean_across_ranks
from zeroshard.core.errors import CheckpointError, RankMismatchError
from zeroshard.core.mesh import Mesh
from zeroshard.core.precision import Precision
from zeroshard.core.residency import Replicated, Residency, Sharded
from zeroshard.core.trace import Event, Memory, Trace, Traffic
from zeroshard.core.version import VERSION as __version__
from zeroshard.handle import Zero, shard
from zeroshard.report.profile import Profile
from zeroshard.state.average import Average
from zeroshard.state.start import init

__all__ = [
    "Average",
    "CheckpointError",
    "Event",
    "Loaded",
    "Memory",
    "Mesh",
    "Precision",
    "Profile",
    "RankMismatchError",
    "Replicated",
    "Residency",
    "Sharded",
    "Trace",
    "Traffic",
    "Zero",
    "__version__",
    "gather_across_ranks",
    "init",
    "latest",
    "mean_across_ranks",
    "shard",
]
