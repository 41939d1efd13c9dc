"""The pages of the documentation site that are no files in docs/, and what a page needs to be read there.

    make docs       # builds the site with mkdocs.yml, which names this file as its hook

Owns: the home page (README.md), a page for each public name from its docstring, the settings of `zeroshard train`, the
examples, and pages that show those files of the repository to which pages link. It must not import the package: names
and settings are read from the source, so the site needs neither torch nor an installation.

Note: one text for the repository and the site
    Pages link as a reader of the repository needs it, also to files outside docs/. On the site, these links lead to
    pages with the contents of the file. `<!-- include: FILE -->` shows a file of the repository on the site; beside it
    the page links to the file, for readers of the repository.
"""

import ast
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the root, and their places on the site."""
SOURCE = "source"
"""The folder of pages that show files."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
FENCE = re.compile(r"^(```+).*?^\1[ ]*$", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".sh": "sh", ".md": "markdown", ".cpp": "cpp"}
RAW = {".png", ".svg", ".jpg"}
LONGEST = 60_000
"""Characters of a shown file; result files are longer, and shown in part."""


def path_of(page: str) -> str:
    """Return the place in the repository of a page of the site, from which its links lead."""
    places = {site: root for root, site in MOVED.items()}
    return page.removeprefix(f"{SOURCE}/") if page.startswith(f"{SOURCE}/") else places.get(page, f"docs/{page}")


def target_of(link: str, path: str) -> str:
    """Return the path in the repository to which a relative link in a file leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def place_of(path: str) -> str:
    """Return the page or file of the site that shows a path of the repository."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith((".py", ".ipynb")):
        return f"{Path(path).with_suffix('')}.md"
    return f"{SOURCE}/{path}" if Path(path).suffix in {*RAW, ".md"} else f"{SOURCE}/{path}.md"


def is_relative(link: str) -> bool:
    """Tell whether a link leads to a file."""
    return "://" not in link and not link.startswith(("mailto:", "/"))


def outside_fences(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a page, and whether each is outside of fenced blocks."""
    at = 0
    for found in FENCE.finditer(text):
        yield text[at : found.start()], True
        yield found[0], False
        at = found.end()
    yield text[at:], True


def prepared(text: str, page: str, path: str) -> str:
    """Return the text of a file as a page of the site shows it: files included, links to where the site has targets."""

    def to_site(found: re.Match[str]) -> str:
        if not is_relative(found[2]):
            return found[0]
        place = place_of(target_of(found[2], path))
        return f"{found[1]}{posixpath.relpath(place, posixpath.dirname(page) or '.')}{found[3]}"

    def included(found: re.Match[str]) -> str:
        content = (ROOT / found[1]).read_text()
        if not found[1].endswith(".md"):
            return fenced(content, Path(found[1]).suffix)
        return prepared(re.sub(r"\A# .*\n+", "", content), page, found[1])

    parts = [LINK.sub(to_site, part) if is_prose else part for part, is_prose in outside_fences(text)]
    return INCLUDE.sub(included, "".join(parts)).replace("<details>", '<details markdown="1">')


def fenced(text: str, suffix: str) -> str:
    """Return a file as a fenced block."""
    cut = f"{text[:LONGEST]}\n[...]\n" if len(text) > LONGEST else text
    return f"````{LANGUAGES.get(suffix, 'text')}\n{cut.rstrip()}\n````"


def shown(path: str) -> str:
    """Return the page that shows a file or the names of a folder."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(one.name for one in place.iterdir() if not one.name.startswith(("_", ".")))
        return f"{UNSEARCHED}# {path}\n\n" + "\n".join(f"- `{name}`" for name in names)
    text = place.read_text()
    return UNSEARCHED + (text if place.suffix == ".md" else f"# {path}\n\n{fenced(text, place.suffix)}\n")


def example_page(path: Path) -> str:
    """Return the page of an example: its docstring, then its program."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
        return "\n\n".join(fenced(text, ".py") if is_code else text for text, is_code in texts)
    text = path.read_text()
    module = ast.parse(text)
    title, _, body = (ast.get_docstring(module) or path.stem).partition("\n")
    program = "\n".join(text.splitlines()[module.body[0].end_lineno or 0 :]).strip("\n")
    return f"# {title.rstrip('.')}\n{body}\n\n`examples/{path.name}`:\n\n{fenced(program, '.py')}\n"


def public_names() -> dict[str, str]:
    """Return, by name, where each public name of the package is defined."""
    module = ast.parse((ROOT / "zeroshard" / "__init__.py").read_text())
    listed: list[str] = []
    origins = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            origins |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
    return {name: origins[name] for name in listed if not name.startswith("_") and name != "optim"}


def reference_pages() -> dict[str, str]:
    """Return the pages of names, settings and modules, by place."""
    pages = {
        f"reference/{name}.md": f"::: {origin}\n    options:\n      heading: zs.{name}\n      heading_level: 1\n"
        for name, origin in public_names().items()
    }
    pages["reference/optim.md"] = "# zs.optim\n\n::: zeroshard.optim\n" + members(["zeroshard.optim"])
    integrations = [
        f"zeroshard.integrations.{name}" for name in ("accelerate", "deepspeed", "lightning", "transformers")
    ]
    pages["reference/integrations.md"] = "# zeroshard.integrations\n\n" + "".join(
        f"## {name}\n\n::: {name}\n{members([name])}\n" for name in integrations
    )
    pages["reference/testing.md"] = "# zeroshard.testing\n\n::: zeroshard.testing\n" + members(["zeroshard.testing"])
    pages["reference/configuration.md"] = configuration()
    return pages


def members(modules: list[str]) -> str:
    """Return the options that show what a module has in `__all__`."""
    names: list[str] = []
    for module in modules:
        path = ROOT / module.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        found = re.search(r"^__all__[^=]*= (\[.*?\])", text, re.MULTILINE | re.DOTALL)
        names += ast.literal_eval(found[1]) if found else []
    listed = "".join(f"        - {name}\n" for name in names)
    return f"    options:\n      show_root_heading: false\n      members:\n{listed}"


def configuration() -> str:
    """Return the page of the settings of `zeroshard train`, from the classes of `train/settings.py`."""
    tables = []
    module = ast.parse((ROOT / "zeroshard" / "train" / "settings.py").read_text()).body
    constants = {ast.unparse(node.target): node.value for node in module if isinstance(node, ast.AnnAssign)}
    for node in module:
        if not (isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["Section"]):
            continue
        rows = [row for statement in node.body if (row := setting(statement, constants))]
        if rows and node.name != "Config":
            head = f"## {node.name.lower()}\n\n{ast.get_docstring(node)}\n\n| setting | type | default | meaning |\n"
            tables.append(head + "|---|---|---|---|\n" + "\n".join(rows))
    intro = "Each is `section.name=value` on the command line, or a line of a TOML file: see [train](../train.md).\n\n"
    return "# Configuration of zeroshard train\n\n" + intro + "\n\n".join(tables) + "\n"


def setting(node: ast.stmt, constants: Mapping[str, ast.expr | None]) -> str:
    """Return the row of a setting, or nothing for another statement."""
    if not (isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)):
        return ""
    given = {
        word.arg: ast.unparse(constants.get(ast.unparse(word.value)) or word.value) for word in node.value.keywords
    }
    if "description" not in given:
        return ""
    kind = re.sub(r"Annotated\[(.*), AfterValidator.*\]", r"\1", ast.unparse(node.annotation))
    limits = [
        f"{sign} {given[key]}" for key, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")) if key in given
    ]
    text = re.sub(r"(?<!`)<([^<>]+)>", r"\\<\1>", str(ast.literal_eval(given["description"])))
    shown_kind = " ".join([kind.replace("|", "or"), ", ".join(limits)]).strip()
    return f"| `{ast.unparse(node.target)}` | {shown_kind} | `{given['default']}` | {text} |".replace("`''`", "empty")


def examples() -> list[Path]:
    """Return the files of examples/ that have a page, the shortest way in first."""
    return sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the parts of the menu that follow from files."""
    names = sorted(public_names())
    reference: list[Any] = [
        {"Functions": [{f"zs.{name}": f"reference/{name}.md"} for name in names if name.islower()]},
        {"Classes": [{f"zs.{name}": f"reference/{name}.md"} for name in names if not name.islower()]},
        {"Modules": [f"reference/{name}.md" for name in ("optim", "integrations", "testing")]},
        {"Formats": ["reference/configuration.md", "checkpoints.md", "compatibility.md"]},
    ]
    nav: list[Any] = config.nav or []
    for entry in nav:
        if entry.get("Examples") == "EXAMPLES":
            entry["Examples"] = ["examples.md", *(f"examples/{path.stem}.md" for path in examples())]
        if entry.get("Reference") == "REFERENCE":
            entry["Reference"] = reference
    listed = json.dumps(nav)
    others = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if f'"{path.name}"' not in listed]
    if others:
        nav[1]["Guide"].append({"More": others})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files in docs/, and those that show what pages link to."""
    made = {place: (ROOT / path).read_text() for path, place in MOVED.items()}
    made |= {f"examples/{path.stem}.md": example_page(path) for path in examples()}
    made |= reference_pages()
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    new = [file.src_uri for file in files.documentation_pages() if not file.src_uri.startswith("reference/")]
    while new:
        page = new.pop()
        for path in linked(files.src_uris[page].content_string, path_of(page)):
            place = place_of(path)
            if place in files.src_uris or not (ROOT / path).exists():
                continue
            content = (ROOT / path).read_bytes() if Path(place).suffix in RAW else shown(path)
            files.append(File.generated(config, place, content=content))
            if (ROOT / path_of(place)).suffix == ".md" and (ROOT / path_of(place)).exists():
                new.append(place)
    return files


def linked(text: str, path: str) -> Iterator[str]:
    """Yield the paths in the repository to which a file, and what it includes, links."""
    prose = "".join(part for part, is_prose in outside_fences(text) if is_prose)
    for found in INCLUDE.finditer(prose):
        if found[1].endswith(".md"):
            yield from linked((ROOT / found[1]).read_text(), found[1])
    yield from (target_of(link, path) for _, link, _ in LINK.findall(prose) if is_relative(link))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Include files, and lead links to where the site has their targets."""
    place = page.file.src_uri
    is_shown = place.startswith(f"{SOURCE}/") and not (ROOT / path_of(place)).exists()
    if place.startswith("reference/") or is_shown:
        return markdown
    return prepared(markdown, place, path_of(place))
