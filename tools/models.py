"""What units published models get, and whether tiny ones of the same architectures train as in one process.

    python -m tools.models                  # units of all models at their real sizes, on the meta device
    python -m tools.models --train          # trains the tiny ones: two ranks at ZeRO stage 3 against one process
    python -m tools.models --split          # trains those that transformers splits: tensor 2 x shard 2, stages 0 and 3
    python -m tools.models --only 'swin*'   # some of them, by name
    python -m tools.models --write          # writes the table into docs/models.md, with --train or --split another one

Owns the tables of docs/models.md and the rule that they are checked against; `tools/published.py` has the models.
Nothing is downloaded: models are built from configurations. Libraries that are not installed are left out, and said so
(`pip install --no-deps timm torchvision diffusers`, extra `models`).
"""

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tools.published import MISSING, REAL, TINY, Tiny
from zeroshard.describe.units import UnitPlan, plan_units
from zeroshard.testing import run_ranks
from zeroshard.train.models.split_hf import RANDOM, split_hf
from zeroshard.tree import find

PAGE = Path(__file__).parents[1] / "benchmarks" / "results" / "units.md"
LARGE_BYTES, LARGE_PART, EQUAL, SMALL_BYTES = 64 << 20, 8, 8, 1 << 20
WARNED_BYTES, WARNED_PART = 256 << 20, 0.5
STEPS = 3
TOLERANCE = 2e-5
"""Of a loss, relative. Two ranks add up the gradients of two batches where one process takes that of their mean: the
same sum in another order, so that weights differ in the last bits after each step."""


@dataclass(frozen=True)
class Row:
    """What units a model got; shares are of all bytes of parameters."""

    library: str
    name: str
    numel: int
    units: int
    largest: str
    largest_share: float
    whole_share: float
    is_warned: bool
    broken: tuple[str, ...]
    plan_s: float


def measure(library: str, name: str, make: Callable[[], nn.Module]) -> Row:
    """Plan the units of a model on the meta device, and check them against the rule."""
    with torch.device("meta"):
        model = make()
    start = time.perf_counter()
    plans = plan_units(model, None)
    plan_s = time.perf_counter() - start
    total = sum(plan.nbytes for plan in plans)
    largest = max(plans, key=lambda plan: plan.nbytes)
    rest = sorted((plan.nbytes for plan in plans[1:]), reverse=True)
    whole = (plans[0].nbytes + sum(rest[:2])) / total
    return Row(
        library,
        name,
        sum(plan.numel for plan in plans),
        len(plans),
        f"{largest.name or '(root)'}, {'a layer' if is_one_layer(largest) else type(largest.module).__name__}",
        largest.nbytes / total,
        whole,
        total > WARNED_BYTES and whole > WARNED_PART,
        tuple(broken_by(plans, model)),
        plan_s,
    )


def is_one_layer(plan: UnitPlan) -> bool:
    """Tell whether all parameters of a unit are registered by one module, or by what torch computes it from."""
    owners = {name.partition(".parametrizations.")[0].rpartition(".")[0] for name, _ in plan.parameters}
    return len(owners) == 1 or isinstance(plan.module, nn.MultiheadAttention)


def broken_by(plans: Sequence[UnitPlan], model: nn.Module) -> Iterator[str]:
    """Yield the units that break the rule, and how. Written without the code that it checks."""
    total = sum(plan.nbytes for plan in plans)
    for plan in plans:
        if plan.nbytes > max(total / LARGE_PART, LARGE_BYTES) and not is_one_layer(plan):
            yield f"{plan.name or '(root)'} holds {plan.nbytes / total:.0%}"
    equal = equal_blocks(model)
    for plan in plans:
        held = {block for module in (plan.blocks or (plan.module,)) for block in module.modules()} & equal
        if plan.name and len(held) > 1 and plan.nbytes > 2 * SMALL_BYTES:
            yield f"{plan.name} holds {len(held)} of at least {EQUAL} equal blocks"


def equal_blocks(model: nn.Module) -> set[nn.Module]:
    """Return the outermost modules that are one of at least 8 equal members of one list, sequence or dictionary."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            shapes = {m: (type(m), *(p.shape for p in m.parameters())) for m in module if isinstance(m, nn.Module)}
            counts = Counter(shapes.values())
            found |= {m for m, shape in shapes.items() if counts[shape] >= EQUAL and len(shape) > 1}
    inner = {one for module in found for one in module.modules() if one is not module}
    return found - inner


# -- training of tiny models ------------------------------------------------------------------------------------------


def loss_of(outputs: Any) -> Tensor:
    """Return a loss that depends on every floating-point tensor of a model's outputs."""
    return torch.stack(
        [tensor.float().square().mean() for tensor in find(outputs, Tensor) if tensor.requires_grad]
    ).sum()


def train(
    name: str, is_sharded: bool, shared_memory: bool = True, stage: int = 3, splits: bool = False, tensor: int = 1
) -> list[float]:
    """Train a tiny model for some steps; return the mean over both batches of each step's loss, and one more.

    Args:
        splits: whether to build the model so that two ranks can split it.
        tensor: number of ranks that split it, by its own plan.
    """
    torch.manual_seed(1)
    tiny = TINY[name]
    # In evaluation mode: dropout would draw other masks for two batches in one process than on two ranks, and batch
    # normalization means something else for them.
    model = (divisible(tiny.make()) if splits else tiny.make()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # a head of zeros gives a loss that nothing changes
                parameter.normal_(std=0.02)
    mesh = None
    if tensor > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("shard", "tensor"))
        split_hf(model, mesh["tensor"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mine: Sequence[int] = (0, 1)
    if is_sharded:
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(shared_memory=shared_memory))
        mine = (zero.mesh.data_ranks.index(zero.mesh.rank),)
    losses = []
    for step in range(STEPS + 1):
        torch.manual_seed(7)  # models that draw numbers in evaluation mode, too
        values = [loss_of(model(**inputs_of(tiny, step, rank))) for rank in mine]
        losses.append(sum(value.item() for value in values) / len(values))
        torch.stack(values).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def inputs_of(tiny: Tiny, step: int, rank: int) -> dict[str, Any]:
    """Return one rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return tiny.inputs(generator)


def divisible(model: Any) -> nn.Module:
    """Return a new model of transformers without dropout, and with a vocabulary that two ranks can split."""
    torch.manual_seed(1)
    config = model.config
    for key, value in config.to_dict().items():
        if RANDOM.search(key) and isinstance(value, float) and value > 0:
            setattr(config, key, 0.0)
    config.vocab_size += config.vocab_size % 2
    made: nn.Module = type(model)(config)
    return made


def train_many(names: Sequence[str], shared_memory: bool, **options: Any) -> dict[str, list[float] | str]:
    """Train several models one after the other on this rank; an error is told in place of losses."""
    found: dict[str, list[float] | str] = {}
    for name in names:
        try:
            found[name] = train(name, is_sharded=True, shared_memory=shared_memory, **options)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[-1][:200]}"
    return found


def with_plans(names: Sequence[str]) -> list[str]:
    """Return the models whose classes name a plan of transformers for tensor parallelism."""
    models = ((name, TINY[name].make()) for name in names if name.startswith("transformers "))
    return [name for name, model in models if model.config.get_text_config().base_model_tp_plan]


def compare(
    names: Sequence[str], shared_memory: bool = True, ranks: int = 2, **options: Any
) -> dict[str, tuple[str, float]]:
    """Return by model "equal", or how ranks differ from one process, and the largest relative difference."""
    run = functools.partial(train_many, names, shared_memory, **options)
    told = run_ranks(run, ranks, timeout_s=60.0 + 10 * ranks * len(names))
    found: dict[str, tuple[str, float]] = {}
    for name in names:
        by_rank = [rank[name] for rank in told]
        if wrong := [one for one in by_rank if isinstance(one, str)]:
            found[name] = wrong[0], float("nan")
            continue
        alone = train(name, is_sharded=False, splits="tensor" in options)
        together = [sum(all_ranks) / ranks for all_ranks in zip(*by_rank, strict=True)]
        most = max(abs(one - two) / max(abs(one), 1e-12) for one, two in zip(alone, together, strict=True))
        verdict = "equal" if most <= TOLERANCE else f"{alone} alone, {together} on {ranks} ranks"
        found[name] = "the loss does not change" if alone[0] == alone[-1] else verdict, most
    return found


# -- tables -----------------------------------------------------------------------------------------------------------


def table_of(rows: Sequence[Row]) -> str:
    """Return the table of real sizes, with what it comes to in front."""
    warned, broken = [row for row in rows if row.is_warned], [row for row in rows if row.broken]
    lines = [
        f"{len(rows)} models on the meta device (no memory, no measurement of time), parameters as they are built; "
        f"{len(broken)} break the rule, {len(warned)} are warned about.",
        "",
        "| library | model | parameters | units | largest unit | its share | whole at once |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.library, row.name)):
        mark = " (warned)" if row.is_warned else ""
        shares = f"{row.largest_share:.1%} | {row.whole_share:.1%}{mark}"
        lines.append(f"| {row.library} | {row.name} | {row.numel:,} | {row.units} | {row.largest} | {shares} |")
    return "\n".join(lines)


def training_table(found: Mapping[str, tuple[str, float]], where: str = "two ranks at ZeRO stage 3") -> str:
    """Return the table of tiny models."""
    equal = sum(verdict == "equal" for verdict, _ in found.values())
    lines = [
        f"CPU, gloo, 2 cores: {equal} of {len(found)} tiny models train alike on {where} and in one "
        f"process, {STEPS} steps, losses within {TOLERANCE:g}.",
        "",
        "| model | losses | largest relative difference |",
        "|---|---|---|",
        *(f"| {name} | {verdict} | {most:.1e} |" for name, (verdict, most) in sorted(found.items())),
    ]
    return "\n".join(lines)


def write(name: str, table: str) -> None:
    """Replace a table of the page."""
    head, _, rest = PAGE.read_text().partition(f"<!-- table: {name} -->\n")
    PAGE.write_text(f"{head}<!-- table: {name} -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}")


def main() -> int:
    """Print or write the tables; return how many models fail."""
    parser = argparse.ArgumentParser(prog="python -m tools.models", description=__doc__)
    parser.add_argument("--train", action="store_true", help="train the tiny models")
    parser.add_argument(
        "--split", action="store_true", help="train those that ranks can split by a plan of transformers"
    )
    parser.add_argument("--only", default="*", help="names of models, with wildcards")
    parser.add_argument("--write", action="store_true", help="write the table to docs/models.md")
    chosen = parser.parse_args()
    failed = 0
    if MISSING:
        print(f"not installed, and left out: {', '.join(MISSING)}")
    if chosen.split:
        names = with_plans([name for name in TINY if fnmatch(name, chosen.only)])
        for stage in (0, 3):
            found = compare(names, ranks=4, stage=stage, splits=True, tensor=2)
            failed += sum(verdict != "equal" for verdict, _ in found.values())
            print(table := training_table(found, f"tensor 2 x shard 2 ranks at ZeRO stage {stage}"), flush=True)
            if chosen.write:
                write(f"split {stage}", table)
    elif not chosen.train:
        rows = []
        for (library, name), make in REAL.items():
            if fnmatch(name, chosen.only):
                rows.append(measure(library, name, make))
                failed += bool(rows[-1].broken)
                print(*rows[-1].broken, rows[-1], flush=True)
        print(table_of(rows))
        if chosen.write:
            write("units", table_of(rows))
    else:
        found = compare([name for name in TINY if fnmatch(name, chosen.only)])
        failed += sum(verdict != "equal" for verdict, _ in found.values())
        print(training_table(found))
        if chosen.write:
            write("training", training_table(found))
    return failed


if __name__ == "__main__":
    sys.exit(main())
