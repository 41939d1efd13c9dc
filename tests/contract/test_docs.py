"""What the pages say can be followed: their programs run, their links lead somewhere, cited sections exist."""

import contextlib
import io
import json
import os
import re
from pathlib import Path

import pytest

from zeroshard.testing import run_ranks

from .blocks import examples, run_block
from .source import REPOSITORY, package_modules
from .test_budgets import load_tool

PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])


def broken_links(text: str, folder: Path) -> list[str]:
    """List the relative links of a page that lead nowhere."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return [target for target in targets if "://" not in target and not (folder / target).exists()]


def cited_sections(text: str) -> list[str]:
    """List the sections of docs/design.md that a text cites, as in: `docs/design.md` ("Bucket")."""
    return re.findall(r'docs/design\.md`? \("([^"]+)"\)', text)


def headings(text: str) -> set[str]:
    """Return the headings of a page."""
    return set(re.findall(r"^#+ (.+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page.read_text(), page.parent) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.md").touch()
    text = "[a](here.md#part) [b](gone.md) [c](https://example.org)"
    assert broken_links(text, tmp_path) == ["gone.md"]


@pytest.mark.parametrize("page", ["README.md", "docs/coming-from.md", "docs/optimizers.md", "docs/recipes.md"])
def test_the_programs_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    programs = examples((REPOSITORY / page).read_text())
    assert programs
    for program in programs:
        run_block(program, page)


def run_quick_start(program: str, folder: str) -> str:
    """Run the README's program in a folder; return what it prints. Runs on a rank."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_block(program, "README.md")
    return printed.getvalue()


def test_the_quick_start_trains_and_resumes_on_two_ranks(tmp_path: Path) -> None:
    (program,) = examples((REPOSITORY / "README.md").read_text())
    losses = []
    for first in (0, 3):
        told, untold = run_ranks(run_quick_start, 2, program, str(tmp_path), process_group=False)
        assert untold == ""
        epochs = re.findall(r"epoch (\d+): held-out loss ([\d.]+)\n", told)
        assert [int(epoch) for epoch, _ in epochs] == [first, first + 1, first + 2]
        losses += [float(loss) for _, loss in epochs]
    assert losses == sorted(losses, reverse=True)
    assert [path.name for path in sorted((tmp_path / "runs" / "quick").glob("step-*"))] == ["step-4", "step-5"]


def test_the_tables_and_the_figure_are_those_of_committed_results() -> None:
    tool = load_tool("tables")
    kept = json.loads(tool.KEPT_RUNS.read_text())
    text = (REPOSITORY / "README.md").read_text()
    assert tool.filled(text, kept) == text
    assert tool.figure(kept) == tool.FIGURE.read_text()


def test_the_faults_are_those_that_were_measured() -> None:
    measured = (REPOSITORY / "benchmarks/results/silence.md").read_text()
    table = (REPOSITORY / "README.md").read_text().partition("| FSDP2 + DCP |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    assert len(rows) == 4
    for fault, ours, peers in rows:
        (row,) = [line for line in measured.splitlines() if line.startswith(f"| {fault} |")]
        assert row.endswith(f"| {peers} |")
        assert ours.split()[0].rstrip(":") in row
        assert {*re.findall(r"\d+", ours)} <= {*re.findall(r"\d+", row)}


def test_cited_sections_exist() -> None:
    cited = {section for module in package_modules() for section in cited_sections(module.text)}
    assert cited - headings((REPOSITORY / "docs/design.md").read_text()) == set()


def test_a_cited_section_is_recognized() -> None:
    assert cited_sections('Read `docs/design.md` ("Nothing of the kind") first.') == ["Nothing of the kind"]
    assert headings("# A\n\ntext\n## B c\n") == {"A", "B c"}


@pytest.mark.timeout(600)  # a minute on a quiet core
def test_pages_show_what_commands_print() -> None:
    """The blocks that `python -m tools.commands` writes."""
    tool = load_tool("commands")
    for page in tool.PAGES:
        text = page.read_text()
        assert tool.BLOCK.search(text)
        assert tool.filled(text) == text
