"""What the pages say can be followed: their programs run, their links lead somewhere, cited sections exist."""

import ast
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import typer

from zeroshard import cli
from zeroshard.testing import run_ranks

from .blocks import examples, run_block
from .source import REPOSITORY, package_modules
from .test_budgets import load_tool

PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(REPOSITORY).as_posix()


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


PROGRAMS = [name_of(page) for page in PAGES if examples(page.read_text())]
RANKS = MappingProxyType({"docs/meshes.md": 4, "docs/outer.md": 4})
"""On how many ranks the programs of a page run, if not in one process."""
ELSEWHERE = MappingProxyType(
    {
        "docs/deepspeed.md": "integrations/test_deepspeed.py",
        "docs/lightning.md": "integrations/test_lightning.py",
        "docs/mailbox.md": "outer/test_mailbox_training.py",
        "docs/pipelines.md": "engine/test_pipeline.py",
        "docs/ray.md": "integrations/test_ray.py",
        "docs/trainers.md": "integrations/test_trainers.py",
    }
)
"""Pages whose programs need a launcher or another library, and the tests that run them."""


def run_page(page: str, folder: str) -> None:
    """Run the programs of a page in their order, as cells of one notebook. May run on a rank."""
    os.chdir(folder)
    names: dict[str, object] = {"__name__": "__example__"}
    for program in examples((REPOSITORY / page).read_text()):
        run_block(program, page, names)


@pytest.mark.rotates
@pytest.mark.parametrize("page", [page for page in PROGRAMS if page not in ELSEWHERE])
def test_the_programs_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page in RANKS:
        run_ranks(run_page, RANKS[page], page, str(tmp_path), process_group=False)
    else:
        run_page(page, str(tmp_path))


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_that_runs_elsewhere_is_named_there(page: str) -> None:
    assert page in PROGRAMS
    assert page in (REPOSITORY / "tests" / ELSEWHERE[page]).read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_block_is_a_program_a_command_or_output(page: Path) -> None:
    """Programs run above, commands are parsed below, differences of loops are applied in test_loops.py."""
    openings = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]
    assert set(openings) <= {"python", "sh", "diff", "text", "console"}


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command in the shell's blocks of a page."""
    lines = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in lines.splitlines()]
    return [list(itertools.takewhile(lambda word: word not in (">", "|"), words)) for words in found if words]


def command_line(words: list[str]) -> typer.Typer:
    """Return what the command line makes of the commands, and does not run here."""
    made: list[typer.Typer] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", words)
        patched.setattr(typer.Typer, "__call__", lambda app, *args, **options: made.append(app))
        with contextlib.suppress(SystemExit):
            cli.main()
    return made[0]


def refused(words: list[str]) -> str:
    """Return what is wrong with a command, as far as its parser, the Makefile or the files here know; else nothing."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        return "" if words[1] in targets else f"no target {words[1]}"
    if words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("tools", "benchmarks"):
        path = REPOSITORY / words[2].replace(".", "/")
        return "" if path.is_dir() or path.with_suffix(".py").exists() else f"no module {words[2]}"
    if words[0] != "zeroshard":
        return ""
    command: Any = typer.main.get_command(command_line(words))
    context = command.make_context(words[0], [], resilient_parsing=True)
    name, rest = words[0], words[1:]
    while hasattr(command, "commands"):
        name, *rest = rest
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    try:
        command.make_context(name, rest, parent=context)
    except Exception as error:  # a click of its own lies in some releases of typer
        if (text := getattr(error, "message", None)) is None:
            raise
        return "" if "does not exist" in text else str(text)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_a_page_are_accepted(page: Path) -> None:
    found = [(words, wrong) for words in commands_of(page.read_text()) if (wrong := refused(words))]
    assert found == []


def test_a_wrong_command_is_found() -> None:
    text = "```sh\nzeroshard train --rank 2\nmake tests\npython -m tools.gone\nzeroshard trian\nmake test\n```"
    assert [bool(refused(words)) for words in commands_of(text)] == [True, True, True, True, False]


def texts_of_the_package() -> str:
    """Return all texts that the package has in its code, with values left out."""
    texts = []
    for module in package_modules():
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_the_errors_of_the_guide_are_those_of_the_package() -> None:
    table = (REPOSITORY / "docs/guide/errors.md").read_text().partition("|---|---|\n")[2].partition("\n\n")[0]
    quoted = [line.split(" | ")[0].strip("| ") for line in table.splitlines()]
    assert len(quoted) >= 15
    texts = texts_of_the_package()
    assert [text for text in quoted if text not in texts] == []


def test_pages_are_short() -> None:
    """Say each thing once: what a page says, a docstring or another page need not say."""
    tool = load_tool("words")
    counts = {page: tool.count(page) for page in tool.pages()}
    assert sum(counts.values()) <= 25_000, counts


def test_words_are_those_that_people_write() -> None:
    text = "# A *b*\n\n[c d](e.md) `f`\n\n```sh\ng\n```\n<!-- h -->\n<!-- table: i -->\nj\n<!-- end -->\n| k | l |\n"
    assert load_tool("words").words_of(text) == 7


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
    text = (REPOSITORY / "README.md").read_text()
    assert tool.filled(text) == text
    assert tool.figure() == tool.FIGURE.read_text()
    captures = load_tool("captures")
    assert captures.page_of(json.loads(captures.KEPT.read_text())) == captures.PAGE.read_text()


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
