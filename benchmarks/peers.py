"""Who takes part: every library and setting, each behind one function that makes a training step.

Owns how a library is told to train a model, and nothing of how it is measured. Imports of a library happen when it is
built, so that a run without DeepSpeed needs none. Read `CONTESTANTS` first.

Note: what is equal for all
    The model, its first parameters, the batches, fused AdamW with the same rate, one thread a rank, gloo on loopback,
    and `zero_grad()` to None after each step. Sharding by module goes by `cases.Block` throughout. What a library does
    by default is one contestant; the same with settings of its own changed is another, marked as part of the sweep.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases import Block

__all__ = ["CONTESTANTS", "Contestant", "Running", "reference_of"]

_LEARNING_RATE: Final = 3e-4

_REFERENCES: Final = ("ddp", "zs-3")
_MESSAGES: Final = "messages"

Step = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class Running:
    """A contestant that was built: `step(batch)` trains once and returns the loss, 0-d.

    Args:
        zero: zeroshard's handle, which predicts; None for the others.
    """

    step: Step
    zero: Any = None


@final
@dataclass(frozen=True)
class Contestant:
    """One library with one setting.

    Args:
        title: for tables.
        library: whose code it is; settings of one library at one stage compete in its sweep.
        stage: what is sharded, as stages of ZeRO count; None for a part of a step, which trains no common model.
        build: takes a model and the number of samples of a micro-batch. Collective: every rank must call.
        is_sweep: whether it only tries a setting of a library that takes part anyway.
    """

    title: str
    library: str
    stage: int | None
    build: Callable[[nn.Module, int], Running]
    is_sweep: bool = False

    @property
    def module(self) -> str:
        """What it imports, for measurements that leave imports out."""
        return _MODULES.get(self.library, "torch.distributed.fsdp")

    def kept_numel(self, numel: int, ranks: int) -> float:
        """Return about how many elements a rank keeps between steps of a model of `numel`."""
        if self.library == _MESSAGES:
            return 0.0  # a buffer of one unit
        parameters, gradients, states = (numel / ranks if (self.stage or 0) >= n else numel for n in (3, 2, 1))
        return parameters + gradients + 2 * states + (2 * numel if self.library == "DeepSpeed" else 0)


_MODULES: Final = {
    "DeepSpeed": "deepspeed",
    "ZeroRedundancyOptimizer": "torch.distributed.optim",
    "zeroshard": "zeroshard",
}


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=True)


def _loop(model: nn.Module, optimizer: Any, zero: Any = None) -> Running:
    """Return the plain training loop, which is what every library but DeepSpeed leaves to its user."""

    def step(batch: Tensor) -> Tensor:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Running(step, zero)


# -- contestants -----------------------------------------------------------------------------------------------------


def _bare(model: nn.Module, samples: int) -> Running:
    return _loop(model, _adamw(model.parameters()))


def _wire(model: nn.Module, samples: int) -> Running:
    """Return the messages of stage 3 alone, point to point and in place.

    These are two gathers of each block and a reduction. The last block and the root are gathered once: they stay for
    their backward.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    sizes.append(sum(p.numel() for p in model.parameters()) - sum(sizes))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    full = torch.zeros(max(sizes))

    def step(batch: Tensor) -> Tensor:
        for size in [*sizes, *sizes, *sizes[:-2]]:
            chunks = full.split(size // ranks)
            others = [other for other in range(ranks) if other != rank]
            works = [dist.irecv(chunks[other], other) for other in others]
            works += [dist.isend(chunks[rank], other) for other in others]
            for work in works:
                work.wait()
        return torch.zeros(())

    return Running(step)


def _zeroshard(stage: int, *, shared_memory: bool = True) -> Callable[[nn.Module, int], Running]:
    def build(model: nn.Module, samples: int) -> Running:
        import zeroshard as zs

        optimizer = _adamw(model.parameters())
        return _loop(
            model, optimizer, zs.shard(model, optimizer, stage=stage, settings=zs.Settings(shared_memory=shared_memory))
        )

    return build


def _ddp(**options: Any) -> Callable[[nn.Module, int], Running]:
    def build(model: nn.Module, samples: int) -> Running:
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        return _loop(wrapped, _adamw(wrapped.parameters()))

    return build


def _redundancy(**options: Any) -> Callable[[nn.Module, int], Running]:
    def build(model: nn.Module, samples: int) -> Running:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.AdamW, lr=_LEARNING_RATE, fused=True, **options
        )
        return _loop(wrapped, optimizer)

    return build


def _fsdp1(strategy: str, **options: Any) -> Callable[[nn.Module, int], Running]:
    def build(model: nn.Module, samples: int) -> Running:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        wrapped = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block, *Block.__subclasses__()}),
            device_id=torch.device("cpu"),
            **options,
        )
        return _loop(wrapped, _adamw(wrapped.parameters()))

    return build


def _fsdp2(blocks_each: int = 1, prefetch: int = 0, **options: Any) -> Callable[[nn.Module, int], Running]:
    """Return FSDP2 with units of `blocks_each` blocks that ask for the next `prefetch` units early."""

    def build(model: nn.Module, samples: int) -> Running:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        units = [blocks[first : first + blocks_each] for first in range(0, len(blocks), blocks_each)]
        for unit in units:
            fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        heads: list[Any] = [unit[0] for unit in units]
        for place, head in enumerate(heads if prefetch else []):
            head.set_modules_to_forward_prefetch(heads[place + 1 : place + 1 + prefetch])
            head.set_modules_to_backward_prefetch(heads[max(0, place - prefetch) : place][::-1])
        return _loop(model, _adamw(model.parameters()))

    return build


def _deepspeed(stage: int, **options: Any) -> Callable[[nn.Module, int], Running]:
    def build(model: nn.Module, samples: int) -> Running:
        import deepspeed

        # Its CPU operators would be compiled at first use; what is compared here needs no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        settings = {
            "train_micro_batch_size_per_gpu": samples,
            "gradient_clipping": 0.0,  # by default it clips at a norm of 1
            "zero_optimization": {"stage": stage, **options},
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=_adamw(model.parameters()), config=settings, dist_init_required=False
        )

        def step(batch: Tensor) -> Tensor:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return Running(step)

    return build


_BUCKETS: Final = {"reduce_bucket_size": 5 * 10**6, "allgather_bucket_size": 5 * 10**6}

_SWEEP: Final = (
    ("ddp-views", "DDP, bucket views", "DDP", 0, _ddp(gradient_as_bucket_view=True)),
    (
        "ddp-100",
        "DDP, static graph, 100 MiB",
        "DDP",
        0,
        _ddp(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=100),
    ),
    (
        "zro-views",
        "ZeroRedundancyOptimizer, bucket views",
        "ZeroRedundancyOptimizer",
        1,
        _redundancy(parameters_as_bucket_view=True),
    ),
    ("ds-1-overlap", "DeepSpeed 1, overlap", "DeepSpeed", 1, _deepspeed(1, overlap_comm=True)),
    ("ds-1-5m", "DeepSpeed 1, buckets of 5M", "DeepSpeed", 1, _deepspeed(1, **_BUCKETS)),
    ("ds-2-overlap", "DeepSpeed 2, overlap", "DeepSpeed", 2, _deepspeed(2, overlap_comm=True)),
    ("ds-2-5m", "DeepSpeed 2, buckets of 5M", "DeepSpeed", 2, _deepspeed(2, **_BUCKETS)),
    # The default once more, but beside the sweep: how far two launches are apart.
    ("fsdp1-3-flat", "FSDP1, its default again", "FSDP1", 3, _fsdp1("FULL_SHARD", use_orig_params=False)),
    ("fsdp1-3-original", "FSDP1, original parameters", "FSDP1", 3, _fsdp1("FULL_SHARD", use_orig_params=True)),
    ("fsdp1-3-prefetch", "FSDP1, forward prefetch", "FSDP1", 3, _fsdp1("FULL_SHARD", forward_prefetch=True)),
    ("fsdp2-3-pairs", "FSDP2, pairs of blocks", "FSDP2", 3, _fsdp2(blocks_each=2)),
    ("fsdp2-3-fours", "FSDP2, four blocks", "FSDP2", 3, _fsdp2(blocks_each=4)),
    ("fsdp2-3-prefetch", "FSDP2, prefetch of 2", "FSDP2", 3, _fsdp2(prefetch=2)),
    ("ds-3-reshard", "DeepSpeed 3, reshard at once", "DeepSpeed", 3, _deepspeed(3, stage3_max_reuse_distance=0)),
    (
        "ds-3-persist",
        "DeepSpeed 3, no small ones kept",
        "DeepSpeed",
        3,
        _deepspeed(3, stage3_param_persistence_threshold=0),
    ),
    ("ds-3-serial", "DeepSpeed 3, no overlap", "DeepSpeed", 3, _deepspeed(3, overlap_comm=False)),
    ("ds-3-5m", "DeepSpeed 3, buckets of 5M", "DeepSpeed", 3, _deepspeed(3, **_BUCKETS)),
)

CONTESTANTS: Final[dict[str, Contestant]] = {
    "bare": Contestant("compute only", "torch", None, _bare),
    "wire": Contestant("messages only", _MESSAGES, None, _wire),
    "ddp": Contestant("DDP, static graph", "DDP", 0, _ddp(gradient_as_bucket_view=True, static_graph=True)),
    "ddp-default": Contestant("DDP", "DDP", 0, _ddp()),
    "zs-0": Contestant("zeroshard 0", "zeroshard", 0, _zeroshard(0)),
    "zs-1": Contestant("zeroshard 1", "zeroshard", 1, _zeroshard(1)),
    "zs-1-wire": Contestant("zeroshard 1, messages", "zeroshard", 1, _zeroshard(1, shared_memory=False)),
    "zro": Contestant("ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer", 1, _redundancy()),
    "ds-1": Contestant("DeepSpeed 1", "DeepSpeed", 1, _deepspeed(1)),
    "zs-2": Contestant("zeroshard 2", "zeroshard", 2, _zeroshard(2)),
    "zs-2-wire": Contestant("zeroshard 2, messages", "zeroshard", 2, _zeroshard(2, shared_memory=False)),
    "fsdp1-2": Contestant("FSDP1, grad-op", "FSDP1", 2, _fsdp1("SHARD_GRAD_OP")),
    "fsdp2-2": Contestant("FSDP2, kept after forward", "FSDP2", 2, _fsdp2(reshard_after_forward=False)),
    "ds-2": Contestant("DeepSpeed 2", "DeepSpeed", 2, _deepspeed(2)),
    "zs-3": Contestant("zeroshard 3", "zeroshard", 3, _zeroshard(3)),
    "zs-3-wire": Contestant("zeroshard 3, messages", "zeroshard", 3, _zeroshard(3, shared_memory=False)),
    "fsdp1-3": Contestant("FSDP1", "FSDP1", 3, _fsdp1("FULL_SHARD")),
    "fsdp2-3": Contestant("FSDP2", "FSDP2", 3, _fsdp2()),
    "ds-3": Contestant("DeepSpeed 3", "DeepSpeed", 3, _deepspeed(3)),
    **{key: Contestant(*rest, is_sweep=True) for key, *rest in _SWEEP},
}
"""By the name that the command line has for them, in the order of tables: each library as it comes, then the sweep."""


def reference_of(names: Iterable[str]) -> str:
    """Return whose step time and losses the others are compared with: DDP, or zeroshard where it does not take part."""
    there = list(names)
    trained = [name for name in there if CONTESTANTS[name].stage is not None]
    return next(name for name in (*_REFERENCES, *trained, *there) if name in there)
