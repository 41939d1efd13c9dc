"""The report page in a headless Chromium, opened from a file: its numbers are the data's, and nothing leaves it."""

import json
import statistics
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import zeroshard as zs
from tests.report import synthetic
from tests.report.opening import READY, Open, Opened
from zeroshard.evidence.scorecard import scorecard
from zeroshard.report.plans import read_sources
from zeroshard.report.player import PLAYER_COLUMNS, player_total, rank_bytes
from zeroshard.report.walk import read_walk

VIEWS = ("overview", "ranks", "player", "film", "frontier", "scorecard", "comparison", "losses", "walk")
CUT = """[...document.querySelectorAll('main *')]
    .filter((one) => one.offsetParent && one.scrollWidth > one.clientWidth + 1)
    .filter((one) => getComputedStyle(one).overflowX !== 'visible')
    .map((one) => `${one.tagName} ${one.className}: ${one.scrollWidth} of ${one.clientWidth} pixels`)"""
"""Parts of the page that hide what is wider than they are, behind a scroll or wholly."""
RUNS = [Path(__file__).parent / "data" / name for name in ("first", "second")]
SAMPLE = Path(__file__).parents[1] / "plan" / "data" / "published_sample.csv"
MANY = 100_000
MANY_BYTES = 3_000_000
MANY_MS = 2000
NARROW = 400
WIDTHS = (1400, NARROW)
ALWAYS_PICTURED = ("overview", "film", "walk")


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return synthetic.plan(4001)


def totals_of(data: dict[str, Any]) -> list[int]:
    """Return the bytes that are live after each event, the state before the first one in front."""
    film = data["film"]
    return list(accumulate(film["events"]["nbytes"], initial=sum(film["initial"]["nbytes"])))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, pictures: Path | None) -> dict[str, Any]:
    """A plan, a search and a scorecard, beside two runs of `zeroshard train` on two cores (`data`).

    Where no screenshots are wanted, of a smaller model and a fifth of the published runs: 10 seconds instead of 100.
    """
    folder = tmp_path_factory.mktemp("real")
    model, seq, batches, share = ("gpt2", 1024, (2,), 5) if pictures is None else ("llama-2-7b", 4096, (1, 2, 4), 1)
    asked = {"world_size": 8, "device": "h100-80", "seq": seq}
    heading, *published = SAMPLE.read_text().splitlines()
    (folder / "published.csv").write_text("\n".join((heading, *published[::share])) + "\n")
    made = {
        "plan": zs.plan(model, batch=2, activations="recompute", **asked).to_json(),
        "search": zs.search(model, batches=batches, pipes=(1,), **asked).to_json(),
        "scorecard": json.loads(scorecard(folder / "published.csv").to_json()),
    }
    for name, data in made.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return dict(read_sources([*(folder / f"{name}.json" for name in made), *RUNS]))


# -- the page as a whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_opens_without_an_error_or_a_request(open_page: Open, plan: dict[str, Any], scheme: str) -> None:
    opened = open_page(plan, color_scheme=scheme)
    assert opened.script("document.documentElement.dataset.theme") == scheme
    for view in VIEWS:
        opened.show(view)
        if view == "walk":
            opened.page.fill("#walk-slider", "14")
        panel = opened.page.locator(f"#panel-{view}")
        assert panel.is_visible()
        assert len(panel.inner_text()) > 50


@pytest.mark.parametrize(("scheme", "width"), [(scheme, width) for scheme in ("light", "dark") for width in WIDTHS])
def test_a_page_of_real_data_has_every_view(
    open_page: Open, real: dict[str, Any], scheme: str, width: int, pictures: Path | None
) -> None:
    opened = open_page(real, color_scheme=scheme, width=width)
    assert opened.path.stat().st_size < 1_000_000
    suffix = "-dark" * (scheme == "dark") + "-narrow" * (width == NARROW)
    for view in VIEWS:
        opened.show(view)
        if view == "walk":
            opened.page.fill("#walk-slider", "14")
        assert len(opened.page.locator(f"#panel-{view}").inner_text()) > 50
        assert opened.script("document.documentElement.scrollWidth") <= width, view
        assert opened.script(CUT) == [], view
        if pictures is not None and (not suffix or view in ALWAYS_PICTURED):
            pictures.mkdir(parents=True, exist_ok=True)
            opened.page.wait_for_timeout(500)
            opened.page.screenshot(path=pictures / f"{view}{suffix}.png", full_page=True)


def test_a_request_would_be_seen(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan)
    opened.script("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/a.png'}))")
    opened.page.wait_for_timeout(200)
    # The page's own policy refuses it, and the refusal is a message.
    assert any("Content Security Policy" in problem for problem in opened.problems)
    assert len(set(opened.requests)) == 2
    opened.problems.clear()
    opened.requests[:] = [url for url in opened.requests if url.startswith("file:")]


def test_a_narrow_screen_does_not_scroll_sideways(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, width=NARROW)
    for view in VIEWS:
        opened.show(view)
        assert opened.page.locator(f"#panel-{view}").is_visible()
        assert opened.script("document.documentElement.scrollWidth") <= NARROW, view
        assert opened.script(CUT) == [], view


def test_views_without_data_are_hidden(open_page: Open) -> None:
    curves = [{"run": "a", "step": [1, 2], "loss": [5.5, 5.1]}]
    opened = open_page({"version": 2, "title": "a run", "curves": curves, "frontier": [], "walk": None})
    assert opened.page.locator("[role=tab]").all_inner_texts() == ["Overview", "Loss"]
    empty = open_page({"version": 2, "title": "nothing", "walk": None})
    assert "no data" in empty.page.inner_text("#panels")


def test_the_least_data_is_enough(open_page: Open) -> None:
    """One of everything, all at one moment: no axis without a length, no division by zero."""
    nothing: dict[str, list[Any]] = {key: [] for key in synthetic.film(4000)["film"]["events"]}
    one = nothing | {key: [0] for key in nothing} | {"t_s": [0.0], "nbytes": [512], "storage": [1]}
    activation = {"bytes_per_token_block": 0.0, "blocks": 0, "fixed_bytes_per_token": 0.0}
    sizes = dict.fromkeys(("parameter_bytes", "gradient_bytes", "state_bytes"), 0)
    least = {
        "version": 2,
        "title": "",
        "sources": [
            {"kind": "plan", "name": "", "verdict": "no", "memory": {"total_bytes": 0, "parts": {}}},
            {"kind": "run", "name": "a", "results": [{"what": "held-out loss", "value": None, "unit": "nats/token"}]},
            {"kind": "run", "name": "b", "options": {}},
        ],
        "columns": ["states"],
        "names": ["x"],
        "ranks": [{"name": "rank 0", "count": 1, "resident_bytes": {}, "peak_bytes": None}],
        "film": {"events": one},
        "player": {"units": [7], **sizes, "activation": activation, "capacity_bytes": 1, "usable_bytes": 0},
        "frontier": [
            {"label": "a", "total_bytes": 5, "tokens_per_s": 3, "is_best": False, "verdict": "no", "options": {}}
        ],
        "scorecard": [{"source": "a", "label": "b", "metric": "c", "unit": "", "predicted": 1, "measured": 1}],
        "comparison": [{"what": "a", "unit": "s", "predicted": 0, "measured": 0}],
        "curves": [
            {"run": "a", "step": [1], "loss": [2.0], "grad_norm": [0.0], "heldout": {"step": [1], "loss": [None]}},
            {"run": "b", "step": [], "loss": []},
            {"run": "c", "step": [1], "loss": [None]},
        ],
    }
    for film in ({"events": one}, {"events": nothing}, {"events": nothing, "initial": one, "phases": []}):
        opened = open_page(least | {"film": film})
        for view in VIEWS:
            opened.show(view)
            text = opened.page.inner_text(f"#panel-{view}")
            assert not any(word in text for word in ("undefined", "Infinity", "null", "NaN")), text


def test_a_damaged_page_says_so(open_page: Open, tmp_path: Path) -> None:
    opened = open_page({"version": 2, "title": "a run"})
    text = opened.path.read_text("utf-8")
    start = text.index('id="data">') + len('id="data">')
    opened.path.write_text(text[: start + 100] + text[text.index("</script>", start) :], "utf-8")
    opened.page.reload()
    opened.page.wait_for_selector("[role=alert]")
    assert "cannot be read" in opened.page.inner_text("#panels")
    assert len(opened.problems) == 1
    opened.problems.clear()


def test_tabs_and_theme_are_used_with_the_keyboard(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan)
    opened.page.focus("#tab-overview")
    for view in (*VIEWS[1:], VIEWS[0]):
        opened.page.keyboard.press("ArrowRight")
        assert opened.script("document.activeElement.id") == f"tab-{view}"
        assert opened.page.locator(f"#panel-{view}").is_visible()
    opened.page.keyboard.press("ArrowLeft")
    assert opened.page.locator("#panel-walk").is_visible()
    opened.page.focus("#theme")
    opened.page.keyboard.press("Enter")
    assert opened.script("document.documentElement.dataset.theme") == "dark"
    assert opened.script("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


def test_text_of_the_data_is_text(open_page: Open) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{data}}"
    data = synthetic.plan()
    data |= {
        "title": hostile,
        "names": [hostile, *data["names"][1:]],
        "sources": [data["sources"][0] | {"name": hostile, "options": {hostile: hostile}}, *data["sources"][1:]],
    }
    data["frontier"][0]["label"] = data["curves"][0]["run"] = data["comparison"][0]["what"] = hostile
    opened = open_page(data)
    for view in VIEWS:
        opened.show(view)
    assert opened.page.inner_text("h1") == hostile
    assert opened.page.title() == hostile
    assert opened.page.locator("img").count() == 0


def test_a_hundred_thousand_events_are_drawn_in_two_seconds(open_page: Open) -> None:
    opened = open_page(synthetic.plan(MANY), "film")
    assert opened.path.stat().st_size < MANY_BYTES
    assert opened.script("zeroshard.views.get('film').timeline.count") == MANY
    times_ms = [opened.script("zeroshard.drawnAfterMs")]
    for _ in range(2):  # the host may be busy with something else for once
        opened.page.reload()
        opened.page.wait_for_selector(READY, state="attached")
        times_ms.append(opened.script("zeroshard.drawnAfterMs"))
    assert min(times_ms) < MANY_MS, times_ms
    # Also while the cursor moves and the part that is shown changes.
    script = "const t = performance.now(); const v = zeroshard.views.get('film'); v.moveTo({}); v.draw();"
    moved_ms = [
        opened.script(f"(() => {{ {script.format(MANY // 2 + place)} return performance.now() - t }})()")
        for place in range(3)
    ]
    assert min(moved_ms) < MANY_MS / 4, moved_ms


# -- the film ---------------------------------------------------------------------------------------------------------


def test_the_peak_is_the_maximum(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "film")
    totals = totals_of(plan)
    assert opened.number("#film-peak") == max(totals)
    assert opened.number("#film-peak", "moment") == totals.index(max(totals))
    # The marker stands on the highest point of the picture: below it is a column, above it is none.
    x, y = opened.script("zeroshard.views.get('film').film.peakPixel")
    assert opened.script(f"""(() => {{
        const {{ film }} = zeroshard.views.get('film');
        const {{ width, height }} = film.canvas;
        const scale = width / film.width;
        const pixels = film.context.getImageData(0, 0, width, height).data;
        const columns = ['0,114,178', '230,159,0', '0,158,115', '140,140,140', '86,180,233', '204,121,167'];
        const isColumn = (x, y) => columns.includes(pixels.slice(4 * (y * width + x), 4 * (y * width + x) + 3).join());
        const [x, y] = [{x}, {y}].map((one) => Math.round(one * scale));
        const rows = [...Array(y - 1).keys()].slice(film.top * scale);
        const isAbove = rows.some((row) => [...Array(width).keys()].some((column) => isColumn(column, row)));
        return [isColumn(x - 3, y + 3), isAbove];
    }})()""") == [True, False]


def test_no_peak_is_lost_between_pixels(open_page: Open) -> None:
    opened = open_page(synthetic.plan(20_000), "film")
    for start, stop, bins in ((0, 1, 7), (0, 1, 200), (0.3, 0.31, 20), (0.9, 1, 3)):
        shown, true = opened.script(f"""(() => {{
            const {{ timeline }} = zeroshard.views.get('film');
            const time = (share) => timeline.start + share * (timeline.stop - timeline.start);
            const [from, to] = [time({start}), time({stop})];
            const highest = (moments) => Math.max(...moments.map((moment) => timeline.totals[moment]));
            const moments = [...Array(timeline.count + 1).keys()];
            const inside = moments.filter((one) => timeline.timeOf(one) >= from && timeline.timeOf(one) <= to);
            return [highest(timeline.sample(from, to, {bins})), highest(inside)];
        }})()""")
        assert shown >= true > 0


def test_the_cursor_lists_what_is_live(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "film")
    totals, peak = totals_of(plan), totals_of(plan).index(max(totals_of(plan)))
    canvas = "#panel-film canvas >> nth=0"
    opened.page.focus(canvas)

    def check(moment: int) -> None:
        assert opened.number("#film-now", "moment") == moment
        for selector in ("#film-now", "#film-live > div", "#icicle-readout"):
            assert opened.number(selector) == totals[moment]

    check(peak)
    for key, moment in (
        ("Home", 0),
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", len(totals) - 1),
        ("ArrowRight", len(totals) - 1),
        ("p", peak),
    ):
        opened.page.keyboard.press(key)
        check(moment)
    opened.page.keyboard.press("Home")
    opened.page.keyboard.press("Shift+ArrowRight")
    assert opened.number("#film-now", "moment") > 10
    box = opened.page.locator(canvas).bounding_box()
    opened.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 100)
    middle = int(opened.number("#film-now", "moment"))
    assert 0 < middle < len(totals) - 1
    check(middle)
    opened.page.click("#film-jump")
    check(peak)


def test_the_live_set_is_that_of_the_events(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "film")
    moment = 1234
    live: dict[int, int] = {}
    for part, stop in (("initial", None), ("events", moment)):
        events = plan["film"][part]
        for nbytes, storage in zip(events["nbytes"][:stop], events["storage"][:stop], strict=True):
            if nbytes > 0:
                live[storage] = nbytes
            else:
                del live[storage]
    found = opened.script(f"zeroshard.views.get('film').timeline.live({moment}).map((one) => one.nbytes)")
    assert found == sorted(live.values(), reverse=True)


def test_every_byte_has_a_place(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "film")
    opened.page.locator("canvas[aria-label^='Bytes by column']").focus()
    opened.page.keyboard.press("ArrowDown")
    total, parts = opened.number("#icicle-readout"), []
    for _ in synthetic.COLUMNS:
        parts.append((opened.page.inner_text("#icicle-readout").split(":")[0], opened.number("#icicle-readout")))
        opened.page.keyboard.press("ArrowRight")
    by_column = dict(parts)
    assert total == max(by_column.values())
    assert sum(by_column.values()) == max(totals_of(plan))
    opened.page.keyboard.press("Home")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowLeft", "Enter", "ArrowDown", "ArrowDown"):
        opened.page.keyboard.press(key)
    assert opened.page.inner_text("#icicle-readout").count(" / ") == 2
    opened.page.keyboard.press("Escape")
    assert opened.page.inner_text("#icicle-readout").startswith("everything")


def test_exposed_time_is_added_up(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "film")
    spans = next(lane["spans"] for lane in plan["lanes"] if lane["name"] == "gather")
    exposed = sum(
        b - a for a, b, is_ in zip(*[spans[k] for k in ("start_s", "stop_s", "is_exposed")], strict=True) if is_
    )
    row = opened.page.locator("#panel-film tr", has_text="gather").first.inner_text()
    assert float(row.split("\t")[-1].removesuffix(" ms")) == pytest.approx(exposed * 1e3, rel=0.01)


# -- the stage player -------------------------------------------------------------------------------------------------


def choose(opened: Opened, **setting: int) -> None:
    """Put the sliders where they are wanted."""
    for name, value in setting.items():
        places = opened.script(f"zeroshard.views.get('player').choices.{name}")
        opened.page.fill(f"#player-{name}", str(places.index(value)))


def bars(opened: Opened) -> dict[int, dict[str, float]]:
    """Return the bytes of each bar that is shown, by rank and column."""
    found = opened.script("""[...document.querySelectorAll('.bar[data-rank]')].map((bar) => [Number(bar.dataset.rank),
        [...bar.querySelectorAll('i[data-column]')].map(({ dataset }) => [dataset.column, Number(dataset.bytes)])])""")
    return {rank: dict(parts) for rank, parts in found}


def test_bars_are_those_of_the_residency_table(open_page: Open, plan: dict[str, Any]) -> None:
    plan = plan | {"player": plan["player"] | {"units": [1001, 4099, 4099, 77]}}
    opened = open_page(plan, "player")
    for stage in range(4):
        for ranks, batch, sequence in ((1, 1, 1024), (3, 2, 2048), (8, 6, 64), (1024, 1, 131072)):
            setting = {"stage": stage, "ranks": ranks, "batch": batch, "sequence": sequence}
            choose(opened, **setting)
            shown = bars(opened)
            assert len(shown) == min(ranks, 15)
            assert shown == {rank: rank_bytes(plan["player"], **setting, rank=rank) for rank in shown}
            assert opened.number("#player-total") == player_total(plan["player"], **setting)


def test_one_rank_is_plain_data_parallelism(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan | {"player": plan["player"] | {"align_numel": 1}}, "player")
    player = plan["player"]
    state_bytes = player["parameter_bytes"] + player["gradient_bytes"] + player["state_bytes"]
    choose(opened, stage=0, ranks=1)
    plain = bars(opened)[0]
    assert plain["transient"] == plain["padding"] == 0
    assert sum(plain[column] for column in PLAYER_COLUMNS[:3]) == state_bytes * sum(player["units"])
    for stage in (1, 2, 3):
        choose(opened, stage=stage)
        assert bars(opened) == {0: plain}


def test_sliders_move_with_the_keyboard_and_change_bars(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "player")
    for name, column in (
        ("stage", "parameters"),
        ("ranks", "states"),
        ("batch", "activations"),
        ("sequence", "activations"),
    ):
        before, height = (
            bars(opened)[0],
            opened.script(f"document.querySelector('[data-column={column}]').style.height"),
        )
        opened.page.focus(f"#player-{name}")
        opened.page.keyboard.press("ArrowLeft")
        assert bars(opened)[0][column] != before[column]
        assert opened.script(f"document.querySelector('[data-column={column}]').style.height") != height


def test_the_badge_follows_the_bars(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "player")
    seen = {}
    for batch in (1, 2, 4, 8, 16, 32, 64, 128):
        choose(opened, stage=3, batch=batch)
        seen[opened.number("#player-total")] = opened.page.get_attribute("#player-badge", "data-verdict")
    player = plan["player"]
    outside_bytes = player["capacity_bytes"] - player["usable_bytes"]
    for nbytes, verdict in seen.items():
        fits = (nbytes - outside_bytes) * player["p90_ratio"] + outside_bytes <= player["capacity_bytes"]
        assert verdict == ("fits" if fits else "tight" if nbytes <= player["capacity_bytes"] else "no")
    assert {"fits", "no"} <= set(seen.values())
    opened.page.hover(".bar[data-rank='2'] [data-column='states']")
    assert "K · P / N" in opened.page.inner_text("#tooltip")


# -- the other views --------------------------------------------------------------------------------------------------


def test_the_frontier_shows_what_is_clicked(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "frontier")
    (best,) = [one for one in plan["frontier"] if one["is_best"]]
    assert best["label"] in opened.page.inner_text("#frontier-detail h3")
    x, y = opened.script("""(() => {
        const { scatter } = zeroshard.views.get('frontier');
        const point = scatter.points[0];
        return [scatter.px(point.x), scatter.py(point.y)];
    })()""")
    box = opened.page.locator("#panel-frontier canvas").bounding_box()
    opened.page.mouse.click(box["x"] + x, box["y"] + y)
    least = min(plan["frontier"], key=lambda one: one["total_bytes"])
    assert opened.number("#frontier-detail p") == least["total_bytes"]
    assert least["label"] in opened.page.inner_text("#frontier-detail h3")
    for name, value in least["options"].items():
        assert f"{name}\t{value}" in opened.page.inner_text("#frontier-detail table")
    opened.page.locator("#panel-frontier canvas").focus()
    opened.page.keyboard.press("ArrowRight")
    second = sorted(plan["frontier"], key=lambda one: one["total_bytes"])[1]
    assert opened.number("#frontier-detail p") == second["total_bytes"]
    front = opened.script("zeroshard.views.get('frontier').front.map((one) => one.label)")
    assert set(front) == {
        one["label"]
        for one in plan["frontier"]
        if not any(
            other["total_bytes"] <= one["total_bytes"] and other["tokens_per_s"] > one["tokens_per_s"]
            for other in plan["frontier"]
        )
    }


def test_the_scorecard_filters_and_counts(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "scorecard")
    scores = [one for one in plan["scorecard"] if one["metric"] == "peak memory"]
    count = "zeroshard.views.get('scorecard').scatter.points.length"
    assert opened.script(count) == len(scores)
    opened.page.select_option("#scorecard-source", "own runs")
    own = [one for one in scores if one["source"] == "own runs"]
    assert opened.script(count) == len(own)
    for source in {one["source"] for one in scores}:
        errors = [abs(one["predicted"] / one["measured"] - 1) for one in scores if one["source"] == source]
        row = opened.page.locator("#scorecard-summary tr", has_text=source).inner_text().split("\t")
        assert row[1:3] == [str(len(errors)), f"{100 * statistics.median(errors):.1f}%"]
        assert row[4] == f"{sum(error <= 0.05 for error in errors)} of {len(errors)}"
    opened.page.locator("#panel-scorecard canvas").focus()
    opened.page.keyboard.press("Home")
    assert opened.number("#scorecard-detail", "predicted") == min(own, key=lambda one: one["measured"])["predicted"]
    opened.page.click("#scorecard-errors")
    assert opened.script("zeroshard.views.get('scorecard').scatter.points[0].y") == pytest.approx(
        next(one["predicted"] / one["measured"] - 1 for one in sorted(own, key=lambda one: one["measured"]))
    )
    opened.page.select_option("#scorecard-metric", "step time (s)")
    assert opened.script(count) == sum(
        one["metric"] == "step time" and one["source"] == "own runs" for one in plan["scorecard"]
    )


def test_tables_show_the_numbers_of_the_data(open_page: Open, plan: dict[str, Any]) -> None:
    opened = open_page(plan, "comparison")
    shown = opened.script(
        "[...document.querySelectorAll('#comparison td span')].map((one) => Number(one.dataset.value))"
    )
    assert shown == [value for one in plan["comparison"] for value in (one["predicted"], one["measured"])]
    opened.show("ranks")
    shown = opened.script("[...document.querySelectorAll('#ranks td span')].map((one) => Number(one.dataset.bytes))")
    expected = []
    for source in (0, 1):  # each has a table of its own, with the columns that it has
        ranks = [one for one in plan["ranks"] if one["source"] == source]
        held = [column for column in plan["columns"] if any(one["resident_bytes"].get(column) for one in ranks)]
        for one in ranks:
            peaks = [one["peak_bytes"], one["total_bytes"]] if source == 0 else []
            expected += [sum(one["resident_bytes"].values()), *peaks, *(one["resident_bytes"][name] for name in held)]
    assert shown == expected
    opened.show("losses")
    for run in plan["curves"]:
        cells = opened.page.locator("#losses tr", has_text=run["run"]).inner_text().split("\t")
        known = [loss for loss in run["loss"] if loss is not None]
        assert cells[1:4] == [str(len(run["loss"])), f"{known[-1]:.4f}", f"{min(known):.4f}"]
    equal = [*plan["curves"][:1], plan["curves"][0] | {"run": "again"}, plan["curves"][1]]
    again = open_page(plan | {"curves": equal}, "losses")
    rows = [row.split("\t")[6] for row in again.page.locator("#losses tbody tr").all_inner_texts()]
    assert rows == ["", f"{equal[0]['run']}, at each step", ""]
    opened.page.locator("#losses canvas").focus()
    opened.page.keyboard.press("End")
    assert opened.page.inner_text("#loss-readout").startswith("step 1,000:")


# -- the walk ---------------------------------------------------------------------------------------------------------


def test_the_walk_tells_the_trace(open_page: Open) -> None:
    opened = open_page({"version": 2, "title": "a walk"}, "walk")
    walk = read_walk()
    opened.page.focus("#walk")
    for step in walk["steps"]:
        opened.page.keyboard.press("ArrowRight")
        state = step["state"]
        sentence, nbytes, drawn = opened.script("""[
            document.querySelector('#walk-sentence').textContent,
            [...document.querySelectorAll('.bytes span')].map((one) => Number(one.dataset.bytes)),
            zeroshard.views.get('walk').cells.map(({ unit, rank, parameters, gradients, kept }) => [
                unit.name, rank, ...[parameters, gradients].map((one) => one.querySelectorAll('.on').length),
                kept.classList.contains('on')])]""")
        assert sentence == step["sentence"]
        assert nbytes == [sum(rank.values()) for rank in state["resident_bytes"]]
        assert drawn == [
            [
                unit["name"],
                rank,
                walk["ranks"] if unit["name"] in state["whole"] else 1,
                int(unit["name"] in state["reduced"]),
                unit["name"] in state["kept"],
            ]
            for unit in walk["units"]
            for rank in range(walk["ranks"])
        ]
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.input_value("#walk-slider") == str(len(walk["steps"]))
    opened.page.keyboard.press("Home")
    assert opened.page.inner_text("#walk-sentence").startswith("Between two steps")
    opened.page.click("#walk-next")
    opened.page.click("#walk-next")
    opened.page.click("#walk-previous")
    assert opened.page.inner_text("#walk-sentence") == walk["steps"][0]["sentence"]


def test_the_walk_plays_and_stops(open_page: Open) -> None:
    opened = open_page({"version": 2, "title": "a walk"}, "walk")
    opened.page.clock.install()
    opened.page.focus("#walk")
    opened.page.keyboard.press(" ")
    opened.page.clock.run_for(6000)
    played = int(opened.page.input_value("#walk-slider"))
    assert played == 3
    opened.page.keyboard.press(" ")
    opened.page.clock.run_for(6000)
    assert int(opened.page.input_value("#walk-slider")) == played
    opened.page.click("#walk-play")
    opened.page.clock.run_for(100_000)
    assert int(opened.page.input_value("#walk-slider")) == len(read_walk()["steps"])
    assert opened.page.inner_text("#walk-play") == "Play"
