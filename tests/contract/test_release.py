"""What a release says of itself: its version in each place, its files, its extras, pinned for the tests."""

import re
import tomllib

from zeroshard.core.version import VERSION

from .source import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def plain(requirement: str) -> str:
    """Return the name of a requirement, as indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()


def test_the_version_is_one() -> None:
    assert re.findall(r"^version: (.*)$", (REPOSITORY / "CITATION.cff").read_text(), re.MULTILINE) == [VERSION]
    headings = re.findall(r"^## \[(.*?)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == VERSION


def test_the_source_distribution_names_files_that_exist() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [path for path in included if not (REPOSITORY / path.lstrip("/")).exists()] == []
    assert {"/examples", "/docs", "/tests", "/CITATION.cff"} <= {*included}


def test_what_the_tests_and_pages_need_is_pinned() -> None:
    pinned = {plain(line) for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = PROJECT["project"]["optional-dependencies"]
    needed = {plain(one) for name in ("cli", "data", "docs", "peft", "report", "transformers") for one in extras[name]}
    assert needed - pinned == set()


def test_claimed_versions_of_python_are_those_of_the_page() -> None:
    page = (REPOSITORY / "docs" / "compatibility.md").read_text()
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert claimed
    assert all(f"| {version}." in page for version in claimed)
