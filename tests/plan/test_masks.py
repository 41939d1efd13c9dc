"""Masks of Transformers in plans: there where a run has them, from the values of the plan's inputs."""

import importlib
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import record_function

import zeroshard as zs
from benchmarks.peaks import measure_peak
from tests.plan.test_own_runs import CPU
from zeroshard.plan.trace.masks import ASKED, MODULES, Masks
from zeroshard.testing import run_ranks
from zeroshard.torch_private import fake_tensors

transformers = pytest.importorskip("transformers")
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100, "pad_token_id": 0}
WIDE = SIZES | {"hidden_size": 32, "intermediate_size": 64}
BATCH, LENGTH = 2, 64
SINGLE = {"world_size": 1, "device": CPU, "stage": 0, "precision": "fp32"}


def made(kind: str, **options: Any) -> nn.Module:
    """Return a model by the name of its class; decoders have one head of keys."""
    heads = {"num_key_value_heads": 1} if kind.endswith("CausalLM") else {}
    cls = getattr(transformers, kind)
    model: nn.Module = cls(cls.config_class(**WIDE | heads | options))
    return model


def given(mask: str, length: int = LENGTH) -> dict[str, Tensor]:
    """Return tokens and labels with no mask, a mask of ones, one with padding, or positions of packed sequences."""
    tokens = torch.randint(1, 100, (BATCH, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "labels": tokens}
    if mask in ("ones", "padded"):
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][0, length - 9 :] = mask == "ones"
    if mask == "packed":
        inputs["position_ids"] = torch.arange(length).remainder(length // 2).expand(BATCH, -1)
    return inputs


def attended(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[tuple[Any, ...]]:
    """Return the masks, the heads of keys, and whether attention is causal, of each layer of a run or plan."""
    seen, attention = list[tuple[Any, ...]](), F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *rest: Any, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        shape = None if attn_mask is None else (*attn_mask.shape, attn_mask.dtype)
        seen.append((shape, key.shape[1], options.get("is_causal")))
        return attention(query, key, *rest, attn_mask=attn_mask, **options)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", watched)
        run()
    return seen


@pytest.mark.parametrize(
    ("kind", "options", "mask"),
    [
        ("LlamaForCausalLM", {}, "ones"),
        ("LlamaForCausalLM", {"use_cache": False}, "none"),
        ("LlamaForCausalLM", {"use_cache": False}, "padded"),
        ("LlamaForCausalLM", {"use_cache": False}, "packed"),
        ("MistralForCausalLM", {"use_cache": False, "sliding_window": 2 * LENGTH}, "ones"),
        ("MistralForCausalLM", {"use_cache": False, "sliding_window": LENGTH // 4}, "ones"),
        ("BertForMaskedLM", {}, "ones"),
        ("BertForMaskedLM", {}, "padded"),
        ("BartForConditionalGeneration", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}, "ones"),
    ],
    ids=str,
)
def test_a_plan_has_the_masks_of_a_run(
    kind: str, options: dict[str, Any], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = made(kind, **options), given(mask)
    run = attended(monkeypatch, lambda: model(**inputs))
    has_none = mask in ("none", "ones") and LENGTH // 4 not in options.values()
    assert {shape is None for shape, *_ in run} == {has_none}
    assert attended(monkeypatch, lambda: zs.plan(model, inputs=inputs, **SINGLE)) == run
    assert attended(monkeypatch, lambda: model(**inputs)) == run


def test_inputs_without_values_have_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = made("LlamaForCausalLM"), [(None, 1, True)]
    for mask in ("padded", "packed"):
        inputs = {name: one.to("meta") for name, one in given(mask).items()}
        assert attended(monkeypatch, lambda inputs=inputs: zs.plan(model, inputs=inputs, **SINGLE)) == run  # type: ignore[misc]


def most_bytes(mask: str) -> int:
    """Return the peak of torch's allocator in a third step at stage 3. Runs in a process of its own."""

    def train(steps: int = 3) -> None:
        model = made("LlamaForCausalLM", use_cache=False)
        optimizer, inputs = torch.optim.AdamW(model.parameters()), given(mask, 4 * LENGTH)
        zs.shard(model, optimizer, stage=3, settings=zs.Settings(shared_memory=False))
        for step in range(steps):
            with record_function(f"step {step}"):
                model(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    train(1)
    return max(one.live_bytes for one in measure_peak(train).blocks if "step 2" in one.operations)


def test_a_run_takes_what_a_plan_with_or_without_a_mask_says() -> None:
    model, options = (
        made("LlamaForCausalLM", use_cache=False),
        {**SINGLE, "world_size": 2, "stage": 3, "shared_memory": False},
    )
    peaks = []
    for mask in ("ones", "padded"):
        plan = zs.plan(model, inputs=given(mask, 4 * LENGTH), loss=lambda out: out.loss, **options)
        peaks.append(plan.ranks[0].allocator_bytes)
        assert peaks[-1] == pytest.approx(run_ranks(most_bytes, 2, mask)[0], rel=0.01)
    assert peaks[1] > 1.1 * peaks[0]


def test_a_model_that_reads_its_own_mask_asks_for_the_value() -> None:
    class Reading(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x) if mask.all() else super().forward(2 * x)

    with pytest.raises(RuntimeError, match="the model reads some"):
        zs.plan(Reading(4, 4), inputs=[torch.zeros(2, 4), torch.ones(2, dtype=torch.bool)], **SINGLE)


@pytest.mark.parametrize("name", MODULES)
def test_transformers_asks_by_this_name_and_gets_its_function_back(name: str) -> None:
    module, one, other = importlib.import_module(name), fake_tensors(), fake_tensors()
    before = getattr(module, ASKED)
    with one:
        x = torch.empty(1)
    with other:
        y = torch.empty(1)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(Masks().read(one))
        second.enter_context(Masks().read(other))
        assert [getattr(module, ASKED)(tensor) for tensor in (x, y)] == [False, False]
        first.close()  # traces of two threads end in any order
        assert [getattr(module, ASKED)(tensor) for tensor in (x, y)] == [True, False]
    assert getattr(module, ASKED) is before
    assert before(x)
