"""What a type checker tells a user: misspelt names and methods are mistakes, and documented calls are none."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from torch import nn

import zeroshard as zs
from zeroshard import argument_names as names
from zeroshard.describe.asked import Asked, resolve
from zeroshard.describe.parameters import NAMED as PARAMETERS
from zeroshard.describe.precision_names import DTYPES, NAMES
from zeroshard.describe.treatments import NAMED, activations_of
from zeroshard.table.stages import CONFIGURATIONS, STAGES

from .source import REPOSITORY

SCRIPT = """
import torch
import zeroshard as zs
from torch.utils.data import DataLoader, TensorDataset

mesh = zs.init(seed=0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
loader = zs.Resumable(DataLoader(TensorDataset(torch.ones(2))))
zero = zs.shard(model, optimizer, stage=3, precision="bf16", activations="recompute+offload", offload="/scratch")
zs.shard(model, stage=2, precision=torch.bfloat16, activations={"blocks.*": ["recompute", zs.Compressed()]}, replicas=2)
zero.save("runs/a", {"epoch": 1}, step=3, loader=loader, model_only=True, mode=0o600)
zero.load("runs/a", loader=loader)
print(zs.from_deepspeed)
print(zs.plan("gpt2", world_size=8).verdict, zero.units, zero.memory().peak_bytes)
"""
MISTAKES = ('zero.savee("x")', "zs.shard(model, optimizer, stage=7)", 'zs.shard(model, optimizer, precision="bf61")')
MORE = ("zs.shrad(model)", 'zs.shard(model, activations="recomptue")', 'zs.shard(model, residency="C7")')


def test_the_types_are_the_names_of_the_program() -> None:
    assert get_args(names.StageName) == (*STAGES, "auto")
    assert get_args(names.ResidencyName) == tuple(CONFIGURATIONS)
    assert get_args(names.PrecisionName) == (*NAMES, *sorted(DTYPES, key=lambda dtype: NAMES.index(DTYPES[dtype])))
    assert get_args(names.ParametersName) == tuple(PARAMETERS)
    for name in get_args(names.OffloadName):
        resolve(Asked(offload=name), 1)


def test_the_types_have_each_combination_of_treatments_that_runs() -> None:
    valid = set[str]()
    for count in range(1, 5):
        for chosen in itertools.permutations(NAMED, count):
            try:
                activations_of("+".join(chosen))
            except ValueError:
                continue
            if count == 1 or "keep" not in chosen:
                valid.add("+".join(chosen))
    assert set(get_args(names.ActivationsName)) == valid


def script_with_mistakes(folder: Path) -> tuple[Path, list[int]]:
    """Write a script whose last lines are mistakes; return it, and the numbers of these lines."""
    script, first = folder / "script.py", SCRIPT.count("\n") + 1
    script.write_text(SCRIPT + "\n".join((*MISTAKES, *MORE)))
    return script, list(range(first, first + len(MISTAKES) + len(MORE)))


@pytest.mark.rotates
@pytest.mark.timeout(320)
def test_mypy_finds_the_mistakes_of_a_script(tmp_path: Path) -> None:
    script, mistakes = script_with_mistakes(tmp_path)
    # The configuration and the cache of `make check`: without these the check of the package takes a minute.
    check = [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file", "pyproject.toml", str(script)]
    run = subprocess.run(check, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    # The cache may have the same script of an earlier run, in another folder.
    lines = [line for line in run.stdout.splitlines() if f"/{script.name}:" in line and ": error:" in line]
    assert [int(line.split(":")[1]) for line in lines] == mistakes, run


@pytest.mark.rotates
def test_pyright_finds_the_mistakes_of_a_script(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="needs basedpyright: pip install basedpyright")
    script, mistakes = script_with_mistakes(tmp_path)
    # basedpyright is pyright with the program that runs it; "standard" are pyright's own rules.
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "standard", "extraPaths": [str(REPOSITORY)]})
    )
    check = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    run = subprocess.run(check, capture_output=True, text=True, timeout=100)
    found = json.loads(run.stdout)["generalDiagnostics"]
    assert {one["file"] for one in found} == {str(script)}
    assert [one["range"]["start"]["line"] + 1 for one in found] == mistakes, run


def test_reprs_say_what_an_object_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    zero = zs.shard(model)
    assert repr(zero.units[0]).startswith("Unit('(root)', ")
    assert repr(zero.trace) == "Trace(no step: no events)"
    assert repr(zero.memory()).startswith("Memory(parameters ") and "parameters" in repr(zero.memory())


@pytest.mark.parametrize(
    ("ask", "remedy"),
    [
        (lambda zero: zero.rank, "zero.mesh.rank"),
        (lambda zero: zero.world_size, "zero.mesh.world_size"),
        (lambda zero: zero.device, "zero.mesh.device"),
        (lambda zero: zero.stage, "zero.residency"),
        (lambda zero: zero.barrier, "zero.agree(True)"),
        (lambda zero: zs.barrier, "zero.agree(True)"),
        (lambda zero: zs.load, "zero.load(path)"),
        (lambda zero: zs.save, "zero.save(path)"),
        (lambda zero: zero.load("x", weights_only=True), "write model_only=True"),
        (lambda zero: zero.save("x", client_state={}), "write extra="),
        (lambda zero: zs.shard(nn.Linear(1, 1), activation_checkpointing=True), "write activations='recompute'"),
        (lambda zero: zs.shard(nn.Linear(1, 1), replicas=2, mesh=2), "not both"),
        (lambda zero: zs.plan("gpt2"), "plan() missing"),
    ],
)
def test_names_that_people_try_are_answered(ask, remedy: str) -> None:
    zero = zs.shard(nn.Linear(2, 2))
    with pytest.raises((AttributeError, TypeError, ValueError)) as told:
        ask(zero)
    assert remedy in str(told.value)


def test_the_plan_is_documented_as_the_function_that_it_is() -> None:
    import inspect

    assert list(inspect.signature(zs.plan).parameters)[:3] == ["model", "world_size", "device"]
    assert str(zs.plan.__doc__).startswith("plan(model, *, world_size")
    assert "Predict a run" in str(zs.plan.__doc__)
