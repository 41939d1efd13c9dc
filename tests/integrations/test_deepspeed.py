"""DeepSpeed's configurations: every key has a sentence, published files translate or are refused, formulas agree."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.contract.blocks import examples, run_block
from tests.contract.source import REPOSITORY
from tests.oracle import WATCHDOG_S
from zeroshard import cli
from zeroshard.integrations.deepspeed import from_deepspeed, notes_of
from zeroshard.integrations.deepspeed_keys import KEYS
from zeroshard.testing import run_ranks

FIELDS = [line for line in Path(__file__).with_name("deepspeed_fields.txt").read_text().splitlines() if line[0] != "#"]
ADAM = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
BUCKETS = {
    "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True,
    "reduce_bucket_size": 2e8, "contiguous_gradients": True,
}  # fmt: skip
CPU = {"device": "cpu", "pin_memory": True}
AUTO_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
AUTO = dict.fromkeys(
    ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto"
)
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "microsoft/DeepSpeedExamples training/cifar/ds_config.json": (
        {
            "train_batch_size": 16, "steps_per_print": 250, "optimizer": ADAM, "scheduler": WARMUP,
            "gradient_clipping": 1.0, "prescale_gradients": False,
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": False, **SCALE},
            "fp16": {"enabled": False, "fp16_master_weights_and_grads": False, **SCALE},
            "wall_clock_breakdown": False, "zero_optimization": {"stage": 0, **BUCKETS, "cpu_offload": False},
        },
        "",
    ),
    "CSCfi/pytorch-ddp-examples ds_config.json": (
        {
            "train_batch_size": 400, "steps_per_print": 2000, "optimizer": ADAM, "scheduler": WARMUP,
            "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
        },
        "",
    ),
    "OvJat/DeepSpeedTutorial deepspeed_config.json": (
        {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "optimizer": ADAM,
            "scheduler": WARMUP,
            "activation_checkpointing": {
                "partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": False,
                "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": True,
            },
            "fp16": {"enabled": True, "auto_cast": False, **SCALE, "consecutive_hysteresis": False},
            "zero_optimization": {
                "stage": 3, "offload_param": CPU, "offload_optimizer": CPU, "contiguous_gradients": True,
                "overlap_comm": True,
            },
        },
        "activations",  # translated; a model of plain layers has nothing to partition
    ),
    "allenai/feb deepspeed_config.json": (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **BUCKETS},
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"adam_w_mode": True, "lr": 3e-5}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 3e-5, "warmup_max_lr": 3e-5, "warmup_num_steps": 0},
            },
        },
        "",
    ),
    "FrankLeeeee/llama-deepspeed-benchmark ds_config.json": (
        {
            "fp16": {"enabled": True, **SCALE, "initial_scale_power": 8}, "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 2, **BUCKETS}, "gradient_accumulation_steps": 1, "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
        },
        "train_batch_size=32 is not train_micro_batch_size_per_gpu=4 x gradient_accumulation_steps=1 x 2 ranks",
    ),
    "aqlaboratory/openfold deepspeed_config.json": (
        {
            "fp16": {"enabled": False, "min_loss_scale": 1}, "amp": {"enabled": False, "opt_level": "O2"},
            "bfloat16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True},
            "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False, "profile": False},
            "gradient_clipping": 0.1, "zero_force_ds_cpu_optimizer": False,
        },
        "activations",
    ),
    "catid/cifar10deepspeed deepspeed_config.json": (
        {
            "_read_the_docs": "https://www.deepspeed.ai/docs/config-json/", "train_micro_batch_size_per_gpu": 256,
            "gradient_accumulation_steps": 1, "gradient_clipping": 5.0, "prescale_gradients": False,
            "comms_logger": {"enabled": True}, "tensorboard": {"enabled": False, "output_path": "logs"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 4e-3}},
            "fp16": {"enabled": True, **SCALE}, "zero_optimization": {"stage": 0, **BUCKETS},
            "checkpoint": {"use_node_local_storage": True},
        },
        "_read_the_docs",
    ),
    "cofe-ai/fast-gector deepspeed_config.json": (
        {
            "train_batch_size": 256, "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-5}, "eps": 1e-8, "weight_decay": 1e-2},
            "gradient_clipping": 1.0, "fp16": {"enabled": False},
            "amp": {"enabled": True, "opt_level": "O1", "loss_scale": "dynamic"},
        },
        "optimizer.eps = 1e-08: refused: unknown to DeepSpeed 0.19.8",
    ),
    "CarperAI/trlx ds_config.json": (
        {
            "gradient_clipping": 1.0, "gradient_accumulation_steps": 1, "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": False}, "bf16": {"enabled": False},
            "zero_optimization": {
                "stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}, **BUCKETS,
            },
        },
        "train_batch_size = \"auto\": refused: the Trainer of Transformers fills 'auto'; write a value",
    ),
    "haotian-liu/LLaVA scripts/zero3_offload.json": (
        {
            "fp16": {"enabled": "auto", **SCALE}, "bf16": {"enabled": True}, "optimizer": AUTO_ADAMW, **AUTO,
            "zero_optimization": {
                "stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 1e9,
                "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 1e9,
                "gather_16bit_weights_on_model_save": True,
            },
            "steps_per_print": 1e5,
        },
        "fp16.enabled",
    ),
    "QwenLM/Qwen finetune/ds_config_zero2.json": (
        {
            "fp16": {"enabled": "auto", **SCALE}, "bf16": {"enabled": "auto"}, "optimizer": AUTO_ADAMW, **AUTO,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "pin_memory": True}, **BUCKETS},
        },
        "bf16.enabled",
    ),
}  # fmt: skip
"""Published configurations by repository and file, and what is refused in them on 2 ranks; "" if nothing is."""


def test_every_field_has_a_class_and_a_sentence() -> None:
    assert len(FIELDS) > 200
    for name in FIELDS:
        parts = name.split(".")
        keys = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        assert sum(key in KEYS for key in keys) == 1, name
    assert all(why and not why.endswith(".") for _, why in KEYS.values())


def train(config: dict[str, Any], options: list[str]) -> list[float]:
    """Train three steps as a configuration says; return the losses."""
    ranks = zs.init(seed=0)
    read = from_deepspeed(config)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = (read.make_optimizer or torch.optim.AdamW)(model.parameters())
    given = {name: value for name, value in read.options.items() if name not in options}
    zs.shard(model, optimizer, **given, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    scheduler = None if read.make_scheduler is None else read.make_scheduler(optimizer)
    losses = []
    for step in range(3):
        for micro in range(read.accumulation):
            torch.manual_seed(100 * step + 10 * micro + ranks.rank)
            loss = model(torch.randn(read.micro_batch or 2, 8)).float().square().mean() / read.accumulation
            loss.backward()
        if read.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), read.max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("origin", PUBLISHED)
def test_published_files_translate_and_train_or_say_why_not(origin: str) -> None:
    config, refused = PUBLISHED[origin]
    if refused not in ("", "activations"):
        with pytest.raises(ValueError, match=re.escape(refused)):
            from_deepspeed(copy.deepcopy(config), world_size=2)
        return
    for losses in run_ranks(train, 2, config, [refused], timeout_s=120):
        assert len(losses) == 3 and all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"zero_optimization": {"stage": 3}}, {"stage": 3}),
        ({"bf16": {"enabled": True}}, {"stage": 0, "precision": "bf16"}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"stage": 0, "precision": zs.Precision(
            param=torch.float16, master=torch.float32, loss_scale=128)}),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, {"stage": 0, "precision": zs.Precision(
            param=torch.bfloat16, reduce=torch.float32, master=torch.float32)}),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "ratio": 0.5},
                                "offload_param": {"device": "cpu"}}},
         {"stage": 3, "offload": zs.Offload(states=0.5, parameters=1.0, to="/disk", parameters_to="host")}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_param": {"device": "cpu"}}},
         {"stage": 2, "offload": zs.Offload()}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, {"stage": 3, "mesh": 4}),
        ({"gradient_allreduce_op": "sum"}, {"stage": 0, "reduction": "sum"}),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"stage": 0, "activations": "recompute+offload"}),
    ],
)  # fmt: skip
def test_values_are_arguments_of_shard(config: dict[str, Any], options: dict[str, Any]) -> None:
    assert from_deepspeed(config, world_size=8).options == options


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"zero_optimisation": {}},
            "zero_optimisation = {}: refused: unknown to DeepSpeed 0.19.8; did you mean zero_optimization",
        ),
        ({"zero_optimization": {"overlap_com": True}}, "0.19.8; did you mean zero_optimization.overlap_comm"),
        ({"overlap_comm": True}, "0.19.8; did you mean zero_optimization.overlap_comm?"),
        ({"zero_optimization": 3}, "zero_optimization = 3: refused"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage must be int; got '3'"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: "),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "messages are not quantized"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size = 8: refused"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled must be bool; got 1"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both true"),
        ({"gradient_clipping": -1.0}, "gradient_clipping must be at least 0; got -1.0"),
        ({"train_batch_size": 0}, "train_batch_size must be at least 1; got 0"),
        ({"train_batch_size": True}, "train_batch_size must be int; got True"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type = \"Lamb\": refused: 'Lamb' of DeepSpeed has no equal here"),
        ({"optimizer": {"type": "OneBitAdam"}}, "has no equal here"),
        ({"optimizer": {"type": "Adm"}}, "'Adm' is not an optimizer of DeepSpeed or torch"),
        ({"optimizer": {"type": "AdamW", "params": {"rate": 1}}}, "AdamW does not take rate"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            "refused: 'auto', which the Trainer of Transformers fills",
        ),
        (
            {"scheduler": {"type": "OneCycle"}},
            "scheduler.type = \"OneCycle\": refused: 'OneCycle'; use a scheduler of torch.optim.lr_scheduler",
        ),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "scheduler.params = {}: refused: WarmupDecayLR needs"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, 'scheduler.type = "WarmupDecayLR": refused: WarmupDecayLR needs'),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "there is no nvme_path"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "parameters go where states go"),
        ({"tensor_parallel": {"autotp_size": 4}}, "parallelize_module"),
        ({"communication_data_type": "fp64"}, "communication_data_type must be one of"),
    ],
)
def test_what_cannot_be_read_is_one_error(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        from_deepspeed(config)


def test_what_is_off_is_not_refused() -> None:
    off = {"tensor_parallel": {"autotp_size": 1}, "hybrid_engine": {"enabled": False}, "sparse_gradients": False}
    assert {one.way for one in notes_of(off)} == {"without meaning"}


def rates(name: str, params: dict[str, Any], steps: int) -> list[float]:
    """Return the rates of the steps of a training."""
    made = from_deepspeed({"scheduler": {"type": name, "params": params}}).make_scheduler
    assert made is not None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, found = made(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_have_deepspeeds_rates() -> None:
    """Computed from the formulas of deepspeed/runtime/lr_schedules.py: the first call of `step()` is iteration 0."""
    linear = {"warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates("WarmupLR", linear, 7) == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.8, 0.8])
    decay = rates("WarmupDecayLR", linear | {"total_num_steps": 8}, 11)
    assert decay == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.8, 0.6, 0.4, 0.2, 0, 0])
    logarithm = rates("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 0.3, "warmup_num_steps": 4}, 5)
    assert logarithm == pytest.approx([0.1, 0.1, *(0.1 + 0.2 * math.log(step + 1) / math.log(4) for step in (1, 2, 3))])
    cosine = rates("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_type": "linear"}, 7)
    middle = 0.1 * (0.0001 + 0.9999 / 2)
    assert cosine == pytest.approx([0, 0, 0.05, middle, 1e-5, 1e-5, 1e-5])


def test_the_decay_of_adam_is_deepspeeds() -> None:
    for kind, params, expected in (
        ("Adam", {}, torch.optim.AdamW), ("AdamW", {}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
    ):  # fmt: skip
        made = from_deepspeed({"optimizer": {"type": kind, "params": params}}).make_optimizer
        assert made is not None
        optimizer = made([torch.nn.Parameter(torch.zeros(1))])
        assert type(optimizer) is expected and optimizer.defaults["weight_decay"] == 0.0


def test_the_command_says_what_becomes_of_each_key(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}}))
    monkeypatch.setattr("sys.argv", ["zeroshard", "deepspeed", "check", str(path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert capsys.readouterr().out == (
        "zero_optimization.stage = 2: honoured: stage= of zs.shard\n"
        "zero_optimization.overlap_comm = true: without meaning: messages and computing overlap always\n"
        "bf16.enabled = true: translated: precision='bf16', with fp32 masters\n\n"
        "zs.shard(model, optimizer, stage=2, precision='bf16')\n"
    )
    for text, wanted in (('{"amp": {"enabled": true}}', "amp"), ('{"a": 1, "a": 2}', "a key twice"), ("[]", "a list")):
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code
        assert wanted in capsys.readouterr().err


def test_the_program_of_the_page_runs() -> None:
    (program,) = examples((REPOSITORY / "docs/deepspeed.md").read_text())
    run_block(program, "docs/deepspeed.md")
