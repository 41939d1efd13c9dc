"""What becomes of each key of a DeepSpeed configuration, with a sentence.

Owns the table. The keys are those of DeepSpeed 0.19.8's configuration classes and constants; a dot separates a section
from its key, and a section that stands alone stands for all of its keys. Imports nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["KEYS", "Way"]

Way = Literal["honoured", "translated", "without meaning", "refused"]
"""Honoured: the value is used as it is. Translated: another argument does the same. Refused: unless it is off."""

_AUTO = "units, buckets and their order follow from the model"
_FILES = "checkpoints are written in parts and loaded at any layout: zero.save(), zero.load()"
_LOG = "nothing of the training depends on it: zero.profile(), zero.memory() and your own logger tell"
_DATA = "the data loader is yours"
_TP = "split the model with torch's parallelize_module over an axis 'tensor' of mesh=: docs/meshes.md"
_EP = "experts are sharded like other parameters; expert parallelism is not supported"
_QUANT = "messages are not quantized"
_FREE = "host memory and files are read and written in pieces of Offload(staging_bytes=)"

KEYS: Final[Mapping[str, tuple[Way, str]]] = MappingProxyType(
    {
        # batches and accumulation
        "train_batch_size": (
            "honoured",
            "the attribute batch; of it, the other two and the ranks, what is absent follows",
        ),
        "train_micro_batch_size_per_gpu": ("honoured", "the attribute micro_batch: rows of one forward on a rank"),
        "gradient_accumulation_steps": ("honoured", "the attribute accumulation: backwards of a step"),
        "check_overflow": ("without meaning", "gradients that are not finite are always found"),
        "managed_gradient_accumulation": ("translated", "backward() for each micro-batch, then optimizer.step() once"),
        "gradient_clipping": (
            "honoured",
            "the attribute max_norm, for clip_grad_norm_; 1.0 where it is absent",
        ),
        "dataloader_drop_last": ("without meaning", _DATA),
        # reductions
        "prescale_gradients": ("without meaning", "gradients are divided before they are sent, in their own dtype"),
        "gradient_predivide_factor": ("without meaning", "gradients are divided once, by the number of ranks"),
        "gradient_allreduce_op": ("translated", "reduction= of zs.shard: 'mean' or 'sum'"),
        "communication_data_type": ("translated", "Precision(reduce=): the dtype of gradients in messages"),
        "seq_parallel_communication_data_type": ("refused", "DeepSpeed's sequence parallelism is not supported"),
        "sparse_gradients": ("refused", "gradients are dense: leave sparse=True out of nn.Embedding"),
        "disable_allgather": ("without meaning", "stages gather what they need"),
        "use_data_before_expert_parallelism": ("refused", _EP),
        "data_parallel_group": ("refused", "write mesh= with a DeviceMesh"),
        "global_rank": ("without meaning", "ranks are those of torchrun"),
        # optimizer and scheduler
        "optimizer.type": ("translated", "make_optimizer(parameters): the class of torch or of zs.optim"),
        "optimizer.params": ("translated", "arguments of the optimizer; those of DeepSpeed's kernels have no meaning"),
        "optimizer.legacy_fusion": ("without meaning", "torch's kernels update"),
        "scheduler.type": ("translated", "make_scheduler(optimizer): a LambdaLR with DeepSpeed's formula"),
        "scheduler.params": ("honoured", "numbers of the formula"),
        "zero_allow_untested_optimizer": ("without meaning", "any optimizer of torch is taken, or refused by name"),
        "zero_force_ds_cpu_optimizer": (
            "without meaning",
            "offloaded states are updated by torch's kernels on the host",
        ),
        # precision
        "fp16.enabled": ("translated", "precision='fp16': fp32 masters, and a loss scale of the engine"),
        "fp16.loss_scale": ("translated", "Precision(loss_scale=); 0 is 'dynamic'"),
        "fp16.auto_cast": ("without meaning", "inputs of the model are cast to its dtype"),
        "fp16.initial_scale_power": ("without meaning", "the dynamic scale starts at 2**16 and finds its value"),
        "fp16.loss_scale_window": ("without meaning", "the dynamic scale doubles after 2,000 steps, as torch's"),
        "fp16.hysteresis": ("without meaning", "the dynamic scale halves at each overflow, as torch's"),
        "fp16.consecutive_hysteresis": ("without meaning", "the dynamic scale halves at each overflow, as torch's"),
        "fp16.min_loss_scale": ("without meaning", "a scale that falls too far is an error"),
        "fp16.fp16_master_weights_and_grads": (
            "refused",
            "masters are fp32; Precision(master=torch.float16) has others",
        ),
        "bf16.enabled": ("translated", "precision='bf16', with fp32 masters"),
        "bf16.immediate_grad_update": ("without meaning", "gradients are reduced as the backward makes them"),
        "bf16.check_grad_overflow": ("without meaning", "gradients that are not finite are always found"),
        "bf16.bf16_master_weights_and_grads": ("refused", "write Precision(master=, rounding='stochastic')"),
        "bf16.bf16_optimizer_states": ("refused", "states have the dtype of masters; zs.optim.AdamW8bit keeps 8 bits"),
        "bf16.loss_scale": ("without meaning", "bf16 needs no loss scale"),
        "bf16.initial_scale_power": ("without meaning", "bf16 needs no loss scale"),
        "bf16.loss_scale_window": ("without meaning", "bf16 needs no loss scale"),
        "bf16.hysteresis": ("without meaning", "bf16 needs no loss scale"),
        "bf16.min_loss_scale": ("without meaning", "bf16 needs no loss scale"),
        "data_types.grad_accum_dtype": ("translated", "Precision(grad=): the dtype of gradients between micro-batches"),
        "data_types.param_dtype": ("translated", "Precision(param=)"),
        "data_types.buffer_dtype": ("refused", "buffers keep their dtype"),
        "data_types.keep_in_fp32_modules": ("refused", "write precision={'': 'bf16', 'pattern': 'fp32'}"),
        "torch_autocast": (
            "refused",
            "precision= casts parameters once; or call the model under torch.autocast yourself",
        ),
        "amp": ("refused", "write precision='fp16'"),
        # ZeRO
        "zero_optimization.stage": ("honoured", "stage= of zs.shard"),
        "zero_optimization.offload_optimizer.device": (
            "translated",
            "offload=zs.Offload(states=): 'host' or the folder",
        ),
        "zero_optimization.offload_optimizer.nvme_path": ("translated", "Offload(to=): a folder on a local disk"),
        "zero_optimization.offload_optimizer.ratio": ("honoured", "Offload(states=): the fraction that moves"),
        "zero_optimization.offload_optimizer.buffer_count": ("without meaning", _FREE),
        "zero_optimization.offload_optimizer.pin_memory": (
            "without meaning",
            "host memory is pinned where copies use it",
        ),
        "zero_optimization.offload_optimizer.pipeline_read": ("without meaning", "reading and updating overlap always"),
        "zero_optimization.offload_optimizer.pipeline_write": (
            "without meaning",
            "writing and updating overlap always",
        ),
        "zero_optimization.offload_optimizer.fast_init": ("without meaning", "states are made when first used"),
        "zero_optimization.offload_optimizer.super_offload": ("refused", "write Offload() for all states on the host"),
        "zero_optimization.offload_optimizer.cpuadam_cores_perc": (
            "without meaning",
            "torch.set_num_threads() decides",
        ),
        "zero_optimization.offload_param.device": ("translated", "Offload(parameters=1): 'host' or the folder"),
        "zero_optimization.offload_param.nvme_path": ("translated", "Offload(to=): a folder on a local disk"),
        "zero_optimization.offload_param.buffer_count": ("without meaning", _FREE),
        "zero_optimization.offload_param.buffer_size": ("without meaning", _FREE),
        "zero_optimization.offload_param.max_in_cpu": ("without meaning", _FREE),
        "zero_optimization.offload_param.pin_memory": ("without meaning", "host memory is pinned where copies use it"),
        "zero_optimization.cpu_offload": ("translated", "offload=zs.Offload()"),
        "zero_optimization.cpu_offload_param": ("translated", "Offload(parameters=1)"),
        "zero_optimization.cpu_offload_use_pin_memory": (
            "without meaning",
            "host memory is pinned where copies use it",
        ),
        "zero_optimization.mics_shard_size": ("translated", "mesh=: the number of copies of the state"),
        "zero_optimization.mics_hierarchical_params_gather": ("without meaning", "each copy gathers among its ranks"),
        "zero_optimization.zero_hpz_partition_size": ("refused", "write mesh= for copies of the state by node"),
        "zero_optimization.zero_quantized_weights": ("refused", _QUANT),
        "zero_optimization.zero_quantized_nontrainable_weights": ("refused", _QUANT),
        "zero_optimization.zero_quantized_gradients": ("refused", _QUANT),
        "zero_optimization.zeropp_loco_param": ("refused", _QUANT),
        "zero_optimization.zenflow": ("refused", "gradients that are not important are applied with the others"),
        "zero_optimization.contiguous_gradients": ("without meaning", _AUTO),
        "zero_optimization.reduce_scatter": ("without meaning", "each rank gets what it keeps"),
        "zero_optimization.reduce_bucket_size": ("without meaning", _AUTO),
        "zero_optimization.use_multi_rank_bucket_allreduce": ("without meaning", _AUTO),
        "zero_optimization.allgather_partitions": ("without meaning", _AUTO),
        "zero_optimization.allgather_bucket_size": ("without meaning", _AUTO),
        "zero_optimization.overlap_comm": ("without meaning", "messages and computing overlap always"),
        "zero_optimization.compute_grad_norm": ("without meaning", "norms are computed when they are asked for"),
        "zero_optimization.load_from_fp32_weights": ("without meaning", _FILES),
        "zero_optimization.elastic_checkpoint": ("without meaning", _FILES),
        "zero_optimization.sub_group_size": ("without meaning", "updates run in pieces of Offload(staging_bytes=)"),
        "zero_optimization.prefetch_bucket_size": ("without meaning", _AUTO),
        "zero_optimization.param_persistence_threshold": ("without meaning", _AUTO),
        "zero_optimization.model_persistence_threshold": ("without meaning", _AUTO),
        "zero_optimization.max_live_parameters": ("without meaning", _AUTO),
        "zero_optimization.max_reuse_distance": ("without meaning", _AUTO),
        "zero_optimization.stage3_prefetch_bucket_size": ("without meaning", _AUTO),
        "zero_optimization.stage3_param_persistence_threshold": ("without meaning", _AUTO),
        "zero_optimization.stage3_model_persistence_threshold": ("without meaning", _AUTO),
        "zero_optimization.stage3_max_live_parameters": ("without meaning", _AUTO),
        "zero_optimization.stage3_max_reuse_distance": ("without meaning", _AUTO),
        "zero_optimization.stage3_module_granularity_threshold": ("without meaning", _AUTO),
        "zero_optimization.stage3_use_all_reduce_for_fetch_params": ("without meaning", _AUTO),
        "zero_optimization.stage3_allgather_sequential": ("without meaning", _AUTO),
        "zero_optimization.module_granularity_threshold": ("without meaning", _AUTO),
        "zero_optimization.use_all_reduce_for_fetch_params": ("without meaning", _AUTO),
        "zero_optimization.allgather_sequential": ("without meaning", _AUTO),
        "zero_optimization.gather_16bit_weights_on_model_save": ("translated", "zeroshard checkpoint export"),
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": ("translated", "zeroshard checkpoint export"),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": ("translated", "zeroshard checkpoint export"),
        "zero_optimization.ignore_unused_parameters": (
            "without meaning",
            "parameters that no rank used keep grad None",
        ),
        "zero_optimization.legacy_stage1": ("without meaning", "there is one stage 1"),
        "zero_optimization.round_robin_gradients": ("without meaning", _AUTO),
        "zero_optimization.parameter_alignment": ("without meaning", _AUTO),
        "zero_optimization.memory_efficient_linear": ("without meaning", "linear layers are torch's"),
        "zero_optimization.pipeline_loading_checkpoint": ("without meaning", _FILES),
        "zero_optimization.override_module_apply": ("without meaning", "Module.apply is torch's"),
        "zero_optimization.log_trace_cache_warnings": ("without meaning", "a changed order of units is no fault"),
        "zero_optimization.enable_sanity_checks": ("without meaning", "ranks are compared always"),
        "zero_optimization.save_muon_momentum_buffer_in_memory": ("without meaning", "states are where offload= says"),
        "zero_optimization.leaf_module": ("translated", "units=: names or classes of modules that are gathered whole"),
        # activations
        "activation_checkpointing.partition_activations": (
            "translated",
            "activations='recompute'; write 'recompute+partition' where mesh= has an axis \"tensor\"",
        ),
        "activation_checkpointing.cpu_checkpointing": ("translated", "activations='recompute+offload'"),
        "activation_checkpointing.number_checkpoints": ("without meaning", "each unit is recomputed by itself"),
        "activation_checkpointing.contiguous_memory_optimization": ("without meaning", "buffers are the allocator's"),
        "activation_checkpointing.synchronize_checkpoint_boundary": ("without meaning", _LOG),
        "activation_checkpointing.profile": ("without meaning", _LOG),
        # files, logs, tools
        "aio": ("without meaning", "files are read and written by threads of Python"),
        "checkpoint": ("without meaning", _FILES),
        "checkpoint_engine": ("without meaning", _FILES),
        "datastates_ckpt": ("without meaning", _FILES),
        "nebula": ("without meaning", _FILES),
        "steps_per_print": ("without meaning", _LOG),
        "wall_clock_breakdown": ("without meaning", _LOG),
        "memory_breakdown": ("without meaning", _LOG),
        "dump_state": ("without meaning", _LOG),
        "log_level": ("without meaning", _LOG),
        "disable_python_gc": ("without meaning", "gc.disable() is yours to call"),
        "timers": ("without meaning", _LOG),
        "comms_logger": ("without meaning", _LOG),
        "flops_profiler": ("without meaning", _LOG),
        "monitor": ("without meaning", _LOG),
        "monitor_config": ("without meaning", _LOG),
        "tensorboard": ("without meaning", _LOG),
        "wandb": ("without meaning", _LOG),
        "csv_monitor": ("without meaning", _LOG),
        "comet": ("without meaning", _LOG),
        "compile": ("refused", "call torch.compile(model) or module.compile() before or after zs.shard"),
        "autotuning": ("refused", "zeroshard plan --search finds a configuration before the run"),
        "elasticity": ("refused", "torchrun --max-restarts starts again, and zero.load() reads on any number of ranks"),
        # other parallelism and methods
        "tensor_parallel": ("refused", _TP),
        "pipeline": ("refused", "write zs.pipeline(model, optimizer, mesh=, micro_batches=)"),
        "expert_parallel": ("refused", _EP),
        "sequence_parallel_size": ("refused", _TP),
        "vocabulary_size": ("without meaning", "shapes are those of the model"),
        "hybrid_engine": ("refused", "generate inside zero.gathered(), or with Settings(forward_methods=)"),
        "data_efficiency": ("refused", _DATA),
        "curriculum_learning": ("refused", _DATA),
        "progressive_layer_drop": ("refused", "drop layers in the model's forward"),
        "eigenvalue": ("refused", "it belongs to quantization in training, which is not there"),
        "quantize_training": ("refused", "quantization in training is not supported"),
        "compression_training": ("refused", "quantization and pruning in training are not supported"),
        "weight_quantization": ("refused", "quantization in training is not supported"),
        "sparse_attention": ("refused", "attention is the model's"),
    }
)
