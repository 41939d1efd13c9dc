"""The closed forms of the stage player: bytes of one rank for any row of the residency table.

Owns only the sums; the table determines the elements of each rank. It must not know torch. The page computes the same
sums in JavaScript (`assets/player.js`), from the rows of `table_rows`; a browser test compares both.
"""

from collections.abc import Mapping
from typing import Final

from zeroshard.report.schema import Player
from zeroshard.table.cells import Cell
from zeroshard.table.layout import ALIGN_BYTES, Layout, plan_layout
from zeroshard.table.stages import STAGES, row_of_stage

__all__ = ["MODEL_STATES", "PLAYER_COLUMNS", "player_total", "rank_bytes", "table_rows"]

MODEL_STATES: Final = ("parameters", "gradients", "states")
PLAYER_COLUMNS: Final = (*MODEL_STATES, "padding", "activations", "transient")


def table_rows() -> list[dict[str, bool]]:
    """Return, for each ZeRO stage, the columns that are sharded.

    >>> from zeroshard.report.player import table_rows
    >>> table_rows()[1]
    {'parameters': False, 'gradients': False, 'states': True}
    """
    return [{column: _is_sharded(getattr(row, column)) for column in MODEL_STATES} for row in STAGES.values()]


def rank_bytes(
    player: Player, *, stage: int, ranks: int, batch: int, sequence: int, rank: int = 0
) -> Mapping[str, float]:
    """Return the most bytes of each column on one rank, by closed forms.

    Args:
        player: the model and its activations.
        stage: a row of the residency table.
        ranks: number of ranks that shard the state.
        batch: sequences per rank.
        sequence: tokens per sequence.
        rank: index of the rank in `ranks`.

    Raises:
        ValueError: the stage does not exist.

    >>> from zeroshard.report.player import rank_bytes
    >>> none = {"bytes_per_token_block": 0, "blocks": 0, "fixed_bytes_per_token": 0}
    >>> sizes = {"units": [8, 64], "parameter_bytes": 2, "gradient_bytes": 4, "state_bytes": 12}
    >>> player = {**sizes, "activation": none, "capacity_bytes": 1, "usable_bytes": 1}
    >>> sum(rank_bytes(player, stage=0, ranks=4, batch=1, sequence=1).values()) == (2 + 4 + 12) * 72
    True
    """
    row = row_of_stage(stage)
    element_bytes = (player["parameter_bytes"], player["gradient_bytes"], player["state_bytes"])
    widths = dict(zip(MODEL_STATES, element_bytes, strict=True))
    nbytes = dict.fromkeys(PLAYER_COLUMNS, 0.0)
    layouts = [_layout(numel, ranks, player.get("align_numel", 1)) for numel in player["units"]]
    for layout in layouts:
        for column, width in widths.items():
            start, stop = getattr(row, column).kept_range(layout, rank)
            owned = layout.owned_numel(start, stop)
            nbytes[column] += width * owned
            nbytes["padding"] += width * (stop - start - owned)
    activation = player["activation"]
    per_token = activation["bytes_per_token_block"] * activation["blocks"] + activation["fixed_bytes_per_token"]
    nbytes["activations"] = per_token * batch * sequence
    if ranks > 1:
        root, *others = (layout.full_numel for layout in layouts)
        if _is_sharded(row.parameters):
            nbytes["transient"] += widths["parameters"] * (root + sum(sorted(others)[-2:]))
        if _is_sharded(row.gradients):
            nbytes["transient"] += widths["gradients"] * max(root, *others, 0)
    return nbytes


def player_total(player: Player, *, stage: int, ranks: int, batch: int, sequence: int) -> int:
    """Return the total of a rank, in device memory: what `Plan.total_bytes` is for a plan.

    The closed forms know neither the allocator nor which columns are largest at different times. Their sum is therefore
    multiplied by what the plan needs, over their sum at the plan's own setting, where the total is equal to the plan's.
    Context and communicators are added. Without a plan's total, the sum of the columns stands for what is reserved.

    Args:
        player, stage, ranks, batch, sequence: as in `rank_bytes`.

    Raises:
        ValueError: the stage does not exist.

    >>> from zeroshard.report.player import player_total
    >>> none = {"bytes_per_token_block": 0, "blocks": 0, "fixed_bytes_per_token": 0}
    >>> sizes = {"units": [8, 64], "parameter_bytes": 2, "gradient_bytes": 4, "state_bytes": 12}
    >>> player = {**sizes, "activation": none, "capacity_bytes": 9000, "usable_bytes": 8000}
    >>> player_total(player, stage=0, ranks=4, batch=1, sequence=1)
    2296
    """
    outside_bytes = player["capacity_bytes"] - player["usable_bytes"]

    def closed_bytes(setting: Mapping[str, int]) -> float:
        # The first rank and the last are enough: those between hold what the first one holds.
        found = (rank_bytes(player, **setting, rank=rank) for rank in (0, setting["ranks"] - 1))
        return max(sum(columns.values()) for columns in found)

    scale = 1.0
    if (total_bytes := player.get("total_bytes")) and (own := player.get("defaults")):
        planned = {name: own[name] for name in ("stage", "ranks", "batch", "sequence")}
        scale = (total_bytes - outside_bytes) / (closed_bytes(planned) or 1)
    asked = {"stage": stage, "ranks": ranks, "batch": batch, "sequence": sequence}
    return round(scale * closed_bytes(asked)) + outside_bytes


def _layout(numel: int, ranks: int, align_numel: int) -> Layout:
    return plan_layout([numel], max(1, ALIGN_BYTES // align_numel), ranks)


def _is_sharded(cell: Cell) -> bool:
    probe = plan_layout([2], ALIGN_BYTES, 2)
    return cell.kept_range(probe, 0) != (0, probe.full_numel)
