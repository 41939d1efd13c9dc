"""The commands of `zeroshard` in the pages' shell blocks, run in a folder that has the files which they name.

`zeroshard train` runs with `--dry-run`: it reads the model and the text and plans the run, and does not train;
`tests/train` trains. Other commands run as they stand, in the order of the page.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.test_docs import PAGES, commands_of, name_of
from tests.train.test_hf import _save

ELSEWHERE = {
    "zeroshard outer --serve": "serves until a signal: tests/outer/test_mailbox_exchange.py",
    "zeroshard outer --replay": "needs an island's log: tests/outer/test_mailbox_exchange.py",
    "zeroshard checkpoint import fsdp2/": "needs a checkpoint of torch: tests/checkpoint/test_dcp.py",
    "zeroshard checkpoint export runs/a/step-1000 adapter/": "needs adapters: tests/train/test_lora.py",
}
"""Beginnings of commands that do not run here, with the reason and the test that runs them."""
TEXT = "The class statement defines a class; a class is an object. " * 40
RUNS = {
    "a": ("tuned", "step-1000"),
    "b": ("tuned", "step-1000"),
    "books": ("made", "step-00000002"),
    "default": ("tuned", "step-00001500"),
    "first": ("made", "step-00000002"),
    "mine": ("tuned", "step-1"),
    "second": ("made", "step-00000002"),
}
"""The runs that pages name, each with the run here that it is a copy of, and its checkpoint."""
MADE = {"made": ["--depth", "1"], "tuned": ["--model", "hf:models/llama"]}
"""Runs here, each with the options of its model."""


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of zeroshard in a folder."""
    called = [sys.executable, "-m", *words]
    return subprocess.run(called, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, texts and runs."""
    root = tmp_path_factory.mktemp("pages")
    for name in ("models/llama", "models/my-model", "texts", "exported"):
        (root / name).mkdir(parents=True)
    _save(root / "models" / "llama", has_weights=True)
    for copy in (root / "models/my-model", root / "exported", root):
        shutil.copy(root / "models/llama/config.json", copy)
    for name in ("more.txt", "texts/one.txt"):
        (root / name).write_text(TEXT)
    (root / "notes.jsonl").write_text("".join(f"{json.dumps({'body': TEXT, 'text': TEXT})}\n" for _ in range(3)))
    short = "--steps 2 --ranks 1 model.context=16 train.batch=4 train.eval_bytes=200 run.sample_bytes=0"
    for name, model in MADE.items():
        done = run(["zeroshard", "train", *model, "--name", name, "--data", "more.txt", *shlex.split(short)], root)
        assert done.returncode == 0, done.stderr
    for name, (source, checkpoint) in RUNS.items():
        shutil.copytree(root / "runs" / source, root / "runs" / name)
        (root / "runs" / name / "step-00000002").rename(root / "runs" / name / checkpoint)
    return root


def runs_here(words: list[str]) -> bool:
    """Say whether a command of a page is zeroshard's, and no other test runs it."""
    return words[0] == "zeroshard" and not any(shlex.join(words).startswith(start) for start in ELSEWHERE)


PAGES_WITH_COMMANDS = [page for page in PAGES if any(map(runs_here, commands_of(page.read_text())))]


@pytest.mark.rotates
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=name_of)
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    shutil.rmtree(folder / "runs/b/step-0", ignore_errors=True)
    for words in commands_of(page.read_text()):
        if not runs_here(words):
            continue
        if words[1:3] == ["checkpoint", "export"]:
            shutil.rmtree(folder / words[4], ignore_errors=True)  # alternatives of a page take the same name
        asked = [*words, "--dry-run"] if words[1] == "train" else words
        done = run(asked, folder)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
        if "--json" in words:
            (folder / "plan.json").write_text(done.stdout)  # pages send it there


def test_each_command_that_runs_elsewhere_is_in_a_page() -> None:
    lines = [shlex.join(words) for page in PAGES for words in commands_of(page.read_text())]
    assert [start for start in ELSEWHERE if not any(line.startswith(start) for line in lines)] == []
    for why in ELSEWHERE.values():
        assert (Path(__file__).parents[2] / why.split(": ")[1]).exists(), why
