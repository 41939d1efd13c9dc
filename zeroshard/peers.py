"""Names from other libraries and their replacements here, for error messages.

Owns the names in code and commands for DDP, FSDP, DeepSpeed and Accelerate that differ in zeroshard. Imports nothing.
`docs/coming-from.md` has the tables.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["ARGUMENTS", "COMMANDS", "FUNCTIONS", "METHODS", "OF_LOAD", "OF_SAVE", "SEE"]

SEE: Final = "docs/coming-from.md has the rest"
_DEEPSPEED: Final = f"settings of DeepSpeed's JSON are arguments here, such as stage=3 and precision='bf16'; {SEE}"
_DEVICE: Final = "zs.init() chooses each rank's device; leave it out"
_IGNORED: Final = "write ignored=[...]"
_NOTHING: Final = "there is nothing to set; leave it out"
_OFFLOAD: Final = "write offload='host' or a zs.Offload"
_PRECISION: Final = "write precision='bf16' or a zs.Precision"
_RECOMPUTE: Final = "write activations='recompute'"
_SHARD: Final = "zero = zs.shard(model, optimizer, stage=3), which shards both in place"

ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "activation_checkpointing": _RECOMPUTE,
        "auto_wrap_policy": "units are found by themselves; units=[Block] or units=['Block'] names others",
        "broadcast_buffers": "write settings=zs.Settings(buffers='own') for False, and nothing for True",
        "bucket_cap_mb": _NOTHING,
        "config": _DEEPSPEED,
        "config_params": _DEEPSPEED,
        "cpu_offload": _OFFLOAD,
        "device_id": _DEVICE,
        "device_ids": _DEVICE,
        "device_mesh": "write mesh=, a number of copies or a DeviceMesh",
        "ds_config": _DEEPSPEED,
        "find_unused_parameters": "parameters that no rank used always keep grad None; leave it out",
        "dtype": _PRECISION,
        "forward_prefetch": _NOTHING,
        "gradient_as_bucket_view": _NOTHING,
        "gradient_checkpointing": _RECOMPUTE,
        "ignored_modules": _IGNORED,
        "ignored_params": _IGNORED,
        "ignored_states": _IGNORED,
        "limit_all_gathers": _NOTHING,
        "mixed_precision": _PRECISION,
        "model_parameters": "build the optimizer from model.parameters() and give it as the second argument",
        "mp_policy": _PRECISION,
        "offload_policy": _OFFLOAD,
        "overlap_comm": _NOTHING,
        "param_init_fn": "write weights=function",
        "reshard_after_forward": "write parameters='until-backward' for False, and nothing for True",
        "sharding_strategy": "write stage=3 for FULL_SHARD, stage=2 for SHARD_GRAD_OP, stage=0 for NO_SHARD",
        "static_graph": _NOTHING,
        "sync_module_states": _NOTHING,
        "use_orig_params": _NOTHING,
        "world_size": "torchrun --nproc-per-node N starts the ranks; leave it out",
        "zero_optimization": _DEEPSPEED,
        "zero_stage": "write stage=3",
    }
)
"""Arguments of wrappers."""

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "chat": "zeroshard generate RUN --prompt TEXT",
        "config": "zeroshard train --dry-run, whose output --config reads",
        "env": "zeroshard version",
        "estimate-memory": "zeroshard plan config.json --ranks N",
        "export": "zeroshard checkpoint export CHECKPOINT FOLDER",
        "finetune": "zeroshard train --model hf:DIR --data FILE",
        "launch": "torchrun --nproc-per-node N FILE, or zeroshard train",
        "merge-weights": "zeroshard checkpoint export CHECKPOINT FOLDER",
        "sft": "zeroshard train --model hf:DIR --data FILE",
        "test": "zeroshard doctor",
    }
)
"""Commands of other command lines."""

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "backward": "loss.backward(), as in plain PyTorch",
        "barrier": "zero.agree(True), which every rank calls",
        "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_(model.parameters(), ...)",
        "device": "zero.mesh.device",
        "load_checkpoint": "zero.load(path)",
        "local_rank": "zero.mesh.device, which zs.init() has chosen for this rank",
        "module": "`model`, which zs.shard() has sharded in place",
        "no_grad": "torch.no_grad(), as in plain PyTorch",
        "optim_state_dict": "optimizer.state_dict() inside `with zero.gathered(states=True):`",
        "parameters": "model.parameters(), as in plain PyTorch",
        "rank": "zero.mesh.rank",
        "save_checkpoint": "zero.save(path), on every rank",
        "save_pretrained": "zero.save(path), then `zeroshard checkpoint export`",
        "stage": "zero.residency, the row of the residency table",
        "state_dict": "model.state_dict() inside `with zero.gathered():`, or zero.save(path)",
        "step": "optimizer.step(), then optimizer.zero_grad()",
        "summon_full_params": "`with zero.gathered():`",
        "world_size": "zero.mesh.world_size",
        "zero_grad": "optimizer.zero_grad(), as in plain PyTorch",
    }
)
"""Attributes of engines and wrappers, requested from the handle."""

FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "DDP": _SHARD,
        "DistributedDataParallel": _SHARD,
        "FSDP": _SHARD,
        "FullyShardedDataParallel": _SHARD,
        "GatheredParameters": "`with zero.gathered(writeback=True):` on the handle of zs.shard()",
        "Init": "`with torch.device('meta'):` around the model, and zs.shard(model, ..., weights=)",
        "ZeroRedundancyOptimizer": _SHARD,
        "barrier": "zero.agree(True) on the handle of zs.shard(), which every rank calls",
        "fully_shard": _SHARD,
        "init_distributed": "zs.init()",
        "init_process_group": "zs.init()",
        "initialize": _SHARD,
        "is_initialized": "torch.distributed.is_initialized()",
        "load": "zero.load(path) on the handle of zs.shard()",
        "local_rank": "zs.init().device, which is this rank's",
        "prepare": _SHARD,
        "rank": "zs.init().rank",
        "save": "zero.save(path) on the handle of zs.shard(), on every rank",
        "world_size": "zs.init().world_size",
        "wrap": _SHARD,
    }
)
"""Names in packages."""

OF_LOAD: Mapping[str, str] = MappingProxyType(
    {
        "load_optimizer_states": "write model_only=True for False, and nothing for True",
        "map_location": "each rank reads its part to its device; leave it out",
        "only_model": "write model_only=True",
        "strict": "names must be equal; zero.gathered(writeback=True) takes model.load_state_dict(state, strict=False)",
        "tag": "the path names the checkpoint; zs.latest(folder) finds the newest",
        "weights_only": "checkpoints hold no code, so nothing is unpickled; write model_only=True for parameters alone",
    }
)
"""Arguments of functions that load."""

OF_SAVE: Mapping[str, str] = MappingProxyType(
    {
        "async_save": "write asynchronous=True",
        "blocking": "write asynchronous=True for False, and nothing for True",
        "client_state": "write extra={...}",
        "only_model": "write model_only=True",
        "save_only_model": "write model_only=True",
        "tag": "the path names the checkpoint, such as runs/a/step-100",
        "weights_only": "write model_only=True",
    }
)
"""Arguments of functions that save."""
