"""Well-known loops, converted by the diffs of `docs/coming-from.md`: as many lines as it says, and the same losses."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

from zeroshard.testing import run_ranks

LOOPS = Path(__file__).parent / "loops"
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
MOST_LINES = 8


def diff_of(name: str) -> str:
    """Return the diff that the page shows of a loop."""
    found = re.search(rf"<!-- diff: {name} -->\n```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, name
    return found[1]


def convert(program: str, diff: str) -> str:
    """Apply a diff whose hunks stand between lines of `@@`."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert program.count(before) == 1, f"not once in the loop:\n{before}"
        program = program.replace(before, after)
    return program


def run(program: str, folder: str, world: int) -> list[list[float]]:
    """Run a program on ranks, as torchrun would start it; return the losses of each."""
    return run_ranks(_run, world, program, folder, process_group=False)


def _run(program: str, folder: str) -> list[float]:
    os.environ["OUT_DIR"] = folder
    names: dict[str, Any] = {"__name__": "__loop__"}
    exec(compile(program, "<loop>", "exec"), names)
    losses: list[float] = names["losses_of_steps"]
    return losses


@pytest.mark.product
@pytest.mark.parametrize("name", ["nanogpt", "mingpt", "fsdp2"])
def test_a_converted_loop_has_the_losses_of_the_original(name: str, tmp_path: Path) -> None:
    original, diff = (LOOPS / f"{name}.py").read_text(), diff_of(name)
    removed, added = (sum(line.startswith(sign) for line in diff.splitlines()) for sign in "-+")
    paragraph = PAGE.read_text().partition(f"<!-- diff: {name} -->")[0].rstrip().rpartition("\n\n")[2]
    assert f"{removed} line{'s' * (removed > 1)} out, {added} in" in paragraph
    assert max(removed, added) <= MOST_LINES
    folders = [str(tmp_path / "original"), str(tmp_path / "converted")]
    for folder in folders:
        Path(folder).mkdir()
    expected = run(original, folders[0], 1 if name == "mingpt" else 2)
    found = run(convert(original, diff), folders[1], 2)
    if name == "mingpt":  # one process, whose batch two ranks share
        found = [[sum(both) / 2 for both in zip(*found, strict=True)]]
    for of_original, losses in zip(expected, found, strict=True):
        assert len(losses) == 10
        assert losses == pytest.approx(of_original, rel=1e-5)
    if name == "nanogpt":  # the original resumes from either checkpoint
        for of_original, losses in zip(*(run(original, folder, 2) for folder in folders), strict=True):
            assert 0 < len(losses) < 10
            assert losses == pytest.approx(of_original, rel=1e-5)


@pytest.mark.rotates
def test_a_converted_loop_of_deepspeed_has_the_losses_of_the_original_and_of_fsdp2(tmp_path: Path) -> None:
    original, diff = (LOOPS / "deepspeed.py").read_text(), diff_of("deepspeed")
    removed, added = (sum(line.startswith(sign) for line in diff.splitlines()) for sign in "-+")
    assert f"{removed} lines out, {added} in" in PAGE.read_text().partition("<!-- diff: deepspeed -->")[0]
    folders = {name: str(tmp_path / name) for name in ("fsdp2", "converted", "original")}
    for folder in folders.values():
        Path(folder).mkdir()
    expected = run((LOOPS / "fsdp2.py").read_text(), folders["fsdp2"], 2)
    found = [run(convert(original, diff), folders["converted"], 2)]
    if importlib.util.find_spec("deepspeed") is not None:
        found.append(run(original, folders["original"], 2))
    for by_rank in found:
        for of_fsdp2, losses in zip(expected, by_rank, strict=True):
            assert len(losses) == 10
            assert losses == pytest.approx(of_fsdp2, rel=1e-5)
