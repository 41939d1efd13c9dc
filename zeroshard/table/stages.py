"""The residency table: ZeRO stages as rows of cells. The only module that knows the number of a stage.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.
"""

from types import MappingProxyType

from zeroshard.table.activations import Activations, Offloaded, Partitioned, Recomputed
from zeroshard.table.cells import Residency, Sharded

__all__ = ["CONFIGURATIONS", "DEFAULT_STAGE", "STAGES", "name_of_row", "row_of_stage"]

STAGES = MappingProxyType(
    {
        0: Residency(),
        1: Residency(states=Sharded()),
        2: Residency(states=Sharded(), gradients=Sharded()),
        3: Residency(states=Sharded(), gradients=Sharded(), parameters=Sharded()),
    }
)

_P_A = (Recomputed(), Partitioned())
CONFIGURATIONS = MappingProxyType(
    {
        "C1": Residency(Sharded(), activations=Activations((Recomputed(),))),
        "C2": Residency(Sharded(), activations=Activations(_P_A)),
        "C3": Residency(Sharded(), Sharded(), activations=Activations((Recomputed(),))),
        "C4": Residency(Sharded(), Sharded(), activations=Activations(_P_A)),
        "C5": Residency(Sharded(), Sharded(), activations=Activations((*_P_A, Offloaded()))),
    }
)
"""The configurations of the paper (table 3). C_B and M_D, which all of them include, are not cells."""

DEFAULT_STAGE = 3
"""The default of `shard()`: all state sharded."""


def row_of_stage(stage: int) -> Residency:
    """Return the residency row of a ZeRO stage.

    Args:
        stage: 0 to 3.

    Raises:
        ValueError: `stage` is out of range.

    ```python
    import zeroshard as zs
    from zeroshard.table.stages import row_of_stage

    assert row_of_stage(2) == zs.Residency(states=zs.Sharded(), gradients=zs.Sharded())
    ```
    """
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in STAGES:
        names = "; ".join(
            f"{n}: states {r.states}, gradients {r.gradients}, parameters {r.parameters}" for n, r in STAGES.items()
        )
        meant = _meant(stage)
        hint = f" Write stage={meant}." if meant is not None else ""
        raise ValueError(f"stage must be one of {sorted(STAGES)} ({names}); got {stage!r}.{hint}")
    return STAGES[stage]


def _meant(stage: object) -> int | None:
    """Return the stage that a number, a text or another library's name stands for: 3.0, "3", "ZeRO-3", "FULL_SHARD"."""
    try:
        number = float(str(stage))
    except ValueError:
        pass
    else:
        return int(number) if number in STAGES else None
    text = "".join(letter for letter in str(stage).rpartition(".")[2].lower() if letter.isalnum())
    named = {"fullshard": 3, "shardgradop": 2, "noshard": 0, "ddp": 0}
    digit = text.removeprefix("zero").removeprefix("stage")
    return int(digit) if digit in map(str, STAGES) else named.get(text)


def name_of_row(row: Residency) -> str:
    """Return the name of a row: "stage 2", or its cells if no stage has them."""
    columns = {"states": row.states, "gradients": row.gradients, "parameters": row.parameters}
    plain = Residency(row.states.plain, row.gradients.plain, row.parameters.plain)
    others = {column: cell for column, cell in columns.items() if cell != cell.plain}
    for stage, known in STAGES.items():
        if known == plain:
            name, columns = f"stage {stage}", others
            break
    else:
        name = ""
    words = [f"{column} {cell}" for column, cell in columns.items()]
    words += [f"parameters of {pattern} {cell}" for pattern, cell in row.units]
    name = ", ".join([*filter(None, [name]), *words])
    return name if row.activations == Activations() else f"{name}, activations {row.activations}"
