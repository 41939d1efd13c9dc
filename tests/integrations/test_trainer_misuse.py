"""Trainers of Transformers that are handed what does not fit: one named error on all ranks, and nothing changed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zeroshard as zs
from tests.integrations.test_trainers import TIMEOUT_S, Made, arguments, found_in, trainer_of
from tests.rotation import third
from zeroshard.integrations.transformers import Trainer, on_meta
from zeroshard.testing import RankFailure, run_ranks

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "eval_strategy": "no"}


def shard_before(folder: Path) -> None:
    trainer = trainer_of(3, folder, eval_strategy="no")
    zs.shard(trainer.model, stage=2)
    trainer.train()


def save_on_rank_0(folder: Path) -> None:
    trainer = trainer_of(3, folder, eval_strategy="no", max_steps=1)
    trainer.train()
    if trainer.args.process_index == 0:
        trainer.save_model(str(folder / "model"))


def train(folder: Path) -> Made:
    trainer = trainer_of(3, folder, **SAVING)
    trainer.train()
    return found_in(trainer)


def resume_another_model(folder: Path) -> None:
    trainer = trainer_of(3, folder, **SAVING)
    mlp = trainer.model.model.layers[0].mlp
    mlp.gate_proj = torch.nn.Linear(mlp.gate_proj.in_features, mlp.gate_proj.out_features, bias=True)
    trainer.train(resume_from_checkpoint=True)


def resume(folder: Path) -> Made:
    trainer = trainer_of(3, folder, **SAVING)
    trainer.train(resume_from_checkpoint=True)
    return found_in(trainer)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (shard_before, r"'model\.embed_tokens\.weight' is sharded already.*call zero\.detach\(\)"),
        (save_on_rank_0, r"Trainer\.save_model\(\)"),
    ],
)
def test_a_call_that_does_not_fit_is_named(call: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=text):
        run_ranks(call, 2, tmp_path, timeout_s=TIMEOUT_S)
    assert not (tmp_path / "model").exists()


def test_checkpoints_of_other_models_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, timeout_s=TIMEOUT_S)
    text = r"'model\.layers\.0\.mlp\.gate_proj\.bias' is in the model and not in the checkpoint"
    with pytest.raises(RankFailure, match=text):
        run_ranks(resume_another_model, 2, tmp_path, timeout_s=TIMEOUT_S)
    part = next((tmp_path / "checkpoint-4").rglob("params-00002-of-00002.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 0xFF
    part.write_bytes(data)
    with pytest.raises(RankFailure, match=r"params-00002-of-00002\.safetensors: .* damaged"):
        run_ranks(resume, 2, tmp_path, timeout_s=TIMEOUT_S)


def test_fewer_ranks_resume_with_the_parameters_of_all(tmp_path: Path) -> None:
    """The checkpoint is of the last step, so that one rank has the parameters of the run that saved it."""
    found = run_ranks(train, 2, tmp_path, timeout_s=TIMEOUT_S)
    for world in third([1, 3]):
        for one in run_ranks(resume, world, tmp_path, timeout_s=TIMEOUT_S):
            assert one["model"].keys() == found[0]["model"].keys()
            for name, value in one["model"].items():
                assert torch.equal(value, found[0]["model"][name]), name


def test_a_number_in_place_of_arguments_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"zero= takes the arguments of zs\.shard, such as zero=\{'stage': 3\}; got 3"):
        Trainer(torch.nn.Linear(2, 2), arguments(tmp_path), zero=3)


def test_a_folder_that_is_not_there_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the local folder has no config\.json, or does not exist"):
        on_meta(tmp_path / "gone")
