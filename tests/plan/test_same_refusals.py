"""`zs.shard` and `zs.plan` resolve their common arguments by the same functions: the same rows, the same refusals."""

from typing import Any

import pytest
import torch

import zeroshard as zs

TREATED = zs.Residency(activations=zs.activations_of("recompute"))
REFUSED: list[dict[str, Any]] = [
    {"stage": 1, "residency": "C1"},
    {"stage": "auto", "residency": "C1"},
    {"stage": 4},
    {"stage": "2"},
    {"stage": True},
    {"residency": "C9"},
    {"residency": 3},
    {"residency": TREATED, "activations": "compress"},
    {"activations": "none"},
    {"activations": ["recompute", "recompute"]},
    {"offload": 0.5},
    {"offload": "states=much"},
    {"offload": zs.Offload(parameters=1.0), "stage": 2},
    {"parameters": "whole"},
    {"parameters": {"nothing": "replicated"}},
]


def refusal_of(call: Any) -> tuple[type[Exception], str]:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return caught.type, str(caught.value)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


@pytest.mark.parametrize("asked", REFUSED, ids=str)
def test_a_refusal_has_one_text(asked: dict[str, Any]) -> None:
    inputs = [torch.ones(2, 4)]
    planned = refusal_of(lambda: zs.plan(model(), world_size=1, device="h100-80", inputs=inputs, **asked))
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    assert refusal_of(lambda: zs.shard(made, optimizer, **asked)) == planned


def test_a_row_keeps_its_own_activations() -> None:
    plan = zs.plan("gpt2", world_size=2, device="h100-80", residency=TREATED)
    assert plan.asked.row == TREATED
