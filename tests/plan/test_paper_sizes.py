"""The ZeRO paper's sizes: its tables, what a step sends, activations. Formulas here are papers', not the planner's."""

import pytest

from zeroshard.evidence import paper_data as data
from zeroshard.evidence.paper_sizes import (
    activations,
    agrees,
    communication,
    figure_1,
    largest_billions,
    partitioned,
    state_bytes,
    table_1,
    table_2,
    table_faults,
)
from zeroshard.evidence.paper_tables import Table, Value

NAMES = ("baseline", "P_os", "P_os+g", "P_os+g+p")
GB = 10**9


def column(table: Table, title: str) -> list[Value]:
    place = [one.title for one in table.columns].index(title)
    return [row[place] for row in table.rows]


def by_first(table: Table, title: str) -> dict[Value, Value]:
    return dict(zip(column(table, table.columns[0].title), column(table, title), strict=True))


def test_a_printed_number_is_rounded_or_truncated_or_near() -> None:
    assert agrees("41.3", 41.25) and agrees("4187", 4187.9) and agrees("1.9", 1.875)
    assert agrees("121.6", 122.27) and not agrees("121.6", 122.4)
    assert not agrees("15.6", 15.71) and not agrees("0.47", 0.48) and not agrees("30", 31)


@pytest.mark.parametrize(("billions", "ranks"), data.TABLE_1)
def test_table_1(billions: float, ranks: int) -> None:
    for name, printed in zip(NAMES[1:], data.TABLE_1[billions, ranks], strict=True):
        found = state_bytes(name, int(billions * GB), ranks) / GB
        assert agrees(printed, found), f"{name}: {printed}, predicted {found}"


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_states_are_the_paper_s_formulas(ranks: int) -> None:
    numel = 64 << 10
    formulas = (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)
    assert [state_bytes(name, numel, ranks) for name in NAMES] == [formula * numel for formula in formulas]


@pytest.mark.parametrize("tensor", data.TABLE_2)
def test_table_2(tensor: int) -> None:
    for name, printed in zip(NAMES, data.TABLE_2[tensor], strict=True):
        found = largest_billions(name, 64, tensor)
        assert agrees(printed, found), f"{name}: {printed}, predicted {found}"


def test_no_cell_is_left_out() -> None:
    assert len(data.TABLE_1) == 18 and len(table_1().rows) == 18
    assert len(data.TABLE_2) == len(table_2().rows) == 5
    assert table_faults() == []


def test_a_wrong_cell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "TABLE_1", {**data.TABLE_1, (7.5, 4): ("52.5", "41.3", "31")})
    monkeypatch.setattr(data, "TABLE_2", {**data.TABLE_2, 2: ("4", "15.5", "28.8", "256")})
    assert [fault.split(":")[0] for fault in table_faults()] == [
        "table 1, 7.5B on 4 ranks, P_os+g+p",
        "table 2, MP 2, P_os",
    ]


def test_figure_1() -> None:
    assert column(figure_1(), "equal as printed") == [True] * 4


def test_a_step_sends_two_elements_for_each_parameter_and_three_where_parameters_are_sharded() -> None:
    table = communication()
    assert column(table, "sum") == pytest.approx([2, 2, 2, 3], rel=2e-4)
    assert column(table, "gathered") == pytest.approx([0, 0, 0, 2], rel=2e-4)
    assert column(table, "gathered after the update") == pytest.approx([0, 1, 1, 0], rel=2e-4)
    assert all(int(str(count)) > 0 for count in column(table, "events"))


def test_p_a_sends_a_twelfth_of_megatrons_messages() -> None:
    counted = by_first(partitioned(), "counted")
    assert counted["messages of Megatron-LM, forward"] == 4
    assert counted["messages of Megatron-LM, backward with recomputation"] == 8
    assert counted["P_a's part of Megatron-LM's"] == pytest.approx(1 / 12)
    whole, part = counted["checkpoint of one layer, GB"], counted["checkpoint of one layer with P_a, GB"]
    assert float(str(whole)) == 16 * float(str(part)) == 2 * 32 * 1024 * 8192 / GB
    assert counted["copies of P_a+cpu to and from the host, GB"] == 2 * float(str(part))
    assert float(str(counted["operations for each byte that P_a+cpu copies"])) >= 10_000


def test_activations() -> None:
    counted = by_first(activations(), "counted")
    assert counted["1.5B, batch 32, all activations by the paper's 12 elements, GB"] == pytest.approx(60, rel=0.01)
    # 34 + 5 a s / h bytes for each element, as "Reducing Activation Recomputation" (arXiv 2205.05198) counts them.
    formula = (34 + 5 * 16 * 1024 / 1600) * 32 * 1024 * 1600 * 48 / GB
    assert counted["the same, what autograd keeps, GB"] == pytest.approx(formula, rel=0.01)
    assert counted["the same, checkpoints alone, GB"] == pytest.approx(2 * 48 * 1600 * 32 * 1024 / GB)
    assert counted["operations of recomputation"] == pytest.approx(1 / 3, rel=0.001)


def test_checkpoints_of_section_6_1_are_those_of_batch_16() -> None:
    counted = list(column(activations(), "counted"))[-4:]
    assert counted == pytest.approx([67.1, 4.19, 33.55, 2.10], rel=0.002)
