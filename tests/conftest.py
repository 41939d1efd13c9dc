"""What every test has in common: one thread, a warm fork server, no process group left behind, GPU tests on a GPU only.

`--rotation` chooses which cases of products run (`tests/rotation.py`).

Note: the fork server
    A rank is forked from a server, and imports for itself what the server has not. torch imports its compiler when the
    first optimizer is made, which takes 2.3 s of a core on every rank of every test, models of Transformers take 2 s,
    and the engine takes 0.25 s; the server imports all once instead. `tests/warm.py` says what else it does.
"""

import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .browser import browser
from .rotation import RUNNING, TURNS, split, turn_of

__all__ = ["browser"]

PRELOAD = ("pytest", "tests.warm")
PRELOAD_OF_TRANSFORMERS = "tests.integrations.tiny"
"""Its models take 2 s, so that the server has them only if a test that was collected needs them."""
# Folders and files of tests/ that run no ranks: `make check` and planted bugs need not wait for a server.
WITHOUT_RANKS = ("contract", "site", "store", "table", "test_durability")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of a rotation."""
    text = f"which share of the cases that rotate runs: a number, modulo {TURNS}; all; or what is common to all numbers"
    parser.addoption("--rotation", default="all", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Give this process one thread, as ranks have: an oracle computed here must round as they do."""
    torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    """Say what the results depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    rotation = config.option.rotation
    named = {"all": "all cases", "common": "cases of all rotations"}
    which = named.get(rotation) or f"rotation {turn_of(rotation)} of 0 to {TURNS - 1}"
    return f"torch {torch.__version__}, {torch.get_num_threads()} thread, GPU: {gpu}, {which}"


@pytest.hookimpl(tryfirst=True)  # a case's place among all cases decides, whatever -k leaves of them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another rotation runs; skip GPU tests where there is no GPU, so that the summary lists them."""
    RUNNING.collected = frozenset(item.nodeid for item in items)
    items[:], left_out = split(items, config.option.rotation)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = [item.nodeid for item in left_out]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell loops inside the test what runs."""
    RUNNING.rotation, RUNNING.case = item.config.option.rotation, item.nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Count what the workers of pytest-xdist left out, once: each has collected the same, and none reports it."""
    stats = node.config.pluginmanager.get_plugin("terminalreporter").stats
    if "deselected" not in stats and (left_out := getattr(node, "workeroutput", {}).get("left_out")):
        node.config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long the tests of each folder took, added up over processes, where durations are asked for."""
    if not terminalreporter.config.option.durations:
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, took_s in seconds.most_common():
        terminalreporter.write_line(f"{took_s:8.1f}  {folder}")


@pytest.fixture(scope="session", autouse=True)
def warm_fork_server(request: pytest.FixtureRequest) -> None:
    """Start the server that `run_ranks` forks ranks from, if a test of this session may need it."""
    if any({item.path.parent.name, item.path.stem}.isdisjoint(WITHOUT_RANKS) for item in request.session.items):
        more = [PRELOAD_OF_TRANSFORMERS] if "transformers" in sys.modules else []
        multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *more])
        forkserver.ensure_running()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Run each test with the thread count of a rank, whatever the test before has set."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test that needs no GPU train on the CPU, where its batches are, also on a machine that has one."""
    if torch.cuda.is_available() and not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("zeroshard.devices.count", lambda: 0)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail a test that leaves a process group in this process: the next test would run inside it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")
