"""offload="auto": the least that must leave the device, chosen alike on all ranks, and said."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.oracle import run_cases
from tests.rotation import third
from zeroshard.table.cells import Elsewhere
from zeroshard.train.config import load_config
from zeroshard.train.planned import choose_sharding

WIDTH, DEPTH = 64, 16
NUMEL = DEPTH * WIDTH * WIDTH


def sharded(stage: int, bytes_per_parameter: float | None, precision: str = "fp32") -> zs.Zero:
    """Shard a model whose states may take so many bytes a parameter of the device; None for a CPU as it is.

    They may take half of it, as docs/offload.md says.
    """
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    room_bytes = None if bytes_per_parameter is None else int(2 * bytes_per_parameter * NUMEL)
    settings, optimizer = zs.Settings(device_bytes=room_bytes), torch.optim.AdamW(model.parameters())
    return zs.shard(model, optimizer, stage=stage, precision=precision, offload="auto", settings=settings)


def moved_part(zero: zs.Zero) -> float:
    cell = zero.residency.states
    return cell.fraction if isinstance(cell, Elsewhere) else 0.0


def kept(zero: zs.Zero) -> int:
    return sum(nbytes for name, nbytes in zero.memory().predicted_bytes.items() if name not in ("host", "file"))


@pytest.mark.parametrize(
    ("bytes_per_parameter", "states", "gradients"),
    [
        (None, 0.0, ""),
        (17, 0.0, ""),
        (12, 1 / 2, "device"),
        (9, 7 / 8, "device"),
        (7, 3 / 4, "host"),
        (4.5, 1.0, "host"),
    ],
)
def test_only_what_does_not_fit_is_moved(bytes_per_parameter: float | None, states: float, gradients: str) -> None:
    zero = sharded(0, bytes_per_parameter)
    # One rank in fp32: 4 bytes stay; of 8 bytes of states, or of 12 with gradients, a part goes, in whole matrices.
    assert not states or zero.residency.gradients.memory == gradients
    assert abs(moved_part(zero) - states) <= 1.5 / DEPTH
    if bytes_per_parameter is not None:
        assert kept(zero) <= bytes_per_parameter * NUMEL
    assert zero.residency.parameters.memory == "device"
    assert "offload='auto': " + ("zs.Offload(" if states else "nothing is offloaded") in zero.summary()


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.SGD, torch.optim.AdamW])
def test_states_count_as_their_optimizer_keeps_them(kind: type[torch.optim.Optimizer]) -> None:
    def shard(**options: Any) -> zs.Zero:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        return zs.shard(model, kind(model.parameters(), lr=0.1), stage=0, **options)  # type: ignore[call-arg]

    needed = kept(shard())
    for nbytes, is_moved in ((needed, False), (needed - 1, True)):
        zero = shard(offload="auto", settings=zs.Settings(device_bytes=2 * nbytes))
        assert (zero.residency.states.memory == "host") is is_moved


def test_parameters_follow_at_stage_3_where_states_are_not_enough(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zeroshard"):
        zero = sharded(3, 3.0)
    assert (moved_part(zero), zero.residency.parameters.memory) == (1.0, "host")
    assert kept(zero) <= 3 * NUMEL
    assert [one.message for one in caplog.records if "offload='auto'" in one.message] == [
        line for line in zero.summary().splitlines() if "offload='auto'" in line
    ]


def test_where_nothing_fits_the_error_has_the_numbers() -> None:
    needs = r"need 1\.\d MiB of a rank's device, and 256\.\d KiB .* stage=3 can also offload"
    with pytest.raises(ValueError, match=needs):
        sharded(0, 1.0)
    with pytest.raises(ValueError, match=r"they may use 655 bytes, half of the 1\.3 KiB free\. Use more ranks"):
        sharded(3, 0.01)


def chosen(stage: int, bytes_per_parameter: float) -> str:
    return str(sharded(stage, bytes_per_parameter, "bf16").residency)


def test_all_ranks_choose_the_same() -> None:
    cases = [(1, 9.0), (2, 8.0), (3, 5.0), (3, 12.0)]
    for case, found in run_cases(chosen, 3, third(cases)).items():
        assert len(set(found)) == 1, case


def test_a_plan_moves_the_least_that_fits() -> None:
    asked = {"world_size": 1, "seq": 1024, "activations": "recompute", "stage": 0}
    plan = zs.plan("gpt2-large", device="v100-32", offload="auto", **asked)
    assert plan.asked.offload is None and plan.verdict == "fits"
    small = zs.plan("gpt2-xl", device="rtx4090", offload="auto", **asked)
    assert small.verdict == "fits" and small.asked.offload is not None
    less = zs.Offload(states=small.asked.offload.states - 0.01)
    assert zs.plan("gpt2-xl", device="rtx4090", offload=less, **asked).verdict != "fits"


def test_a_training_on_a_cpu_moves_nothing() -> None:
    config = load_config(None, ["zero.stage=auto", "zero.offload=auto", "run.ranks=2"])
    resolved = choose_sharding(config)
    assert resolved.zero.offload == "" and resolved.zero.stage in range(4)
