"""What `zs.plan` says of this project's own runs on the CPU, beside what torch's allocator hands out in them.

    python -m benchmarks.predicted
    python -m benchmarks.predicted --part tensor
    python -m benchmarks.predicted --part offload
    python -m benchmarks.predicted --part owners
    python -m benchmarks.predicted --part pipe
    python -m benchmarks.predicted --part others      # models of Transformers, whole, frozen in part, with adapters

Owns the matrix of configurations and the comparison. `benchmarks/peaks.py` measures: each rank adds up the profiler's
memory events, so nothing of what is judged comes from the engine's own count. Resident bytes are those of the tensors
that are there between steps. Every rank of a run is compared with the plan of its own place.

Note: late frees
    DTensor's collectives run on gloo's threads, which drop their last reference to a buffer some microseconds after the
    program dropped its own, or later on a busy machine. The buffer counts until then, as it should, but a peak so
    depends on the scheduler: 1 to 3% more in every tenth run. A steady step makes the same allocations each time, so
    with an axis "tensor" the live bytes of each allocation are the least of eight steady steps.
"""

import argparse
import gc
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from benchmarks.peaks import Block, measure_peak
from tools.models import loss_of
from tools.published import wide
from zeroshard.table.sizes import MIB
from zeroshard.testing import run_ranks
from zeroshard.train.models.gpt import GPT, GPTConfig
from zeroshard.train.models.gpt import Block as GPTBlock

__all__ = ["Case", "Found", "compare", "measure", "predict"]

RESULTS = Path(__file__).parent / "results"
STEPS, SPLIT_STEPS = 3, 10
COLUMNS = ("parameters", "gradients", "states", "padding", "transient")
ELSEWHERE = ("host", "file")
STAGING_BYTES = 1 << 18
TREATMENTS = (
    "keep",
    "recompute",
    "recompute-sqrt",
    "recompute-rest",
    "offload",
    "compress",
    "compress-bf16",
    "compress-int8",
    "recompute+offload",
    "recompute+compress-bf16",
    "compress+offload",
    "recompute+compress-int8+offload",
)
ZEROS = 0.5
"""The part of a ReLU's results that are zero at the start, where what it is given is as often below zero as above."""
WIDE = wide(8)
"""Models of other libraries, of one to ten million parameters."""
STEP, END = "step ", "between steps"
MARKER_BYTES = 4
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "muon": lambda model: zs.optim.Muon(zs.optim.muon_groups(model)),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
}


@final
@dataclass(frozen=True)
class Case:
    """One configuration.

    Args:
        offloaded: the fraction of states in another memory, `place`: "host" or "file".
        brought: the fraction of parameters in that memory, at stage 3.
        optimizer: a key of `OPTIMIZERS`.
        model: a key of `WIDE`; "" for this project's GPT.
        trained: "all", "half" (the parameters after the first half are trained), or "adapters" (of PEFT's LoRA).
        pipe: the places of a pipe; `schedule`, `chunks`, `reduce` and `recompute` are those of `zs.pipeline`.
    """

    stage: int = 3
    ranks: int = 2
    activations: str | zs.Offloaded = "keep"
    shared_memory: bool = True
    precision: str = "fp32"
    micro_batches: int = 1
    depth: int = 6
    context: int = 256
    batch: int = 2
    tensor: int = 1
    replicas: int = 1
    is_sequence_parallel: bool = False
    offloaded: float = 0.0
    brought: float = 0.0
    place: str = "host"
    optimizer: str = "adamw"
    model: str = ""
    trained: str = "all"
    vocabulary: int = 256
    pipe: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    reduce: str = "last"
    recompute: bool = False

    def __str__(self) -> str:
        parts = [f"{self.model.partition(' ')[2]}, {self.trained} trained"] * bool(self.model)
        parts += [f"stage {self.stage}", f"{self.ranks} ranks", str(self.activations)]
        parts += [f"tensor {self.tensor}"] * (self.tensor > 1)
        parts += ["split by tokens"] * self.is_sequence_parallel
        parts += [f"pipe {self.pipe}, {self.schedule}, reduced with the {self.reduce}"] * (self.pipe > 1)
        parts += ["chunks run again"] * self.recompute
        parts += [f"{self.replicas} copies"] * (self.replicas > 1)
        parts += ["memory of the host" if self.shared_memory else "messages"] * (self.ranks > 1)
        parts += [self.precision] * (self.precision != "fp32")
        parts += [self.optimizer] * (self.optimizer != "adamw")
        parts += [f"{self.offloaded:.0%} of the states in the {self.place}"] * (self.offloaded > 0)
        parts += [f"{self.brought:.0%} of the parameters there"] * (self.brought > 0)
        return ", ".join(parts + [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1))


@final
@dataclass(frozen=True)
class Found:
    """What a rank has, measured or predicted.

    Args:
        resident_bytes: by column of the device, and by other memory.
        allocated_bytes: of torch's allocator between steps.
        peak_bytes: of torch's allocator at most, in a steady step.
        first_bytes: the same in the first step.
        at: where the peak was.
    """

    resident_bytes: dict[str, int]
    allocated_bytes: int
    peak_bytes: int
    first_bytes: int
    at: str


@final
class SplitAttention(nn.Module):
    """Causal attention without positions, whose heads stand outermost, so that tensor ranks have whole ones."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Mix (batch, time, width) over time; no token sees a later one."""
        query, key, value = self.qkv(x).unflatten(-1, (-1, 3, self.width)).permute(3, 0, 2, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


def make_model(case: Case) -> nn.Module:
    """Return the model of a case."""
    if case.model:
        return partly_trained(WIDE[case.model].make(), case.trained)
    config = GPTConfig(case.depth, case.context, case.vocabulary)
    own = GPT(config)
    for block in own.blocks if case.tensor > 1 else ():
        block.attention = SplitAttention(config)
    return own


def partly_trained(model: nn.Module, trained: str) -> nn.Module:
    """Freeze what is not trained."""
    if trained == "adapters":
        from peft import LoraConfig, get_peft_model

        found: nn.Module = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))  # type: ignore[arg-type]
        return found
    parameters = [*model.parameters()]
    for parameter in parameters[: len(parameters) // 2 if trained == "half" else 0]:
        parameter.requires_grad_(False)
    return model


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the products of a model over the ranks of a mesh, as users do."""
    plan: dict[str, Any] = {"attention.qkv": ColwiseParallel(), "mlp.up": ColwiseParallel()}
    plan |= {"attention.out": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    assert isinstance(model, GPT)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def parallelize_sequence(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split products, and what lies between them by tokens."""
    plan: dict[str, Any] = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    plan |= dict.fromkeys(("attention.qkv", "mlp.up"), ColwiseParallel(input_layouts=Shard(1)))
    plan |= dict.fromkeys(("attention.out", "mlp.down"), RowwiseParallel(output_layouts=Shard(1)))
    assert isinstance(model, GPT)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    ends: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def make_inputs(case: Case) -> Any:
    """Return the tokens and targets of a micro-batch, or of all micro-batches of a pipe; of other models their own."""
    if case.model:
        return WIDE[case.model].inputs(torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    size = (case.batch * (case.micro_batches if case.pipe > 1 else 1), case.context)
    return torch.randint(256, size), torch.randint(256, size)


def splitting(case: Case) -> Callable[[nn.Module, DeviceMesh], None]:
    """Return what splits the model of a case."""
    return parallelize_sequence if case.is_sequence_parallel else parallelize


def mesh_of(case: Case) -> DeviceMesh | None:
    """Return the mesh of a case, where it has axes besides that of shards."""
    if case.tensor == case.replicas == case.pipe == 1:
        return None
    shards = case.ranks // case.tensor // case.replicas // case.pipe
    sizes = {"pipe": case.pipe, "replicate": case.replicas, "shard": shards, "tensor": case.tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def offload_of(case: Case, folder: str) -> zs.Offload | None:
    """Return what lies elsewhere in a case.

    Args:
        folder: where files are made.
    """
    to = folder if case.place == "file" else "host"
    if not case.offloaded:
        return None
    return zs.Offload(states=case.offloaded, parameters=case.brought, to=to, staging_bytes=STAGING_BYTES)


def measure_rank(case: Case) -> Found:
    """Train on this rank, and return what it took."""
    torch.set_num_threads(1)
    resident: dict[str, int] = {}
    least = max(case.tensor, case.pipe * case.chunks)
    train(replace(case, depth=least, context=16), {})  # what torch makes once in a process
    steps: list[list[Block]] = [[] for _ in range(steps_of(case))]
    between_bytes = 0
    for block in measure_peak(lambda: run(case, resident)).blocks:
        for name in block.operations:
            if name == END:
                between_bytes = block.live_bytes - MARKER_BYTES
            elif name.startswith(STEP) and block.nbytes > 0:
                steps[int(name.removeprefix(STEP))].append(block)
    live_bytes, place = max(zip(least_live(steps[STEPS - 1 :]), itertools.count(), strict=False))
    at = " > ".join(steps[-1][place].operations[-2:])
    return Found(resident, between_bytes, live_bytes, max(block.live_bytes for block in steps[0]), at)


def units_of(case: Case) -> list[type] | None:
    """Return the units that are asked for."""
    return None if case.model else [GPTBlock]


def steps_of(case: Case) -> int:
    """Return how many steps are measured; see "Note: late frees"."""
    return SPLIT_STEPS if case.tensor > 1 else STEPS


def least_live(steps: Sequence[Sequence[Block]]) -> list[int]:
    """Return, for each allocation of a steady step, the least bytes that were live after it in any of the steps.

    Raises:
        RuntimeError: the steps allocated other blocks.
    """
    if len({tuple(block.nbytes for block in step) for step in steps}) > 1:
        raise RuntimeError(f"{len(steps)} steady steps allocated other blocks, so their peaks cannot be compared.")
    return [min(block.live_bytes for block in same) for same in zip(*steps, strict=True)]


def run(case: Case, resident: dict[str, int]) -> None:
    """Train, and let go of everything."""
    train(case, resident)
    gc.collect()


def train(case: Case, resident: dict[str, int]) -> list[Any]:
    """Train as a user would; return what keeps everything alive."""
    torch.manual_seed(0)
    model, inputs = make_model(case), make_inputs(case)
    mesh = mesh_of(case)
    if mesh is not None and case.tensor > 1:
        splitting(case)(model, mesh["tensor"])
    optimizer = OPTIMIZERS[case.optimizer](model)
    options: dict[str, Any] = {"stage": case.stage, "units": units_of(case), "activations": case.activations}
    options |= {"precision": case.precision, "settings": zs.Settings(shared_memory=case.shared_memory), "mesh": mesh}
    options["offload"] = offload_of(case, tempfile.gettempdir())
    if case.pipe > 1:
        options |= {"micro_batches": case.micro_batches, "schedule": case.schedule, "reduce": case.reduce}
        options |= {"chunks": case.chunks, "recompute": case.recompute}
    pipe = zs.pipeline(model, optimizer, **options) if case.pipe > 1 else None
    zero = zs.shard(model, optimizer, **options) if pipe is None else pipe.zero
    for step in range(steps_of(case)):
        with record_function(f"{STEP}{step}"):
            for _ in range(case.micro_batches if pipe is None else 0):
                loss = loss_of(model(**inputs)) if case.model else model(*inputs)
                (loss / case.micro_batches).backward()
            if pipe is not None:
                pipe.step(inputs)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with record_function(END):
        marker = torch.empty(1)
    held = zero.memory().resident_bytes
    resident.update({column: held[column] for column in COLUMNS})
    resident.update({memory: held.get(memory, 0) for memory in ELSEWHERE})
    resident["parameters"] += sum(buffer.nbytes for buffer in model.buffers())
    if pipe is not None:  # what stands for parameters of other places
        stand_ins = [one for module in model.modules() for one in vars(module).values() if isinstance(one, Tensor)]
        resident["parameters"] += sum(one.untyped_storage().nbytes() for one in stand_ins)
    return [model, inputs, optimizer, zero, pipe, marker]


def measure(case: Case) -> list[Found]:
    """Return what each rank took; ranks are processes of their own."""
    return run_ranks(measure_rank, case.ranks, case, process_group=case.ranks > 1, timeout_s=600)


def predict(case: Case) -> list[Found]:
    """Return what `zs.plan` says of each rank."""
    with torch.device("meta"):
        model = make_model(case)
    plan = zs.plan(
        model,
        world_size=case.ranks,
        device=zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1),
        stage=case.stage,
        precision=case.precision,
        activations=case.activations,
        micro_batches=case.micro_batches,
        shared_memory=case.shared_memory,
        zeros=ZEROS,
        inputs=make_inputs(replace(case, pipe=1)),
        units=units_of(case),
        loss=loss_of if case.model else None,
        mesh=case.replicas,
        offload=offload_of(case, "/states"),
        optimizer=case.optimizer,
        tensor=case.tensor,
        parallelize=splitting(case) if case.tensor > 1 else None,
        pipe=case.pipe,
        schedule=case.schedule,
        chunks=case.chunks,
        reduce=case.reduce if case.pipe > 1 else "auto",
        recompute=case.recompute,
    )
    film = plan.film
    mapped_bytes = sum(one.nbytes for one in film.before if one.is_mapped)
    inside = sum(film.resident_bytes.values()) - mapped_bytes + film.elsewhere_bytes.get("host", 0)
    place = max(range(len(film.live)), key=film.live.__getitem__)
    return [
        Found(
            {column: one.resident_bytes[column] for column in COLUMNS}
            | {memory: one.elsewhere_bytes.get(memory, 0) for memory in ELSEWHERE},
            inside if case.pipe == 1 else sum(one.resident_bytes.values()),
            one.allocator_bytes,
            plan.first.allocated_bytes,
            film.events[place].what,
        )
        for one in plan.ranks
        for _ in range(one.count)
    ]


def compare(case: Case) -> list[tuple[Found, Found]]:
    """Return what was predicted for each rank, and what it took."""
    return list(zip(predict(case), measure(case), strict=True))


def matrix() -> Iterator[Case]:
    """Yield all configurations: stages and ranks by both transports, then treatments of activations."""
    for ranks in (1, 2, 3, 4):
        for stage in (0, 1, 2, 3) if ranks > 1 else (0, 3):
            for shared_memory in (True, False) if ranks > 1 else (True,):
                yield Case(stage, ranks, shared_memory=shared_memory)
    for activations in TREATMENTS[1:]:
        yield Case(0, 1, activations)
        for shared_memory in (True, False):
            yield Case(3, 2, activations, shared_memory)
    for stage in (1, 2):
        yield Case(stage, 2, "recompute", shared_memory=False)
        yield Case(stage, 2, micro_batches=2)
        yield Case(stage, 2, micro_batches=2, shared_memory=False)
    for ranks, stage in ((1, 0), (2, 1), (2, 3)):
        yield Case(stage, ranks, precision="bf16")


def split_matrix() -> Iterator[Case]:
    """Yield all configurations with a tensor axis."""
    for stage in (0, 1, 2, 3):
        for activations in ("keep", "recompute", "recompute+partition"):
            yield Case(stage, 4, activations, tensor=2)
            yield Case(stage, 4, activations, shared_memory=False, tensor=2, replicas=2)
    yield Case(3, 4, shared_memory=False, tensor=2)
    for activations in ("keep", "recompute"):
        yield Case(3, 4, activations, tensor=2, is_sequence_parallel=True)
    yield Case(3, 4, "recompute+partition+offload", tensor=2)
    yield Case(3, 4, tensor=2, precision="bf16")


def offload_matrix() -> Iterator[Case]:
    """Yield all configurations with states elsewhere."""
    for place in ELSEWHERE:
        for ranks, stage in ((1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)):
            for offloaded in (0.3, 1.0):
                yield Case(stage, ranks, offloaded=offloaded, place=place)
        for ranks, stage in ((1, 0), (2, 2), (3, 3)):
            for offloaded in (0.3, 1.0):
                yield Case(stage, ranks, precision="bf16", offloaded=offloaded, place=place, shared_memory=False)
        for ranks, stage in ((1, 0), (2, 2), (2, 3)):
            yield Case(stage, ranks, "recompute", micro_batches=2, offloaded=1.0, place=place, shared_memory=False)


def owners_matrix() -> Iterator[Case]:
    """Yield all configurations with optimizers that need whole matrices."""
    for optimizer in ("muon", "adafactor"):
        yield Case(0, 1, optimizer=optimizer)
        for ranks in (2, 3):
            for stage in (0, 1, 2, 3):
                yield Case(stage, ranks, optimizer=optimizer, shared_memory=stage % 2 == 0)
        yield Case(3, 2, "recompute", precision="bf16", optimizer=optimizer, shared_memory=False)


def pipe_matrix() -> Iterator[Case]:
    """Yield all configurations with a pipe: a GPT of 8.4 million parameters whose embedding is tied."""
    case = Case(ranks=4, depth=8, context=128, vocabulary=8192, shared_memory=False)
    for pipe in (2, 4):
        for activations in ("keep", "recompute"):
            for stage in (0, 1, 2, 3):
                yield replace(case, stage=stage, pipe=pipe, micro_batches=2 * pipe, activations=activations)
    yield replace(case, stage=3, ranks=8, pipe=4, micro_batches=8)
    case = replace(case, ranks=2, pipe=2, stage=1)
    for micro_batches in (4, 16):
        yield replace(case, micro_batches=micro_batches)
        yield replace(case, micro_batches=micro_batches, schedule="gpipe", activations="recompute")
        yield replace(case, micro_batches=micro_batches, schedule="gpipe", recompute=True)
    yield replace(case, micro_batches=4, schedule="naive")
    yield replace(case, micro_batches=4, schedule="interleaved", chunks=2)
    case = replace(case, ranks=4, micro_batches=4)
    yield replace(case, pipe=4, precision="bf16")
    yield replace(case, stage=3, reduce="each")
    yield replace(case, stage=3, shared_memory=True)
    yield replace(case, ranks=8, stage=0, replicas=2)


OTHERS = (
    *(
        f"transformers {name}ForCausalLM"
        for name in "Llama Mistral Mixtral Qwen3 Gemma2 OPT Bloom Falcon Mamba".split()
    ),
    *(f"transformers {name}" for name in ("GPT2LMHeadModel", "BertForMaskedLM", "DebertaV2ForMaskedLM")),
    *(f"transformers {name}ForConditionalGeneration" for name in ("T5", "Bart")),
    *(f"transformers {name}ForImageClassification" for name in "ViT Swin ConvNext ResNet Segformer Dinov2".split()),
    *(f"timm {name}" for name in "resnet10t vit_tiny_patch16_224 convnext_atto mobilenetv3_small_050".split()),
    *(f"torchvision {name}" for name in ("resnet18", "SwinTransformer")),
    *(f"diffusers {name}" for name in ("UNet2DModel", "AutoencoderKL")),
)
"""Decoders, experts, encoders, both, convolutions, and what denoises; the last eight where their libraries are."""


def others_matrix() -> Iterator[Case]:
    """Yield three drawn configurations of each model; the draw is the same each time."""
    for place, name in itertools.product(range(3), [name for name in OTHERS if name in WIDE]):
        r = random.Random(f"{name} {place}")
        ranks = r.choice((1, 2, 3))
        case = Case(r.choice((0, 3) if ranks == 1 else (0, 1, 2, 3)), ranks, model=name)
        activations = r.choice(("keep", "keep", "recompute", "recompute-rest", "offload", "recompute+offload"))
        trained = r.choice(("all", "all", "half", "adapters" if name.startswith("transformers") else "half"))
        optimizer = r.choice(("adamw", "adamw", "muon", "adafactor")) if trained == "all" else "adamw"
        offloaded = r.choice((0.0, 0.0, 1.0)) if optimizer == "adamw" else 0.0
        case = replace(case, activations=activations, trained=trained, optimizer=optimizer, offloaded=offloaded)
        yield replace(case, precision=r.choice(("fp32", "fp32", "bf16")), shared_memory=r.random() < 0.5)


PARTS = {
    "others": (others_matrix, RESULTS / "predicted_others.json"),
    "pipe": (pipe_matrix, RESULTS / "predicted_pipe.json"),
    "data": (matrix, RESULTS / "predicted.json"),
    "owners": (owners_matrix, RESULTS / "predicted_owners.json"),
    "offload": (offload_matrix, RESULTS / "predicted_offload.json"),
    "tensor": (split_matrix, RESULTS / "predicted_tensor.json"),
}


def row(case: Case) -> dict[str, Any]:
    """Return the comparison of one configuration; of ranks, that with the largest error."""
    pairs = compare(case)
    predicted, measured = max(pairs, key=lambda pair: abs(pair[0].peak_bytes / pair[1].peak_bytes - 1))
    return {
        "case": asdict(case),
        "error": round(predicted.peak_bytes / measured.peak_bytes - 1, 6),
        # Of a pipe, a plan has the first step of its fullest place alone.
        "first_step_error": round(predicted.first_bytes / measured.first_bytes - 1, 6) if case.pipe == 1 else None,
        "errors_by_rank": [round(one.peak_bytes / other.peak_bytes - 1, 6) for one, other in pairs],
        "is_resident_exact": all(one.resident_bytes == other.resident_bytes for one, other in pairs),
        "predicted": asdict(predicted),
        "measured": asdict(measured),
    }


def main() -> None:
    """Compare, print and store."""
    parser = argparse.ArgumentParser()
    for name, default in asdict(Case()).items():
        kind = (lambda text: text != "False") if isinstance(default, bool) else type(default)
        parser.add_argument(f"--{name}", type=kind, help="one configuration alone")
    parser.add_argument("--part", choices=PARTS, default="data", help="which configurations")
    asked = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    cases, result = PARTS[asked.pop("part")]
    rows = []
    for case in [Case(**asked)] if asked else cases():
        start_s = time.perf_counter()
        try:
            rows.append(row(case))
        except (RuntimeError, ValueError) as error:
            rows.append({"case": asdict(case), "refused": str(error).splitlines()[-1]})
            print(f"{case}: {rows[-1]['refused']}", flush=True)
            continue
        print(
            f"{case!s:64} peak {rows[-1]['measured']['peak_bytes'] / MIB:8.3f} MiB, "
            f"predicted {rows[-1]['error']:+.3%}, first step {rows[-1]['first_step_error'] or 0:+.2%}, resident "
            f"{'exact' if rows[-1]['is_resident_exact'] else 'WRONG'}, {time.perf_counter() - start_s:.0f} s",
            flush=True,
        )
    errors = [abs(one["error"]) for one in rows if "error" in one]
    summary = {
        "configurations": len(errors),
        "resident_exact": sum(one.get("is_resident_exact", False) for one in rows),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "refused": len(rows) - len(errors),
    }
    print(summary)
    if not asked:
        write_result(result, {**circumstances("benchmarks.predicted"), "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
