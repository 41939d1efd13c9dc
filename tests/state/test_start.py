"""Joining, and arguments that are refused: an error on every rank, whichever rank was given them, and no wait."""

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests.errors import raised
from tools.settled import settled
from zeroshard.testing import run_ranks

TIMEOUT_S = 30.0
PROMPT_S = 5.0


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def not_joined() -> list[str]:
    """Shard under torchrun's variables without `zs.init()`, then in too small a process group, then as it should be."""
    texts = [raised(lambda: zs.shard(*plain()))]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=dist.PrefixStore(f"alone-{os.environ['RANK']}", store), rank=0, world_size=1)
    texts += [raised(lambda: zs.shard(*plain())), raised(zs.init)]
    dist.destroy_process_group()
    zs.init(seed=3)
    zs.shard(*plain())
    # Once more, and after shard(): nothing is joined again.
    assert zs.init(seed=4, backend="gloo").world_size == 2
    texts.append(raised(lambda: zs.init(backend="nccl")))
    dist.destroy_process_group()
    return texts


def test_ranks_that_were_started_together_do_not_train_apart() -> None:
    for texts in run_ranks(not_joined, 2, timeout_s=TIMEOUT_S, process_group=False):
        assert re.search(r"RuntimeError: WORLD_SIZE is 2, .* joined no process group.*zs\.init\(\)", texts[0])
        for text in texts[1:3]:
            assert re.search(r"RuntimeError: WORLD_SIZE is 2, .* process group of 1 rank.*zs\.init\(\)", text)
        assert re.search(r"RuntimeError: zs\.init\(backend='nccl'\) comes too late.*'gloo'", texts[3])


def alone_on_purpose() -> int:
    """One process that torchrun started, then variables of fewer ranks than the user's own process group has."""
    zs.shard(*plain())
    del os.environ["WORLD_SIZE"]
    return zs.init(seed=1).world_size


def own_process_group() -> tuple[int, int]:
    os.environ["WORLD_SIZE"] = "1"
    first = zs.shard(*plain()).mesh.world_size
    del os.environ["WORLD_SIZE"]
    return first, zs.shard(*plain()).mesh.world_size


def test_one_process_and_ones_own_process_group_are_as_they_are_meant() -> None:
    assert run_ranks(alone_on_purpose, 1, timeout_s=TIMEOUT_S, process_group=False) == [1]
    assert run_ranks(own_process_group, 2, timeout_s=TIMEOUT_S) == [(2, 2)] * 2


def at_init(**options: Any) -> None:
    zs.init(**options)


def at_shard(**options: Any) -> None:
    zs.shard(*plain(), **settled(options))


def at_shard_as_is(**options: Any) -> None:
    zs.shard(*plain(), **options)


def with_gradient() -> None:
    model, optimizer = plain()
    model(torch.ones(1, 4)).sum().backward()
    zs.shard(model, optimizer)


def with_gradient_of_a_frozen_parameter() -> None:
    model, _ = plain()
    model.bias.grad = torch.ones(2)
    model.bias.requires_grad_(False)
    zs.shard(model, torch.optim.SGD([model.weight], lr=0.1))


def with_trainable_bytes() -> None:
    model, _ = plain()
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn))
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Special(nn.Parameter):
    """A parameter that is more than its values."""


def with_a_class_of_its_own() -> None:
    model, _ = plain()
    model.bias = Special(model.bias.detach(), requires_grad=False)
    zs.shard(model, torch.optim.SGD([model.weight], lr=0.1))


def a_cell_by_name() -> None:
    zs.shard(*plain(), residency=zs.Residency(states="sharded"))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[..., None], dict[str, Any], str]] = {
    "gradient": (with_gradient, {}, r"ValueError: 2 parameter\(s\) have a gradient.*'weight'.*zero_grad"),
    "frozen gradient": (with_gradient_of_a_frozen_parameter, {}, r"ValueError: 1 parameter\(s\) have.*'bias'"),
    "trainable bytes": (with_trainable_bytes, {}, r"ValueError: Parameter 'weight' is trainable .*float8_e4m3fn"),
    "special class": (with_a_class_of_its_own, {}, r"TypeError: Parameter 'bias' is a .*Special"),
    "stage too large": (at_shard, {"stage": 4}, r"ValueError: stage .*got 4"),
    "stage as text": (at_shard, {"stage": "3"}, r"ValueError: stage .*got '3'"),
    "stage as a truth": (at_shard, {"stage": True}, r"ValueError: stage .*got True"),
    "stage as a list": (at_shard, {"stage": [3]}, r"ValueError: stage .*got \[3\]"),
    "residency": (at_shard, {"residency": 3}, r"TypeError: residency .*got 3"),
    "cell": (a_cell_by_name, {}, r"TypeError: Residency\(states=.*got 'sharded'"),
    "precision": (at_shard, {"precision": "fp8"}, r"ValueError: precision .*got 'fp8'"),
    "precision as a dtype": (at_shard, {"precision": torch.int8}, r"ValueError: precision .*got torch.int8"),
    "precision as a list": (at_shard, {"precision": ["bf16"]}, r"ValueError: precision .*got \['bf16'\]"),
    "reduction": (at_shard, {"reduction": "max"}, r"ValueError: reduction .*got 'max'"),
    "divisor": (at_shard, {"reduction": 0}, r"ValueError: reduction .*got 0"),
    "divisor without end": (at_shard, {"reduction": float("inf")}, r"ValueError: reduction .*got inf"),
    "divisor as a truth": (at_shard, {"reduction": True}, r"ValueError: reduction .*got True"),
    "units as text": (at_shard, {"units": "Linear"}, r"TypeError: units= .*'Linear'"),
    "units as a class": (at_shard, {"units": nn.Linear}, r"TypeError: units= .*Linear"),
    "forward methods as text": (
        at_shard,
        {"forward_methods": "generate"},
        r"TypeError: .*forward_methods.*'generate'",
    ),
    "replicas": (at_shard, {"mesh": 3}, r"ValueError: 3 replicas must divide the 2"),
    "replicas as text": (at_shard, {"mesh": "2"}, r"TypeError: mesh .*'2'"),
    "replicas of parts": (at_shard, {"mesh": 1.0}, r"TypeError: mesh .*1\.0"),
    "settings": (at_shard_as_is, {"settings": {"watchdog_s": 5}}, r"TypeError: settings must be a zs.Settings.*5"),
    "weights": (at_shard, {"weights": 3}, r"TypeError: weights .*got 3"),
    "watchdog of nothing": (at_shard, {"watchdog_s": 0}, r"ValueError: watchdog_s .*got 0"),
    "watchdog without end": (at_shard, {"watchdog_s": float("inf")}, r"ValueError: watchdog_s .*got inf"),
    "heartbeat as text": (at_shard, {"heartbeat_s": "30"}, r"ValueError: heartbeat_s .*got '30'"),
    "heartbeat in the past": (at_shard, {"heartbeat_s": -1.0}, r"ValueError: heartbeat_s .*got -1"),
    "seed as text": (at_init, {"seed": "one"}, r"ValueError: .*seed=.*got 'one'"),
    "seed of parts": (at_init, {"seed": 1.0}, r"ValueError: .*seed=.*got 1\.0"),
    "seed too large": (at_init, {"seed": 2**64 - 1}, r"ValueError: .*seed=.*got 18446744073709551615"),
    "limit": (at_init, {"watchdog_s": -3}, r"ValueError: watchdog_s .*got -3"),
}

EVERYWHERE = (at_init, a_cell_by_name)
"""What cannot be told to other ranks: they are not there yet, or it ends before zs.shard() begins."""


def refuse_everywhere_and_on_one_rank() -> dict[str, tuple[str, str]]:
    """Hand each refused argument to all ranks, then to rank 1 alone."""
    found = {}
    for name, (action, options, _) in REFUSED.items():
        begin_s = time.monotonic()
        everywhere = raised(lambda action=action, options=options: action(**options))
        is_culprit = dist.get_rank() == 1 or action in EVERYWHERE
        alone = raised((lambda a=action, o=options: a(**o)) if is_culprit else lambda: zs.shard(*plain()))
        assert time.monotonic() - begin_s < PROMPT_S, name
        found[name] = everywhere, alone
    # Nothing is left half done: the next call finds ranks that are together.
    zs.shard(*plain())
    return found


def test_what_one_rank_refuses_all_refuse() -> None:
    first, second = run_ranks(refuse_everywhere_and_on_one_rank, 2, timeout_s=2 * TIMEOUT_S)
    for name, (action, _, pattern) in REFUSED.items():
        for text in (*first[name][:1], *second[name]):
            assert re.match(pattern, text, re.DOTALL), f"{name}: {text}"
        if action not in EVERYWHERE:
            told = first[name][1]
            assert re.match(r"RankMismatchError: \[rank 0/2\] zs.shard\(\) was rejected on 1 of 2", told), told
            assert re.search(rf"rank 1: {pattern}", told, re.DOTALL), f"{name}: {told}"


@pytest.mark.parametrize("keep", [nn.LayerNorm, [nn.LayerNorm], ("LayerNorm",)])
def test_what_precision_keeps_is_a_tuple_of_classes(keep: Any) -> None:
    with pytest.raises(TypeError, match=r"Precision\(keep=...\) takes a tuple"):
        zs.Precision(keep=keep)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 0, -2.0, "static", [2.0]])
def test_a_loss_scale_is_a_positive_number(scale: Any) -> None:
    with pytest.raises(ValueError, match="loss_scale must be"):
        zs.Precision(loss_scale=scale)
