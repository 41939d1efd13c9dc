"""The smallest checkpoint with every kind of content, in this process, and ways to damage files."""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint.index import parse
from zeroshard.checkpoint.manifest import EXTRA, FORMAT, MANIFEST
from zeroshard.checkpoint.values import decode, encode


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


def downgrade(checkpoint: Path) -> Path:
    """Make a checkpoint one of format version 1, as it was written then."""
    manifest = parse((checkpoint / MANIFEST).read_bytes(), MANIFEST, lambda name, nbytes: b"")
    tensors = [
        [s.kind, s.name, s.dtype, list(s.shape), *([list(s.order)] if s.order else [])] for s in manifest.tensors
    ]
    extra = json.loads((checkpoint / EXTRA).read_bytes())
    for optimizer in extra["optimizers"]:
        assert optimizer.pop("stateful") is None
        of_groups = [[manifest.tensors[place].name for place in group["params"]] for group in optimizer["groups"]]
        for group, names in zip(optimizer["groups"], of_groups, strict=True):
            group["params"] = names
        states = {name: {} for names in of_groups for name in names}
        for key, _, values in optimizer["states"]:
            stacked = torch.cat([decode(value, "") for value in values["stacked"]])
            for name, value in zip(states, stacked, strict=True):
                states[name][key] = encode(value.clone(), "")
        optimizer["states"] = states
    text = json.dumps(extra, separators=(",", ":"), sort_keys=True).encode()
    (checkpoint / EXTRA).write_bytes(text)
    files = {
        name: {
            "bytes": entry.nbytes,
            "chunks": [[c.tensor, c.start, c.stop] for c, _ in manifest.place_of(name)],
            "crc32": list(entry.crc32),
        }
        for name, entry in manifest.files.items()
    }
    files[EXTRA] = {"bytes": len(text), "chunks": [], "crc32": [zlib.crc32(text)]}
    head = {"aliases": dict(manifest.aliases), "expires": manifest.expires, "files": files, "format": FORMAT}
    head |= {"software": dict(manifest.software), "step": manifest.step, "tensors": tensors, "version": 1}
    seal(checkpoint / MANIFEST, json.dumps(head | {"world_size": manifest.world_size}).encode())
    return checkpoint


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as somebody would who knows the format: its checksum is right."""
    text = path.read_bytes().rpartition(b"\n{")[0]
    value = json.loads(text)
    returned = change(value)
    seal(path, json.dumps(value if returned is None else returned).encode())


def seal(path: Path, text: bytes) -> None:
    """Write a manifest's text with its checksum."""
    path.write_bytes(text + b'\n{"crc32":%d}\n' % zlib.crc32(text))
