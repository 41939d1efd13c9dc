"""The documentation site: built without warnings, no dead links, no request to outside, search from a disk."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import zeroshard as zs
from tests.contract.source import REPOSITORY

pytestmark = [pytest.mark.rotates, pytest.mark.timeout(600)]

BUILD_S = 300


class Links(HTMLParser):
    """What a page links to, what it loads by itself, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.followed: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.followed.append(given["href"])
        elif tag == "link" and "href" in given and given.get("rel") != "canonical":
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    beside = Path(sys.executable).parent / "mkdocs"
    mkdocs = str(beside) if beside.exists() else shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("needs mkdocs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [mkdocs, "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=BUILD_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr.strip() == ""
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    """Return the links of all pages."""
    return {path: Links(path.read_text()) for path in site.rglob("*.html")}


def dead(pages: dict[Path, Links], site: Path) -> Iterator[str]:
    """Yield the links within the site that lead nowhere, with their anchors."""
    for page, links in pages.items():
        if page.name == "404.html":  # its links are those of a server's root
            continue
        for link in [*links.followed, *links.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            is_there = target.exists() and (
                not anchor or target.suffix != ".html" or anchor == "__skip" or anchor in pages[target].anchors
            )
            if not is_there:
                yield f"{page.relative_to(site)}: {link}"


def test_no_link_is_dead(pages: dict[Path, Links], site: Path) -> None:
    assert sorted(set(dead(pages, site))) == []
    assert sum(len(links.followed) for links in pages.values()) > 1000


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    here = tmp_path / "here.html"
    here.write_text('<a href="gone.html">a</a><a href="here.html#part">b</a><a href="here.html#no">c</a><i id="part">')
    found = list(dead({here: Links(here.read_text())}, tmp_path))
    assert found == ["here.html: gone.html", "here.html: here.html#no"]


def test_nothing_is_loaded_from_outside(pages: dict[Path, Links], site: Path) -> None:
    assert {link for links in pages.values() for link in links.loaded if urlsplit(link).netloc} == set()
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()) == []


def test_every_public_name_has_a_page_with_its_docstring(site: Path) -> None:
    for name in zs.__all__:
        if name.startswith("_") or name == "optim":
            continue
        text = (site / "reference" / f"{name}.html").read_text()
        words = re.sub(r"<[^>]+>", "", text)
        named = getattr(zs, name)
        documented = importlib.import_module("zeroshard.plan.planning").make_plan if name == "plan" else named
        first = (documented.__doc__ or "").strip().split("\n")[0].replace("`", "")
        assert " ".join(first.split()[:5]) in " ".join(words.split()), name


def test_search_finds_from_a_disk_without_a_request(site: Path, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.click("input[name=query]")
    page.keyboard.type("gathered", delay=20)  # search begins with a key
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    found = page.inner_text(".md-search-result__list")
    assert "gathered" in found
    page.click(".md-search-result__link >> nth=0")
    page.wait_for_load_state()
    assert page.url.startswith("file:")
    assert [url for url in requests if not url.startswith(("file:", "blob:", "data:"))] == []
    context.close()
