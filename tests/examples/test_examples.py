"""Each example runs on two or four ranks and does what its page says, beside a plain loop where there is one."""

import copy
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.source import REPOSITORY
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.rotates

EXAMPLES = REPOSITORY / "examples"
TIMEOUT_S = 100.0


def run_main(name: str, *args: Any) -> Any:
    """Run the main function of an example. Runs on a rank."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    return importlib.import_module(f"examples.{name}").main(*args)


def run(name: str, ranks: int, *args: Any) -> list[Any]:
    """Run an example on ranks as torchrun starts it; return what each returns."""
    return run_ranks(run_main, ranks, name, *args, process_group=False, timeout_s=TIMEOUT_S)


def test_fine_tuning_has_the_losses_of_one_process_and_exports(tmp_path: Path) -> None:
    import transformers

    from examples import fine_tune

    source, target = tmp_path / "model", tmp_path / "tuned"
    fine_tune.make_tiny(source)
    losses, same = run("fine_tune", 2, str(source), str(target), 6)
    assert losses == same
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    expected = []
    for step in range(6):
        ids = torch.cat([fine_tune.batch_of(step, rank, 128) for rank in (0, 1)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)
    tuned = transformers.LlamaForCausalLM.from_pretrained(target)
    ids = fine_tune.batch_of(99, 0, 128)
    found, wanted = (one(input_ids=ids, labels=ids).loss.item() for one in (tuned, model))
    assert found == pytest.approx(wanted, rel=1e-3)


def test_adapters_are_trained_alone_and_load_in_peft(tmp_path: Path) -> None:
    import peft

    from examples import lora

    (losses, states_bytes), (same, _) = run("lora", 2, str(tmp_path / "adapters"), 30)
    assert losses == same and losses[-1] < losses[0] - 0.2
    model = lora.build()
    adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert states_bytes == pytest.approx(2 * 4 * adapters / 2, rel=0.02)  # two states of AdamW, on two ranks
    base = lora.build().unload()
    saved = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    ids = lora.batch_of(29, 0)
    assert saved(input_ids=ids, labels=ids).loss.item() == pytest.approx(losses[-1], rel=0.05)


def test_dpo_prefers_and_shards_its_reference(tmp_path: Path) -> None:
    from examples import dpo

    whole_bytes = sum(parameter.nbytes for parameter in dpo.build().parameters())
    for logged, reference_bytes in run("dpo", 2, str(tmp_path), 24):  # TRL alone on both ranks' data: 0.45
        assert logged[-1]["loss"] < 0.5 < logged[0]["loss"]
        assert logged[-1]["rewards/accuracies"] > 0.9
        assert reference_bytes == pytest.approx(whole_bytes / 2, rel=0.01)


def test_vision_learns() -> None:
    for before, after in run("vision", 2):
        assert before < 0.5 and after > 0.9


def test_a_gan_moves_towards_the_data() -> None:
    for before, after in run("gan", 2):
        assert after < before / 2


def test_a_policy_learns() -> None:
    for first, last in run("reinforcement", 2):
        assert last > first + 0.1


def test_copies_hold_what_half_of_the_ranks_would() -> None:
    of_two, of_one = run("hybrid", 4, 2), run("hybrid", 4, 1)
    for (losses, held_bytes), (plain, sharded_bytes) in zip(of_two, of_one, strict=True):
        assert losses == pytest.approx(plain, rel=1e-5)
        assert held_bytes == 2 * sharded_bytes


def test_split_layers_have_the_losses_of_one_process() -> None:
    from examples import tensor_parallel

    torch.manual_seed(0)
    model = nn.Sequential(*(tensor_parallel.Block() for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for step in range(5):
        batch = tensor_parallel.batch_of(step, 0, 1)
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses in run("tensor_parallel", 4):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_offload_moves_states_and_keeps_the_bits() -> None:
    from examples import offload

    found = offload.main()
    assert len({loss for loss, _ in found.values()}) == 1
    held = {name: places for name, (_, places) in found.items()}
    assert held["all on the device"]["host"] == held["all on the device"]["file"] == 0
    assert held["states on the host"]["host"] > 2 * 4 * 6 * 128 * 129
    assert held["states in a file"]["file"] > 2 * 4 * 6 * 128 * 129
    assert held["states and parameters on the host"]["device"] < held["states on the host"]["device"]


def test_early_stopping_ends_all_ranks_with_the_best(tmp_path: Path) -> None:
    results = run("early_stopping", 2, str(tmp_path))
    assert results[0] == results[1]
    epochs, best, reloaded = results[0]
    assert 3 < epochs < 60
    assert reloaded == best


def test_the_notebook_runs_and_its_cells_run_again() -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    programs = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__notebook__"}
    for program in programs:
        exec(compile(program, "<notebook>", "exec"), names)
    first = copy.copy(names["losses"])
    exec(compile(programs[2], "<notebook>", "exec"), names)
    assert names["losses"][-1] < first[-1] < first[0]


def test_every_example_has_a_test() -> None:
    tests = Path(__file__).read_text() + (Path(__file__).parent / "test_zero_from_scratch.py").read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f'"{path.stem}"' in tests or f"import {path.stem}\n" in tests or path.name in tests, path.name
