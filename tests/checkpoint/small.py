"""The smallest checkpoint with every kind of content, in this process, and ways to damage files."""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer.testing import CliRunner

import zeroshard as zs
from zeroshard.checkpoint.checkpoint_commands import make_commands


class Small:
    """A linear layer with a buffer, trained by AdamW, on one process."""

    def __init__(self, key: int = 0) -> None:
        self.model = self.plain(key)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.zero = zs.shard(self.model, self.optimizer, stage=2)

    @staticmethod
    def plain(key: int) -> nn.Module:
        """Return the model as it is before it is sharded."""
        torch.manual_seed(key)
        model = nn.Linear(2, 1)
        model.register_buffer("count", torch.tensor([key]))
        return model

    def train(self, steps: int) -> "Small":
        for step in range(steps):
            self.model(torch.randn(3, 2) + step).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self) -> list[bytes]:
        """Return all that a load may change, as bytes."""
        with self.zero.gathered(states=True):
            tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
            state = self.optimizer.state_dict()
        tensors += [value for one in state["state"].values() for value in one.values()]
        return [*(t.numpy().tobytes() for t in tensors), repr(state["param_groups"]).encode()]


def write(folder: Path, steps: int = 2, key: int = 0) -> Path:
    """Write a checkpoint after some steps and return it."""
    return Small(key).train(steps).zero.save(folder / f"step-{steps}", {"steps": steps})


@contextlib.contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """Give a file another content for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as somebody would who knows the format: its checksum is right."""
    text = path.read_bytes().rpartition(b"\n{")[0]
    value = json.loads(text)
    returned = change(value)
    seal(path, json.dumps(value if returned is None else returned).encode())


def seal(path: Path, text: bytes) -> None:
    """Write a manifest's text with its checksum."""
    path.write_bytes(text + b'\n{"crc32":%d}\n' % zlib.crc32(text))


def command(*arguments: object) -> tuple[int, list[str], list[str]]:
    """Run a command; return its exit status, its lines and its problems."""
    lines: list[str] = []
    problems: list[str] = []
    app = make_commands(lines.append, problems.append, lambda: contextlib.nullcontext(lambda done, total: None))
    return CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code, lines, problems
