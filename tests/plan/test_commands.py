"""The commands of plans: what they print, their JSON, their errors in one line."""

import json
import sys
from pathlib import Path

import pytest

from zeroshard import cli
from zeroshard.evidence import paper
from zeroshard.evidence.paper import Reproduction
from zeroshard.evidence.paper_sizes import table_1
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.machine.profiles import write_profile
from zeroshard.plan.shape.shapes import SHAPES

SAMPLE = Path(__file__).parent / "data" / "published_sample.csv"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command line in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["zeroshard", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_plan_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", "gpt2", "--ranks", 4, "--device", "a100-40", "--stage", 2) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gpt2: 124.44M parameters\nranks 4, device a100-40, row stage 2")
    assert "FITS" in printed
    assert "tokens/s" in printed


def test_a_plan_as_json_is_a_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "plan", "gpt2", "--ranks", 4, "--device", "a100-40", "--json") == 0
    text = capsys.readouterr().out
    assert json.loads(text)["model"]["parameters"] == SHAPES["gpt2"].numel()
    (tmp_path / "plan.json").write_text(text)
    assert run(monkeypatch, "report", tmp_path / "plan.json", "-o", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_a_search_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", "gpt2", "--ranks", "1,2", "--device", "a100-40", "--search") == 0
    printed = capsys.readouterr().out
    assert "simulated); the frontier of memory and speed:" in printed
    assert "1 ranks:" in printed
    assert "2 ranks:" in printed


def test_a_search_that_is_interrupted_before_a_result_ends_as_other_commands_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zeroshard.plan.search.bound_of", interrupt)
    assert run(monkeypatch, "plan", "gpt2", "--search") == 130
    assert capsys.readouterr() == ("", "")


def test_names_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", "--list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*SHAPES, *DEVICES))


def test_a_stored_profile_is_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_profile(DEVICES["v100-32"], tmp_path / "mine.json")
    assert run(monkeypatch, "plan", "gpt2", "--device", tmp_path / "mine.json") == 0
    assert "device v100-32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "gpt9"], "No shape is named 'gpt9'"),
        (["plan", "nosuch/config.json"], "The path 'nosuch/config.json' does not exist"),
        (
            ["plan", "gpt2", "--ranks", "0"],
            "--ranks takes numbers from 1 to 16,777,216, such as 8 or, with --search, 8,16; got '0'",
        ),
        (
            ["plan", "gpt2", "--ranks", "two"],
            "--ranks takes numbers from 1 to 16,777,216, such as 8 or, with --search, 8,16; got 'two'",
        ),
        (["plan", "gpt2", "--ranks", "9" * 20], "--ranks takes numbers from 1 to 16,777,216"),
        (["plan", "gpt2", "--ranks", "1,2"], "--ranks takes several numbers with --search only"),
        (["plan", "gpt2", "--search", "--system", "fsdp2"], "--search is of zeroshard; leave out --system"),
        (["plan", "gpt2", "--host", "-1"], "'--host': Input should be greater than or equal to 0.001"),
        (["plan", "gpt2", "--device", "z1"], "device must be one of"),
        (["plan", "gpt2", "--device", str(SAMPLE)], "is not a profile of `zeroshard doctor`"),
        (["report", "gone.json"], "gone.json"),
        (["report", str(SAMPLE)], "is not JSON"),
        (["scorecard", "--data", "gone.csv"], "gone.csv"),
    ],
)
def test_mistakes_end_with_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_the_paper_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = Reproduction({"table_1": table_1()}, ())
    monkeypatch.setattr(paper, "reproduce", lambda: found)
    assert run(monkeypatch, "paper", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tables"].keys() == {"table_1"}
    assert run(monkeypatch, "paper") == 0
    assert "Table 1" in capsys.readouterr().out


def test_a_scorecard_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "few.csv").write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:4]))
    assert run(monkeypatch, "scorecard", "--data", tmp_path / "few.csv") == 0
    assert "By system" in capsys.readouterr().out
