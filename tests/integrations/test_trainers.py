"""The Trainer of Transformers with a sharded model: what the stock class with DDP computes, saves and resumes."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import zeroshard as zs
from tests.contract.blocks import examples, run_block
from tests.contract.source import REPOSITORY
from tests.oracle import STAGES, WATCHDOG_S, assert_close, randint, seed
from tests.rotation import third
from zeroshard.integrations.transformers import Trainer, newest, on_meta
from zeroshard.table.settings import Settings
from zeroshard.testing import RankFailure, run_ranks

from . import tiny

TIMEOUT_S = 240
STEPS = 6
Made = dict[str, Any]


def windows(first: int) -> list[dict[str, torch.Tensor]]:
    """Return a data set of 32 windows of 12 tokens."""
    ids = [randint(64, 12, key=(5, first + place)) for place in range(32)]
    return [{"input_ids": one, "labels": one} for one in ids]


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no", "learning_rate": 1e-3, "max_grad_norm": 0.5,
    }  # fmt: skip
    defaults |= {"report_to": [], "use_cpu": True, "disable_tqdm": True} | options
    return transformers.TrainingArguments(str(folder), **defaults)


def trainer_of(stage: int | None, folder: Path, kind: type | None = None, **options: Any) -> transformers.Trainer:
    """Return a Trainer of a small Llama: for stage None the stock one, or a class that derives from it."""
    seed(99)
    model = tiny.kinds()["llama"].build()
    given = {"args": arguments(folder, **options), "train_dataset": windows(0), "eval_dataset": windows(32)}
    if stage is None:
        return (kind or transformers.Trainer)(model, **given)
    return (kind or Trainer)(model, **given, zero={"stage": stage, "settings": Settings(watchdog_s=WATCHDOG_S)})


def found_in(trainer: transformers.Trainer) -> Made:
    """Return what a training told, and its parameters."""
    told = {
        key: [one[key] for one in trainer.state.log_history if key in one] for key in ("loss", "grad_norm", "eval_loss")
    }
    if (zero := getattr(trainer, "zero", None)) is None:
        return told | {"model": {name: one.clone() for name, one in trainer.model.state_dict().items()}}
    with zero.gathered():
        return told | {"model": {name: one.clone() for name, one in trainer.model.state_dict().items()}}


def train(stages: list[int | None], folder: Path, options: dict[str, Any]) -> list[Made]:
    found = []
    for stage in stages:
        trainer = trainer_of(stage, folder / str(stage), **options)
        trainer.train()
        found.append(found_in(trainer))
    return found


def assert_equal(one: Made, other: Made, *, norms_rel: float = 1e-5) -> None:
    assert one["loss"] == other["loss"]
    assert one["eval_loss"] == other["eval_loss"]
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=norms_rel)
    assert one["model"].keys() == other["model"].keys()
    for name, value in one["model"].items():
        torch.testing.assert_close(value, other["model"][name], rtol=0, atol=0, msg=name)


def test_a_sharded_trainer_computes_what_ddp_computes(tmp_path: Path) -> None:
    stages = [None, *third(STAGES[::-1])]
    for found in run_ranks(train, 2, stages, tmp_path, {"max_grad_norm": 0.0}, timeout_s=TIMEOUT_S):
        for other in found[1:]:
            assert_equal(other, found[0])


def test_clipping_is_global(tmp_path: Path) -> None:
    for plain, *sharded in run_ranks(train, 2, [None, 1, 3], tmp_path, {}, timeout_s=TIMEOUT_S):
        assert max(plain["grad_norm"]) > 0.5  # clipping takes effect
        for found in sharded:
            assert_close(found, plain, "loss", "grad_norm", "eval_loss")


class Own:
    """Makes an optimizer without the stock class: another one each time, if so told."""

    makes_others = False

    def create_optimizer(self, *_: Any) -> Any:
        if self.optimizer is None or self.makes_others:
            self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3, momentum=0.5)
        return self.optimizer


def train_with_own_optimizer(folder: Path) -> tuple[Made, Made, str]:
    found = []
    for base, stage in ((transformers.Trainer, None), (Trainer, 3)):
        trainer = trainer_of(stage, folder / str(stage), type("Mine", (Own, base), {}), max_grad_norm=0.0)
        trainer.train()
        found.append(found_in(trainer))
    trainer.makes_others = True
    with pytest.raises(ValueError) as caught:
        trainer.train()
    return found[0], found[1], str(caught.value)


def test_the_optimizer_of_a_subclass_is_sharded_once(tmp_path: Path) -> None:
    for plain, sharded, text in run_ranks(train_with_own_optimizer, 2, tmp_path, timeout_s=TIMEOUT_S):
        assert_equal(sharded, plain)
        assert "Mine.train()" in text and "Have it return self.optimizer unless that is None" in text


def test_adafactor_of_transformers_has_whole_matrices(tmp_path: Path) -> None:
    options = {"max_grad_norm": 0.0, "optim": "adafactor"}
    for plain, sharded in run_ranks(train, 2, [None, 3], tmp_path, options, timeout_s=TIMEOUT_S):
        assert_equal(sharded, plain)


# -- files ------------------------------------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 3}


def stop_and_resume(stage: int, folder: Path) -> tuple[Made, Made, list[str]]:
    """Train to the end; again, in two parts; return both, and the names in a checkpoint."""
    whole = trainer_of(stage, folder / "whole", **SAVING)
    whole.train()
    for path in (folder / "whole" / "checkpoint-6",):
        names = sorted(str(one.relative_to(path)) for one in path.iterdir())
    parts = trainer_of(stage, folder / "parts", **SAVING, lr_scheduler_type="constant")
    expected = trainer_of(stage, folder / "expected", **SAVING, lr_scheduler_type="constant")
    expected.train()
    parts.args.max_steps = 3
    parts.train()
    again = trainer_of(stage, folder / "parts", **SAVING, lr_scheduler_type="constant")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS
    return found_in(again), found_in(expected), names


def test_a_stopped_training_resumes_to_the_bit(tmp_path: Path) -> None:
    for stage in third([0, 3, 1, 2]):
        for resumed, expected, names in run_ranks(
            stop_and_resume, 2, stage, tmp_path / str(stage), timeout_s=TIMEOUT_S
        ):
            assert_equal(resumed, expected)
            # The stock Trainer's names, with "zeroshard" in the place of "optimizer.pt" and "scheduler.pt".
            assert names == [
                "config.json", "generation_config.json", "model.safetensors", "rng_state_0.pth", "rng_state_1.pth",
                "trainer_state.json", "training_args.bin", "zeroshard",
            ]  # fmt: skip


class Drawing(transformers.TrainerCallback):
    """Draws from torch's generator as dropout of texts of different lengths does: unlike on each rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.rand(1 + args.process_index)


def resume_in_an_epoch(folder: Path) -> list[Made]:
    """Train an epoch, and its last step again; its order is drawn from torch's generator on each rank."""
    found = []
    for resumes in (None, str(folder / "checkpoint-3")):
        trainer = trainer_of(3, folder, **SAVING, train_sampling_strategy="group_by_length", max_steps=4)
        trainer.add_callback(Drawing())
        trainer.train(resume_from_checkpoint=resumes)
        found.append(found_in(trainer))
    return found


def test_a_resume_leaves_generators_alike_until_the_order_is_drawn(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(resume_in_an_epoch, 2, tmp_path, timeout_s=TIMEOUT_S):
        assert_equal(resumed, whole)


def save_and_choose(stage: int, folder: Path) -> tuple[Made, str, float]:
    """Train with the best model loaded at the end, and save it; return it, its folder and its evaluation."""
    options = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "save_total_limit": 1,
        "learning_rate": 0.5,
        "eval_steps": 1,
        "save_steps": 1,
    }
    trainer = trainer_of(stage, folder, save_strategy="steps", **options)
    trainer.train()
    trainer.save_model(str(folder / "best"))
    return found_in(trainer), str(trainer.state.best_model_checkpoint), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_best_model_is_loaded_saved_and_read_by_transformers(stage: int, tmp_path: Path) -> None:
    found, best, loss = run_ranks(save_and_choose, 2, stage, tmp_path, timeout_s=TIMEOUT_S)[0]
    # The worst is chosen: the last one would be there anyway.
    assert loss == max(found["eval_loss"]) > found["eval_loss"][-2]
    assert Path(best) == tmp_path / f"checkpoint-{1 + found['eval_loss'].index(loss)}"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [Path(best).name]
    for path in (tmp_path / "best", Path(best)):
        read = transformers.AutoModelForCausalLM.from_pretrained(path)
        for name, value in read.state_dict().items():
            assert torch.equal(value, found["model"][name]), name


class Killing(transformers.TrainerCallback):
    """Ends a rank without a word after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if (args.process_index, state.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGKILL)


class KilledInASave(Trainer):
    """A Trainer whose rank 1 ends in its second save, when rank 0 may have written its files."""

    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == 4 and self.args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


def run_until_killed(folder: Path, where: str) -> None:
    kind = KilledInASave if where == "in a save" else Trainer
    trainer = trainer_of(3, folder, kind, save_strategy="steps", save_steps=2)
    if where != "in a save":
        trainer.add_callback(Killing(int(where), 5))
    trainer.train()


def resume(folder: Path) -> Made:
    trainer = trainer_of(3, folder, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
    return found_in(trainer)


def test_a_killed_training_resumes_to_the_bit(tmp_path: Path) -> None:
    expected = run_ranks(resume, 2, tmp_path / "whole", timeout_s=TIMEOUT_S)
    for where in third(["in a save", "0", "1"]):
        with pytest.raises(RankFailure, match="SIGKILL"):
            run_ranks(run_until_killed, 2, tmp_path / where, where, timeout_s=TIMEOUT_S)
        last = newest(tmp_path / where).name
        assert last == ("checkpoint-2" if where == "in a save" else "checkpoint-4")
        for found, one in zip(run_ranks(resume, 2, tmp_path / where, timeout_s=TIMEOUT_S), expected, strict=True):
            assert_equal(found, one)


# -- adapters, precision, generation, first values --------------------------------------------------------------------


def adapted() -> torch.nn.Module:
    seed(99)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(tiny.kinds()["llama"].build(), config)


def train_adapters(stage: int | None, folder: Path) -> Made:
    model, given = adapted(), {"train_dataset": windows(0), "eval_dataset": windows(32)}
    args = arguments(folder, save_strategy="steps", save_steps=6, max_grad_norm=0.0)
    zero = {"stage": stage, "settings": Settings(watchdog_s=WATCHDOG_S)}
    trainer = transformers.Trainer(model, args, **given) if stage is None else Trainer(model, args, **given, zero=zero)
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    return found_in(trainer)


def test_adapters_alone_are_saved_and_read_by_peft(tmp_path: Path) -> None:
    plain = run_ranks(train_adapters, 2, None, tmp_path / "plain", timeout_s=TIMEOUT_S)[0]
    for stage in third([3, 1]):
        found = run_ranks(train_adapters, 2, stage, tmp_path / str(stage), timeout_s=TIMEOUT_S)[0]
        assert_equal(found, plain)
        plain_names, names = (
            {one.name for one in (tmp_path / kind / "adapter").iterdir()} for kind in ("plain", str(stage))
        )
        assert names == plain_names
        base = adapted().unload()
        read = peft.PeftModel.from_pretrained(base, tmp_path / str(stage) / "adapter").state_dict()
        assert read.keys() == found["model"].keys()
        for name, value in read.items():
            assert torch.equal(value, found["model"][name]), name


def train_in(precision: str, folder: Path) -> tuple[str, list[float], str | None]:
    trainer = trainer_of(3, folder, **({precision: True} if precision else {}))
    seen = set[str]()
    trainer.model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *given: seen.add(str(given[2].dtype)))
    trainer.train()
    (dtype,) = seen
    return dtype, found_in(trainer)["loss"], str(trainer.accelerator.scaler)


def test_the_precision_of_the_arguments_is_that_of_the_engine(tmp_path: Path) -> None:
    for precision in ("bf16", "fp16"):
        (dtype, losses, scaler), _ = run_ranks(train_in, 2, precision, tmp_path / precision, timeout_s=TIMEOUT_S)
        (_, expected, _), _ = run_ranks(train_in, 2, "", tmp_path / "fp32", timeout_s=TIMEOUT_S)
        assert dtype == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
        assert losses == pytest.approx(expected, rel=0.02)
        assert scaler == "None"


def train_as_deepspeed(folder: Path, field: str, config: dict[str, Any], precision: Any) -> list[list[float]]:
    """Train as a file of DeepSpeed says beside arguments that have the dtype; and as a precision without it."""
    found, rest = [], {"gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    for options in ({field: True}, {}):
        seed(99)
        args = arguments(folder, max_steps=2, eval_strategy="no", **options)
        zero = {"stage": 2, "precision": precision}
        if options:
            zero = dict(zs.from_deepspeed(rest | config, args=args).options)
        zero["settings"] = Settings(watchdog_s=WATCHDOG_S)
        trainer = Trainer(tiny.kinds()["llama"].build(), args, train_dataset=windows(0), zero=zero)
        trainer.train()
        assert trainer.zero.mesh.world_size == 2
        found.append(found_in(trainer)["loss"])
    return found


@pytest.mark.parametrize(
    ("field", "config", "precision"),
    [
        (
            "bf16",
            {"bf16": {"enabled": "auto"}, "communication_data_type": "fp32"},
            zs.Precision(param=torch.bfloat16, reduce=torch.float32, master=torch.float32),
        ),
        (
            "fp16",
            {"fp16": {"enabled": True, "loss_scale": 64}},
            zs.Precision(param=torch.float16, master=torch.float32, loss_scale=64.0),
        ),
    ],
)
def test_a_file_of_deepspeed_says_more_of_the_dtype_of_arguments(
    field: str, config: Any, precision: Any, tmp_path: Path
) -> None:
    for found, expected in run_ranks(train_as_deepspeed, 2, tmp_path, field, config, precision, timeout_s=TIMEOUT_S):
        assert len(found) == 2
        assert found == expected


def generate(stage: int | None, folder: Path) -> list[list[int]]:
    """Train, and generate texts: of other lengths on each rank."""
    trainer = trainer_of(stage, folder, eval_strategy="no")
    trainer.train()
    rank, tokens = trainer.args.process_index, []
    for length in (5 + 7 * rank, 3):
        made = trainer.model.generate(
            windows(64 + rank)[0]["input_ids"][None, :4], max_new_tokens=length, do_sample=False
        )
        tokens.append(made[0].tolist())
    return tokens


def test_ranks_generate_texts_of_different_lengths(tmp_path: Path) -> None:
    plain, sharded = (run_ranks(generate, 2, stage, tmp_path / str(stage), timeout_s=TIMEOUT_S) for stage in (None, 3))
    assert sharded == plain


def train_from(folder: Path, is_on_meta: bool) -> Made:
    model = on_meta(folder) if is_on_meta else transformers.AutoModelForCausalLM.from_pretrained(folder)
    args, data = arguments(folder / "runs"), {"train_dataset": windows(0), "eval_dataset": windows(32)}
    zero = {"stage": 3, "settings": Settings(watchdog_s=WATCHDOG_S)}
    trainer = Trainer(model, args, **data, zero=zero)
    trainer.train()
    return found_in(trainer)


def test_a_local_folder_is_read_into_shards(tmp_path: Path) -> None:
    seed(99)
    tiny.kinds()["llama"].build().save_pretrained(tmp_path)
    read, whole = (run_ranks(train_from, 2, tmp_path, is_on_meta, timeout_s=TIMEOUT_S) for is_on_meta in (True, False))
    for one, other in zip(read, whole, strict=True):
        assert_equal(one, other)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "more", "text"),
    [
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=...): it would shard the model again"),
        ({"fsdp": True}, {}, "fsdp=...): it shards, too"),
        ({"bf16_full_eval": True}, {}, "write zero=dict(precision='bf16')"),
        ({"bf16": True}, {"precision": "fp16"}, "TrainingArguments(bf16=True) beside zero=dict(precision='fp16')"),
        ({"bf16": True}, {"precision": zs.Precision(param=torch.float16, loss_scale=1.0)},
         "write one dtype in both, as zs.Precision(param=torch.bfloat16), or leave one of them out"),
        ({"fp16": True}, {"precision": zs.Precision(param=torch.float16)},
         "write one dtype in both, as zs.Precision(param=torch.float16, loss_scale=...), or leave"),
        ({}, {"optimizers": "adamw"}, "optimizers=: the model may change until training begins"),
        ({"eval_strategy": "no"}, {"stage": 7}, "stage must be"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_refused(options: Any, more: Any, text: str, tmp_path: Path) -> None:
    model = tiny.kinds()["llama"].build()
    if "optimizers" in more:
        more = {"optimizers": (torch.optim.AdamW(model.parameters()), None)}
    zero = {"stage": more.pop("stage", 3)} | {name: more.pop(name) for name in ("precision",) if name in more}
    with pytest.raises(ValueError, match=re.escape(text)):
        Trainer(model, args=arguments(tmp_path, **options), train_dataset=windows(0), zero=zero, **more).train()
    assert all(one.grad is None for one in model.parameters())


def train_twice(folder: Path) -> list[bool]:
    """Train two models of `model_init`; tell whether each was sharded."""
    args, found = arguments(folder, max_steps=1, eval_strategy="no"), []
    made = {"args": args, "train_dataset": windows(0), "model_init": tiny.kinds()["llama"].build}
    trainer = Trainer(**made, zero={"stage": 3, "settings": Settings(watchdog_s=WATCHDOG_S)})
    for _ in range(2):
        trainer.train()
        memory = trainer.zero.memory().resident_bytes["parameters"]
        found.append(
            trainer.model is not None and memory < 0.6 * sum(one.numel() * 4 for one in trainer.model.parameters())
        )
    return found


def test_each_model_of_model_init_is_sharded(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(train_twice, 2, tmp_path, timeout_s=TIMEOUT_S)):
        assert found == [True, True], rank


def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for number, text in ((3, "{}"), (6, "{"), (9, None)):
        (tmp_path / f"checkpoint-{number}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(text)
    assert newest(tmp_path) == tmp_path / "checkpoint-3"
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        newest(tmp_path / "other")


# -- the page ---------------------------------------------------------------------------------------------------------


def run_page(folder: Path) -> None:
    os.chdir(folder)
    program = examples((REPOSITORY / "docs/trainers.md").read_text())[0]
    run_block(program, "docs/trainers.md")


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_the_program_of_the_page_runs(world: int, tmp_path: Path) -> None:
    run_ranks(run_page, world, tmp_path, process_group=False, timeout_s=TIMEOUT_S)
