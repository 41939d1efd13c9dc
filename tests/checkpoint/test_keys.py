"""Whatever an optimizer calls its states and a model its parameters: what is committed loads, or nothing is written."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint.manifest import join_state, split_state
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

from .rig import TIMEOUT_S

KEYS = [
    *("a/b", "/", "//", "", ".", "a.b", "@", "a@0", "exp_avg@3", "~", '~"a"', "~1", "1", 1, 1.5, None, False),
    *('"', "\\", "\\u002f", "\0", "\n", "ключ", "😀", "0/exp_avg", "rng/0/torch", "x" * 5000, "a/" * 500),
]


class Keyed(torch.optim.SGD):
    """Has a state of each key, which tells its key and its step."""

    def __init__(self, params: Any, keys: list[Any]) -> None:
        super().__init__(params, lr=0.1)
        self.keys = keys

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    for place, key in enumerate(self.keys):
                        state = self.state[p].setdefault(key, torch.zeros_like(p))
                        state.copy_(p.grad).mul_(place + 1)
        super().step(closure)


def round_trip(folder: str, keys: list[Any], shared: bool = True) -> None:
    """Save, verify, and load into another; states must be there under their keys, bit for bit."""
    made = []
    for key in (0, 1):
        torch.manual_seed(key)
        model = nn.Linear(3, 5)
        optimizer = Keyed(model.parameters(), keys)
        zero = zs.shard(model, optimizer, stage=2, settings=zs.Settings(shared_memory=shared, elementwise=True))
        made.append((model, optimizer, zero))
        model(torch.ones(2, 3) * (key + 1)).sum().backward()
        optimizer.step()
        if not key:
            zero.save(folder)
        optimizer.zero_grad()
    verify(folder)
    zero.load(folder)
    states = []
    for _, optimizer, zero in made:
        with zero.gathered(states=True):
            found = optimizer.state_dict()["state"]
        states.append({(n, key): value for n, state in found.items() for key, value in state.items()})
    assert states[0].keys() == states[1].keys() == {(n, key) for n in (0, 1) for key in keys}
    for place, value in states[0].items():
        assert torch.equal(value, states[1][place]), place


def test_any_key_is_saved_and_loaded(tmp_path: Path) -> None:
    for shared in (True, False):
        run_ranks(round_trip, 2, str(tmp_path / f"a-{shared}"), KEYS, shared, timeout_s=TIMEOUT_S)
    paths = list((tmp_path / "a-True").glob("*.safetensors"))
    assert paths
    for path in paths:
        with safe_open(path, "np") as file:  # what any other program reads them with
            assert list(file.keys())


def random_text(draw: random.Random) -> str:
    alphabet = 'ab01/.@~"\\ \n\x00\u007f\u00e9\u4e2d\U0001f600{}[]:,_-'
    return "".join(draw.choice(alphabet) for _ in range(draw.choice([0, 1, 2, 3, 8, 40])))


def test_names_of_states_are_told_apart() -> None:
    """Every pair of a key and a parameter's name has a name of its own, from which both follow."""
    draw = random.Random(5)
    names: dict[str, tuple[int, Any, str]] = {}
    for _ in range(20_000):
        key = draw.choice([random_text(draw), draw.randint(-3, 3), draw.choice(KEYS)])
        key = None if isinstance(key, bool) else key
        one = (draw.randint(0, 11), key, random_text(draw))
        name = join_state(*one)
        assert split_state(name) == one
        assert names.setdefault(name, one) == one


@pytest.mark.parametrize("name", ["0/~1", "0/~/a", "0/~[]/a", '0/~"a"/b', "0/~ 1/a", "x/a/b", "00/a/b", "-1/a/b", "a"])
def test_what_is_no_name_of_a_state_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        split_state(name)


def test_random_names_load(tmp_path: Path) -> None:
    draw = random.Random(6)
    for number in range(6):
        keys = list({random_text(draw) for _ in range(20)})
        round_trip(str(tmp_path / str(number)), keys)


@pytest.mark.parametrize("keys", [["\ud800"], ["a", ("b", 1)], [float("nan")]], ids=repr)
def test_a_key_that_no_file_holds_is_refused_before_anything_is_written(keys: list[Any], tmp_path: Path) -> None:
    with pytest.raises(zs.CheckpointError, match="Nothing was committed"):
        round_trip(str(tmp_path / "a"), keys)
    assert os.listdir(tmp_path) == []


class Named(nn.Module):
    """Has a parameter under each name."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(3)))

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.parameters())).sum()


NAMES = ["a/b", "a@0", "a", "a!", "@", "~", " ", "0/exp_avg/a", "ключ", "😀", "\0", '"', "x" * 10_000]


def test_names_of_parameters(tmp_path: Path) -> None:
    models = [Named(NAMES), Named(NAMES)]
    zeros = [zs.shard(m, torch.optim.AdamW(m.parameters())) for m in models]
    models[0]().backward()
    zeros[0].save(tmp_path / "a")
    verify(tmp_path / "a")
    zeros[1].load(tmp_path / "a")
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other), name
