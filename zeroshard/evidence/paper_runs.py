"""Predictions of the ZeRO paper's runs: memory and time of one step of a configuration.

Owns the paper's programs and machines as arguments of the planner: DGX-2 nodes, Megatron-LM's model parallelism,
kernels of 2019. It must not know the paper's measurements (`paper_data.py`); one measurement of another paper gives the
fraction of a device that programs of that time reached. Read `film.py` first.

Note: what is assumed, and why
    Machine: the preset "v100-32" in nodes of 16 whose adapters have 800 Gb/s together, as in section 10 of the paper.
    Latencies of a hop are from NCCL's tuning table for rings on NVLink and on InfiniBand; the preset's latencies are
    those of Ethernet in a cloud.
    Program: Megatron-LM of September 2019. Attention is a chain of kernels, biases are added separately, blocks are
    recomputed, and the host waits for the copies of P_a+cpu. Gradients and checkpoints have permanent separate memory
    (M_D). The fused buffers (C_B) have DeepSpeed's default sizes.
    Software: kernels of that time reached less than the roofline. The factor is from another paper: Megatron-LM's 1.2
    billion parameters on one V100 reached 39 teraFLOPS. `software_part` is the ratio of that number and the planner's
    prediction of that run; it slows every kernel here.
    Gradients of P_os+g: ranks own equal parts of the matrices' elements, and of the vectors'. In the order of a
    backward, what one rank owns of a gradient is reduced to it alone, in the stream of the kernels: a chain over all
    ranks, which a reduction fills chunk by chunk before its last rank has the first.
    Operations are counted as in Megatron-LM: 8 per parameter and token, for two forwards and a backward.

Source: Megatron-LM, mpu/transformer.py of 2019; NCCL 2.8, src/graph/tuning.cc, src/include/collectives.h and
src/init.cc (buffers of 4 MiB, filled in 8 steps); DeepSpeed's documentation of reduce_bucket_size and
allgather_bucket_size, and its version 0.2, of May 2020: `average_tensor` of pt/deepspeed_zero_optimizer.py, with its
defaults `reduce_scatter` and no `overlap_comm`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Final, final

from zeroshard.evidence.paper_data import MEGATRON, Run
from zeroshard.plan.machine.hardware import Cost, Device
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.named import OPTIMIZERS, PRECISIONS, own_units, specs_of, updates_of
from zeroshard.plan.shape.shapes import Transformer, gpt
from zeroshard.plan.shape.tape import Parts, instructions
from zeroshard.plan.shape.transformer import Kernels, Workload, tapes
from zeroshard.plan.step.film import Film
from zeroshard.plan.step.rank_job import Call, Job
from zeroshard.plan.step.simulate import make_film
from zeroshard.plan.step.system import ZEROSHARD, System
from zeroshard.table.activations import Offloaded, Partitioned, Recomputed, Treated
from zeroshard.table.cells import Residency
from zeroshard.table.stages import CONFIGURATIONS, STAGES
from zeroshard.table.wires import Native, Silence

__all__ = [
    "AS_SAID",
    "Assumptions",
    "BUDGET_BYTES",
    "CB_BYTES",
    "CHAIN_BYTES",
    "DGX_2",
    "KERNELS",
    "Outcome",
    "ROWS",
    "film_of",
    "model_of",
    "outcome_of",
    "parts_of",
    "row_of",
    "software_part",
]

SEQUENCE: Final = 1024
OPERATIONS: Final = 8
"""Floating-point operations per parameter and token: two forwards of 2, a backward of 4."""
DGX_2: Final = Device(
    **{
        **vars(DEVICES["v100-32"]),
        "name": "v100-32 in a DGX-2",
        "node_ranks": 16,
        "node_bytes_per_s": 100e9,
        "hop_s": 3.4e-6,
        "launch_s": 4e-6,
        "sustained_part": 1.0,
        "node_part": 0.8,
        "queue_s": 0.0,
        "exchange_s": 0.0,
    }
)
"""A V100 in a node of 16, with eight adapters of 100 Gb/s."""
CB_BYTES: Final = 2 * 5 * 10**8 * 2
"""Bytes of the constant buffers: one for reductions and one for gathers, of 5e8 elements of 2 bytes."""
GROUPS: Final = 3
"""Number of communicators of a rank: for all ranks, for model-parallel ranks, and for data-parallel ranks."""
BUDGET_BYTES: Final = DGX_2.memory_bytes - DGX_2.context_bytes - GROUPS * DGX_2.communicator_bytes
"""Bytes available to the allocator."""
CHAIN_BYTES: Final = 4 * 2**20
"""That a rank passes on at a time, of the rings of a reduction by whole nodes: one for each adapter."""
ROWS: Final[Mapping[str, Residency]] = MappingProxyType(
    dict(zip(("baseline", "P_os", "P_os+g", "P_os+g+p"), STAGES.values(), strict=True))
)
"""The stages by the paper's names, with unchanged activations."""
KERNELS: Final = Kernels(attention="stepwise", fused_bias=False, loss="sharded")


@final
@dataclass(frozen=True)
class Assumptions:
    """Assumptions outside the planner; the note above gives their sources.

    Args:
        is_slowed: whether kernels reach only `software_part()` of the roofline.
        reduces_alone: whether what a rank owns of a gradient is reduced alone, in the stream of the kernels.
        has_preset_latencies: whether to use the latencies of the preset "v100-32".
    """

    name: str = "as the note says"
    is_slowed: bool = True
    reduces_alone: bool = True
    has_preset_latencies: bool = False


AS_SAID: Final = Assumptions()


@final
@dataclass(frozen=True)
class Outcome:
    """A predicted run.

    Args:
        step_s: seconds of a step.
        state_bytes: bytes of parameters, gradients and states of a rank.
        peak_bytes: peak of a rank, including constant buffers.
        teraflops: teraFLOPS per device.
    """

    step_s: float
    state_bytes: int
    peak_bytes: int
    teraflops: float

    @property
    def fits(self) -> bool:
        """Whether the run fits into the device's memory."""
        return self.peak_bytes <= BUDGET_BYTES


def model_of(run: Run) -> Transformer:
    """Return the model of a run."""
    return gpt(run.label, run.layers, run.hidden, run.heads, sequence=SEQUENCE)


def row_of(name: str) -> Residency:
    """Return the row of the residency table with this name; stages also recompute."""
    return CONFIGURATIONS.get(name) or replace(ROWS[name], activations=CONFIGURATIONS["C1"].activations)


def parts_of(model: Transformer, load: Workload, row: Residency) -> dict[str, Parts]:
    """Return the instructions of embedding, block and head, with the row's treatment of activations for blocks."""
    kinds: dict[type[Treated], Treated] = {type(link): link for link in row.activations.chain}
    found = {}
    for name, tape in tapes(model, load).items():
        is_treated = name == "block" and Recomputed in kinds
        found[name] = instructions(
            tape,
            "recompute" if is_treated else "keep",
            input_parts=load.tensor if is_treated and Partitioned in kinds else 1,
            is_input_offloaded=is_treated and Offloaded in kinds,
        )
    return found


def film_of(
    run: Run, device: Device = DGX_2, seconds: Callable[[Cost], float] | None = None, system: System = ZEROSHARD
) -> Film:
    """Simulate a step of the first rank of a run.

    Args:
        seconds: returns the seconds of one kernel; by default the device's formula.
    """
    model, row, ranks = model_of(run), row_of(run.row), run.devices // run.tensor
    units = dict(own_units(model, run.tensor))
    specs = specs_of(units, row, PRECISIONS["paper"], ranks)
    load = Workload(batch=run.batch, sequence=SEQUENCE, tensor=run.tensor, kernels=KERNELS)
    parts = parts_of(model, load, row)
    numbers = {name: number for number, name in enumerate(units)}
    blocks = [Call(number, parts["block"]) for name, number in numbers.items() if ".h." in name]
    job = Job(
        units=specs,
        calls=[Call(numbers["transformer.wte"], parts["embedding"]), *blocks, Call(0, parts["head"])],
        updates=[updates_of(specs, OPTIMIZERS["adam"])],
        wire=Native(lands_together=False, keeps_buffers=True, overlaps=False) if ranks > 1 else Silence(),
        device=device,
        dtype=PRECISIONS["paper"].param,
        spans={"shard": device.spread(ranks, run.tensor), "tensor": device.spread(run.tensor)},
        keeps_gradients=True,
        seconds=seconds,
        system=system,
    )
    return make_film(job)


def operations_of(run: Run) -> float:
    """Return the operations of one device in a step, as counted in published throughputs."""
    return OPERATIONS * model_of(run).numel() * run.batch * SEQUENCE / run.tensor


@cache
def software_part() -> float:
    """Return the fraction of the roofline that programs of 2019 reached, from Megatron-LM's single-device baseline.

    The baseline ran on a V100 with a peak of 130 teraFLOPS.
    """
    device = replace(DGX_2, peak_flops={**DGX_2.peak_flops, "float16": 130e12})
    return film_of(MEGATRON, device).step_s * MEGATRON.published * 1e12 / operations_of(MEGATRON)


@cache
def outcome_of(run: Run, given: Assumptions = AS_SAID) -> Outcome:
    """Predict a run."""
    part, device = software_part() if given.is_slowed else 1.0, DGX_2
    if given.has_preset_latencies:
        preset = DEVICES["v100-32"]
        device = replace(device, hop_s=preset.hop_s, node_hop_s=preset.node_hop_s)
    film = film_of(
        run,
        device,
        lambda cost: device.kernel_s(cost, "float16") / part,
        replace(ZEROSHARD, chain_bytes=CHAIN_BYTES if given.reduces_alone else 0),
    )
    step_s, peak_bytes = film.step_s, film.peak[0]
    state_bytes = sum(film.resident_bytes[column] for column in ("parameters", "gradients", "states"))
    # Megatron-LM and torch's DistributedDataParallel have other buffers, at most of the gradients' size.
    peak_bytes += CB_BYTES if run.row in CONFIGURATIONS else 0
    return Outcome(step_s, state_bytes, peak_bytes, operations_of(run) / step_s / 1e12)
