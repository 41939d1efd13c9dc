"""The cross-entropy of a plan: kernels that keep logits or none, and loops that keep what a model returns."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.plan.planning import make_plan
from zeroshard.plan.shape.transformer import CHUNK_TOKENS

SEQUENCE = 8 * CHUNK_TOKENS
BIG = {"world_size": 8, "device": "a100-40", "seq": 8192, "stage": 3, "activations": "recompute"}


class Model(nn.Module):
    """A model of Transformers with a head, and a loss over a number of tokens at a time."""

    def __init__(self, config: object, chunk: int) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        self.model, self.chunk = transformers.LlamaModel(config), chunk
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)  # type: ignore[attr-defined]

    def part(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm_head(hidden).float(), labels, reduction="sum")

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=input_ids, use_cache=False)[0].flatten(0, 1)
        pairs = zip(hidden.split(self.chunk), labels.flatten().split(self.chunk), strict=True)
        run = self.part if self.chunk == SEQUENCE else lambda *pair: checkpoint(self.part, *pair, use_reentrant=False)
        return torch.stack([run(*pair) for pair in pairs]).sum() / labels.numel()


@pytest.mark.rotates
def test_a_chunked_loss_saves_what_a_traced_one_saves(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=64000, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64, device="meta")
    saved = []
    for stage, ranks in ((0, 1), (3, 4)):
        asked = {"world_size": ranks, "stage": stage, "device": "h100-80"}
        with torch.device("meta"):
            whole, parts = Model(config, SEQUENCE), Model(config, CHUNK_TOKENS)
        inputs = {"input_ids": tokens, "labels": tokens}
        traced = [make_plan(one, **asked, inputs=inputs).peak_bytes for one in (whole, parts)]
        shapes = [make_plan(tmp_path, **asked, seq=SEQUENCE, loss=loss).peak_bytes for loss in ("logits", "chunked")]
        saved.append((traced[0] - traced[1], shapes[0] - shapes[1]))
    for of_trace, of_shape in saved:
        assert of_trace > 4 << 30
        assert of_shape == pytest.approx(of_trace, rel=0.03)


def test_kernels_of_a_loss_are_an_option_of_shapes() -> None:
    plans = {loss: zs.plan("llama-3-8b", **BIG, loss=loss) for loss in ("logits", "fused", "chunked")}  # type: ignore[arg-type]
    peaks = [one.peak_bytes for one in plans.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert plans["chunked"].options["loss"] == "chunked"
    assert zs.plan("llama-3-8b", **BIG).peak_bytes == peaks[0]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss must be one of logits, fused, chunked; got 'liger'"):
        zs.plan("gpt2", world_size=1, loss="liger")
    with pytest.raises(TypeError, match="loss: a name is of shapes only; Linear is a module"):
        zs.plan(nn.Linear(4, 4), world_size=1, inputs=[torch.zeros(2, 4)], loss="chunked")
    with pytest.raises(TypeError, match="loss: of modules only; gpt2 is a shape"):
        zs.plan("gpt2", world_size=1, loss=lambda out: out)
    with pytest.raises(ValueError, match="loss= with nanotron: its kernels have their own"):
        zs.plan("llama-3-8b", world_size=8, system="nanotron", loss="fused")
    searched = zs.search("gpt2", world_size=1, device="t4", batches=(8,), tensors=(1,), pipes=(1,), loss="chunked")
    assert all(one.options.words()["loss"] == "chunked" for one in searched.candidates)


def test_a_plan_without_room_suggests_a_chunked_loss() -> None:
    plan = zs.plan("llama-3-8b", **BIG, batch=2)  # type: ignore[arg-type]
    assert plan.verdict == "no"
    (change,) = [one for one in plan.changes if one.what == "a chunked loss"]
    made = zs.plan("llama-3-8b", **BIG, batch=2, loss="chunked")  # type: ignore[arg-type]
    assert change.total_bytes == made.total_bytes
    assert "a chunked loss" not in [one.what for one in made.changes]


def test_a_loop_that_keeps_logits_is_named_where_they_have_no_room() -> None:
    """The note has the bytes of the logits in fp32; with room for them, or without logits, there is none."""

    def notes(**changed: object) -> list[str]:
        return [one for one in zs.plan("llama-3-8b", **BIG | changed).notes if "`del out`" in one]  # type: ignore[arg-type]

    (note,) = notes(device="h100", batch=3)
    assert "takes up to 11.74 GiB more" in note
    assert round(3 * 8192 * 128256 * 4 / 2**30, 2) == 11.74
    assert notes(device="h100", batch=1) == notes(device="h100", batch=3, loss="chunked") == []
    # A plan that does not fit says so already; one that is tight has still less room.
    assert notes(device="a100-40", batch=3) == []
    tight = zs.plan("llama-3-8b", **BIG | {"device": "h100", "batch": 4})  # type: ignore[arg-type]
    assert (tight.verdict, len(tight.notes)) == ("tight", 1)


class Returns(nn.Module):
    """Returns a loss beside something large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"loss": y.mean(), "large": y.detach().expand(2**11, *y.shape).contiguous()}


def test_what_a_module_returns_beside_its_loss_is_counted() -> None:
    asked = {"world_size": 1, "device": "t4", "precision": "fp32", "stage": 0}
    x = torch.zeros(2**14, 64, device="meta")
    (note,) = [one for one in zs.plan(Returns().to("meta"), **asked, inputs=[x]).notes if "`del out`" in one]  # type: ignore[arg-type]
    assert "takes up to 8.00 GiB more" in note
