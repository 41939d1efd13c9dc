"""Trackers get the numbers of `metrics.jsonl`: stand-ins for the libraries, and a library where it is installed."""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from zeroshard.train.config import load_config
from zeroshard.train.loop import train
from zeroshard.train.trackers import check_installed

SETTINGS = [
    "model.depth=1", "model.context=32", "train.steps=3", "train.eval_every=2", "train.eval_bytes=200",
    "run.sample_bytes=0", "run.ranks=1",
]  # fmt: skip


class _Nobody:
    """A reporter that listens to nothing."""

    def started(self, *told):
        pass

    stepped = evaluated = saving = saved = finished = started


def run(folder: Path, log_to: str) -> dict[str, list[tuple[int, float]]]:
    """Train with a tracker; return what `metrics.jsonl` says it must have heard, by name."""
    train(load_config(overrides=[*SETTINGS, f"run.log_to={log_to}", f"run.folder={folder}"]), _Nobody())
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (folder / "default" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        section, names = {
            "step": ("train", ("loss", "learning_rate", "grad_norm", "tokens_per_s", "tokens")),
            "eval": ("eval", ("loss", "bits_per_byte")),
        }[record["kind"]]
        for name in names:
            found.setdefault(f"{section}/{name}", []).append((record["step"], record[name]))
    return found


class Heard:
    """What a stand-in has heard."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, float]]] = {}
        self.settings: Any = None
        self.is_closed = False

    def add(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append((step, value))

    def close(self) -> None:
        self.is_closed = True


def test_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard, module = Heard(), types.ModuleType("wandb")

    def init(project: str, name: str, dir: str, config: dict[str, object]) -> object:
        heard.settings = (name, dir, config)
        return types.SimpleNamespace(log=lambda values, step: heard.add(values, step), finish=heard.close)

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert run(tmp_path, "wandb") == heard.values
    assert heard.is_closed
    assert heard.settings[:2] == ("default", str(tmp_path / "default"))
    assert heard.settings[2]["train.steps"] == 3


def test_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard, module = Heard(), types.ModuleType("mlflow")
    module.is_tracking_uri_set = lambda: False  # type: ignore[attr-defined]
    module.set_tracking_uri = lambda uri: setattr(heard, "settings", uri)  # type: ignore[attr-defined]
    module.start_run = lambda run_name: None  # type: ignore[attr-defined]
    module.log_params = lambda params: None  # type: ignore[attr-defined]
    module.log_metrics = lambda values, step: heard.add(values, step)  # type: ignore[attr-defined]
    module.end_run = heard.close  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    assert run(tmp_path, "mlflow") == heard.values
    assert heard.is_closed
    assert heard.settings == f"sqlite:///{tmp_path / 'default' / 'mlflow.db'}"


def test_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard, module = Heard(), types.ModuleType("torch.utils.tensorboard")

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            heard.settings = folder

        def add_text(self, tag: str, text: str) -> None:
            assert "train.steps = 3" in text

        def add_scalar(self, name: str, value: float, step: int) -> None:
            heard.add({name: value}, step)

        def close(self) -> None:
            heard.close()

    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert run(tmp_path, "tensorboard") == heard.values
    assert heard.is_closed
    assert heard.settings == str(tmp_path / "default" / "tensorboard")


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_files_of_tensorboard_hold_the_numbers(tmp_path: Path) -> None:
    expected = run(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "default" / "tensorboard"))
    events.Reload()
    for name, values in expected.items():
        found = [(one.step, one.value) for one in events.Scalars(name)]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in values]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_the_database_of_mlflow_holds_the_numbers(tmp_path: Path) -> None:
    expected = run(tmp_path, "mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'default' / 'mlflow.db'}")
    [found] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    assert {name: [(one.step, one.value) for one in values] for name, values in history.items()} == expected
    assert found.data.params["train.steps"] == "3"


def records_of(log: bytes) -> list[bytes]:
    """Return the records of a file of wandb: after a header, blocks of LevelDB's log format."""
    records, block, place = [b""], 32768, 7
    while place + 7 <= len(log):
        if block - place % block < 7:
            place += block - place % block
            continue
        count, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        records[-1] += log[place + 7 : place + 7 + count]
        place += 7 + count
        if kind in (1, 4):  # whole, or the last piece
            records.append(b"")
    return records[:-1]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_file_of_wandb_holds_the_numbers_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    expected = run(tmp_path, "wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = (tmp_path / "default" / "wandb").glob("offline-run-*/*.wandb")
    found: dict[str, list[tuple[int, float]]] = {}
    for data in records_of(path.read_bytes()):
        history = Record.FromString(data).history
        for item in history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                found.setdefault(name, []).append((history.step.num, json.loads(item.value_json)))
    assert found == expected


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_library_is_named_before_ranks_start(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match=rf'needs .{name}.; install it with: pip install "zeroshard\[{name}\]"'):
        check_installed(load_config(overrides=[*SETTINGS, f"run.log_to={name}"]).run.log_to)
