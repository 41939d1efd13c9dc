"""What becomes one file: data that is checked, modules that are joined, and the size of both."""

import base64
import copy
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.report import synthetic
from zeroshard.report.check import check_page
from zeroshard.report.page import join_modules, make_page, write_page
from zeroshard.report.player import table_rows
from zeroshard.report.walk import read_walk

CODE_BYTES = 300_000
MINIMAL = {"version": 2, "title": "a run"}


def unpack(page: str) -> dict[str, Any]:
    """Return the data that a page holds."""
    (packed,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(packed)))


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return synthetic.plan()


def test_a_page_holds_its_data(plan: dict[str, Any], tmp_path: Path) -> None:
    path = write_page(plan, tmp_path / "page.html")
    found = unpack(path.read_text("utf-8"))
    for key in plan.keys() - {"film"}:
        assert found[key] == plan[key]
    for part, columns in plan["film"].items():
        if part in ("events", "ticks"):
            assert found["film"][part].pop("t_s") == pytest.approx(columns["t_s"], abs=5e-10)
            columns = {key: values for key, values in columns.items() if key != "t_s"}
        assert found["film"][part] == columns
    assert found["walk"] == read_walk()
    assert found["rows"] == table_rows()


def test_the_code_of_a_page_is_small() -> None:
    page = make_page(MINIMAL | {"walk": None})
    assert len(page.encode()) < CODE_BYTES
    # With the walk and nothing else, too.
    assert len(make_page(MINIMAL).encode()) < CODE_BYTES


def test_a_page_names_no_other_file() -> None:
    page = make_page(MINIMAL | {"walk": None})
    code = re.sub(r'id="data">.*?</script>', "", page)
    assert (
        re.findall(r"https?:|\bsrc=|@import|url\(|^import |\bfetch\(|XMLHttpRequest|WebSocket", code, re.MULTILINE)
        == []
    )
    assert re.findall(r'href="([^"]*)"', code) == ["data:,", "#panels"]
    assert code.count("</script>") == 1  # the end of the code itself; that of the data went with it


def test_titles_are_escaped() -> None:
    page = make_page(MINIMAL | {"title": "</title><script>alert(1)</script>", "walk": None})
    assert "alert(1)" not in page.replace("&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;", "")


def test_modules_are_joined_once_each_in_the_order_of_their_imports(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text('import { c } from "./c.js";\nimport { b } from "./b.js";\n\nb(c);\n')
    (tmp_path / "b.js").write_text('import { c } from "./c.js";\n\nexport function b() {}\n')
    (tmp_path / "c.js").write_text("export const c = 1; // export const\n")
    joined = join_modules("a.js", tmp_path)
    assert joined.split() == "const c = 1; // export const function b() {} b(c);".split()
    (tmp_path / "c.js").write_text('import { a } from "./a.js";\n')
    with pytest.raises(ValueError, match=re.escape("a.js imports c.js imports a.js")):
        join_modules("a.js", tmp_path)


def test_the_modules_of_the_page_have_no_import_left() -> None:
    joined = join_modules("main.js")
    assert not re.search(r"^(import|export) ", joined, re.MULTILINE)
    names = re.findall(r"^(?:const|let|class|(?:async )?function) (\w+)", joined, re.MULTILINE)
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))


def test_all_data_may_be_left_out(plan: dict[str, Any]) -> None:
    check_page(MINIMAL)
    check_page(plan)
    check_page(MINIMAL | dict.fromkeys(("film", "walk", "player", "frontier", "ranks", "curves", "lanes")))


CHANGES = [
    (("version",), 1, ValueError, "data.version must be 2, got 1"),
    (("sources", 0, "kind"), "picture", ValueError, "data.sources[0].kind must be one of ['plan', 'search', 'run',"),
    (("sources", 1, "state"), "good", ValueError, "data.sources[1].state must be one of ['complete', 'interrupted',"),
    (("sources", 0, "memory", "total_bytes"), 3, ValueError, "data.sources[0].memory: the parts are 19,327,352,832"),
    (
        ("sources", 0, "results", 0, "value"),
        float("nan"),
        ValueError,
        "data.sources[0].results[0].value must be finite",
    ),
    (("shows", "film"), [3], ValueError, "data.shows.film: indices must be from 0 to 2, got 3 to 3"),
    (("shows", "views"), [0], ValueError, "data.shows has 'views', which is no entry of the data"),
    (("ranks", 0, "source"), 7, ValueError, "data.ranks: source: indices must be from 0 to 2, got 0 to 7"),
    (("title",), 3, TypeError, "data.title must be str, got int: '3'"),
    (("surprise",), 3, ValueError, "data has ['surprise'], which PageData does not have"),
    (("sources", 0, "model", "parameters_numel"), True, TypeError, "parameters_numel must be int, got bool"),
    (("sources", 0, "options", "stage"), None, TypeError, "data.sources[0].options.stage must be"),
    (("ranks", 0, "resident_bytes", "other"), 3, ValueError, "data.ranks[0].resident_bytes has ['other']"),
    (("frontier", 3, "verdict"), "maybe", ValueError, "data.frontier[3].verdict must be one of"),
    (
        ("frontier", 3, "tokens_per_s"),
        float("nan"),
        ValueError,
        "data.frontier[3].tokens_per_s must be finite, got nan",
    ),
    (("curves", 0, "loss", 2), float("inf"), ValueError, "data.curves[0].loss[2] must be finite, got inf"),
    (("curves", 0, "loss"), [1.0], ValueError, "data.curves[0]: columns differ in length"),
    (("curves", 0, "grad_norm"), [1.0], ValueError, "data.curves[0]: columns differ in length"),
    (("curves", 0, "heldout", "loss"), [1.0], ValueError, "data.curves[0].heldout: columns differ in length"),
    (("film", "events", "column", 5), 17, ValueError, "data.film.events.column: indices must be from 0 to 5"),
    (("film", "events", "module", 5), -1, ValueError, "data.film.events.module: indices must be from 0"),
    (("film", "events", "nbytes", 5), 0, ValueError, "data.film.events: event 5 has 0 bytes; omit"),
    (("film", "events", "nbytes", 5), 1.5, TypeError, "data.film.events.nbytes[5] must be int, got float"),
    (("film", "events", "nbytes", 0), -4096, ValueError, "data.film.events: event 0 releases 4096 bytes of storage"),
    (("film", "events", "storage", 1), 1, ValueError, "data.film.events: event 1 allocates storage 1, which is"),
    (("film", "events", "t_s", 9), 1e9, ValueError, "data.film.events.t_s: entry 10 is earlier"),
    (("film", "ticks", "unit", 0), 10**6, ValueError, "data.film.ticks.unit: indices must be"),
    (("lanes", 0, "spans", "label"), [], ValueError, "data.lanes[0].spans: columns differ in length"),
    (("player", "units"), [], ValueError, "data.player.units is empty"),
    (("player", "align_numel"), 3, ValueError, "data.player.align_numel must be a power of two up to 64, got 3"),
    (("walk", "steps", 0, "state", "whole"), ["none"], ValueError, "data.walk: state 1 names ['none']"),
    (("walk", "start", "resident_bytes"), [], ValueError, "data.walk: state 0 has 0 of 4 ranks"),
    (("walk", "steps", 2, "event", "kind"), "fetch", ValueError, "data.walk.steps[2].event.kind must be one of"),
]


@pytest.mark.parametrize(("path", "value", "error", "message"), CHANGES, ids=lambda value: str(value)[:40])
def test_wrong_data_is_refused_with_its_place(
    plan: dict[str, Any], path: tuple[Any, ...], value: object, error: type[Exception], message: str
) -> None:
    data = copy.deepcopy(plan | {"walk": read_walk()})
    check_page(data)
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(error, match=re.escape(message)):
        make_page(data)
    with pytest.raises(ValueError, match=re.escape("data has no ['title']")):
        make_page({"version": 2})
