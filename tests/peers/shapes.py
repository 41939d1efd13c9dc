"""How a defect of another library is tried here.

Owns the two decorators that make tests of functions which run on ranks. Must not know any defect: each test says in its
docstring what went wrong elsewhere, in one sentence, and gives the link; docs/others-defects.md has the table of all.

Note: one group of ranks for a file
    A group of ranks costs more than a shape. The first test of a file runs all shapes of the file, by number of ranks,
    and the other tests read what is kept, so all rotate together. A shape that raises is recorded and the next one
    runs, so each test fails for itself. Shapes are sent to the ranks by name, since a decorated function is no longer
    the one that pickle finds.
"""

import contextlib
import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pytest
import torch

from tests.oracle import WATCHDOG_S, Plain, Run, Sharded, assert_same, run_cases, seed, stages_of
from tests.rotation import third
from zeroshard.testing import RankFailure

TRANSPORTS: Final = ("memory", "messages")
TIMEOUT_S: Final = 90.0
RIGHT: Final = "right"


class Shape(NamedTuple):
    """A function that ranks run, and where.

    Args:
        script: a training loop against `Run` that a comparison runs plainly and sharded, else any function of a stage
            and of options of `zs.shard`.
        worlds: numbers of ranks.
        stages: ZeRO stages, or none for those of `stages_of`.
        options: of `zs.shard`.
        relative: distance that a comparison allows, as for `assert_same`.
        here: what happens here, for the table.
    """

    script: Callable[..., Any]
    worlds: Sequence[int]
    stages: Sequence[int]
    options: Mapping[str, Any]
    relative: float
    here: str

    @property
    def defect(self) -> str:
        """What went wrong elsewhere, in one sentence."""
        return " ".join(inspect.getdoc(self.script).partition("\n\n")[0].split())  # type: ignore[union-attr]

    @property
    def link(self) -> str:
        """The address of the issue."""
        return inspect.getdoc(self.script).split()[-2]  # type: ignore[union-attr]

    @property
    def year(self) -> str:
        """When the issue was reported."""
        return inspect.getdoc(self.script).split()[-1]  # type: ignore[union-attr]

    @property
    def is_compared(self) -> bool:
        """Whether the shape is a loop to be compared with plain training."""
        return list(inspect.signature(self.script).parameters) == ["run"]


def tried(
    worlds: Sequence[int] = (2,),
    stages: Sequence[int] = (),
    relative: float = 0.0,
    here: str = RIGHT,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Make a test of a function that runs on ranks, at some stages, over the two transports in turn.

    A function of `run` is a training loop that must give the results of plain data parallelism. A function of
    (`stage`, `options`) asserts by itself.

    Args:
        stages: those that the report concerns; by default those of `stages_of`.
        relative: 0 for equal bits; a test that gives a distance says why.
        here: "right", or "refused: " or "mended: " and what.
    """

    def decorate(script: Callable[..., Any]) -> Callable[[], None]:
        @functools.wraps(script)
        def test() -> None:
            for world in worlds:
                results = _results(script.__module__, world)
                assert not isinstance(results, Exception), str(results)
                for rank, found in enumerate(results[script.__module__, script.__name__]):
                    _check(found, relative, f"[rank {rank}/{world}]")

        test.shape = Shape(script, worlds, stages, options, relative, here)  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
        del test.__wrapped__  # type: ignore[attr-defined]
        return pytest.mark.rotates(together=True)(test)

    return decorate


def _check(found: Any, relative: float, where: str) -> None:
    assert not isinstance(found, str), f"{where}\n{found}"
    expected, actual = found
    for kind, result in actual.items():
        assert_same(expected, result, f"{where} stage {kind}", relative)


@functools.cache
def _results(module: str, world: int) -> dict[tuple[Any, ...], list[Any]] | Exception:
    """Return by shape what each rank returned, or the error of the group, which is not run again for each test."""
    named = vars(importlib.import_module(module))
    names = [name for name, one in named.items() if name.startswith("test_") and world in one.shape.worlds]
    try:
        cases = [(module, name, tuple(third(_places(named[name].shape)))) for name in names]
        results = run_cases(run_shape, world, cases, timeout_s=TIMEOUT_S)
        return {case[:2]: result for case, result in results.items()}
    except RankFailure as error:
        return error


def _places(shape: Shape) -> Iterable[int]:
    """Return the places of a shape's stages, the highest first: a rotation runs it, and a third of the others."""
    stages = _stages(shape)
    return sorted(range(len(stages)), key=stages.__getitem__, reverse=True)


def _stages(shape: Shape) -> Sequence[int]:
    return shape.stages or stages_of(shape.script)


def run_shape(module: str, name: str, places: Sequence[int]) -> Any:
    """Run a shape on this rank; return what it recorded, plainly and by stage, or the traceback of its error."""
    shape: Shape = vars(importlib.import_module(module))[name].shape
    expected = None
    actual = {}
    kind = "plain"
    try:
        if shape.is_compared:
            expected = _execute(Plain(), shape.script)
        for kind, stage, options in _kinds(shape, places):
            if shape.is_compared:
                actual[kind] = _execute(Sharded(stage, options), shape.script)
            else:
                seed(0)
                shape.script(stage, options)
    except Exception:
        return f"{name} at {kind}: {traceback.format_exc()}"
    return expected, actual


def _kinds(shape: Shape, places: Sequence[int]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for place in places:
        stage = _stages(shape)[place]
        transport = TRANSPORTS[(place + _world()) % 2]
        options = {"shared_memory": transport == "memory", "watchdog_s": WATCHDOG_S, **shape.options}
        yield f"{stage}, {transport}", stage, options


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _execute(run: Run, script: Callable[[Run], None]) -> dict[str, Any]:
    seed(0)
    script(run)
    return run.result()


@contextlib.contextmanager
def raises_on_all(kind: type[Exception], *texts: str) -> Iterator[None]:
    """Require an error that names the cause: each of some texts. For use inside a shape, on every rank."""
    with pytest.raises(kind) as caught:
        yield
    missing = [text for text in texts if text not in str(caught.value)]
    assert not missing, f"the error does not say {missing}: {caught.value}"
