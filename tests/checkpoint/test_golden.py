"""The format lives on: an old checkpoint is read bit for bit, at any number of ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.oracle import assert_same
from zeroshard.checkpoint.diff import diff
from zeroshard.checkpoint.manifest import VERSION
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

from . import golden
from .rig import TIMEOUT_S, Trainer

VERSIONS = sorted(golden.FOLDER.glob("version-*"))


def test_the_newest_is_there() -> None:
    assert VERSIONS[-1].name == f"version-{VERSION}"


def load(path: str, stage: int) -> dict[str, Any]:
    expected = golden.made().state()
    trainer = Trainer.make(stage, key=1, precision="fp16")
    loaded = trainer.zero.load(path)
    scale = trainer.zero._engine.loss_scale
    assert scale is not None
    return {"expected": expected, "state": trainer.state(), "loaded": loaded, "scale": (scale.value, scale.history)}


@pytest.mark.product
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 3), (3, 0)])
@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.name)
def test_an_old_checkpoint_is_read_bit_for_bit(path: Path, world: int, stage: int) -> None:
    assert verify(path).step == golden.STEP
    results = run_ranks(load, world, str(path), stage, timeout_s=TIMEOUT_S, process_group=world > 1)
    for rank, result in enumerate(results):
        for part in ("parameters", "buffers", "optimizers", *(["draws"] if rank < 2 else [])):
            assert_same(result["expected"][part], result["state"][part], f"{part} on rank {rank}")
        assert result["loaded"].step == golden.STEP
        extra = result["loaded"].extra
        assert_same(golden.EXTRA["tensor"], extra["tensor"], "extra")
        assert {**extra, "tensor": None} == {**golden.EXTRA, "tensor": None}
        assert result["scale"] == (1024.0, [4096.0, 2048.0])


def test_what_is_written_today_is_the_newest_of_them(tmp_path: Path) -> None:
    run_ranks(golden.write, 2, str(tmp_path / "step-12"), timeout_s=TIMEOUT_S)
    assert diff(VERSIONS[-1], tmp_path / "step-12") == []
    for path in VERSIONS[-1].glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "step-12" / path.name).read_bytes()
