"""Sums of a plan over its job and film: operations, bytes of a save and of a node's host, and what is not predicted.

It must not know how a step is simulated. Needs no torch.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from operator import mul
from typing import Any, Final

from zeroshard.describe.axes import check_count
from zeroshard.plan.job import Options, Treatment, load_of, outside_bytes_of, parts_of, treatment_of
from zeroshard.plan.named import States
from zeroshard.plan.result import wide_bytes
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.step.film import Film
from zeroshard.plan.step.rank_job import Job
from zeroshard.table.activations import Compressed, Offloaded, Partitioned
from zeroshard.table.bytes import Updates
from zeroshard.table.sizes import size_text
from zeroshard.table.spec import itemsize
from zeroshard.table.whole import owned_bytes

__all__ = [
    "activations_of_shape",
    "compute_dtype_of",
    "element_bytes_of",
    "flops_of",
    "host_bytes_of",
    "micro_batches_of",
    "notes_of",
    "notes_of_run",
    "output_bytes_of",
    "passing_of_outer",
    "save_bytes_of",
    "states_by_rank",
]

PROCESS_BYTES: Final = 3 << 30
"""Of host memory: the interpreter and torch."""


def flops_of(shape: Transformer, options: Options) -> float:
    """Return the operations of the model for each token: 6 for each parameter, and causal attention."""
    width = shape.heads * (sum(shape.latent[2:]) / 2 if shape.latent else shape.head_width)
    embedding = 0 if shape.is_tied else shape.vocabulary * shape.hidden
    return 6.0 * (shape.used_numel() - embedding) + 6.0 * shape.layers * width * options.sequence


def activations_of_shape(model: Transformer, options: Options) -> tuple[float, int, float]:
    """Return (bytes that a block keeps per token, number of blocks, bytes that the other modules keep per token)."""
    load = load_of(options)
    treatment = treatment_of(options.row.activations.chain, options)
    block = parts_of(model, load, "block", treatment, None).saved_bytes
    head = parts_of(model, load, "head", Treatment(), None)
    rest = parts_of(model, load, "embedding", Treatment(), None).saved_bytes + head.saved_bytes + head.forward_bytes
    return block / load.tokens, model.layers, rest / load.tokens


def compute_dtype_of(job: Job) -> str:
    """Return the dtype in which most operations are made: that of the run's tensors, which a module may have itself."""
    flops = Counter[str]()
    for one in job.pipe.chunks.values() if job.pipe is not None else [job]:
        for _, made in one.told.forward:
            if made.cost is not None:
                flops[made.cost.dtype or job.dtype] += int(made.cost.flops)
    return max(flops, key=flops.__getitem__, default=job.dtype)


def element_bytes_of(job: Job) -> tuple[int, int, int]:
    """Return the bytes of an element: of a parameter, of a held gradient, and of its masters and states."""
    bucket = max((b for unit in job.units for b in unit.buckets), key=lambda b: b.layout.numel)
    formats = bucket.formats
    most = max(job.updates, key=lambda one: one.numel_bytes() + one.numel_bytes(is_apart=True) + len(one.whole))
    whole = sum(one.state_bytes for one in most.whole)
    if whole:  # of what is updated whole, the mean
        states = round(whole / sum(one.bucket.layout.numels[one.index] for one in most.whole))
    else:
        numels = [one.bucket.layout.numels[one.index] for one in most.parameters]
        each = [one.cost.each_bytes(itemsize(formats.state)) for one in most.parameters]
        states = round(sum(map(mul, numels, each)) / max(1, sum(numels)))
    masters = itemsize(formats.master) * (formats.master != formats.param)
    return itemsize(formats.param), itemsize(formats.grad), states + masters


def states_by_rank(updates: Sequence[Updates], ranks: int) -> Sequence[int]:
    """Return the bytes of states by rank of a replica: of what it owns, and of slices where these are not alike."""
    found = owned_bytes(updates, ranks)
    if len(updates) == 1 and not updates[0].unused and not updates[0].whole:
        return found  # slices differ by padding
    for one in updates:
        for entry in one.trained.parameters:
            bucket, index = entry.bucket, entry.index
            each = entry.cost.each_bytes(itemsize(bucket.formats.state))
            for rank in () if bucket.updates_all else bucket.layout.shards_of(index):
                start, stop = bucket.layout.overlap(index, *bucket.layout.shard_range(rank))
                found[rank] += (stop - start) * each
    return found


def micro_batches_of(batch_tokens: int, options: Options) -> int:
    """Return the number of micro-batches of a step that has a number of tokens, over all ranks.

    Raises:
        ValueError: the tokens are no multiple of those of a micro-batch of all ranks.
    """
    each = dataclasses.replace(options, micro_batches=1).tokens_per_step
    if each == 0 or check_count("batch_tokens", batch_tokens) % each:
        raise ValueError(
            f"batch_tokens={batch_tokens:,} is not a multiple of {each:,}: {options.place_ranks // options.tensor} "
            f"data rank(s), micro-batches of {options.batch} x {options.sequence:,} tokens. Change one of these "
            "numbers."
        )
    return batch_tokens // each


def save_bytes_of(job: Job) -> int:
    """Return the most bytes that a rank copies to the host for an asynchronous save, random generators aside.

    Whatever the row is, each rank writes its shard of masters and states, and owners write what they update whole. The
    first rank writes buffers; of what several places of a pipe have, the first of them writes all.
    """
    pipe, by_rank = job.pipe, Counter({0: job.saved_buffer_bytes})
    others = {one.unit for one in pipe.tied if one.places[0] != pipe.place} if pipe is not None else ()
    buckets = {b.number: b for unit in job.units if unit.number not in others for b in unit.buckets}
    each = {(b.number, at): itemsize(b.formats.master) for b in buckets.values() for at in range(len(b.names))}
    for one in job.updates:
        for owned in one.trained.whole:
            by_rank[owned.owner] += owned.state_bytes * (owned.bucket.number in buckets)
        for entry in one.trained.parameters:
            if (number := entry.bucket.number) in buckets:
                each[number, entry.index] += entry.cost.saved_bytes(itemsize(entry.bucket.formats.state))
    # Blocks are alike, and there may be a thousand ranks.
    alike = Counter((b.layout, tuple(each[b.number, at] for at in range(len(b.names)))) for b in buckets.values())
    for (layout, sizes), count in alike.items():
        for index, nbytes in enumerate(sizes):
            for rank in layout.shards_of(index):
                start, stop = layout.overlap(index, *layout.shard_range(rank))
                by_rank[rank] += count * (stop - start) * nbytes
    return max(by_rank.values())


def host_bytes_of(options: Options, film: Film) -> int:
    """Return the bytes of host memory that processes of one node take, what is offloaded to it among them."""
    return options.node_processes * (PROCESS_BYTES + film.host_peak_bytes)


def notes_of(shape: Transformer, options: Options) -> list[str]:
    """Return what a plan of a shape does not predict."""
    found, chains = [], options.row.activations.chains
    links = [(link, treatment_of(chain, options)) for chain in chains for link in chain]
    if any(isinstance(link, Compressed) for link, _ in links):
        found.append("Compression depends on values: activations are counted as if they were kept.")
    if any(isinstance(link, Offloaded) and not how.is_input_offloaded for link, how in links):
        found.append(
            "Only whole inputs of recomputed blocks of shapes are planned in memory of the host: what is "
            "offloaded beside these is counted as if it stayed on the device."
        )
    elif any(isinstance(link, Offloaded) and how.name == "recompute-rest" for link, how in links):
        found.append("Products that are kept are counted as if they stayed on the device; inputs are offloaded.")
    if any(isinstance(link, Partitioned) and how.input_parts == 1 for link, how in links):
        found.append("Nothing is partitioned: there are no tensor ranks that hold the same activations.")
    if options.sequence > shape.sequence:
        found.append(f"{shape.name} is configured for {shape.sequence:,} tokens; the run must extend its positions.")
    return found


def output_bytes_of(shape: Transformer, options: Options) -> int:
    """Return the bytes of the logits that a model returns: none of a chunked loss, else in float32 as outputs are."""
    numel = options.batch * options.sequence * shape.vocabulary // options.tensor
    return numel * itemsize("float32") * (options.system.kernels.loss != "chunked")


def notes_of_run(options: Options, dtype: str, reserved_bytes: int, output_bytes: int) -> list[str]:
    """Return what a plan does not predict of a device, and of a loop that keeps what the model returns.

    Args:
        dtype: of most operations.
        output_bytes: of what the model returns beside the loss.
    """
    found, device = [], options.device
    if dtype == "bfloat16" and device.half_precision != "bf16":
        found.append(f"{device.name} has no units for bfloat16, so the time of a step is a guess. Use fp16.")
    outside_bytes = outside_bytes_of(options)
    most_bytes = wide_bytes(reserved_bytes, outside_bytes, options) + output_bytes
    if options.pipe == 1 and output_bytes and reserved_bytes + outside_bytes <= options.room_bytes < most_bytes:
        found.append(
            "A loop that keeps what the model returns (`out = model(x)`) until its next forward takes up to "
            f"{size_text(output_bytes)} more, for which there is no room: `del out` after the loss."
        )
    return found


def passing_of_outer(outer: Any, *, is_cpu: bool) -> float:
    """Return the numbers for each element that a step of the outer optimizer has beside its states."""
    if outer is None or (optimizer := outer.trial()) is None:
        return 0.0
    from zeroshard.plan.trace.passing import passing_of  # torch is needed for modules and outer optimizers only

    passing = passing_of(optimizer, States(0, 0), is_cpu=is_cpu)
    return passing.total + passing.own  # it updates one parameter, a fragment
