"""`zeroshard plot`: the curves of runs as text, picture and page."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from zeroshard.terminal import spark
from zeroshard.train.curves import as_html, as_svg, as_text, read_curves


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Return two runs, the second of which has an unfinished line, a name to escape, and no evaluation."""
    folders = []
    for name, losses in (("a", [4.0, 3.0, 2.0, "nan"]), ("b<&", [5.0])):
        folder = tmp_path / name
        folder.mkdir()
        lines = [
            {"kind": "step", "step": step, "loss": loss, "grad_norm": 1.0, "mfu": None}
            for step, loss in enumerate(losses, start=1)
        ]
        lines += [{"kind": "eval", "step": 4, "loss": 2.5, "bits_per_byte": 1.25}] if name == "a" else []
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text + ('{"kind": "step", "st' if name != "a" else ""))
        folders.append(folder)
    return folders


def test_curves_are_those_of_the_records(runs: list[Path]) -> None:
    curves = read_curves(runs, ["loss", "heldout", "mfu"])
    assert list(curves) == ["loss", "heldout"]
    assert curves["loss"][str(runs[0])][:3] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert curves["loss"][str(runs[1])] == [(1, 5.0)]
    assert curves["heldout"] == {str(runs[0]): [(4, 2.5)]}


def test_text_has_each_run_on_one_scale(runs: list[Path]) -> None:
    text = as_text(read_curves(runs, ["loss"]), 40)
    assert "  \u2586\u2583\u2581x\n" in text and "  \u2588\n" in text
    assert "from 2 to 5" in text
    assert f"{runs[0]}: 4 at step 1, nan at step 4" in text


def test_a_picture_is_valid_and_has_a_line_for_each_run(runs: list[Path]) -> None:
    picture = as_svg(read_curves(runs, ["loss", "grad_norm"]))
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}polyline")) == 4
    assert any(str(runs[1]) == one.text for one in root.findall(f"{space}text"))
    first = root.findall(f"{space}polyline")[0].attrib["points"].split()
    heights = [float(point.split(",")[1]) for point in first]
    assert heights == sorted(heights), "a falling loss goes down"


def test_ranges_are_those_of_all_values() -> None:
    points = [(step, {1: 5.0, 500: 9.0}.get(step, 1.0)) for step in range(1, 2001)]
    curves = {"loss": {"run": points}}
    text = as_text(curves, 60)
    assert "run: 5 at step 1, 1 at step 2000" in text and "from 1 to 9" in text
    root = ElementTree.fromstring(as_svg(curves))
    labels = {one.text for one in root.findall("{http://www.w3.org/2000/svg}text")}
    assert {"9", "1", "step 2000"} <= labels


def test_means_of_nearly_equal_values_are_drawn() -> None:
    points = [(step, 0.1 if step % 2 else math.nextafter(0.1, 1)) for step in range(1000)]
    assert "from 0.1 to 0.1" in as_text({"loss": {"run": points}}, 3)


def test_a_page_asks_nothing_of_anybody(runs: list[Path]) -> None:
    page = as_html(read_curves(runs, ["loss"]))
    assert page.startswith("<!doctype html>") and "<svg" in page
    assert re.findall(r"(?:href|src)=", page) == []


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it has no metrics\.jsonl"):
        read_curves([tmp_path], ["loss"])
    with pytest.raises(ValueError, match="there is no metric 'lss'; there are: loss, heldout"):
        read_curves([tmp_path], ["lss"])


def test_a_small_curve_has_means_of_equal_parts() -> None:
    assert spark([8.0, 6.0, 4.0, 2.0, 0.0, 0.0], 3) == "\u2588\u2584\u2581"
    assert spark([1.0, 1.0], 9) == "\u2581\u2581"
    assert spark([float("nan"), 1.0, 2.0], 9) == "x\u2581\u2588"
