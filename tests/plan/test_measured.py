"""What a trace predicts, beside what torch's CPU allocator hands out in the same step."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peaks
from benchmarks.peaks import Block, Measured, follow_all_threads, measure_gpt, measure_peak, peak_of, trace_gpt
from benchmarks.predicted import least_live
from tests.plan.saved import Shape
from zeroshard.plan.trace.events import Trace
from zeroshard.plan.trace.tracer import trace_step
from zeroshard.train.models.gpt import GPTConfig

from .blocks import GPT2Block, LlamaBlock

B, S, H = 4, 64, 128
MIB = 2**18  # elements of 4 bytes


# -- the measurement --------------------------------------------------------------------------------------------------


def test_a_peak_counts_what_is_there_at_once() -> None:
    def run() -> Tensor:
        kept = torch.ones(MIB)
        for _ in range(3):
            passing = torch.ones(2 * MIB)
            del passing
        return kept

    measured = measure_peak(run)
    assert measured.peak_bytes == 3 * 2**20
    assert sum(block.nbytes > 0 for block in measured.blocks) == 4
    assert [block.live_bytes >> 20 for block in measured.blocks if block.nbytes > 0] == [1, 3, 3, 3]


def test_a_peak_counts_what_a_kernel_takes_for_itself() -> None:
    def run() -> Tensor:
        x = torch.ones(1024, 256)
        return x @ torch.ones(1).expand(256, 256)  # a factor whose strides are 0 is copied

    measured = measure_peak(run)
    assert measured.peak_bytes == 2 * 2**20 + 4 * (256 * 256 + 1)
    assert "aten::mm" in [operation for block in measured.blocks for operation in block.operations]


def test_what_was_there_before_is_not_counted() -> None:
    before = torch.ones(MIB)
    assert measure_peak(lambda: before.square()).peak_bytes == 2**20


def test_what_another_thread_frees_is_gone() -> None:
    def run() -> None:
        blocks = [torch.ones(4 * MIB)]
        thread = threading.Thread(target=blocks.clear)
        thread.start()
        thread.join()
        torch.ones(MIB)

    live = [block.live_bytes for block in measure_peak(run).blocks if block.nbytes > 0]
    assert live == [4 * 2**20, 2**20]


def test_a_measurement_that_misses_other_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "follow_all_threads", lambda: follow_all_threads(False))
    try:
        with pytest.raises(RuntimeError, match="counts 65,536 bytes that another thread has freed"):
            measure_peak(lambda: torch.ones(1))
    finally:
        follow_all_threads(True)


def test_steady_steps_are_compared_allocation_by_allocation() -> None:
    late = [Block(4, 4, ()), Block(8, 16, ())]
    assert least_live([[Block(4, 8, ()), Block(8, 12, ())], late]) == [4, 12]
    with pytest.raises(RuntimeError, match="2 steady steps allocated other blocks"):
        least_live([late, late[:1]])


# -- predictions ------------------------------------------------------------------------------------------------------


def close(trace: Trace, measured: Measured, within: float = 5e-4) -> None:
    """Assert that a predicted peak is within a twentieth of a percent: scalars that Python makes are not traced."""
    error = peak_of(trace).nbytes / measured.peak_bytes - 1
    assert abs(error) <= within, f"{error:+.4%}: {peak_of(trace)}, measured {measured.peak_bytes:,} at {measured.at}"


@pytest.mark.parametrize(
    ("treatment", "batch", "vocabulary", "steps"),
    [("kept", 4, 256, 1), ("recompute", 4, 256, 1), ("selective", 4, 256, 1), ("recompute", 1, 4096, 2)],
)
def test_a_step_of_the_gpt(treatment: str, batch: int, vocabulary: int, steps: int) -> None:
    config = GPTConfig(depth=6, context=512, vocabulary=vocabulary)
    trace = trace_gpt(config, batch, treatment, steps)
    # Activation checkpointing keeps the state of the random numbers, 5 kB a block, which is not traced.
    close(trace, measure_gpt(config, batch, treatment, steps))


class Attention(nn.Module):
    """Attention whose gradient does not lie as its kernel wants it."""

    def __init__(self, mask: torch.dtype | None) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(H, 3 * H), mask

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        length = x.shape[1]
        mask = None if self.mask is None else torch.ones(length, length, dtype=self.mask, device=x.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


class Language(nn.Module):
    """A table and a head, tied or not."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2048, H), nn.Linear(H, 2048, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., 0].to(torch.int64)
        return F.cross_entropy(self.head(self.table(tokens)).flatten(0, 1), tokens.flatten())


class Sums(nn.Module):
    """A tensor whose gradients come from several places, in and out of views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(H, H, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = x.sin() + x * x + self.second(x) + self.third(x) + x.flatten(1).view_as(x)
        return y + x[:, :1]


class Images(nn.Module):
    """A model of images, (B, channels, 32, 32).

    Args:
        is_last: whether channels are last.
    """

    def __init__(self, channels: int, *layers: nn.Module, is_last: bool = False) -> None:
        super().__init__()
        self.layers, self.channels, self.is_last = nn.Sequential(*layers), channels, is_last

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten()[: B * 1024].repeat(self.channels).view(B, self.channels, 32, 32)
        x = x.contiguous(memory_format=torch.channels_last if self.is_last else torch.contiguous_format)
        y: Tensor = self.layers(x)
        return y


class Expanded(nn.Module):
    """A sum over images, whose gradient is one number for all elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum((2, 3))


class Products(nn.Module):
    """A product of three factors, and a small layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(H, H), nn.Bilinear(H, H, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x), x)
        return y


class Transcripts(nn.Module):
    """A loss over all alignments of each sequence with its targets, given in rows or all in one."""

    def __init__(self, *, is_flat: bool = False) -> None:
        super().__init__()
        self.first, self.is_flat = nn.Linear(H, 24), is_flat

    def forward(self, x: Tensor) -> Tensor:
        log_probs = self.first(x).log_softmax(-1).transpose(0, 1)
        lengths, targets = torch.full((B,), S), torch.ones(B, S // 2, dtype=torch.int64)
        loss: Tensor = F.ctc_loss(log_probs, targets.flatten() if self.is_flat else targets, lengths, lengths // 2)
        return loss


class Loss(nn.Module):
    """A loss that is computed within the model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(H, H, bias=False), getattr(F, name)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.function(
            self.first(x.flatten(1)[:, :H].repeat(4096 // B, 1)).sigmoid(), x.new_ones(4096, H)
        )
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(H, 4 * H), nn.ReLU(), nn.Linear(4 * H, H)),
    "norm": lambda: nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H), nn.GELU(), nn.Linear(H, H)),
    "rms norm": lambda: nn.Sequential(nn.Linear(H, H), nn.RMSNorm(H), nn.SiLU(), nn.Linear(H, H)),
    "dropout": lambda: nn.Sequential(nn.Linear(H, H), nn.Dropout(0.1), nn.Softmax(-1), nn.Linear(H, H)),
    "bf16": lambda: nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H), nn.GELU()).to(torch.bfloat16),
    "attention": lambda: Attention(None),
    "attention, bool mask": lambda: Attention(torch.bool),
    "attention, float mask": lambda: Attention(torch.float32),
    "encoder": lambda: nn.TransformerEncoderLayer(H, 4, 4 * H, dropout=0.0, batch_first=True, norm_first=True),
    "encoder, dropout": lambda: nn.TransformerEncoderLayer(H, 4, 4 * H, dropout=0.1, batch_first=True),
    "language": lambda: Language(is_tied=False),
    "language, tied": lambda: Language(is_tied=True),
    "sums": Sums,
    "gpt2 block": lambda: GPT2Block(Shape(B, S, H, heads=4)),
    "llama block": lambda: LlamaBlock(Shape(B, S, H, heads=4, kv_heads=2)),
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x.to(next(model.parameters()).dtype))
    return out.float().square().mean()


def compare(
    make: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer], steps: int = 1, **options: Any
) -> tuple[Trace, Measured]:
    """Trace and measure steps of a model for an input of (B, S, H)."""

    def run() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, x = make(), torch.rand(B, S, H)
        chosen = optimizer(model.parameters())
        for _ in range(steps):
            for _ in range(options.get("micro_batches", 1)):
                loss_of(model, x).backward()
            chosen.step()
            model.zero_grad()
        return model, chosen

    run()  # what torch makes once a process is made
    with torch.device("meta"):
        model, x = make(), torch.rand(B, S, H)
    return trace_step(loss_of, model, [x], optimizer=optimizer, steps=steps, **options), measure_peak(run)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_a_module(name: str) -> None:
    close(*compare(MODELS[name], torch.optim.AdamW))


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "many channels": lambda: Images(512, nn.Conv2d(512, 512, 3, padding=1), nn.Tanh(), nn.Conv2d(512, 256, 3, 2, 1)),
    "a stride": lambda: Images(3, nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1)),
    "few channels": lambda: Images(64, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 8, 3, padding=1)),
    "few channels between": lambda: Images(64, nn.Conv2d(64, 8, 3, 1, 1), nn.Tanh(), nn.Conv2d(8, 64, 3, 1, 1)),
    "an expanded gradient": lambda: Images(64, nn.Conv2d(64, 64, 3, 1, 1), nn.Conv2d(64, 64, 3, 1, 1), Expanded()),
    "channels last": lambda: Images(
        64, nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), is_last=True
    ),
    "transposed": lambda: Images(64, nn.Conv2d(64, 64, 3, 1, 1), nn.ConvTranspose2d(64, 32, 4, 2, 1)),
    "a dilation": lambda: Images(64, nn.Conv2d(64, 64, 3, 1, 1), nn.Tanh(), nn.Conv2d(64, 64, 5, 2, 4, dilation=2)),
    "groups of few channels": lambda: Images(64, nn.Conv2d(64, 64, 3, 1, 1), nn.Conv2d(64, 4, 5, 1, 4, 2, groups=2)),
    "groups of four": lambda: Images(64, nn.Conv2d(64, 64, 3, 1, 1), nn.Conv2d(64, 16, 3, 1, 1, groups=4), nn.Tanh()),
    "depthwise": lambda: Images(16, nn.Conv2d(16, 16, 1), nn.Tanh(), nn.Conv2d(16, 16, 7, 1, 6, 2, 16), Expanded()),
    "one dimension": lambda: Images(
        64, nn.Conv2d(64, 64, 3, 1, 1), nn.Flatten(2), nn.Tanh(), nn.Conv1d(64, 24, 5, 2, 4, dilation=2), nn.Tanh()
    ),
    "three dimensions": lambda: Images(
        64, nn.Conv2d(64, 64, 1), nn.Unflatten(2, (4, 8)), nn.Tanh(), nn.Conv3d(64, 64, 3, 1, 2, dilation=2), nn.Tanh()
    ),
    "bilinear": lambda: Images(32, nn.Conv2d(32, 32, 1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Tanh()),
    "nearest, an expanded gradient": lambda: Images(32, nn.Conv2d(32, 32, 1), nn.Upsample(scale_factor=2), Expanded()),
}


@pytest.mark.parametrize("name", IMAGES)
def test_a_step_of_images(name: str) -> None:
    """Of what oneDNN copies into blocks of channels, and torch into another order."""
    close(*compare(IMAGES[name], torch.optim.SGD))


def test_a_loss_over_alignments() -> None:
    close(*compare(Transcripts, torch.optim.SGD))


def test_alignments_with_targets_in_a_row_are_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"all 128 targets of 4 sequences in a row, .* as \(sequences, length\)"):
        compare(lambda: Transcripts(is_flat=True), torch.optim.SGD)


def test_a_product_of_three_factors_is_made_for_one_output_at_a_time() -> None:
    close(*compare(Products, torch.optim.SGD))


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss"])
def test_a_loss_keeps_the_storage_of_its_elements(name: str) -> None:
    close(*compare(lambda: Loss(name), torch.optim.SGD))


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        torch.optim.Adagrad,
        torch.optim.Adafactor,
    ],
)
def test_steps_of_an_optimizer(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    close(*compare(MODELS["norm"], optimizer, steps=2))


@pytest.mark.parametrize("name", ["linear", "sums", "language, tied"])
def test_micro_batches(name: str) -> None:
    close(*compare(MODELS[name], torch.optim.AdamW, micro_batches=2))


@pytest.mark.parametrize("name", ["sums", "language, tied", "norm"])
def test_large_blocks_come_and_go_in_the_order_of_the_trace(name: str) -> None:
    def run() -> nn.Module:
        model, x = MODELS[name](), torch.rand(B, S, H)
        loss_of(model, x).backward()
        return model

    run()
    with torch.device("meta"):
        model, x = MODELS[name](), torch.rand(B, S, H)
    trace = trace_step(loss_of, model, [x])
    least = 4 * B * S * H // 2
    inside = [e.nbytes for e in trace.events if e.phase in ("forward", "backward") and e.nbytes >= least]
    blocks = [b.nbytes for b in measure_peak(run).blocks if b.nbytes >= least]
    assert inside == blocks[-len(inside) :]
