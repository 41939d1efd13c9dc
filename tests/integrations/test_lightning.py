"""Lightning's Fabric and Trainer with a sharded model: what their DDP computes, saves and resumes."""

import logging
import os
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import zeroshard.integrations.lightning
from tests.contract.blocks import examples, run_block
from tests.contract.source import REPOSITORY
from tests.oracle import STAGES, WATCHDOG_S, randn, seed
from tests.rotation import third
from zeroshard.integrations.lightning import FabricStrategy, ZeroStrategy
from zeroshard.table.settings import Settings
from zeroshard.testing import RankFailure, run_ranks

TIMEOUT_S = 240
WIDTH = 8
MEMBERS = {"accelerator": "cpu", "devices": 2}


def zero(stage: int) -> dict[str, Any]:
    return {"stage": stage, "settings": Settings(watchdog_s=WATCHDOG_S)}


def net() -> nn.Module:
    seed(7)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])


def batches(first: int, count: int) -> Any:
    samples: Any = [randn(WIDTH, key=(3, first + place)) for place in range(count)]
    return DataLoader(samples, batch_size=2)


def beside_ddp(run: Any, folder: str) -> list[Any]:
    """Call a function in one launch for Lightning's DDP and for stage 3; return both results."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    return [run(stage, f"{folder}/{stage}") for stage in (None, 3)]


# -- Fabric -----------------------------------------------------------------------------------------------------------


def run_fabric(
    stage: int | None, folder: str, clip: float | None, is_resumed: bool, steps: int = 4, killed_after: int = 0
) -> list[Any]:
    """Train with accumulation over two micro-batches, and save in the middle; return what was told, and parameters.

    Losses, norms where gradients are clipped, and every five steps an evaluation.

    Args:
        killed_after: the step after which rank 1 is killed, without a word.
    """
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # the ranks are there, as under torchrun
    fabric = lightning.Fabric(**MEMBERS, strategy="ddp" if stage is None else FabricStrategy(zero(stage)))
    fabric.launch()
    model: Any = net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler, loader = torch.optim.lr_scheduler.StepLR(optimizer, 2), fabric.setup_dataloaders(batches(0, 8 * steps))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if is_resumed:
        generator = torch.get_rng_state()
        assert fabric.load(f"{folder}/middle", state) == {}
        assert torch.equal(torch.get_rng_state(), generator)  # as with DDP: samplers may draw alike on all ranks
        assert state["step"] == steps // 2
    told: list[Any] = []
    for number, batch in enumerate(loader):
        if number < 2 * int(str(state["step"])) and is_resumed:
            continue
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(batch).square().mean()
            fabric.backward(loss)
        told.append(loss.item())
        if is_last:
            if clip is not None:
                told.append(fabric.clip_gradients(model, optimizer, max_norm=clip).item())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if number % 10 == 9:
                model.eval()
                with torch.no_grad():
                    told.append(fabric.all_reduce(model(next(iter(batches(999, 2)))).square().mean()).item())
                model.train()
        if number == steps - 1 and not is_resumed and stage is not None:
            state["step"] = steps // 2
            fabric.save(f"{folder}/middle", state)
        if killed_after == (number + 1) / 2 and fabric.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if stage is None:
        return [*told, {name: one.detach().clone() for name, one in model.module.named_parameters()}]
    with fabric.strategy.zero_of(model).gathered():
        return [*told, {name: one.detach().clone() for name, one in model.module.named_parameters()}]


def assert_equal(one: list[Any], other: list[Any], rel: float = 0.0) -> None:
    assert one[:-1] == pytest.approx(other[:-1], rel=rel, abs=0.0)
    assert one[-1].keys() == other[-1].keys()
    for name, value in one[-1].items():
        torch.testing.assert_close(value, other[-1][name], rtol=rel, atol=rel, msg=name)


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_fabric_computes_what_ddp_computes_and_resumes(stage: int, tmp_path: Path) -> None:
    for clip, rel in ((None, 0.0), (0.05, 1e-5)):
        folder = str(tmp_path / str(clip))
        plain = run_ranks(run_fabric, 2, None, folder, clip, False, timeout_s=TIMEOUT_S)
        whole = run_ranks(run_fabric, 2, stage, folder, clip, False, timeout_s=TIMEOUT_S)
        again = run_ranks(run_fabric, 2, stage, folder, clip, True, timeout_s=TIMEOUT_S)
        for expected, found, resumed in zip(plain, whole, again, strict=True):
            assert_equal(found, expected, rel)
            assert_equal(resumed, found[-len(resumed) :])


def train_two_models(stage: int | None) -> list[float]:
    """Set up two models, and then the optimizers of both; return losses."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    strategy = "ddp_find_unused_parameters_true" if stage is None else FabricStrategy(zero(stage))
    fabric, told = lightning.Fabric(**MEMBERS, strategy=strategy), []
    fabric.launch()
    models: list[Any] = [net(), nn.Linear(WIDTH, 1)]
    made = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    models = [fabric.setup_module(model) for model in models]
    optimizers = fabric.setup_optimizers(*made)
    for batch in fabric.setup_dataloaders(batches(0, 16)):
        loss = models[1](models[0](batch)).square().mean()
        fabric.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        told.append(loss.item())
    if stage is not None:
        for parameters in (nn.Linear(2, 2).parameters(), [one for model in models for one in model.parameters()]):
            with pytest.raises(ValueError, match=r"SGD has parameters of [02] of 2 models"):
                fabric.setup_optimizers(torch.optim.SGD(parameters, lr=0.1))
    return told


def test_optimizers_are_set_up_after_several_models() -> None:
    expected = run_ranks(train_two_models, 2, None, timeout_s=TIMEOUT_S)
    for stage in third([3, 1]):
        assert run_ranks(train_two_models, 2, stage, timeout_s=TIMEOUT_S) == expected


def load_a_model_alone(stage: int | None, folder: str) -> list[float]:
    """Save a model and train on; load the model without its optimizer; return the losses of all steps."""
    fabric = lightning.Fabric(**MEMBERS, strategy="ddp" if stage is None else FabricStrategy(zero(stage)))
    fabric.launch()
    model: Any = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    told = []
    for number, batch in enumerate(fabric.setup_dataloaders(batches(0, 32))):
        if number == 2:
            fabric.save(folder, {"model": model, "optimizer": optimizer})
            optimizer.param_groups[0]["lr"] = 0.01
        if number == 5:
            fabric.load(folder, {"model": model})
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return [*told, optimizer.param_groups[0]["lr"]]


def test_a_load_of_a_model_alone_leaves_its_optimizer(tmp_path: Path) -> None:
    for expected, found in run_ranks(beside_ddp, 2, load_a_model_alone, str(tmp_path), timeout_s=TIMEOUT_S):
        assert found == expected


def refuse_in_fabric(folder: str) -> list[str]:
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    fabric, told = lightning.Fabric(**MEMBERS, strategy=FabricStrategy(zero(3)), precision="bf16-mixed"), []
    fabric.launch()
    attempts: list[Any] = [
        lambda: fabric.setup(net()),
        lambda: fabric.save(f"{folder}/none", {"step": 1}),
        lambda: fabric.save(f"{folder}/filter", {"step": 1}, filter={"step": lambda *_: True}),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:
            attempt()
        told.append(str(caught.value))
    return told


def test_what_fabric_cannot_combine_is_refused(tmp_path: Path) -> None:
    for told in run_ranks(refuse_in_fabric, 2, str(tmp_path), timeout_s=TIMEOUT_S):
        for text, wanted in zip(
            told, ("leave Lightning's precision out", "0 sharded models", "no filter="), strict=True
        ):
            assert wanted in text


# -- the Trainer ------------------------------------------------------------------------------------------------------


class Task(lightning.LightningModule):
    """Trains a net, and notes its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses, self.validated = net(), [], []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        loss = self.net(batch).square().mean()
        self.validated.append(loss.item())
        self.log("validated", loss, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Killing(lightning.Callback):
    """Ends rank 1 without a word after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (1, self.step):
            os.kill(os.getpid(), signal.SIGKILL)


def run_trainer(
    stage: int | None,
    folder: str,
    clip: float | None,
    steps: int,
    resumes: bool,
    an_epoch: int = 4,
    killed_after: int = 0,
    plugins: Any = None,
) -> dict[str, Any]:
    """Train with accumulation over two micro-batches; return losses, evaluations, a last evaluation and parameters.

    Args:
        an_epoch: steps of an epoch, at whose end the run is evaluated and saved. A stock loader that resumes within one
            begins its epoch again.
        killed_after: the step after which rank 1 is killed.
    """
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = "ddp" if stage is None else ZeroStrategy(zero(stage))
    saves = ModelCheckpoint(
        dirpath=folder, save_last=True, save_top_k=1, monitor="step", mode="max", save_on_train_epoch_end=False
    )  # after evaluations: `every_n_train_steps` saves again within the first accumulation after a resume
    trainer = lightning.Trainer(
        **MEMBERS, strategy=strategy, max_steps=steps, accumulate_grad_batches=2, gradient_clip_val=clip,
        val_check_interval=2 * an_epoch, callbacks=[saves, Killing(killed_after or -1)], default_root_dir=folder,
        logger=False, enable_progress_bar=False, enable_model_summary=False, plugins=plugins,
    )  # fmt: skip
    task = Task()
    trainer.fit(task, batches(0, 8 * an_epoch), batches(999, 8), ckpt_path="last" if resumes else None)
    tested = trainer.validate(task, batches(999, 8), verbose=False)[0]["validated"]
    told = {"loss": task.losses, "validated": task.validated, "tested": [tested]}
    with nullcontext() if stage is None else trainer.strategy.zero.gathered():
        return told | {"model": {name: one.detach().clone() for name, one in task.net.named_parameters()}}


def flat(found: dict[str, Any]) -> list[Any]:
    return [*found["loss"], *found["validated"], *found["tested"], found["model"]]


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_the_trainer_computes_what_ddp_computes_and_resumes(stage: int, tmp_path: Path) -> None:
    for clip, rel in third([(None, 0.0), (0.05, 1e-5)]):
        plain, whole = (
            run_ranks(run_trainer, 2, kind, str(tmp_path / f"{clip}-{kind}"), clip, 8, False, timeout_s=TIMEOUT_S)
            for kind in (None, stage)
        )
        folder = str(tmp_path / f"{clip}-parts")
        run_ranks(run_trainer, 2, stage, folder, clip, 4, False, timeout_s=TIMEOUT_S)  # an epoch has 4 steps
        again = run_ranks(run_trainer, 2, stage, folder, clip, 8, True, timeout_s=TIMEOUT_S)
        for expected, found, resumed in zip(plain, whole, again, strict=True):
            assert_equal(flat(found), flat(expected), rel)
            assert resumed["loss"] == found["loss"][8:16]  # of the second epoch
            assert_equal(flat(resumed)[-2:], flat(found)[-2:])
        assert {path.name for path in Path(folder).iterdir()} >= {"last.ckpt"}
        assert all((path / "lightning.ckpt").exists() for path in Path(folder).iterdir())


def run_until_killed_in_a_save(folder: str) -> None:
    """Train three epochs; rank 0 is killed while the file `last.ckpt` is replaced by that of the second."""
    saved, count = zeroshard.integrations.lightning.save_in, []

    def save(handle: Any, path: Path, step: int) -> None:
        saved(handle, path, step)
        count.append(path.name)
        if count.count("last.ckpt") == 2 and handle.mesh.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    zeroshard.integrations.lightning.save_in = save
    run_trainer(3, folder, None, 12, False)


def test_a_kill_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    whole = run_ranks(run_trainer, 2, 3, str(tmp_path / "whole"), None, 12, False, timeout_s=TIMEOUT_S)
    folder = str(tmp_path / "killed")
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(run_until_killed_in_a_save, 2, folder, timeout_s=TIMEOUT_S)
    again = run_ranks(run_trainer, 2, 3, folder, None, 12, True, timeout_s=TIMEOUT_S)
    for expected, resumed in zip(whole, again, strict=True):
        assert resumed["loss"] == expected["loss"][8:]  # after the first epoch
        assert_equal(flat(resumed)[-2:], flat(expected)[-2:])
    assert {path.name for path in Path(folder, "last.ckpt", "zeroshard").glob("step-*")} == {"step-12"}


class Slow(TorchCheckpointIO):
    """Takes its time to write a file."""

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        time.sleep(0.3)
        super().save_checkpoint(*args, **options)


def run_with_writes_in_background(folder: str) -> list[int]:
    """Train two epochs; return the steps of Lightning's own file when earlier steps are removed."""
    module, found = zeroshard.integrations.lightning, list[int]()
    removed = module.remove_others

    def remove(path: Path, step: int) -> None:
        found.append(torch.load(path / module.VALUES, weights_only=False)["global_step"])
        assert found[-1] == step
        removed(path, step)

    module.remove_others = remove
    run_trainer(3, folder, None, 8, False, plugins=[AsyncCheckpointIO(Slow())])
    return found


def test_a_step_stays_until_a_write_in_background_has_ended(tmp_path: Path) -> None:
    (found, _) = run_ranks(run_with_writes_in_background, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    assert set(found) == {4, 8}


@pytest.mark.parametrize("strategy", [FabricStrategy, ZeroStrategy])
def test_options_of_shard_are_no_options_of_a_strategy(strategy: type) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{strategy.__name__}({{'stage': 1}})")):
        strategy(stage=1)
    assert strategy(zero(3), find_unused_parameters=True) is not None


def evaluate_alone(folder: str) -> float:
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(**MEMBERS, strategy=ZeroStrategy(zero(3)), **quiet)
    task = Task()
    (told,) = trainer.validate(task, batches(999, 8), ckpt_path=f"{folder}/last.ckpt", verbose=False)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(task, batches(0, 32), batches(64, 8))  # with optimizers that are attached now
    assert trainer.strategy.zero.optimizers and len(task.losses) == 8
    return float(told["validated"])


def test_a_checkpoint_is_evaluated_without_a_training_before(tmp_path: Path) -> None:
    whole = run_ranks(run_trainer, 2, 1, str(tmp_path), None, 4, False, timeout_s=TIMEOUT_S)
    alone = run_ranks(evaluate_alone, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    assert alone == [found["tested"][0] for found in whole]


def evaluate_an_earlier_epoch(stage: int | None, folder: str) -> list[float]:
    """Train two epochs and evaluate the first; return evaluations, the learning rate and the sums of the states."""
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = "ddp" if stage is None else ZeroStrategy(zero(stage))
    saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer, task = lightning.Trainer(**MEMBERS, **options, strategy=strategy, max_epochs=2, callbacks=[saves]), Task()
    trainer.fit(task, batches(0, 16))
    for evaluate in (trainer.validate, trainer.test):
        evaluate(task, batches(999, 8), ckpt_path=f"{folder}/epoch=0.ckpt", verbose=False)
    with nullcontext() if stage is None else trainer.strategy.zero.gathered(states=True):
        (state,) = (one.state_dict() for one in trainer.optimizers)
    sums = [float(one["exp_avg"].double().sum()) for one in state["state"].values()]
    return [*task.validated, state["param_groups"][0]["lr"], *sums]


def test_an_evaluation_of_a_checkpoint_leaves_the_optimizer(tmp_path: Path) -> None:
    for expected, found in run_ranks(beside_ddp, 2, evaluate_an_earlier_epoch, str(tmp_path), timeout_s=TIMEOUT_S):
        assert found == expected


class Tuned(Task):
    """Has a learning rate that Lightning finds."""

    lr = 1e-3

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def find_a_rate_and_fit_twice(stage: int | None, folder: str) -> list[Any]:
    """Find a learning rate, train twice, and resume elsewhere; return losses and learning rates."""
    strategy = ["ddp" if stage is None else ZeroStrategy(zero(stage)) for _ in range(2)]
    trainer, other = (
        lightning.Trainer(**MEMBERS, **QUIET, strategy=one, max_epochs=1, default_root_dir=folder) for one in strategy
    )
    task, resumed, told = Tuned(), Tuned(), []
    Tuner(trainer).lr_find(task, batches(0, 96), num_training=16)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(task, batches(0, 32))
        told += [task.lr, trainer.optimizers[0].param_groups[0]["lr"], len(trainer.optimizers)]
    trainer.save_checkpoint(f"{folder}/twice")
    other.fit_loop.max_epochs = 3
    other.fit(resumed, batches(0, 32), ckpt_path=f"{folder}/twice")
    return [*told, task.losses, resumed.losses]


def test_each_fit_has_the_optimizers_that_ddp_makes(tmp_path: Path) -> None:
    for expected, found in run_ranks(beside_ddp, 2, find_a_rate_and_fit_twice, str(tmp_path), timeout_s=TIMEOUT_S):
        assert found == expected
        assert found[0] != Tuned.lr


def alternate(stage: int | None) -> list[float]:
    """Train a model, evaluate another one and the first, and train the other one; return evaluations and its losses."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    strategy = "ddp" if stage is None else ZeroStrategy(zero(stage))
    trainer = lightning.Trainer(**MEMBERS, **QUIET, strategy=strategy, max_epochs=1)
    first, second = Task(), Task()
    trainer.fit(first, batches(0, 16))
    for one in (second, first):
        trainer.validate(one, batches(999, 8), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, batches(64, 16))
    return [*second.validated, *first.validated, *second.losses]


def test_models_take_turns_in_one_trainer() -> None:
    expected, found = (run_ranks(alternate, 2, stage, timeout_s=TIMEOUT_S) for stage in (None, 3))
    assert found == expected


class Drawing(Task):
    """Draws from torch's generator as dropout of texts of different lengths does: unlike on each rank."""

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        torch.rand(1 + self.global_rank)
        return super().training_step(batch, number)


def resume_in_an_epoch(stage: int | None, folder: str) -> list[float]:
    """Train with a sampler that draws from torch's generator on each rank; return the losses of the resumed epoch."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for steps, path in ((3, None), (6, f"{folder}/last.ckpt")):
        saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=3)
        strategy = "ddp" if stage is None else ZeroStrategy(zero(stage))
        trainer = lightning.Trainer(**MEMBERS, **options, strategy=strategy, max_steps=steps, callbacks=[saves])
        task, samples = Drawing(), batches(0, 16).dataset
        seed(11)
        sampler = WeightedRandomSampler([1.0] * len(samples), len(samples), replacement=False)
        trainer.fit(task, DataLoader(samples, 2, sampler=sampler), ckpt_path=path)
    return task.losses


def test_a_resume_leaves_generators_as_ddp_does(tmp_path: Path) -> None:
    expected, found = (
        run_ranks(resume_in_an_epoch, 2, stage, str(tmp_path / str(stage)), timeout_s=TIMEOUT_S) for stage in (None, 2)
    )
    assert found == expected


class TwoNets(lightning.LightningModule):
    """Trains two nets in turn, each with an optimizer of its own, and freezes the other one by its groups.

    The head is in no block, and `training_step` calls it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.losses = net(), net(), []
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2)])
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, _: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.heads[0](self.second(self.first(batch))).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        parts = self.first, nn.ModuleList([self.second, self.heads])
        return [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in parts]


QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}


def run_by_hand(stage: int | None) -> list[float]:
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    strategy = "ddp_find_unused_parameters_true" if stage is None else ZeroStrategy(zero(stage))
    task = TwoNets()
    lightning.Trainer(**MEMBERS, **QUIET, strategy=strategy, max_epochs=1).fit(task, batches(0, 16))
    return task.losses


def test_manual_optimization_computes_what_ddp_computes() -> None:
    expected = run_ranks(run_by_hand, 2, None, timeout_s=TIMEOUT_S)
    for stage in third([3, 1]):
        assert run_ranks(run_by_hand, 2, stage, timeout_s=TIMEOUT_S) == expected


class Thawing(Task):
    """Trains its first layer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch >= 1)


class Thaw(BaseFinetuning):
    """Does so by Lightning's callback."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def run_finetuning(stage: int | None, callbacks: list[Any]) -> list[float]:
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    strategy = "ddp_find_unused_parameters_true" if stage is None else ZeroStrategy(zero(stage))
    task = Thawing()
    trainer = lightning.Trainer(**MEMBERS, **QUIET, strategy=strategy, max_epochs=2, callbacks=callbacks)
    trainer.fit(task, batches(0, 16))
    return task.losses


def refuse_finetuning() -> str:
    with pytest.raises(ValueError) as caught:
        run_finetuning(1, [Thaw()])
    return str(caught.value)


def test_the_callback_for_finetuning_is_refused_and_its_replacement_trains() -> None:
    for text in run_ranks(refuse_finetuning, 2, timeout_s=TIMEOUT_S):
        assert "the callback Thaw" in text and "self.backbone.requires_grad_(" in text
    expected = run_ranks(run_finetuning, 2, None, [], timeout_s=TIMEOUT_S)
    for stage in third([3, 1]):
        assert run_ranks(run_finetuning, 2, stage, [], timeout_s=TIMEOUT_S) == expected


class Averaging(lightning.Callback):
    """Averages parameters as the error about Lightning's callback says."""

    def on_train_start(self, trainer: Any, _: Any) -> None:
        self.average = trainer.strategy.zero.ema(0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()


def average_by_callbacks(stage: int, folder: str) -> tuple[str, bool]:
    with pytest.raises(ValueError) as caught:
        run_finetuning(stage, [lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.5)])
    averaging, task = Averaging(), Task()
    trainer = lightning.Trainer(
        **MEMBERS, **QUIET, strategy=ZeroStrategy(zero(stage)), max_epochs=1, callbacks=[averaging]
    )
    trainer.fit(task, batches(0, 16))
    handle: Any = trainer.strategy.zero
    with averaging.average.swapped():
        handle.save(folder, model_only=True)
        with handle.gathered():
            expected = [one.detach().clone() for one in task.parameters()]
    handle.load(folder, model_only=True)
    with handle.gathered():
        return str(caught.value), all(map(torch.equal, task.parameters(), expected))


def test_the_callback_for_averages_is_refused_and_its_replacement_is_saved(tmp_path: Path) -> None:
    for stage in third([1, 3]):
        for text, is_saved in run_ranks(
            average_by_callbacks, 2, stage, str(tmp_path / str(stage)), timeout_s=TIMEOUT_S
        ):
            assert "the callback EMAWeightAveraging" in text and "zero.ema(" in text
            assert is_saved


class Hooked(Task):
    """Calls a function with a checkpoint in the hooks, on some ranks."""

    def __init__(self, hook: Any, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.hook, self.ranks = hook, ranks

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank in self.ranks:
            self.hook(checkpoint)

    on_load_checkpoint = on_save_checkpoint


def change_in_hooks(folder: str) -> list[str]:
    """Return the errors of hooks that change parameters of a checkpoint, in saves and in loads."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    trainer = lightning.Trainer(**MEMBERS, **QUIET, strategy=ZeroStrategy(zero(1)), max_epochs=1)
    task, told = Hooked(lambda checkpoint: checkpoint.update(mine=1), (0, 1)), []
    trainer.fit(task, batches(0, 8))
    trainer.save_checkpoint(f"{folder}/whole")
    values = torch.load(f"{folder}/whole/lightning.ckpt", weights_only=True)
    assert (values["state_dict"], values["mine"]) == ({}, 1)
    hooks: list[tuple[Any, tuple[int, ...]]] = [
        (lambda checkpoint: [checkpoint["state_dict"][name].mul_(0) for name in checkpoint["state_dict"]], (0, 1)),
        (lambda checkpoint: checkpoint["state_dict"].pop("net.0.0.weight", None), (0, 1)),
        (lambda checkpoint: checkpoint.update(state_dict={}), (1,)),  # which the other rank must not wait for
    ]
    for task.hook, task.ranks in hooks:
        for act in (
            lambda: trainer.save_checkpoint(f"{folder}/never"),
            lambda: trainer.validate(task, batches(999, 8), ckpt_path=f"{folder}/whole", verbose=False),
        ):
            with pytest.raises(RuntimeError) as caught:
                act()
            told.append(str(caught.value))
    task.ranks = ()
    trainer.validate(task, batches(999, 8), ckpt_path=f"{folder}/whole", verbose=False)
    return told


def test_a_hook_that_changes_parameters_of_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    for told in run_ranks(change_in_hooks, 2, str(tmp_path), timeout_s=TIMEOUT_S):
        assert len(told) == 6
        assert all("checkpoint['state_dict']" in text and "gathered(writeback=True)" in text for text in told)
    assert not (tmp_path / "never").exists()


# -- the page ---------------------------------------------------------------------------------------------------------


def run_page(folder: Path) -> None:
    os.chdir(folder)
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    for program in examples((REPOSITORY / "docs/lightning.md").read_text()):
        run_block(program, "docs/lightning.md")


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    run_ranks(run_page, 2, tmp_path, process_group=False, timeout_s=TIMEOUT_S)
