"""What the pages say can be followed: their programs run, their links lead somewhere, cited sections exist."""

import re
from pathlib import Path

import pytest

from .source import REPOSITORY, package_modules
from .test_all import examples, run_block
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


@pytest.mark.parametrize("page", ["README.md", "docs/coming-from.md", "docs/optimizers.md"])
def test_the_programs_of_a_page_run(page: str) -> None:
    programs = examples((REPOSITORY / page).read_text())
    assert programs
    for program in programs:
        run_block(program, page)


def test_cited_sections_exist() -> None:
    cited = {section for module in package_modules() for section in cited_sections(module.text)}
    assert cited - headings((REPOSITORY / "docs/design.md").read_text()) == set()


def test_a_cited_section_is_recognized() -> None:
    assert cited_sections('Read `docs/design.md` ("Nothing of the kind") first.') == ["Nothing of the kind"]
    assert headings("# A\n\ntext\n## B c\n") == {"A", "B c"}


def test_pages_show_what_commands_print() -> None:
    """The blocks that `python -m tools.commands` writes."""
    tool = load_tool("commands")
    for page in tool.PAGES:
        text = page.read_text()
        assert tool.BLOCK.search(text)
        assert tool.filled(text) == text
