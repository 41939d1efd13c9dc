"""One model trained by several systems, in one table.

Owns the table. It must not know how a plan is made (`planning.py`). Needs no torch.
"""

from collections.abc import Sequence
from dataclasses import replace

from zeroshard.plan.numbers import seconds
from zeroshard.plan.result import Plan
from zeroshard.table.activations import Activations
from zeroshard.table.sizes import GIB, aligned
from zeroshard.table.stages import name_of_row

__all__ = ["table_of"]


def table_of(plans: Sequence[Plan]) -> str:
    """Return plans of one model as a table, one system a line, and the notes of all.

    The parts of the device's memory are those of the fullest rank; speed is that of one rank.
    """
    rows = [
        ("system", "row", "activations", "GiB at the peak", "GiB in total", "", "time of a step", "tokens/s a rank")
    ]
    for plan in plans:
        asked, each = plan.asked, plan.tokens_per_s / plan.asked.world_size
        sizes = f"{plan.peak_bytes / GIB:.2f}", f"{plan.total_bytes / GIB:.2f}", plan.verdict
        row = name_of_row(replace(asked.row, activations=Activations())) + ", offload" * (asked.offload is not None)
        shown = row, str(asked.row.activations)
        rows.append((asked.system.name, *shown, *sizes, seconds(plan.step_s), f"{each:,.0f}"))
    first = plans[0]
    about = f"{first.model}: {first.asked.world_size} ranks, device {first.asked.device.name}, micro-batch "
    about += f"{first.asked.batch} of {first.asked.sequence} tokens, {first.asked.micro_batches} a step"
    notes = dict.fromkeys(f"note: {plan.asked.system.name}: {note}" for plan in plans for note in plan.notes)
    return "\n".join([about, "", *aligned(rows), *notes])
