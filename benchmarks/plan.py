"""What is published: each result file with what is measured for it, and about how long that takes.

Owns the choice of settings; nothing here measures. Read `PLAN`.

Note: order
    What matters most comes first, so that a run that is cut short has measured it. The estimates are of a quiet machine
    with two cores.
"""

from dataclasses import dataclass
from typing import Final, final

__all__ = ["PLAN", "Setting"]


@final
@dataclass(frozen=True)
class Setting:
    """A case on some ranks, with some samples a micro-batch, and who takes part.

    Args:
        kind: "step" (time, interleaved), "scaling" (the same, for another table) or "memory".
        case: a name of `CASES`.
        samples: of a micro-batch.
        only: who takes part, patterns of names of `CONTESTANTS`.
        sweep: of whom the fastest, for each library and stage, take part, too; patterns as well.
        warmup: rounds that are not recorded.
        steps: recorded rounds.
        minutes: how long it takes, about.
    """

    kind: str
    case: str
    ranks: int
    samples: int
    only: str = "default"
    sweep: str = ""
    warmup: int = 3
    steps: int = 30
    minutes: int = 0

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.kind}-{self.case}-{self.ranks}x{self.samples}"


_STAGE_3: Final = "*-3-*"
"""The sweeps of peers that shard as stage 3 does."""

_DEFAULTS_3: Final = "zs-3,fsdp1-3,fsdp2-3,ds-3"
"""Where time or memory is short: zeroshard 3 and its peers."""

_LIMIT: Final = "bare,wire,zs-3"
"""What a step is made of, and a step."""

_SETTINGS: Final = (
    Setting("step", "gpt-30m", 2, 1, sweep="sweep", minutes=15),
    Setting("memory", "gpt-30m", 2, 1, "default,sweep", minutes=16),
    Setting("step", "small-tensors", 2, 1, sweep=_STAGE_3, minutes=4),
    Setting("step", "gpt-30m", 2, 4, sweep=_STAGE_3, minutes=34),
    Setting("scaling", "gpt-124m", 2, 1, _LIMIT, minutes=5),
    Setting("step", "gpt-124m", 2, 1, sweep=_STAGE_3, minutes=65),
    Setting("memory", "gpt-124m", 2, 1, minutes=25),
    Setting("step", "experts", 2, 1, sweep=_STAGE_3, minutes=9),
    Setting("memory", "experts", 2, 1, minutes=8),
    Setting("memory", "small-tensors", 2, 1, minutes=7),
    Setting("step", "gpt-30m", 4, 1, sweep=_STAGE_3, minutes=23),
    Setting("memory", "gpt-30m", 4, 1, minutes=13),
    Setting("memory", "gpt-30m", 2, 4, minutes=16),
    Setting("scaling", "gpt-8m", 2, 1, _LIMIT, minutes=1),
    Setting("scaling", "gpt-30m", 2, 1, _LIMIT, minutes=1),
    Setting("scaling", "gpt-60m", 2, 1, _LIMIT, minutes=3),
    Setting("scaling", "gpt-250m", 2, 1, _LIMIT, minutes=9),
    *(Setting("scaling", "gpt-30m", ranks, 1, _LIMIT, minutes=ranks) for ranks in (1, 3, 4)),
    *(Setting("scaling", "gpt-124m", ranks, 1, _LIMIT, minutes=2 * ranks) for ranks in (1, 3, 4)),
    Setting("step", "gpt-30m", 4, 4, f"ddp,{_DEFAULTS_3}", sweep=_STAGE_3, minutes=35),
    Setting("step", "gpt-124m", 4, 1, _DEFAULTS_3, sweep=_STAGE_3, minutes=60),
    Setting("memory", "gpt-124m", 4, 1, f"zs-*,zro,{_DEFAULTS_3}", minutes=27),
    Setting("step", "gpt-124m", 2, 4, f"ddp,{_DEFAULTS_3}", sweep=_STAGE_3, minutes=85),
    Setting("memory", "gpt-124m", 2, 4, f"ddp,zs-*,zro,{_DEFAULTS_3}", minutes=33),
)

PLAN: Final = {setting.name: setting for setting in _SETTINGS}
"""By the name of the file."""
