"""Sizes that stay small on purpose."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from .source import PACKAGE, REPOSITORY

CORE = ("table", "wire", "core")
ENGINE = (*CORE, "account", "activations", "describe", "join", "setup", "store", "update", "values", "whole")
PLAYED = 589
"""Lines that left evidence/ for plan/, which is larger by no more: other systems are options of its plans."""
PLANNED = {
    "what a step of any optimizer takes beside its states": 64,
    "operations of traced models as their graph has them, of a CPU's attention and recurrent layers, too": 34,
    "configurations that leave sizes to Transformers, parameters without gradients": 24,
    "searches with offload that look at few choices, and plan few of them": 49,
    "searches in processes, each for some of the numbers of ranks": 34,
    "batches that a loop holds until it has the next": 6,
    "sizes of a batch beside inputs are refused": 5,
    "states that are made with the optimizer": 4,
    "no plan that leaves memory uncounted fits without doubt": 7,
    "errors of texts, searches and traces that name what was given": 8,
    "losses whose storage is that of their elements": 7,
    "gradients of sparse embeddings": 6,
    "partial sums of messages when all are there": 5,
    "copies of convolutions by channels and strides, of gradients in another order, of small images": 50,
    "convolutions with dilations and groups by the kernels that run them, a note on half precision": 22,
    "products of three factors": 11,
    "losses over alignments": 15,
    "masks that Transformers leaves out after a look at their values": 96,
    "experts as stacks of matrices; what islands do not save": 4,
    "modules that keep tensors of their graph or convert parts, checkpoints that runs refuse": 31,
    "gradients of tied weights that places of a pipe exchange": 12,
    "what the fullest rank copies for a save": 18,
    "exchanges of other programs: each matrix alone, beside products, or to one rank": 60,
    "the offload of a system, which the scorecard plans": 3,
    "ranks whose states, gradients or updates differ, each with a peak of its own": 33,
    "passes of a pipe that wait for more than messages, in plans and searches alike": 8,
    "devices that cannot be are refused by name": 11,
    "steps of the greediest group, the mean of states that differ by group": 7,
    "the step in which an exchange of islands ends, the first step without one": 50,
    "paths of models that do not exist": 3,
    "a frontier whose pipes are planned in full, pieces of files in updates": 21,
    "updates on lists, with moments, of matrices marked by hand": 11,
    "states of random numbers that recomputations keep": 18,
}
"""Lines of plans that silent faults and slow searches have added since the budgets were set."""
SHOWN = {
    "recomputation of one block in some": 3,
    "cells, units and values of systems that are read whole, or refused by column or option": 104,
}
"""Lines of published runs that were misread, or whose programs were, since the budgets were set."""
ADMITTED = {
    "optimizers that are not known see shapes where nothing is cut": 12,
    "wrappers without hooks": 6,
    "trials with the options of groups, each slice in an optimizer of its own, in other entries": 48,
    "which states are of elements and which are counters": 26,
    "states by the options of groups, of other dtypes and of later steps, why a trial failed": 22,
    "Adafactor's lists and moments": 1,
    "trials of as many dimensions as parameters have, every hook of wrappers": 7,
    "numbers of groups in trials": 8,
    "trials with the attributes of parameters": 51,
    "states in a dict by parameter are refused by name": 17,
    "collections of parameters are refused by name": 15,
    "trials of whole parameters have other entries in each step": 16,
    "parameters are alike if what trials read of them is equal": 34,
    "numbers of groups apart from objects and times, and the error that names them": 19,
}
"""Lines of optimizers that silent faults of admission have added since the budgets were set."""
BUDGETS = {
    CORE: 5120,
    ENGINE: 11903,
    ("plan",): 6607 + PLAYED + sum(PLANNED.values()),
    ("evidence",): 1830 - PLAYED + sum(SHOWN.values()),
    ("optim",): 1040 + sum(ADMITTED.values()),
}
"""Lines of code by rooms."""
ADDED = {
    "a step that is skipped looks at held gradients": 40,
    "buffers follow rank 0, expanded ones too, also before forward methods": 226,
    "recomputations are compared each time": 162,
    "closures": 40,
    "whole parameters have storages of their own": 40,
    "detach": 253,
    "smaller mends: defects of other libraries, torch's defaults, states in files": 66,
    "changes of gradients by optimizers": 17,
    "plans of frozen parameters": 12,
    "reentrant checkpoints, refused by runs and plans alike": 10,
    "batch norm under treatments of activations": 16,
    "what random programs of more features found": 10,
    "a backward after gathered() is refused": 16,
    "meshes that are a part of the launch, and the axis pipe": 139,
    "parts of a pipe, and their micro-batches in flight": 58,
    "events of updates, copies, files, replicas and waits": 41,
    "what ranks along the axis tensor have alike, whole states with it": 19,
    "first values of split parameters, hooks that hold no engine": 24,
    "hooks of saved tensors do not outlive an interrupted forward": 13,
    "recomputations read the buffers of their forward": 16,
    "weights of several groups, each split over the ranks": 8,
    "pipelines: schedules, messages, chunks of a model": 200,
    "passes of a pipe that wait for more than messages": 7,
    "parameters that stay whole until the step": 19,
    "starts that share the store of a launcher": 30,
    "sums over replicas with computation beside them, communicators in one order": 52,
    "updated parameters that arrive beside the next forward": 50,
    "offload 'auto' that keeps gradients on the device": 19,
    "gradients that leave for the host beside the backward": 109,
    "what a forward uses last stays for its backward": 43,
    "gradients that land in the dtype of their message": 32,
    "replicas=, reprs of units, traces and memory": 25,
    "errors under torchrun: where the file is, and what is a consequence": 22,
    "faults of pipelines: one watchdog, the first value that is not finite, calls inside a step": 15,
    "local updates over islands, and plans of them, with the memory of each moment of an exchange": 187,
    "gradients pin memory of exact sizes, once": 7,
    "backwards and steps inside compiled functions": 7,
    "threads beside a forward, unused parameters in plans": 7,
    "optimizers that are not known see shapes where nothing is cut; trials of groups added later": 31,
    "silent faults: shared memory, changed parameters, complex reductions, lazy signs, orders of copies": 43,
    "averages ask what was trained, also if it is frozen again": 7,
    "options, tensors and lists of another type are refused by name": 13,
    "values that optimizers assign to .data": 25,
    "counters with dimensions, whatever the size of a slice": 2,
    "states of which ranks cannot join slices are refused by name": 36,
    "states of one element beside slices of one element": 20,
    "learning rates in tensors are compared": 1,
    "several optimizers adapt the loss scale once": 6,
    "gathers of partitioned inputs ahead of use stay within a forward": 5,
    "states that are made with the optimizer": 1,
    "outputs are summed by parts": 12,
    "a value of an offload that is given twice": 3,
    "tied parameters of a pipe are compared, votes along the axis tensor": 4,
    "groups that were removed are added again, and groups that change under gathered()": 17,
    "states of groups that were removed return to their parameters": 9,
    "parameters are no keys of an optimizer's states outside gathered()": 48,
    "changes under gathered() that an exception has ended are refused, or undone: counters and groups": 63,
    "sums of a replica that are apart from the second micro-batch on": 7,
    "units before the first trained one in predicted steps": 16,
    "the shards that have a parameter, for plans as for saves": 3,
    "errors of transforms inside a forward and of updates inside a backward name the cause": 12,
    "plain attributes that are views of parameters are refused by name": 31,
    "groups of pairs of a name and a parameter, and groups that cannot be added": 20,
    "an error that says why a context of torch does not help": 9,
    "states of each slice by the options of its group": 34,
    "what code outside a step computes from gradients of slices": 44,
    "parameters follow what code writes to entries of optimizers, and updates use data of gradients": 119,
    "optimizers that make way for those of another training": 29,
    "states of optimizers that Accelerate does not copy to its device": 6,
    "attributes of parameters on what stands for them": 9,
    "groups of whole matrices in plans": 4,
    "a buffer that is replaced goes first": 1,
    "checksums in place of states of random numbers": 1,
    "options of groups without addresses, in the comparison of ranks": 15,
    "threads that draw random numbers beside recomputations": 14,
}
"""Lines of the engine that features have added since the budgets were set."""
MOVED = {
    "arguments that plan/ resolved itself": 66,
    "treatments, which run in traces, too": 52,
    "the steady step": 122,
    "what Transformers' files are converted by": -110,
    "the balanced cut and the arguments of pipelines, from parallel/ and pipes.py": 35,
}
"""Lines that came to the engine's rooms from others, which are smaller by as many or more, and lines that left."""
FILE_LINES = 350
README_LINES = 150


def load_tool(name: str) -> ModuleType:
    """Import a script of `tools/`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loc = load_tool("loc")


def over_budget(counts: dict[Path, int], each: int, total: int) -> list[str]:
    """Say which file, or whether the sum, is over its budget of code lines."""
    found = [f"{path}: {lines} lines of code, of {each}" for path, lines in counts.items() if lines > each]
    if sum(counts.values()) > total:
        found.append(f"together: {sum(counts.values())} lines of code, of {total}")
    return found


def count(rooms: tuple[str, ...]) -> dict[Path, int]:
    """Count the lines of code of each file of some rooms."""
    return {Path(room) / path: n for room in rooms for path, n in loc.count_tree(PACKAGE / room).items()}


@pytest.mark.parametrize("rooms", BUDGETS, ids="+".join)
def test_rooms_are_within_their_budget(rooms: tuple[str, ...]) -> None:
    added = (sum(ADDED.values()) if set(CORE) <= set(rooms) else 0) + (sum(MOVED.values()) if rooms == ENGINE else 0)
    assert over_budget(count(rooms), 10**9, BUDGETS[rooms] + added) == []


def test_files_are_short() -> None:
    counts = loc.count_tree(PACKAGE)
    assert {Path("core/engine.py"), Path("wire/memory.py"), Path("cli.py")} <= counts.keys()
    assert over_budget(counts, FILE_LINES, 10**9) == []


def test_the_readme_is_within_its_budget() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) < README_LINES


def test_a_budget_can_be_exceeded() -> None:
    counts = {Path("a.py"): 4, Path("b.py"): 3}
    assert over_budget(counts, 4, 7) == []
    assert over_budget(counts, 3, 7) == ["a.py: 4 lines of code, of 3"]
    assert over_budget(counts, 4, 6) == ["together: 7 lines of code, of 6"]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Module."""\n\nimport os  # why\n', 1),
        ('def f():\n    """Doc\n\n    of four lines.\n    """\n    return 1\n', 2),
        ('class A:\n    """Doc."""\n\n    # comment\n    x = 1\n', 2),
        ('text = """not\na docstring"""\n', 2),
        ("f(\n    1,\n\n    2,\n)\n", 4),
        ('x = 1\n"""What x is."""\n', 1),
        ('def f(): "doc"\n', 1),
        ("a = 1; b = 2\n", 1),
        ("", 0),
    ],
)
def test_code_lines_are_counted_as_defined(source: str, lines: int) -> None:
    assert loc.count_code_lines(source) == lines
