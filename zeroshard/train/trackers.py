"""Trackers of other projects as reporters of a run: TensorBoard, Weights & Biases, MLflow.

Owns the names of their scalars, which are those of `metrics.jsonl`, and their calls. TensorBoard and MLflow write to
the run's folder, and wandb does what its own settings say: with WANDB_MODE=offline it writes files. Each is an extra.
Read `Tracker` first.
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, final

from zeroshard.train.extras import need
from zeroshard.train.metrics import EvalRecord, Start, StepRecord, Summary

__all__ = ["Tracker", "check_installed", "check_names", "make_trackers"]

MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
)
"""The module that each tracker needs; its extra has the same name."""
STEP: Final = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "mfu", "tokens")
EVALUATION: Final = ("loss", "bits_per_byte")


class Backend(Protocol):
    """What a tracker does with numbers."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars of one step, by name."""

    def close(self) -> None:
        """Write what is left."""


def names_of(log_to: str) -> list[str]:
    """Return the trackers of the setting `run.log_to`.

    >>> from zeroshard.train.trackers import names_of
    >>> names_of("tensorboard+wandb")
    ['tensorboard', 'wandb']
    """
    return [name.strip() for name in log_to.split("+") if name.strip()]


def check_names(log_to: str) -> None:
    """Raise ValueError for a tracker that is unknown."""
    for name in names_of(log_to):
        if name not in MODULES:
            raise ValueError(f"run.log_to={log_to!r}: there is no tracker {name!r}; there are: {', '.join(MODULES)}")


def check_installed(log_to: str) -> None:
    """Raise ValueError for a tracker that is not installed, before ranks start."""
    for name in names_of(log_to):
        if not _is_there(MODULES[name]):
            raise ValueError(
                f'run.log_to={log_to!r} needs {MODULES[name]!r}; install it with: pip install "zeroshard[{name}]"'
            )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a stand-in without a specification, as tests have it
        return True


def make_trackers(log_to: str, folder: Path, name: str, settings: Mapping[str, Any]) -> list["Tracker"]:
    """Return the trackers of a run, on rank 0.

    Args:
        folder: of the run.
        name: of the run.
        settings: the configuration, by section.
    """
    flat = {f"{section}.{key}": value for section, values in settings.items() for key, value in values.items()}
    return [Tracker(_BACKENDS[one](folder, name, flat)) for one in names_of(log_to)]


@final
class Tracker:
    """A reporter that passes the numbers of steps and evaluations on."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def started(self, start: Start) -> None:
        """Log nothing: the tracker has the settings."""

    def stepped(self, record: StepRecord) -> None:
        """Log the numbers of a step."""
        self._log("train", record, STEP, record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Log the numbers of an evaluation."""
        self._log("eval", record, EVALUATION, record.step)

    def saving(self, step: int) -> None:
        """Log nothing."""

    def saved(self, step: int, path: Path) -> None:
        """Log nothing."""

    def finished(self, summary: Summary) -> None:
        """Write what is left."""
        self._backend.close()

    def _log(self, section: str, record: object, names: Iterable[str], step: int) -> None:
        values = {f"{section}/{name}": getattr(record, name) for name in names}
        self._backend.log({name: value for name, value in values.items() if value is not None}, step)


class _TensorBoard:
    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        need("tensorboard", "tensorboard", "run.log_to=tensorboard")
        board = need("torch.utils.tensorboard", "tensorboard", "run.log_to=tensorboard")
        self._writer = board.SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in settings.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        wandb = need("wandb", "wandb", "run.log_to=wandb")
        self._run = wandb.init(project="zeroshard", name=name, dir=str(folder), config=dict(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self._mlflow = need("mlflow", "mlflow", "run.log_to=mlflow")
        if not self._mlflow.is_tracking_uri_set():
            # MLflow 3.17 refuses plain files.
            self._mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').absolute()}")
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params(dict(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_BACKENDS: Final[Mapping[str, Callable[[Path, str, Mapping[str, Any]], Backend]]] = MappingProxyType(
    {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow}
)
