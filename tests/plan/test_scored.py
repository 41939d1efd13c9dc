"""What the repository says of published runs is what its result says."""

import json

from tools import scored

RESULT = json.loads(scored.RESULT.read_text())


def test_margins_of_plans_are_those_of_the_scorecard() -> None:
    assert scored.MARGINS.read_text() == scored.margins_of(RESULT)
    assert RESULT["margins"]


def test_the_table_of_the_page_is_that_of_the_scorecard() -> None:
    assert f"<!-- table: scorecard -->\n{scored.table_of(RESULT)}\n<!-- end -->" in scored.PAGE.read_text()


def test_a_summary_has_the_mean_error_without_the_worst_rows() -> None:
    timed = [
        {"group": "time", "error": error, "source": "HF" if error < 1 else "b", "label": "l"}
        for error in (*[0.1] * 19, 9.0)
    ]
    card = {**{key: {} for key in scored.KEPT}, "records": [*timed, {"group": "memory", "error": 5.0}]}
    found = scored.summary_of(card)
    assert found["time_mean_error"] == {"without the worst 5%": sum([0.1] * 19) / 19, "outside the playbook": 9.0}
    assert found["time_worst"] == ["b: l: +900%"]
