"""The runs of the ZeRO paper, predicted: a configuration in, memory and time of one step out.

Owns what the paper's programs and machines were, as arguments of the planner: DGX-2 nodes, model parallelism as
Megatron-LM's, kernels of 2019. Must not know what the paper measured (`paper_data.py` has that); one measurement of
another paper says how much of a device programs of that time reached. Read `film.py` first.

Note: what is assumed, and why
    Machine: the preset "v100-32" in nodes of 16 whose adapters have 800 Gb/s together, as section 10 of the paper says.
    Latencies of a hop are those that NCCL's own tuning table has for its rings on NVLink and on InfiniBand; the
    preset's are those of Ethernet in a cloud.
    Program: Megatron-LM of September 2019. Attention is a chain of kernels, biases are added apart, blocks are
    recomputed, and the copies of P_a+cpu are waited for. Gradients and checkpoints have memory of their own for good
    (M_D). The fused buffers (C_B) have the sizes that DeepSpeed gives them where nothing is said.
    Software: kernels of that time reached less than a roofline says. How much less is taken from another paper:
    Megatron-LM's 1.2 billion parameters on one V100 made 39 teraFLOPS. `software_part` is what the planner says of that
    run, set in relation; it slows every kernel here.
    Many ranks: the slowest of N sets the pace, `1 + STRAGGLING * sqrt(2 ln N)`, the expected maximum of N normal times.
    Work is counted as Megatron-LM counts it: 8 operations for each parameter and token, two forwards and a backward.

Source: Megatron-LM, mpu/transformer.py of 2019; NCCL 2.8, src/graph/tuning.cc; DeepSpeed's documentation of
reduce_bucket_size and allgather_bucket_size.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Final, final

from zeroshard.plan.film import Call, Film, Job, make_film
from zeroshard.plan.hardware import DEVICES, Cost, Device
from zeroshard.plan.paper_data import MEGATRON, Run
from zeroshard.plan.shapes import Transformer, gpt
from zeroshard.plan.specs import OPTIMIZERS, PRECISIONS, own_units, specs_of, updates_of
from zeroshard.plan.tape import Parts, instructions
from zeroshard.plan.transformer import Kernels, Workload, cached_tapes
from zeroshard.table.activations import Offloaded, Partitioned, Recomputed, Treated
from zeroshard.table.cells import Residency
from zeroshard.table.stages import CONFIGURATIONS, STAGES
from zeroshard.table.wires import Native, Silence

__all__ = [
    "AS_SAID",
    "Assumptions",
    "BUDGET_BYTES",
    "CB_BYTES",
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
"""Floating-point operations for each parameter and token: two forwards of 2, a backward of 4."""
DGX_2: Final = Device(
    **{
        **vars(DEVICES["v100-32"]),
        "name": "v100-32 in a DGX-2",
        "node_ranks": 16,
        "node_bytes_per_s": 100e9,
        "hop_s": 3.4e-6,
        "node_hop_s": 9.6e-6,
    }
)
"""A V100 in a node of 16, with eight adapters of 100 Gb/s."""
CB_BYTES: Final = 2 * 5 * 10**8 * 2
"""Of the constant buffers: one of reductions and one of gathers, of 5e8 elements of 2 bytes."""
GROUPS: Final = 3
"""Communicators of a rank: of all ranks, of its model-parallel ranks, of its data-parallel ranks."""
BUDGET_BYTES: Final = DGX_2.memory_bytes - DGX_2.context_bytes - GROUPS * DGX_2.communicator_bytes
"""What is left for the allocator."""
STRAGGLING: Final = 0.015
"""Of a step's time: how much ranks differ in it."""
ROWS: Final[Mapping[str, Residency]] = MappingProxyType(
    dict(zip(("baseline", "P_os", "P_os+g", "P_os+g+p"), STAGES.values(), strict=True))
)
"""The stages by the paper's names, with activations as they are."""
KERNELS: Final = Kernels(attention="stepwise", fused_bias=False, loss="sharded")


@final
@dataclass(frozen=True)
class Assumptions:
    """What is not the planner's own; the note above says where each is from.

    Args:
        is_slowed: whether kernels reach `software_part()` of the roofline, and not all of it.
        straggling: of a step's time, how much ranks differ in it.
        has_preset_latencies: whether latencies are those of the preset "v100-32".
    """

    name: str = "as the note says"
    is_slowed: bool = True
    straggling: float = STRAGGLING
    has_preset_latencies: bool = False


AS_SAID: Final = Assumptions()


@final
@dataclass(frozen=True)
class Outcome:
    """A predicted run.

    Args:
        step_s: of a step, stragglers included.
        state_bytes: of parameters, gradients and states of a rank.
        peak_bytes: of a rank, constant buffers included.
        teraflops: of each device.
    """

    step_s: float
    state_bytes: int
    peak_bytes: int
    teraflops: float

    @property
    def fits(self) -> bool:
        """Whether the device has the memory."""
        return self.peak_bytes <= BUDGET_BYTES


def model_of(run: Run) -> Transformer:
    """Return the model of a run."""
    return gpt(run.label, run.layers, run.hidden, run.heads, sequence=SEQUENCE)


def row_of(name: str) -> Residency:
    """Return the row of the residency table of a name; the stages recompute, too."""
    return CONFIGURATIONS.get(name) or replace(ROWS[name], activations=CONFIGURATIONS["C1"].activations)


def parts_of(model: Transformer, load: Workload, row: Residency) -> dict[str, Parts]:
    """Return what embedding, block and head do, with the row's treatment of activations for blocks."""
    kinds: dict[type[Treated], Treated] = {type(link): link for link in row.activations.chain}
    found = {}
    for name, tape in cached_tapes(model, load).items():
        is_treated = name == "block" and Recomputed in kinds
        found[name] = instructions(
            tape,
            "recompute" if is_treated else "keep",
            input_parts=load.tensor if is_treated and Partitioned in kinds else 1,
            is_input_offloaded=is_treated and Offloaded in kinds,
        )
    return found


def film_of(
    run: Run, device: Device = DGX_2, seconds: Callable[[Cost], float] | None = None, *, is_settled: bool = False
) -> Film:
    """Simulate a step of the first rank of a run.

    Args:
        seconds: of one kernel; the device's own formula where not given.
        is_settled: whether pooled buffers of an earlier step are there.
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
        wire=Native(lands_together=False) if ranks > 1 else Silence(),
        device=device,
        dtype=PRECISIONS["paper"].param,
        spans={"shard": device.spread(ranks, run.tensor), "tensor": device.spread(run.tensor)},
        keeps_gradients=True,
        seconds=seconds,
    )
    return make_film(job, is_settled=is_settled)


def operations_of(run: Run) -> float:
    """Return the operations of one device in a step, as published throughputs count them."""
    return OPERATIONS * model_of(run).numel() * run.batch * SEQUENCE / run.tensor


@cache
def software_part() -> float:
    """Return what programs of 2019 reached of what the roofline says, from Megatron-LM's single-device baseline.

    That was a V100 with a peak of 130 teraFLOPS.
    """
    device = replace(DGX_2, peak_flops={**DGX_2.peak_flops, "float16": 130e12})
    return film_of(MEGATRON, device).step_s * MEGATRON.published * 1e12 / operations_of(MEGATRON)


@cache
def _simulated(run: Run, *, is_slowed: bool, has_preset_latencies: bool) -> tuple[float, int, int]:
    """Return the seconds of a step, and the bytes of model states and at most; a whole film would be kept for each."""
    part, device = software_part() if is_slowed else 1.0, DGX_2
    if has_preset_latencies:
        preset = DEVICES["v100-32"]
        device = replace(device, hop_s=preset.hop_s, node_hop_s=preset.node_hop_s)
    film = film_of(run, device, seconds=lambda cost: device.kernel_s(cost, "float16") / part)
    resident = film.resident_bytes
    return film.step_s, sum(resident[column] for column in ("parameters", "gradients", "states")), film.peak[0]


@cache
def outcome_of(run: Run, given: Assumptions = AS_SAID) -> Outcome:
    """Predict a run."""
    alone_s, state_bytes, peak_bytes = _simulated(
        run, is_slowed=given.is_slowed, has_preset_latencies=given.has_preset_latencies
    )
    step_s = alone_s * (1 + given.straggling * math.sqrt(2 * math.log(run.devices)))
    # Megatron-LM and torch's DistributedDataParallel have buffers of their own, of the gradients' size at most.
    peak_bytes += CB_BYTES if run.row in CONFIGURATIONS else 0
    return Outcome(step_s, state_bytes, peak_bytes, operations_of(run) / step_s / 1e12)
