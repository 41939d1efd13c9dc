"""What kernels of a GPU save, traced without one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard.plan.trace.events import Phase, Trace
from zeroshard.plan.trace.tracer import trace_step

from .saved_bytes import saved_by_module

B, S, H, HEADS = 2, 40, 64, 4
ROWS = B * S


class Function(nn.Module):
    """Calls a function on the output of a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = H) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(H, width, bias=False), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


def traced(model: nn.Module, dtype: torch.dtype = torch.bfloat16, personality: str = "cuda", **options: Any) -> Trace:
    x = torch.empty(B, S, H, dtype=dtype, device="meta")
    return trace_step(lambda model, x: model(x).sum(), model.to("meta", dtype), [x], personality=personality, **options)


def own(trace: Trace) -> int:
    """Return what the function saves, its layer aside."""
    return saved_by_module(trace)[""]


def attend(x: Tensor, mask: Tensor | None = None) -> Tensor:
    query, key, value = x.view(B, S, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


def test_dropout_saves_a_mask_of_bytes() -> None:
    model = Function(lambda x: F.dropout(x, 0.1))
    assert own(traced(model)) == ROWS * H
    assert own(traced(model, personality="cpu")) == 2 * ROWS * H


def test_dropout_that_drops_nothing_saves_nothing() -> None:
    assert "" not in saved_by_module(traced(Function(lambda x: F.dropout(x, 0.0))))
    assert "" not in saved_by_module(traced(Function(lambda x: F.dropout(x, 0.1, training=False))))


def test_layer_norm_keeps_statistics_in_fp32() -> None:
    model = Function(lambda x: F.layer_norm(x, (H,)))
    assert own(traced(model)) == 2 * ROWS * H + 2 * 4 * ROWS
    assert own(traced(model, personality="cpu")) == 2 * ROWS * H + 2 * 2 * ROWS


def test_rms_norm_saves_its_input_and_a_number_a_row() -> None:
    model = Function(nn.RMSNorm(H))
    trace = traced(model)
    assert saved_by_module(trace)["function"] == 2 * ROWS * H + 4 * ROWS
    gradients = sum(e.nbytes for e in trace.events if e.category == "gradient" and e.nbytes > 0)
    assert gradients == 2 * (H * H + H)


def test_attention_in_half_precision_saves_a_number_a_row() -> None:
    # All of queries, keys and values; the mixed heads; sums of the softmax in fp32; the state of the random numbers.
    assert own(traced(Function(attend, 3 * H))) == 2 * ROWS * 4 * H + 4 * ROWS * HEADS + 24


def test_attention_in_fp32_pads_its_sums() -> None:
    found = own(traced(Function(attend, 3 * H), torch.float32))
    assert found - 4 * ROWS * 4 * H - 4 * B * HEADS * 64 <= 16


def test_attention_with_a_mask_keeps_no_scores() -> None:
    def masked(x: Tensor) -> Tensor:
        return attend(x, torch.ones(S, S, dtype=torch.bool, device=x.device))

    found = own(traced(Function(masked, 3 * H)))
    assert found - 2 * ROWS * 4 * H - 4 * B * HEADS * 64 - 2 * S * S <= 16


def test_widths_of_heads_are_padded() -> None:
    def narrow(x: Tensor) -> Tensor:
        query, key, value = x.view(B, S, 3, HEADS, 12).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert mixed.shape == (B, HEADS, S, 12)
        return mixed

    assert own(traced(Function(narrow, 3 * HEADS * 12))) == 2 * ROWS * HEADS * 16 * 4 + 4 * ROWS * HEADS + 24


def test_flash_attention_has_a_gradient_in_fp32_in_its_backward() -> None:
    trace = traced(Function(attend, 3 * H))
    (taken,) = [e.nbytes for e in trace.events if e.operation.endswith("backward.default (workspace)") and e.nbytes > 0]
    rows = B * HEADS * 128  # 40 rounded up
    assert taken == 4 * rows * 32 + 4 * rows


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"])
@pytest.mark.parametrize("personality", ["cuda", "cpu"])
def test_a_loss_has_the_storage_of_its_elements(name: str, personality: str) -> None:
    def made(reduction: str) -> set[int]:
        model = Function(lambda x: getattr(F, name)(x, torch.zeros_like(x), reduction=reduction))
        events = traced(model, personality=personality).events
        return {e.nbytes for e in events if e.operation.startswith(f"aten.{name}.default") and e.nbytes > 0}

    assert max(made("mean")) == max(made("sum")) == 2 * ROWS * H
    assert made("none") == {2 * ROWS * H}


def test_attention_inside_torch_s_own_layers_is_rewritten() -> None:
    layer = nn.TransformerEncoderLayer(H, HEADS, 2 * H, dropout=0.1, batch_first=True)
    trace = traced(layer)
    operations = {event.operation for event in trace.events}
    assert "aten._scaled_dot_product_flash_attention.default" in operations
    masks = [e.nbytes for e in trace.events if e.operation == "aten.native_dropout.default" and e.nbytes > 0]
    assert sorted(masks) == sorted([2 * ROWS * H, ROWS * H] * 2 + [2 * ROWS * 2 * H, ROWS * 2 * H])


def test_a_recomputation_runs_the_same_kernels() -> None:
    inner = Function(lambda x: F.dropout(attend(x), 0.1), 3 * H)
    trace = traced(Function(lambda x: checkpoint(inner, x, use_reentrant=False)))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        operations = {event.operation for event in trace.events if event.phase is phase}
        assert "aten._scaled_dot_product_flash_attention.default" in operations


@pytest.mark.parametrize(("personality", "is_for_loop"), [("cuda", False), ("cpu", True)])
def test_optimizers_update_as_they_do_on_the_device(personality: str, is_for_loop: bool) -> None:
    trace = traced(nn.Linear(H, H), optimizer=torch.optim.AdamW, personality=personality)
    operations = {event.operation for event in trace.events if event.phase is Phase.UPDATE}
    assert ("aten._foreach_sqrt.default" in operations) is not is_for_loop
    assert ("aten.sqrt.default" in operations) is is_for_loop


def test_names_of_torch_are_left_as_they_were() -> None:
    before = (F.dropout, F.scaled_dot_product_attention, F.linear)
    traced(nn.TransformerEncoderLayer(H, HEADS, 2 * H, batch_first=True))
    assert before == (F.dropout, F.scaled_dot_product_attention, F.linear)
