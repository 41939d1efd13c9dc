"""The overview of a page in a headless Chromium, the header of each view, and the one total of memory."""

import json
from typing import Any

import pytest

import zeroshard as zs
from tests.report import synthetic
from tests.report.opening import Open, Opened
from tests.report.test_runs import rank_bytes, summary, write_run
from zeroshard.plan.numbers import GIB
from zeroshard.report.plans import read_sources

WIDTHS = (1400, 400)


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return synthetic.plan(4001)


@pytest.fixture(scope="module")
def small() -> zs.Plan:
    """A plan of a model that does not fit its device."""
    return zs.plan("gpt2-xl", world_size=8, device="a100-40", stage=2, batch=16, seq=1024)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, small: zs.Plan) -> dict[str, Any]:
    """Two plans and two runs, one of which is not finished, on one page."""
    folder = tmp_path_factory.mktemp("mixed")
    other = zs.plan("gpt2", world_size=2, device="h100-80", stage=3)
    for name, one in (("no", small), ("yes", other)):
        (folder / f"{name}.json").write_text(json.dumps(one.to_json()))
    first = write_run(folder / "a", [5.5, 5.0], summary("first", [rank_bytes(64)]))
    second = write_run(folder / "b", [5.5, 4.0, 3.5], None)
    text = (second / "config.toml").read_text()
    (second / "config.toml").write_text(text.replace("clip = 1.0", "clip = 0.5\nsteps = 9"))
    return dict(read_sources([folder / "no.json", first, folder / "yes.json", second]))


def texts(opened: Opened, selector: str) -> list[str]:
    return opened.page.locator(selector).all_inner_texts()


def test_a_page_opens_on_the_overview(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan)
    assert opened.page.locator("#panel-overview").is_visible()
    cards = opened.page.locator(".card").all()
    assert len(cards) == len(plan["sources"])
    for card, source in zip(cards, plan["sources"], strict=True):
        assert card.locator("h3").inner_text() == source["name"]
        shown = card.locator("[data-value]").evaluate_all("(all) => all.map((one) => Number(one.dataset.value))")
        assert shown == [one["value"] for one in source["results"]]
        badges = [card.locator(f"[data-verdict={source['verdict']}]")] if "verdict" in source else []
        badges += [card.locator(f"[data-state={source['state']}]")] if "state" in source else []
        assert [badge.count() for badge in badges] == [1]


def test_curves_have_the_numbers_of_the_data_and_one_axis(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan)
    titles = texts(opened, "#overview h4")
    assert [title.partition(",")[0] for title in titles] == [
        "Loss",
        "Learning rate",
        "Norm of the gradients",
        "Tokens per second",
        "State memory of rank 0: sum of its columns' peaks",
    ]
    charts = opened.script("""zeroshard.views.get('overview').charts.map(({ chart }) => [
        chart.steps, chart.values, chart.series.map(({ run, points, isMarked }) => [run, !!isMarked, points])])""")
    assert {tuple(steps) for steps, _, _ in charts} == {(1, 1000)}
    keys = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "memory_bytes")
    for key, (_, (low, high), series) in zip(keys, charts, strict=True):
        expected = []
        for run in plan["curves"]:
            pairs = [[step, one] for step, one in zip(run["step"], run.get(key, ()), strict=False) if one is not None]
            expected += [[run["run"], False, pairs]] if pairs else []
            if key == "loss" and (held := run.get("heldout")):
                pairs = [list(pair) for pair in zip(held["step"], held["loss"], strict=True)]
                expected.append([run["run"], True, pairs])
        assert series == expected
        assert all(low <= value <= high for _, _, points in series for _, value in points)


def test_the_cursor_is_at_one_step_of_all_charts(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan)
    opened.page.locator("#overview canvas").nth(1).focus()
    opened.page.keyboard.press("End")
    opened.page.keyboard.press("ArrowLeft")
    assert opened.script("zeroshard.views.get('overview').charts.map(({ chart }) => chart.cursor)") == [990] * 5
    readouts = opened.script("""[...document.querySelectorAll('#overview .readout')].map((one) =>
        [...one.querySelectorAll('[data-value]')].map(({ dataset }) => [dataset.step, dataset.value].map(Number)))""")
    rates = [[990, run["learning_rate"][989]] for run in plan["curves"] if "learning_rate" in run]
    assert readouts[1] == rates
    # The run of 600 steps has its last loss there, and held-out losses are those of the nearest evaluation.
    assert readouts[0][-1] == [600, plan["curves"][2]["loss"][-1]]
    assert readouts[0][1] == [1000, plan["curves"][0]["heldout"]["loss"][-1]]


def test_curves_without_numbers_are_left_out(open_page: Open) -> None:
    curves = [{"run": "a", "step": [1, 2], "loss": [5.5, 5.1], "grad_norm": [None, None]}]
    opened = open_page({"version": 2, "title": "a run", "curves": curves, "walk": None})
    assert texts(opened, "#overview h4") == ["Loss, nats per token"]


def test_runs_of_the_same_time_have_their_clocks(open_page: Open) -> None:
    curves = [
        {"run": run, "step": [1, 2], "loss": [5.5, 5.1], "clock_s": [at, at + 60.0]}
        for run, at in (("a", 0.0), ("b", 7.0))
    ]
    opened = open_page({"version": 2, "title": "islands", "curves": curves, "walk": None})
    assert texts(opened, "#overview h4") == ["Loss, nats per token", "Clock: seconds since the first step of all runs"]
    points = opened.script("zeroshard.views.get('overview').charts[1].chart.series.map(({ points }) => points)")
    assert points == [[[1, 0.0], [2, 60.0]], [[1, 7.0], [2, 67.0]]]


def test_settings_that_differ_are_listed(open_page: Open, mixed: dict[str, Any]) -> None:
    opened = open_page(mixed)
    rows = [row.split("\t") for row in texts(opened, "#settings-run tbody tr")]
    assert rows == [["ranks", "1", "not set"], ["train.clip", "1", "0.5"], ["train.steps", "not set", "9"]]
    opened.page.click("#settings-run summary")
    assert texts(opened, "#settings-run dt") == ["data.path", "zero.stage"]
    assert texts(opened, "#settings-run dd") == ["empty", "3"]
    plans = {row.split("\t")[0]: row.split("\t")[1:] for row in texts(opened, "#settings-plan tbody tr")}
    options = [source["options"] for source in mixed["sources"] if source["kind"] == "plan"]
    assert plans == {
        key: [str(one[key]) for one in options] for key in options[0] if options[0][key] != options[1][key]
    }


def test_each_view_names_what_it_shows(open_page: Open, mixed: dict[str, Any]) -> None:
    """A verdict stands only beside the name of its plan, and never in a view of runs alone."""
    opened = open_page(mixed)
    no, yes, first, second = (source["name"] for source in mixed["sources"])
    verdicts = {no: "✗ does not fit", yes: "✓ fits"}
    for view, names in (
        ("ranks", [no, yes, first]),
        ("player", [no]),
        ("film", [no]),
        ("comparison", [first, second]),
        ("losses", [first, second]),
    ):
        opened.show(view)
        heads = "h3" if view == "ranks" else ".shows li"
        shown = [text.split("\n") for text in texts(opened, f"#panel-{view} {heads}")]
        joined = ["".join(parts) for parts in shown]
        assert len(joined) == len(names), view
        for text, name in zip(joined, names, strict=True):
            assert name in text, view
            assert [verdict for verdict in verdicts.values() if verdict in text] == [
                verdict for plan, verdict in verdicts.items() if plan == name
            ]
        if view == "losses":
            assert opened.page.locator("#panel-losses [data-verdict]").count() == 0
    opened.show("walk")
    assert "none of its plans and runs" in opened.page.inner_text("#panel-walk .shows")


@pytest.mark.parametrize("width", WIDTHS)
def test_there_is_one_total(open_page: Open, mixed: dict[str, Any], small: zs.Plan, width: int) -> None:
    """The terminal, the overview, the ranks, the player and the film have the total of `Plan.total_bytes`."""
    total = small.total_bytes
    (line,) = [line for line in str(small).splitlines() if line.startswith("  total ")]
    assert line.split()[1] == f"{total / GIB:.2f}"
    lines = str(small).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("memory per rank"))
    parts = lines[start + 1 : lines.index(line)]
    assert sum(float(part[26:35]) for part in parts) == pytest.approx(total / GIB, abs=0.005 * len(parts))
    opened = open_page(mixed, width=width)
    card = opened.page.locator(".card").first
    assert int(card.locator("[data-total]").get_attribute("data-total")) == total
    assert sum(card.locator("i").evaluate_all("(all) => all.map((one) => Number(one.dataset.bytes))")) == total
    opened.show("ranks")
    assert total in opened.script(
        "[...document.querySelectorAll('#ranks td span')].map((one) => Number(one.dataset.bytes))"
    )
    opened.show("player")
    assert opened.number("#player-total") == total
    assert opened.page.get_attribute("#player-badge", "data-verdict") == small.verdict == "no"
    opened.show("film")
    assert opened.script("zeroshard.views.get('film').total") == total
    assert opened.number("#film-peak") == small.film.peak[0] < total


@pytest.mark.parametrize("width", WIDTHS)
def test_no_label_of_a_limit_hides_another(open_page: Open, mixed: dict[str, Any], width: int) -> None:
    opened = open_page(mixed, "player", width=width)
    boxes = [one.bounding_box() for one in opened.page.locator(".level span").all()]
    assert len(boxes) == 2
    upper, lower = sorted(boxes, key=lambda box: box["y"])
    assert upper["y"] + upper["height"] <= lower["y"]
    opened.show("film")
    labels = opened.script("zeroshard.views.get('film').labels")
    assert [text.partition(":")[0] for text, _ in labels] == ["total", "a100-40"]
    assert labels[1][1] - labels[0][1] >= 16
    assert labels[0][1] - 8 >= opened.script("zeroshard.views.get('film').film.top")
