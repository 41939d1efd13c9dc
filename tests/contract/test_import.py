"""`import zeroshard` is light: no extras, no network, no process group, nothing changed behind the user's back."""

import ast
import importlib
import importlib.util
import subprocess
import sys

import pytest

from .source import REPOSITORY, package_modules

HEAVY = (
    "accelerate",
    "transformers",
    "peft",
    "typer",
    "rich",
    "pydantic",
    "pandas",
    "deepspeed",
    "lightning",
    "matplotlib",
    "pyarrow",
)
# What a module needs beside torch, numpy and safetensors, by layer; the others must do without any extra.
NEED_EXTRAS = ("zeroshard.cli", "zeroshard.terminal", "zeroshard.train", "zeroshard.integrations")

# What happens around `import zeroshard` in a fresh interpreter; `{planted}` stands after the import.
PROGRAM = """
import os, random, sys, threading
import numpy, torch, torch.distributed

def state():
    return dict(
        environment=dict(os.environ),
        random=(random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        torch=(torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
        python_threads=threading.active_count(),
        process_group=torch.distributed.is_initialized(),
        cuda=torch.cuda.is_initialized(),
    )

def audit(event, arguments):
    if event in watched:
        print("EVENT", event, arguments)

watched = {{"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen"}}
before, modules = state(), set(sys.modules)
sys.addaudithook(audit)
import zeroshard
from zeroshard import *  # names are imported when they are first used
{planted}
watched.clear()
after = state()
print(*("CHANGED " + key for key in before if before[key] != after[key]), sep="\\n")
print(*("LOADED " + name for name in sorted({{m.partition(".")[0] for m in set(sys.modules) - modules}})), sep="\\n")
"""

BLOCKED = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)

sys.meta_path.insert(0, Blocker())
for name in {names!r}:
    importlib.import_module(name)
    print("IMPORTED", name)
"""


def run(program: str) -> list[str]:
    """Run a program in a fresh interpreter at the root of the repository and return the lines it prints."""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]


def loaded(lines: list[str]) -> set[str]:
    """Return the top-level modules that the import added."""
    return {line.split()[1] for line in lines if line.startswith("LOADED ")}


def side_effects(lines: list[str]) -> list[str]:
    """Return what the import did besides importing."""
    return [line for line in lines if line.startswith(("EVENT ", "CHANGED "))]


def third_party(names: set[str]) -> set[str]:
    """Keep the modules that come from neither Python, nor torch's compiled parts, nor this package."""
    return {name for name in names if name not in sys.stdlib_module_names} - {"zeroshard"}


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What a plain import does."""
    return run(PROGRAM.format(planted=""))


def test_import_loads_no_extra(lines: list[str]) -> None:
    assert "zeroshard" in loaded(lines)
    assert third_party(loaded(lines)) <= {"torch", "numpy", "safetensors"}


def test_import_has_no_side_effect(lines: list[str]) -> None:
    assert side_effects(lines) == []


@pytest.mark.rotates
def test_planted_side_effects_are_found() -> None:
    planted = """
import socket
socket.socket().bind(("127.0.0.1", 0))
socket.getaddrinfo("127.0.0.1", 1)
os.environ["ZEROSHARD"] = "1"
torch.rand(1)
torch.set_grad_enabled(False)
threading.Thread(target=threading.Event().wait, daemon=True).start()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
"""
    found = {" ".join(line.split()[:2]) for line in side_effects(run(PROGRAM.format(planted=planted)))}
    changed = {f"CHANGED {key}" for key in ("environment", "random", "torch", "python_threads", "process_group")}
    assert found >= {"EVENT socket.bind", "EVENT socket.getaddrinfo"} | changed


@pytest.mark.rotates
def test_a_planted_extra_is_found() -> None:
    names = loaded(run(PROGRAM.format(planted="import pytest")))
    assert "pytest" in third_party(names)


def test_all_but_the_command_line_imports_without_extras() -> None:
    names = [m.name for m in package_modules() if not m.name.startswith(NEED_EXTRAS)]
    assert "zeroshard.core.engine" in names
    assert run(BLOCKED.format(blocked=HEAVY, names=names)) == [f"IMPORTED {name}" for name in names]


def test_the_table_imports_without_torch() -> None:
    names = [m.name for m in package_modules() if m.name.startswith("zeroshard.table")]
    assert "zeroshard.table.schedule" in names
    assert run(BLOCKED.format(blocked=("torch", "numpy", "safetensors"), names=names)) == [
        f"IMPORTED {name}" for name in names
    ]


def test_what_the_planner_knows_imports_without_torch() -> None:
    modules = ("machine.allocator", "machine.memory_blocks", "machine.rules", "trace.events", "step.simulate")
    names = ["zeroshard.plan", *(f"zeroshard.plan.{name}" for name in modules), "benchmarks.arena", "tests.plan.saved"]
    assert run(BLOCKED.format(blocked=("torch", "numpy", "safetensors"), names=names)) == [
        f"IMPORTED {name}" for name in names
    ]


def test_the_report_page_is_written_without_torch() -> None:
    modules = ("check", "page", "runs", "player", "schema", "walk")
    names = [f"zeroshard.report.{name}" for name in modules]
    assert run(BLOCKED.format(blocked=("torch", "numpy", "safetensors"), names=names)) == [
        f"IMPORTED {name}" for name in names
    ]


@pytest.mark.rotates
def test_a_blocked_extra_is_found() -> None:
    with pytest.raises(AssertionError, match="No module named 'typer'"):
        run(BLOCKED.format(blocked=HEAVY, names=["typer"]))


HELP = """
import contextlib, io, runpy, sys
sys.argv = ["zeroshard", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    runpy.run_module("zeroshard", run_name="__main__")
assert "Begin with: zeroshard train" in shown.getvalue()
print(*("LOADED " + name for name in sys.modules), sep="\\n")
"""


def test_the_help_loads_nothing_that_only_commands_need() -> None:
    """A count, because seconds depend on the machine: 330 modules take 0.23 s."""
    names = loaded(run(HELP))
    assert {name for name in names if name.startswith("zeroshard")} <= {
        "zeroshard", "zeroshard.__main__", "zeroshard.cli", "zeroshard.table", "zeroshard.table.errors"
    }  # fmt: skip
    assert third_party({name.partition(".")[0] for name in names}).isdisjoint({"torch", "numpy", "pydantic"})
    assert len(names) < 400


def missing_names(text: str) -> list[str]:
    """Return what a script imports from the package and the package does not have."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "zeroshard":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = hasattr(module, "__path__") and importlib.util.find_spec(name) is not None
                if not hasattr(module, alias.name) and not is_module:
                    found.append(name)
    return found


def test_scripts_import_what_the_package_has() -> None:
    """No test runs all benchmarks and tools, which a moved function would break unseen."""
    assert missing_names("from zeroshard.torch_private import check_tracing") == [
        "zeroshard.torch_private.check_tracing"
    ]
    scripts = [path for room in ("benchmarks", "examples", "tools") for path in (REPOSITORY / room).rglob("*.py")]
    assert len(scripts) > 50
    assert {str(path): names for path in scripts if (names := missing_names(path.read_text()))} == {}
