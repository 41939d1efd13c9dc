"""Files that people give programs: whole, whatever happens while they are written."""

import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from zeroshard.plan.machine.profiles import host_device, write_profile
from zeroshard.report.page import write_page
from zeroshard.text_files import write_whole

PAGE = {"version": 2, "title": "a run", "curves": [{"run": "a", "step": [1, 2], "loss": [5.5, 5.1]}]}


@contextmanager
def full_disk() -> Iterator[None]:
    """Have writes fail after 100 bytes of a file, as a full disk has them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_profile(host_device(), path),
        lambda path: write_page(PAGE, path),
        lambda path: write_whole(path, "new" * 100),
    ],
    ids=["profile", "page", "text"],
)
def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with full_disk(), pytest.raises(OSError, match=r"File too large: '.*/file'$"):
        write(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    write(path)
    assert path.stat().st_size > 100


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.touch(0o600)
    link.symlink_to("file")
    write_whole(link, "ä")
    assert link.is_symlink()
    assert path.read_text("utf-8") == "ä"
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_regular_file_is_written_as_it_is(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    write_whole(f"/dev/fd/{writes}", "text")
    assert os.read(reads, 9) == b"text"
    os.close(reads)
    os.close(writes)
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "text")


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*/no/file'$"):
        write_whole(tmp_path / "no" / "file", "text")


def test_what_another_file_cannot_replace_is_written_in_place(tmp_path: Path) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    with log.open("a") as opened:
        write_whole(f"/dev/fd/{opened.fileno()}", "page")
        opened.write(" written")
    assert log.read_text().endswith(" written")
    other.hardlink_to(log)
    write_whole(other, "both")
    assert log.read_text() == "both"
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        write_whole(loop, "text")
    assert loop.is_symlink()


def test_threads_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 200 + ".html")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write_whole(path, f"{number}" * 1000), range(40)))
    assert len({*path.read_text()}) <= 2
    assert os.listdir(tmp_path) == [path.name]
