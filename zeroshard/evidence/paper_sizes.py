"""The ZeRO paper's sizes: model states, communication and activations, without time.

Owns figure 1, tables 1 and 2, and the arithmetic of sections 3 to 8. Every number is counted from the predicted memory
or messages of a step: the buckets of `table/`, the events of a film, the operations of a tape. `paper.py` has the other
tables.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from zeroshard.evidence import paper_data as data
from zeroshard.evidence.paper_data import Run
from zeroshard.evidence.paper_runs import ROWS, SEQUENCE, film_of, model_of, parts_of, row_of
from zeroshard.evidence.paper_tables import Column, Table, Value
from zeroshard.plan.machine.hardware import Span
from zeroshard.plan.named import OPTIMIZERS, PRECISIONS, specs_of, updates_of
from zeroshard.plan.shape.tape import Instruction, Parts
from zeroshard.plan.shape.transformer import Kernels, Workload
from zeroshard.plan.step.clock import sent_of
from zeroshard.table.bytes import predict
from zeroshard.table.wires import Silence

__all__ = ["activations", "communication", "figure_1", "partitioned", "state_bytes", "table_1", "table_2",
           "table_faults"]  # fmt: skip

GB: Final = 10**9
HALF: Final = 2
"""Bytes of an element in half precision."""
NAMES: Final = tuple(ROWS)
DEVICE_GB: Final = 32
TABLE_2_RANKS: Final = 64


@cache
def state_bytes(name: str, numel: int, ranks: int) -> int:
    """Return the bytes of a rank's parameters, gradients and states, without padding.

    Args:
        name: name of a stage in the paper.
        numel: number of parameters of the model.
        ranks: number of data-parallel ranks.
    """
    units = specs_of({"": (("weight", numel),)}, ROWS[name], PRECISIONS["paper"], ranks)
    found = predict(units, [updates_of(units, OPTIMIZERS["adam"])], Silence())
    return found["parameters"] + found["gradients"] + found["states"]


def figure_1() -> Table:
    """Return model states of 7.5 billion parameters on 64 ranks."""
    columns = [Column("states"), Column("paper GB"), Column("predicted GB", ".2f"), Column("equal as printed")]
    rows = list[Sequence[Value]]()
    for name in NAMES:
        found, printed = state_bytes(name, 7_500_000_000, 64) / GB, data.FIGURE_1[name]
        rows.append([name, printed, found, agrees(printed, found)])
    return Table("figure_1", "Figure 1: model states of a device, 7.5B parameters, 64 ranks, K = 12", columns, rows)


def agrees(printed: str, found: float) -> bool:
    """Return whether a number equals a printed number, rounded or truncated to its digits, or within 0.6%."""
    digits = len(printed.partition(".")[2])
    scale = 10**digits
    is_same = float(printed) in (round(found, digits), int(found * scale) / scale)
    return is_same or abs(found / float(printed) - 1) <= 0.006


def table_1() -> Table:
    """Return model states by size and ranks."""
    columns = [Column("parameters B", "g"), Column("ranks")]
    for name in NAMES[1:]:
        columns += [Column(f"{name} paper"), Column(name, ".2f")]
    rows = list[Sequence[Value]]()
    for (billions, ranks), printed in data.TABLE_1.items():
        row: list[Value] = [billions, ranks]
        for name, cell in zip(NAMES[1:], printed, strict=True):
            row += [cell, state_bytes(name, int(billions * GB), ranks) / GB]
        rows.append(row)
    return Table("table_1", "Table 1: GB of model states of a device", columns, rows)


def largest_billions(name: str, ranks: int, tensor: int) -> float:
    """Return the number of parameters, in billions, whose states fill a device."""
    numel = ranks << 20
    return DEVICE_GB / (state_bytes(name, numel, ranks) / numel) * tensor


def table_2() -> Table:
    """Return the largest models whose states fit, by model parallelism."""
    columns = [Column("MP"), Column("devices")]
    for name in NAMES:
        columns += [Column(f"{name} paper"), Column(name, ".2f")]
    columns += [Column("baseline measured", "g"), Column("P_os measured", "g")]
    rows = list[Sequence[Value]]()
    for tensor, printed in data.TABLE_2.items():
        row: list[Value] = [tensor, TABLE_2_RANKS * tensor]
        for name, cell in zip(NAMES, printed, strict=True):
            row += [cell, largest_billions(name, TABLE_2_RANKS, tensor)]
        rows.append([*row, *data.TABLE_2_MEASURED[tensor]])
    note = "512, 1024 and 2048 are printed as 0.5T, 1T and 2T. Measured models needed memory for more than states."
    title = "Table 2: billions of parameters whose states fill 32 GB, 64 data-parallel ranks"
    return Table("table_2", title, columns, rows, [note])


def table_faults() -> list[str]:
    """Return the cells of table 1, and of the theory columns of table 2, that differ from the predictions."""
    cells = [
        (f"table 1, {billions:g}B on {ranks} ranks, {name}", cell, state_bytes(name, int(billions * GB), ranks) / GB)
        for (billions, ranks), printed in data.TABLE_1.items()
        for name, cell in zip(NAMES[1:], printed, strict=True)
    ]
    cells += [
        (f"table 2, MP {tensor}, {name}", cell, largest_billions(name, TABLE_2_RANKS, tensor))
        for tensor, cells_of in data.TABLE_2.items()
        for name, cell in zip(NAMES, cells_of, strict=True)
    ]
    return [f"{what}: {cell}, predicted {found}" for what, cell, found in cells if not agrees(cell, found)]


# -- communication ----------------------------------------------------------------------------------------------------


def communication() -> Table:
    """Return the elements that a rank sends in a step per parameter, counted from the events of a step."""
    columns = [Column("states"), Column("events"), Column("gathered", ".3f"), Column("reduced", ".3f"),
               Column("gathered after the update", ".3f"), Column("sum", ".3f"), Column("paper", "g")]  # fmt: skip
    ranks, rows = 64, list[Sequence[Value]]()
    for name, paper in zip(NAMES, (2, 2, 2, 3), strict=True):
        run = Run(label="", row=name, layers=48, hidden=1600, heads=16, devices=ranks, tensor=1, batch=1,
                  published=0)  # fmt: skip
        ticks = [tick for tick in film_of(run).ticks if tick.nbytes and tick.kind in ("gather", "reduce", "publish")]
        scale = HALF * model_of(run).numel() * (ranks - 1) / ranks
        sums = [sum(t.nbytes for t in ticks if t.kind == kind) / scale for kind in ("gather", "reduce", "publish")]
        rows.append([name, len(ticks), *sums, sum(sums), paper])
    notes = ["Elements for each parameter, with the factor (N - 1) / N taken out, as in section 7: 1.5B on 64 ranks. "
             "Gradients and parameters of padding are counted, too."]  # fmt: skip
    return Table("communication", "Section 7: what a rank sends in a step", columns, rows, notes)


def _sent_bytes(instructions: Iterable[Instruction], kind: str, tensor: int) -> int:
    span = Span(tensor, tensor)
    exchanges = [one.exchange for one in instructions if one.exchange is not None]
    return sum(sent_of(kind, one.nbytes, span) for one in exchanges if one.kind == kind)


def _block(run: Run, kernels: Kernels | None = None) -> Parts:
    load = Workload(batch=run.batch, sequence=SEQUENCE, tensor=run.tensor, kernels=kernels or Kernels())
    return parts_of(model_of(run), load, row_of(run.row))["block"]


def _hundred(row: str, batch: int = 32) -> Run:
    """Return the paper's model of 100B in the configuration of figure 7."""
    return Run(label="100B", row=row, layers=125, hidden=8192, heads=64, devices=400, tensor=16, batch=batch,
               published=0)  # fmt: skip


def partitioned() -> Table:
    """Return the costs and savings of P_a, counted from the instructions of one block."""
    plain, split, moved = (_block(_hundred(row)) for row in ("C3", "C4", "C5"))
    message = 32 * SEQUENCE * 8192 * HALF * 15 / 16
    forward, backward = (_sent_bytes(half, "all-reduce", 16) / message for half in (plain.forward, plain.backward))
    gathered = _sent_bytes((*split.forward, *split.backward), "gather", 16) / message
    copied = [sum(one.nbytes for one in half if one.kind == "copy") for half in (moved.forward, moved.backward)]
    operations = sum(one.cost.flops for half in (plain.forward, plain.backward) for one in half if one.cost)
    columns = [Column("quantity"), Column("paper"), Column("counted", ".6g")]
    rows: list[Sequence[Value]] = [
        ["messages of Megatron-LM, forward", "4", forward],
        ["messages of Megatron-LM, backward with recomputation", "8", backward],
        ["messages of P_a", "1", gathered],
        ["P_a's part of Megatron-LM's", "below 10%", gathered / (forward + backward)],
        ["checkpoint of one layer, GB", "-", plain.saved_bytes / GB],
        ["checkpoint of one layer with P_a, GB", "1/16", split.saved_bytes / GB],
        ["copies of P_a+cpu to and from the host, GB", "twice that", sum(copied) / GB],
        ["operations for each byte that P_a+cpu copies", "at least 10,000", operations / sum(copied)],
    ]
    note = "100B, MP 16, batch 32. A message is batch x sequence x hidden elements; an all-reduce sends it twice."
    return Table("partitioned", "Section 8: what P_a sends and saves, by block", columns, rows, [note])


# -- activations ------------------------------------------------------------------------------------------------------


def activations() -> Table:
    """Return the arithmetic of activations, counted from tapes."""
    unfused = Kernels(attention="plain")
    kept, again = (
        Run(label="1.5B", row=row, layers=48, hidden=1600, heads=16, devices=1, tensor=1, batch=32, published=0)
        for row in ("baseline", "C1")
    )
    load = Workload(batch=32, sequence=SEQUENCE, kernels=unfused)
    whole = parts_of(model_of(kept), load, ROWS["baseline"])["block"]
    recomputed = _block(again, unfused)
    flops = [sum(one.cost.flops for half in (p.forward, p.backward) for one in half if one.cost is not None)
             for p in (whole, recomputed)]  # fmt: skip
    twelve = 12 * 1600 * 32 * SEQUENCE * 48 * HALF
    columns = [Column("quantity"), Column("paper"), Column("counted", ".3g")]
    rows: list[Sequence[Value]] = [
        ["1.5B, batch 32, all activations by the paper's 12 elements, GB", "60", twelve / GB],
        ["the same, what autograd keeps, GB", "60", whole.saved_bytes * 48 / GB],
        ["the same, checkpoints alone, GB", "about 8", recomputed.saved_bytes * 48 / GB],
        ["the same, checkpoints and the block that is recomputed, GB", "about 8",
         (recomputed.saved_bytes * 48 + recomputed.backward_bytes) / GB],
        ["operations of recomputation", "33%", flops[1] / flops[0] - 1],
        ["1.5B, parameters in half precision, GB", "3", 1.5 * HALF],
        ["1.5B, model states, GB", "24", state_bytes("baseline", 1_500_000_000, 1) / GB],
        ["3B, a fused buffer of gradients in fp32, GB", "12", 3.0 * 4],
        ["1T, model states on 1,024 ranks, GB", "16", state_bytes("P_os+g+p", 10**12, 1024) / GB],
    ]  # fmt: skip
    for batch, section, paper, paper_split in ((32, "3.2", "60", "-"), (16, "6.1", "33", "2")):
        plain, split = (_block(_hundred(row, batch)).saved_bytes * 125 / GB for row in ("C3", "C4"))
        rows.append([f"100B, MP 16, batch {batch}, checkpoints, GB (section {section})", paper, plain])
        rows.append([f"the same with P_a, GB (section {section})", paper_split, split])
    note = ("The paper says batch 32 in both sections; 33 GB and 2 GB are those of a batch of 16. Twelve elements "
            "leave out scores and masks of attention, which were kept in 2019.")  # fmt: skip
    return Table("activations", "Sections 3.2, 6.1: activations", columns, rows, [note])
