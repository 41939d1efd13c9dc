"""Write the tables of docs/one-gpu.md: what one device trains, from plans.

    python -m tools.one_gpu

Owns the choice of models, places and sizes. Each table stands between `<!-- table: NAME -->` and `<!-- end -->`; what
is there is replaced. The second one follows from the first alone, so that a test compares both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, final

import zeroshard as zs
from benchmarks.machine import put_table
from zeroshard.plan.machine.hardware import Device
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.margins import margin_of
from zeroshard.table.sizes import GIB

__all__ = ["Needs", "best_table", "needs_of", "needs_table", "read_needs"]

PAGE: Final = Path(__file__).parent.parent / "benchmarks" / "results" / "one-gpu.md"
MODELS: Final = (
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "llama-3-70b",
)
PLACES: Final[Mapping[str, zs.Offload | None]] = MappingProxyType(
    {
        "all on the device": None,
        "states on the host": zs.Offload(gradients=0),
        "states and gradients on the host": zs.Offload(),
        "all on the host": zs.Offload(parameters=1.0),
        "states in files": zs.Offload(gradients=0, to="/scratch"),
        "states in files, gradients on the host": zs.Offload(to="/scratch"),
        "states in files, all else on the host": zs.Offload(parameters=1.0, to="/scratch", parameters_to="host"),
        "states and parameters in files": zs.Offload(parameters=1.0, to="/scratch"),
    }
)
SIZES: Final = MappingProxyType({24: DEVICES["rtx4090"], 48: DEVICES["l40s"], 80: DEVICES["h100-80"]})
"""Devices by their memory in GB."""
HOSTS: Final = (64, 128, 512)
"""Memory of the host in GiB."""
MICRO_BATCHES: Final = 16
TENTH: Final = 10


@final
@dataclass(frozen=True)
class Needs:
    """What a model takes with its states in some place.

    Args:
        device_gib: of the device, with the error of nine plans in ten on top, and the context.
        host_gib, file_gib: of the host and of a disk.
        step_s: of 16 micro-batches of 2,048 tokens on each of `SIZES`.
    """

    model: str
    place: str
    device_gib: float
    host_gib: float
    file_gib: float
    step_s: tuple[float, ...]

    def row(self) -> str:
        """Return the line of the table."""
        times = [f"{one:.1f}" for one in self.step_s]
        numbers = [f"{one:.1f}" for one in (self.device_gib, self.host_gib, self.file_gib)]
        return f"| {' | '.join([self.model, self.place, *numbers, *times])} |"


def plan_of(model: str, place: str, device: Device) -> zs.Plan:
    """Return the plan of a model on one device, whatever the host holds."""
    return zs.plan(
        model,
        world_size=1,
        device=device,
        seq=2048,
        stage=3,
        activations="recompute",
        micro_batches=MICRO_BATCHES,
        offload=PLACES[place],
    )


def needs_of(model: str, place: str) -> Needs:
    """Plan a model on each device."""
    plans = [plan_of(model, place, device) for device in SIZES.values()]
    one = plans[-1]
    device_bytes = one.reserved_bytes * (1 + margin_of(one.asked).nine_tenths) + one.outside_bytes
    numbers = device_bytes / GIB, one.host_bytes / GIB, one.file_bytes / GIB
    # As the page has them: up, so that what fits by these numbers does fit.
    return Needs(model, place, *(_up(number) for number in numbers), tuple(round(plan.step_s, 1) for plan in plans))


def _up(number: float) -> float:
    return -(-number * TENTH // 1) / TENTH


HEAD: Final = (
    "| model | place | device, GiB | host, GiB | disk, GiB | s a step, 24 GB | 48 GB | 80 GB |\n"
    + "|---|---|"
    + "---|" * 6
)


def needs_table(needs: Iterable[Needs]) -> str:
    """Return the first table."""
    return "\n".join([HEAD, *(one.row() for one in needs)])


def read_needs(page: str) -> list[Needs]:
    """Return what the first table of a page says."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[1] in PLACES:
            numbers = [float(cell) for cell in cells[2:]]
            found.append(Needs(cells[0], cells[1], *numbers[:3], tuple(numbers[3:])))
    return found


def best_table(needs: Sequence[Needs]) -> str:
    """Return the second table: the largest model that fits, where a disk may be used and where not."""
    heads = [f"{host} GiB of the host{disk}" for host in HOSTS for disk in ("", ", and a disk")]
    lines = [f"| device | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for place, (gb, device) in enumerate(SIZES.items()):
        cells = [_best(needs, place, device, host, has_disk) for host in HOSTS for has_disk in (False, True)]
        lines.append(f"| {gb} GB ({device.name}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(needs: Sequence[Needs], place: int, device: Device, host_gib: int, has_disk: bool) -> str:
    """Return the largest model that fits, in the place where a step takes least."""
    fitting = [
        one
        for one in needs
        if one.device_gib * GIB <= device.memory_bytes and one.host_gib <= host_gib and (has_disk or not one.file_gib)
    ]
    if not fitting:
        return "none"
    largest = max(MODELS.index(one.model) for one in fitting)
    best = min((one for one in fitting if one.model == MODELS[largest]), key=lambda one: one.step_s[place])
    tokens_per_s = MICRO_BATCHES * 2048 / best.step_s[place]
    return f"{best.model}, {best.place}: {tokens_per_s:,.0f} tokens/s"


def main() -> None:
    """Write both tables."""
    needs = [needs_of(model, place) for model in MODELS for place in PLACES]
    text = put_table(PAGE.read_text(), "needs", needs_table(needs))
    PAGE.write_text(put_table(text, "best", best_table(needs)))


if __name__ == "__main__":
    main()
