"""PNG and SVG files of a page's views."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report import synthetic
from zeroshard.report import pictures
from zeroshard.report.pictures import write_pictures

NAMES = ("stages", "film", "frontier", "scorecard", "comparison", "losses")
SVG = "{http://www.w3.org/2000/svg}svg"


def test_each_view_with_data_has_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = write_pictures(synthetic.plan(), tmp_path / "new")
    assert [path.name for path in paths] == [f"{name}.{suffix}" for name in NAMES for suffix in ("png", "svg")]
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ElementTree.parse(path).getroot().tag == SVG
        assert 5_000 < path.stat().st_size < 1_000_000
    curves = [{"run": "a", "step": [1, 2], "loss": [5.5, None]}]
    only = write_pictures({"version": 2, "title": "a", "curves": curves}, tmp_path, ["svg"])
    assert [path.name for path in only] == ["losses.svg"]


def test_the_same_data_gives_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = (write_pictures(synthetic.plan(), tmp_path / name, ["svg"]) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_no_peak_is_lost() -> None:
    np = pytest.importorskip("numpy")
    totals = np.zeros(50_000)
    totals[31_313] = 7
    kept = pictures._kept_moments(totals)
    assert 31_313 in kept
    assert len(kept) < 2000


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(
        ImportError, match=r"pictures need 'matplotlib.*'; install it with: pip install \"zeroshard\[report\]\""
    ):
        write_pictures({"version": 2, "title": "a"}, tmp_path)
