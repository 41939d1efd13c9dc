"""The ZeRO paper, reproduced: its tables and figures, with published and predicted values.

Owns the comparison, and the targets of a reproduction. `paper_data.py` has the published values, `paper_runs.py`
predicts runs, and `paper_sizes.py` counts sizes. Needs no torch; docs/paper.md explains each table.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Final, final

from zeroshard.evidence import paper_data as data
from zeroshard.evidence.paper_data import Largest, Run
from zeroshard.evidence.paper_runs import AS_SAID, BUDGET_BYTES, Assumptions, model_of, outcome_of, software_part
from zeroshard.evidence.paper_sizes import (
    activations,
    communication,
    figure_1,
    partitioned,
    table_1,
    table_2,
    table_faults,
)
from zeroshard.evidence.paper_tables import Column, Table, Target, Value, wrapped

__all__ = ["Reproduction", "TITLES", "reproduce"]

GB: Final = 10**9
ROOFLINE: Final = Assumptions("kernels at the roofline", is_slowed=False)
VARIANTS: Final = (
    AS_SAID,
    ROOFLINE,
    Assumptions("reductions beside kernels", reduces_alone=False),
    Assumptions("latencies of the preset", has_preset_latencies=True),
)
MARK: Final = "Published values were read off the paper's chart, to about 2%."
TITLES: Final = (
    "figure_1", "table_1", "table_2", "communication", "activations", "partitioned", "figure_2", "figure_3",
    "figure_4", "figure_6", "figure_7", "figure_8", "assumptions",
)  # fmt: skip
"""Names of the tables, in order."""


@final
@dataclass(frozen=True)
class Reproduction:
    """All tables, and the targets.

    ```python
    from zeroshard.evidence.paper import Reproduction
    from zeroshard.evidence.paper_sizes import table_1

    found = Reproduction({"table_1": table_1()}, ())  # reproduce() makes all, in some seconds
    print(found.tables["table_1"].render())
    ```
    """

    tables: Mapping[str, Table]
    targets: tuple[Target, ...]

    def render(self) -> str:
        """Return everything as plain text."""
        slips = "\n".join(["Where the paper contradicts itself", *(wrapped(slip) for slip in data.SLIPS)])
        parts = [*(table.render() for table in self.tables.values()), self.target_table().render()]
        return "\n\n".join([*parts, slips])

    def target_table(self) -> Table:
        """Return the targets as a table."""
        columns = [Column("target"), Column("wanted"), Column("reached"), Column("met")]
        rows: list[Sequence[Value]] = [[one.what, one.wanted, one.reached, one.is_met] for one in self.targets]
        return Table("targets", "Targets", columns, rows)

    def as_mapping(self) -> Mapping[str, object]:
        """Return everything for JSON."""
        return {
            "tables": {name: table.as_mapping() for name, table in self.tables.items()},
            "targets": [asdict(one) for one in self.targets],
            "slips": list(data.SLIPS),
        }

    def json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.as_mapping(), indent=2)


def reproduce() -> Reproduction:
    """Predict everything; some seconds on one core."""
    makers = (figure_1, table_1, table_2, communication, activations, partitioned, figure_2, figure_3, figure_4,
              figure_6, figure_7, figure_8, assumptions)  # fmt: skip
    tables = {table.name: table for table in (make() for make in makers)}
    return Reproduction(tables, targets())


def teraflops(run: Run, given: Assumptions = AS_SAID) -> float:
    """Return the predicted teraFLOPS per device."""
    return outcome_of(run, given).teraflops


def figure_2() -> Table:
    """Return throughput by model size, and its ratio to the baseline."""
    columns = [Column("model"), Column("MP"), Column("batch"), Column("paper", ".1f"),
               Column("predicted", ".1f"), Column("error", "+.0%"), Column("base MP"), Column("base paper", ".1f"),
               Column("base", ".1f"), Column("base error", "+.0%"), Column("ratio paper", ".1f"),
               Column("ratio", ".1f"), Column("ratio error", "+.0%"),
               Column("peak GB", ".1f")]  # fmt: skip
    rows = list[Sequence[Value]]()
    for pair in data.FIGURE_2:
        ours, theirs = teraflops(pair.zero), teraflops(pair.baseline)
        published, ratio = pair.zero.published / pair.baseline.published, ours / theirs
        rows.append(
            [pair.zero.label, pair.zero.tensor, pair.zero.batch, pair.zero.published, ours,
             ours / pair.zero.published - 1, pair.baseline.tensor, pair.baseline.published, theirs,
             theirs / pair.baseline.published - 1, published, ratio, ratio / published - 1,
             outcome_of(pair.zero).peak_bytes / GB]
        )  # fmt: skip
    title = "Figure 2: teraFLOPS of each device by model size, 400 devices, against Megatron-LM"
    return Table("figure_2", title, columns, rows, [MARK])


def ratio_errors(given: Assumptions = AS_SAID) -> dict[str, float]:
    """Return the error of the ratio to the baseline, by size."""
    found = {}
    for pair in data.FIGURE_2:
        published = pair.zero.published / pair.baseline.published
        found[pair.zero.label] = teraflops(pair.zero, given) / teraflops(pair.baseline, given) / published - 1
    return found


def figure_3() -> Table:
    """Return throughput by number of devices."""
    columns = [Column("devices"), Column("batch"), Column("paper", ".1f"), Column("predicted", ".1f"),
               Column("error", "+.0%"), Column("PFLOPS paper", ".2f"), Column("PFLOPS", ".2f"),
               Column("states GB", ".1f"), Column("peak GB", ".1f"), Column("at batch 48", ".1f")]  # fmt: skip
    rows = list[Sequence[Value]]()
    for run in data.FIGURE_3:
        found = outcome_of(run)
        rows.append(
            [run.devices, run.batch, run.published, found.teraflops, found.teraflops / run.published - 1,
             run.published * run.devices / 1000, found.teraflops * run.devices / 1000, found.state_bytes / GB,
             found.peak_bytes / GB, teraflops(replace(run, batch=48))]
        )  # fmt: skip
    note = "The last column is predicted for a batch of 48 everywhere, whether or not it fits."
    title = "Figure 3: teraFLOPS of each device with 60B parameters, by number of devices"
    return Table("figure_3", title, columns, rows, [MARK, note])


def is_zero(run: Run) -> bool:
    """Return whether a run uses ZeRO and is not a baseline."""
    return run.row != "baseline"


def mean_error(given: Assumptions = AS_SAID) -> float:
    """Return the error of the mean of figure 4's ZeRO sizes."""
    return sum(teraflops(run, given) for run in zero_sizes()) / sum(run.published for run in zero_sizes()) - 1


def zero_sizes() -> list[Run]:
    """Return the ZeRO runs of figure 4."""
    return [run for run in data.FIGURE_4 if is_zero(run)]


def figure_4() -> Table:
    """Return throughput without model parallelism."""
    columns = [Column("model"), Column("batch"), Column("paper", ".1f"), Column("predicted", ".1f"),
               Column("error", "+.0%"), Column("peak GB", ".1f"), Column("roofline alone", ".1f")]  # fmt: skip
    rows = list[Sequence[Value]]()
    means = [0.0, 0.0, 0.0]
    for run in data.FIGURE_4:
        found = outcome_of(run)
        values = run.published, found.teraflops, teraflops(run, ROOFLINE)
        means = [a + b * is_zero(run) / len(zero_sizes()) for a, b in zip(means, values, strict=True)]
        rows.append([run.label, run.batch, *values[:2], values[1] / values[0] - 1, found.peak_bytes / GB, values[2]])
    rows.append(["mean of the 9 ZeRO sizes", None, *means[:2], means[1] / means[0] - 1, None, means[2]])
    note = (
        "The last column is predicted as if kernels reached the roofline; "
        f"they reach {software_part():.0%} of it, as Megatron-LM's single-device baseline does."
    )
    title = "Figure 4: teraFLOPS of each device with data parallelism alone, 128 devices"
    return Table("figure_4", title, columns, rows, [MARK, note])


@cache
def largest_layers(case: Largest) -> int:
    """Return the maximum number of layers with which a configuration of figure 6 fits."""

    def peak_bytes(layers: int) -> int:
        run = Run(label="", row=case.row, layers=layers, hidden=case.hidden, heads=case.heads, devices=400, tensor=16,
                  batch=16, published=0)  # fmt: skip
        return outcome_of(run).peak_bytes

    # Memory is linear in the number of layers, so two sizes give a good estimate of the limit.
    few, many = peak_bytes(20), peak_bytes(40)
    layers = 20 + int((BUDGET_BYTES - few) / (many - few) * 20)
    while peak_bytes(layers) > BUDGET_BYTES:
        layers -= 1
    while peak_bytes(layers + 1) <= BUDGET_BYTES:
        layers += 1
    return layers


def largest_parameters(case: Largest) -> float:
    """Return the parameters of the largest model that fits, in billions."""
    run = Run(label="", row=case.row, layers=largest_layers(case), hidden=case.hidden, heads=case.heads, devices=400,
              tensor=16, batch=16, published=0)  # fmt: skip
    return model_of(run).numel() / 1e9


def figure_6() -> Table:
    """Return the largest model by configuration."""
    columns = [Column("configuration"), Column("paper B", ".0f"), Column("predicted B", ".1f"),
               Column("error", "+.0%"), Column("layers"), Column("hidden")]  # fmt: skip
    rows = list[Sequence[Value]]()
    for case in data.FIGURE_6:
        found = largest_parameters(case)
        rows.append([case.row, case.published, found, found / case.published - 1, largest_layers(case), case.hidden])
    notes = [
        f"One budget for all: {BUDGET_BYTES / GB:.1f} GB, the device's memory less context and communicators.",
        "The paper ran multiples of 10 billion parameters, so a published value is a lower bound.",
    ]
    return Table("figure_6", "Figure 6: the largest model, 400 devices, MP 16, batch 16", columns, rows, notes)


def figure_7() -> Table:
    """Return peak memory by configuration."""
    columns = [Column("model"), Column("configuration"), Column("batch"), Column("paper GB", ".1f"),
               Column("predicted GB", ".1f"), Column("error", "+.0%")]  # fmt: skip
    rows = list[Sequence[Value]]()
    for run in data.FIGURE_7:
        found = outcome_of(run).peak_bytes / GB
        rows.append([run.label, run.row, run.batch, run.published, found, found / run.published - 1])
    note = "Published is what the allocator cached, predicted what is allocated."
    return Table("figure_7", "Figure 7: the most memory, 400 devices, MP 16", columns, rows, [MARK, note])


def figure_8() -> Table:
    """Return throughput by configuration."""
    columns = [Column("model"), Column("configuration"), Column("batch"), Column("paper", ".1f"),
               Column("predicted", ".1f"), Column("error", "+.0%"), Column("peak GB", ".1f"), Column("fits"),
               Column("ran")]  # fmt: skip
    rows = list[Sequence[Value]]()
    for run in data.FIGURE_8:
        found = outcome_of(run)
        shown = found.teraflops if found.fits else None
        error = shown / run.published - 1 if shown and run.published else None
        rows.append([run.label, run.row, run.batch, run.published or None, shown, error, found.peak_bytes / GB,
                     found.fits, run.published > 0])  # fmt: skip
    title = "Figure 8: teraFLOPS of each device by configuration: 60B on 128 devices, 170B on 400"
    return Table("figure_8", title, columns, rows, [MARK])


def assumptions() -> Table:
    """Return the effect of each assumption on the results."""
    columns = [Column("assumptions"), Column("figure 4, error of the mean", "+.0%"),
               Column("figure 2, ratios within 25%"), Column("figure 3, 64 to 400", "+.1%"),
               Column("figure 3, 256 to 400", "+.1%")]  # fmt: skip
    rows = list[Sequence[Value]]()
    for given in VARIANTS:
        close = sum(abs(error) <= 0.25 for error in ratio_errors(given).values())
        each = {run.devices: teraflops(run, given) for run in data.FIGURE_3}
        growth = [each[400] / each[fewer] - 1 for fewer in (64, 256)]
        rows.append([given.name, mean_error(given), close, *growth])
    return Table("assumptions", "What the results owe to the assumptions", columns, rows)


# -- the targets ------------------------------------------------------------------------------------------------------


def targets() -> tuple[Target, ...]:
    """Return the targets of a reproduction, and the results of this reproduction."""
    faults = table_faults()
    errors = {case.row: largest_parameters(case) / case.published - 1 for case in data.FIGURE_6}
    sizes = [case.row for case in sorted(data.FIGURE_6, key=lambda case: case.published)]
    predicted = sorted(data.FIGURE_6, key=largest_parameters)
    peaks = [outcome_of(run).peak_bytes for row in ("C1", "C3", "C2", "C4", "C5") for run in data.FIGURE_7
             if (run.label, run.row) == ("40B", row)]  # fmt: skip
    each = {run.devices: teraflops(run) for run in data.FIGURE_3}
    mean = mean_error()
    at_60 = {run.row: teraflops(run) for run in data.FIGURE_8 if run.label == "60B"}
    at_170 = [run.row for run in data.FIGURE_8 if run.label == "170B" and outcome_of(run).fits]
    ratios = ratio_errors()
    close = sum(abs(error) <= 0.25 for error in ratios.values())
    four = [errors[row] for row in ("C1", "C3", "C4", "C5")]
    return (
        Target("tables 1 and 2", "every cell", f"{len(faults)} differ", not faults),
        Target("figure 6, C1, C3, C4, C5", "within 15%", " ".join(f"{e:+.0%}" for e in four),
               all(abs(error) <= 0.15 for error in four)),
        Target("figure 6, C2", "over-predicted", f"{errors['C2']:+.0%}", errors["C2"] > 0),
        Target("figure 6, order", " < ".join(sizes), " < ".join(case.row for case in predicted),
               sizes == [case.row for case in predicted]),
        Target("figure 7, order at 40B", "C1 > C3 > C2 > C4 >= C5", " ".join(f"{peak / GB:.1f}" for peak in peaks),
               all(a > b for a, b in pairwise(peaks[:4])) and peaks[3] >= peaks[4]),
        Target("figure 3, 64 to 400 devices", "super-linear", f"{each[400] / each[64] - 1:+.1%}",
               each[400] > each[64]),
        Target("figure 3, 256 to 400 devices", "sub-linear", f"{each[400] / each[256] - 1:+.1%}",
               each[400] < each[256]),
        Target("figure 4, mean of 9 sizes", "within 20%", f"{mean:+.0%}", abs(mean) <= 0.2),
        Target("figure 8, 60B", "C4 above C5", f"{at_60['C4']:.1f} {at_60['C5']:.1f}", at_60["C4"] > at_60["C5"]),
        Target("figure 8, 170B", "C5 alone fits", " ".join(at_170), at_170 == ["C5"]),
        Target("figure 2, ratio within 25%", "7 of 9", f"{close} of {len(ratios)}", close >= 7),
    )  # fmt: skip
