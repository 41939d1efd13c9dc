"""The arguments of `shard()`: a few for what is sharded and how, all else in `Settings`, earlier spellings refused."""

import dataclasses
import inspect

import pytest
import torch

import zeroshard as zs

ARGUMENTS = (
    "stage residency activations offload parameters ignored precision units".split()
    + "replicas mesh reduction outer weights settings".split()
)
"""After model and optimizer."""

NEW = {
    "cut": "leave it out",
    "activation_checkpointing": "write activations='recompute'",
    "init_fn": "write weights=function",
    "watchdog_s": r"write settings=zs\.Settings\(watchdog_s=\.\.\.\)",
    "heartbeat_s": r"zs\.Settings\(heartbeat_s=",
    "shared_memory": r"zs\.Settings\(shared_memory=",
    "elementwise": r"zs\.Settings\(elementwise=",
    "forward_methods": r"zs\.Settings\(forward_methods=",
}


def test_the_arguments_are_these() -> None:
    signature = inspect.signature(zs.shard)
    assert list(signature.parameters) == ["model", "optimizer", *ARGUMENTS]
    assert all(signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ARGUMENTS)


@pytest.mark.parametrize("name", NEW)
def test_an_earlier_spelling_is_refused_with_the_new_one(name: str) -> None:
    with pytest.raises(TypeError, match=rf"shard\(\) has no argument {name}=: .*{NEW[name]}"):
        zs.shard(torch.nn.Linear(2, 2), **{name: None})


def test_an_unknown_argument_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"shard\(\) has no argument stages=: did you mean stage=\?"):
        zs.shard(torch.nn.Linear(2, 2), stages=3)  # type: ignore[call-arg]


def test_settings_cannot_change_and_are_given_by_name() -> None:
    settings = zs.Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.watchdog_s = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        zs.Settings(60.0)  # type: ignore[misc]


def test_the_loop_of_rank_0_is_no_with_statement() -> None:
    zero = zs.shard(torch.nn.Linear(2, 2))
    assert [*zero.on_first_rank()] == [None]
    with pytest.raises(TypeError, match=r"write `for _ in zero\.on_first_rank\(\):`"), zero.on_first_rank():  # type: ignore[attr-defined]
        pass


def test_a_mean_of_numbers_needs_no_tensor() -> None:
    assert zs.mean_across_ranks(0.5) == 0.5
