"""DeepSpeed's configurations: every key has a sentence, published files translate or are refused, formulas agree."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import zeroshard as zs
from tests.contract.blocks import examples, run_block
from tests.contract.source import REPOSITORY
from tests.oracle import WATCHDOG_S
from zeroshard import cli
from zeroshard.integrations.deepspeed import DeepSpeed, from_deepspeed, notes_of
from zeroshard.integrations.deepspeed_keys import KEYS
from zeroshard.testing import run_ranks

FIELDS = [line for line in Path(__file__).with_name("deepspeed_fields.txt").read_text().splitlines() if line[0] != "#"]
PUBLISHED = json.loads(Path(__file__).with_name("deepspeed_published.json").read_text())
"""Published configurations by repository, commit and file."""
REFUSED = {
    "FrankLeeeee/llama-deepspeed-benchmark ds_config.json": "train_batch_size=32 is not train_micro",
    "catid/cifar10deepspeed deepspeed_config.json": "_read_the_docs",
    "cofe-ai/fast-gector deepspeed_config.json": "optimizer.eps = 1e-08: refused: unknown to DeepSpeed 0.19.8",
    "ds_config_W8A8_Qgroup64_fp32.json": "compression_training",
    "compression/cifar/config/ds_config.json": "train_batch_size=32 is not train_micro_batch_size_per_gpu=32",
    "nccl/deepspeed_onebitadam_bsz96_config.json": "bias_correction is false",
    "BingBertSquad/deepspeed_bsz24_config.json": "bias_correction is false",
    "deberta/ds_config_fp16_tune.json": "autotuning",
    "deepspeed_bsz4k_01adam_config_seq128_nccl.json": "bias_correction is false",
    "deepspeed_bsz64k_onebitlamb_config_seq128_nccl.json": "bias_correction is false",
    "deepspeed_bsz4k_progressive_layer_drop_config_seq128.json": "progressive_layer_drop",
    "deepspeed_bsz64k_lamb_config_seq128.json": "sparse_attention",
    "ds_config_gpt_base_random_ltd.json": "data_efficiency",
    "imagenet/config/ds_fp16_z1_config.json": "cuda_visible_devices = 0: refused: unknown to DeepSpeed 0.19.8",
    "zero1_torch_compile.json": "compile",
    "zero2_torch_compile.json": "compile",
    "zero3_bf16_cpuoffload_params.json": "offload_param to host: parameters go where states go",
    "ds_z2_autotp_config.json": "tensor_parallel",
    "ds_z3_fp8_config.json": 'comms_config = {"verbose": false}: refused: unknown to DeepSpeed 0.19.8',
}
"""What is refused in published files on 2 ranks, by the end of their names."""


def test_every_field_has_a_class_and_a_sentence() -> None:
    assert len(FIELDS) > 200
    for name in FIELDS:
        parts = name.split(".")
        keys = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        assert sum(key in KEYS for key in keys) == 1, name
    assert all(why and not why.endswith(".") for _, why in KEYS.values())


def read_alike(config: dict[str, Any], folder: str) -> DeepSpeed:
    """Read a configuration on 2 ranks; TrainingArguments that agree with it fill "auto"."""
    if '"auto"' not in json.dumps(config):
        return from_deepspeed(config, world_size=2)
    micro_batch, accumulation = (
        config.get(name) if isinstance(config.get(name), int) else 2
        for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    args = TrainingArguments(
        folder, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=accumulation, max_steps=3,
        use_cpu=True, report_to=[],
        lr_scheduler_type={"WarmupLR": "constant_with_warmup"}.get(config.get("scheduler", {}).get("type"), "linear"),
    )  # fmt: skip
    for name in ("fp16", "bf16"):  # which TrainingArguments refuses on a CPU
        setattr(args, name, config.get(name, {}).get("enabled") is True)
    read = from_deepspeed(config, args=args, world_size=2)
    assert (read.batch, read.micro_batch, read.accumulation) == (
        2 * micro_batch * accumulation, micro_batch, accumulation,
    )  # fmt: skip
    return read


def train(read: DeepSpeed) -> list[float]:
    """Train three steps as a configuration says; return the losses."""
    ranks = zs.init(seed=0)
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    model = torch.nn.Sequential(block, torch.nn.Linear(8, 1))
    optimizer = (read.make_optimizer or torch.optim.AdamW)(model.parameters())
    zero = zs.shard(model, optimizer, **read.options, units=[block], settings=zs.Settings(watchdog_s=WATCHDOG_S))
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
    zero.detach()
    return losses


def train_all(folder: str) -> dict[str, list[float]]:
    """Train as each published file says that translates."""
    names = [name for name in PUBLISHED if not name.endswith(tuple(REFUSED))]
    return {name: train(read_alike(PUBLISHED[name], folder)) for name in names}


def test_published_files_translate_and_train(tmp_path: Path) -> None:
    found = run_ranks(train_all, 2, str(tmp_path), timeout_s=120)
    for by_name in found:
        assert len(by_name) == len(PUBLISHED) - len(REFUSED)
        for name, losses in by_name.items():
            assert len(losses) == 3 and all(map(math.isfinite, losses)), name


@pytest.mark.parametrize("end", REFUSED)
def test_published_files_say_why_not(end: str, tmp_path: Path) -> None:
    (name,) = (name for name in PUBLISHED if name.endswith(end))
    with pytest.raises(ValueError, match=re.escape(REFUSED[end])):
        read_alike(copy.deepcopy(PUBLISHED[name]), str(tmp_path))


def test_what_the_arguments_leave_open_stays_auto(tmp_path: Path) -> None:
    params = dict.fromkeys(("total_num_steps", "warmup_num_steps", "warmup_max_lr"), "auto")
    config = {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], warmup_steps=2)
    with pytest.raises(ValueError, match="refused: 'auto'"):
        from_deepspeed(config, args=args)
    args.max_steps = 8
    assert from_deepspeed(config, args=args).make_scheduler is not None
    from_deepspeed({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": (0.9, 0.999)}}}, args=args)
    with pytest.raises(ValueError, match=r"gradient_clipping is 2.0, and the arguments say 1.0"):
        from_deepspeed({"gradient_clipping": 2.0}, args=args)


BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [
        ({BATCH: 32, MICRO: 4}, 2, (32, 4, 4)),
        ({BATCH: 32, STEPS: 4}, 2, (32, 4, 4)),
        ({BATCH: 32}, 2, (32, 16, 1)),
        ({MICRO: 4}, 2, (8, 4, 1)),
        ({MICRO: 4, STEPS: 2}, 2, (16, 4, 2)),
        ({STEPS: 2}, 2, (None, None, 2)),
        ({MICRO: 4}, None, (None, 4, 1)),
        ({BATCH: 32, MICRO: 4, STEPS: 2}, None, (32, 4, 2)),
        ({BATCH: 32, MICRO: 4}, None, "train_batch_size=32 is divided over the ranks, whose number is not known: pass"),
        ({BATCH: 32, STEPS: 4}, None, "whose number is not known"),
        ({BATCH: 32}, None, "whose number is not known"),
        ({BATCH: 30, MICRO: 4}, 2, f"{BATCH}=30 is not {MICRO}=4 x {STEPS}=3 x 2 ranks; write values whose product"),
        ({BATCH: 30, STEPS: 4}, 2, f"{BATCH}=30 is not {MICRO}=3 x {STEPS}=4 x 2 ranks"),
        ({BATCH: 31}, 2, f"{BATCH}=31 is not {MICRO}=15 x {STEPS}=1 x 2 ranks"),
        ({BATCH: 2, MICRO: 4}, 2, f"{BATCH}=2 is not {MICRO}=4 x {STEPS}=1 x 2 ranks"),
        ({BATCH: 30, MICRO: 4, STEPS: 2}, None, f"{BATCH}=30 is not {MICRO}=4 x {STEPS}=2 x a number of ranks"),
    ],
)  # fmt: skip
def test_an_absent_batch_follows_from_the_others(
    config: dict[str, int], ranks: int | None, expected: tuple[int | None, ...] | str
) -> None:
    """As in `_set_batch_related_parameters` of deepspeed/runtime/config.py."""
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            from_deepspeed(config, world_size=ranks)
    else:
        read = from_deepspeed(config, world_size=ranks)
        assert (read.batch, read.micro_batch, read.accumulation) == expected


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
        ({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}, {"stage": 3}),
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
        ({"zero_optimization": 3}, "zero_optimization = 3: refused: it takes an object"),
        ({"zero_optimization": {"offload_param": "cpu"}}, 'offload_param = "cpu": refused: it takes an object'),
        ({"zero_optimization": {"mics_shard_size": 0}}, "mics_shard_size=0 must divide the ranks"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage must be int; got '3'"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: "),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "messages are not quantized"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size = 8: refused"),
        ({"zero_optimization": {"zero_quantized_weights": 1}}, "zero_quantized_weights = 1: refused: messages are not"),
        ({"sparse_gradients": 1}, "sparse_gradients = 1: refused: gradients are dense"),
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
            "refused: 'auto': write a value, or pass args=TrainingArguments(...)",
        ),
        (
            {"scheduler": {"type": "OneCycle"}},
            "scheduler.type = \"OneCycle\": refused: 'OneCycle'; use a scheduler of torch.optim.lr_scheduler",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 3}}},
            "refused: last_batch_iteration must be -1; resume with the schedule's state_dict",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": None}}},
            "refused: warmup_num_steps must be an integer of at least 0; got None",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "10"}}}, "at least 0; got '10'"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, "0.2"]}}},
            "refused: warmup_max_lr must be a number (or a list, one for each group) of at least 0; got [0.1, '0.2']",
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
    off = {
        "tensor_parallel": {"autotp_size": 1}, "hybrid_engine": {"enabled": False}, "sparse_gradients": False,
        "sequence_parallel_size": 1, "scheduler": None,
        "zero_optimization": {"zero_hpz_partition_size": 1, "offload_optimizer": None, "offload_param": None},
    }  # fmt: skip
    assert {one.way for one in notes_of(off)} == {"without meaning"}
    assert from_deepspeed(off | {"optimizer": None}).options == {"stage": 0}


def test_a_file_without_clipping_clips_at_deepspeeds_default(tmp_path: Path) -> None:
    assert [from_deepspeed(one).max_norm for one in ({}, {"gradient_clipping": 0.0})] == [1.0, None]
    path = tmp_path / "ds.json"
    path.write_text("{}")
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert from_deepspeed(path, args=args).max_norm == 1.0
    args.max_grad_norm = 0.5
    with pytest.raises(ValueError, match=r"gradient_clipping is 1.0, and the arguments say 0.5: write 'auto'"):
        from_deepspeed(path, args=args)


@pytest.mark.parametrize(
    ("section", "kind", "params", "text"),
    [
        ("optimizer", "SGD", {"lr": "auto"}, "the file has SGD, and optim='adamw_torch' makes AdamW: write the"),
        ("optimizer", "Adam", {"lr": "auto", "adam_w_mode": False}, "the file has Adam, and optim='adamw_torch' makes"),
        ("optimizer", "AdamW", {}, "AdamW of the file has lr=0.001, and that of the arguments 5e-05"),
        ("optimizer", "AdamW", {"lr": "auto", "amsgrad": True}, "AdamW of the file has amsgrad=True, and that of the"),
        ("scheduler", "WarmupLR", {}, "the file has WarmupLR, and lr_scheduler_type='linear' is another: write"),
        ("scheduler", "WarmupCosineLR", {"total_num_steps": 8}, "is another: leave the section out"),
        ("scheduler", "WarmupDecayLR", {"total_num_steps": 9}, "total_num_steps is 9, and the arguments say 8"),
        ("scheduler", "WarmupDecayLR", {"total_num_steps": 8, "warmup_max_lr": "auto"},
         "WarmupDecayLR without warmup_num_steps has 1000, and the arguments say 2: write warmup_num_steps: 'auto'"),
        ("scheduler", "WarmupDecayLR", {"total_num_steps": 8, "warmup_min_lr": 1e-6}, "warmup_min_lr is 1e-06, and"),
        ("scheduler", "WarmupDecayLR", {"total_num_steps": 8, "warmup_type": "log"}, "warmup_type is 'log', and the"),
    ],
)  # fmt: skip
def test_a_trainer_must_make_the_files_optimizer_and_schedule(
    section: str, kind: str, params: dict[str, Any], text: str, tmp_path: Path
) -> None:
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], max_steps=8, warmup_steps=2, optim="adamw_torch"
    )  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(text)):
        from_deepspeed({section: {"type": kind, "params": params}}, args=args)


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


def test_absent_parameters_of_schedules_are_deepspeeds() -> None:
    """WarmupLR rises to the rate of the optimizer, WarmupDecayLR to 0.001."""
    assert rates("WarmupLR", {"warmup_num_steps": 2}, 3) == pytest.approx([0, 0, 0.1])
    assert rates("WarmupLR", {}, 3)[2] == pytest.approx(0.1 * math.log(2) / math.log(1000))
    assert rates("WarmupDecayLR", {"warmup_num_steps": 2, "total_num_steps": 9}, 3) == pytest.approx([0, 0, 0.001])


def test_schedules_take_rates_of_zero_and_of_each_group() -> None:
    assert rates("WarmupLR", {"warmup_max_lr": 0, "warmup_num_steps": 2}, 3) == [0, 0, 0]
    down = {"warmup_min_lr": 0.4, "warmup_max_lr": [0], "warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates("WarmupLR", down, 7) == pytest.approx([0.4, 0.4, 0.3, 0.2, 0.1, 0, 0])
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=0.1)

    def schedule(most: list[float]) -> Any:
        params = {"warmup_max_lr": most, "warmup_num_steps": 2}
        made = from_deepspeed({"scheduler": {"type": "WarmupLR", "params": params}}).make_scheduler
        assert made is not None
        return made(optimizer)

    scheduler = schedule([0.2, 0.6])
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.2, 0.6]
    with pytest.raises(ValueError, match="warmup_max_lr has 3 rates, and the optimizer 2 groups"):
        schedule([0.2, 0.6, 0.8])


def test_absent_parameters_of_optimizers_are_deepspeeds() -> None:
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    lion = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    for kind, params, expected, defaults in (
        ("Adam", {}, torch.optim.AdamW, adam), ("AdamW", {}, torch.optim.AdamW, adam),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, adam),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, adam | {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, adam),
        ("Lion", {}, zs.optim.Lion, lion), ("Adagrad", {}, torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10}),
    ):  # fmt: skip
        made = from_deepspeed({"optimizer": {"type": kind, "params": params}}).make_optimizer
        assert made is not None
        optimizer = made([torch.nn.Parameter(torch.zeros(1))])
        assert type(optimizer) is expected and optimizer.defaults.items() >= defaults.items()


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
        "bf16.enabled = true: translated: precision='bf16', with fp32 masters\n"
        "gradient_clipping = 1.0: honoured: the attribute max_norm, for clip_grad_norm_; 1.0 where it is absent\n\n"
        "zs.shard(model, optimizer, stage=2, precision='bf16')\n"
    )
    for text, wanted in (
        ('{"zero_optimization": {"stage": 2}, "amp": {"enabled": true}}', "amp"),
        ('{"zero_optimization": {"stage": 2}, "train_batch_size": 8}', "whose number is not known"),
        ('{"a": 1, "a": 2}', "a key twice"),
        ("[]", "a list"),
        ('{"a": ', f"{path} is not JSON"),
        ("[" * 100_000, f"{path} is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code
        said = capsys.readouterr()
        assert wanted in said.err and not said.out


def test_the_program_of_the_page_runs() -> None:
    (program,) = examples((REPOSITORY / "docs/deepspeed.md").read_text())
    run_block(program, "docs/deepspeed.md")
