"""Seven kinds of Transformers models, unmodified: trained at every stage as without it, saved whole, and reloaded."""

import contextlib
import copy
import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Run, Sharded, assert_matches, assert_same, seed
from zeroshard.testing import run_ranks

from . import tiny

STEPS = 3
WORDS = 900
"""A vocabulary so large that the embedding is a unit of its own."""
EMBEDDINGS = {
    "transformer.wte",
    "model.embed_tokens",
    "shared",
    "bert.embeddings",
    "vit.embeddings",
}


def train(run: Run, name: str, folder: str) -> None:
    """Train with the model's own dropout and loss, then save it as Transformers does."""
    seed(99)
    kind = tiny.kinds()[name]
    model = kind.build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.shard(model, optimizer)
    for step in range(STEPS):
        seed(step, run.rank)
        loss = model(**kind.batch(step, run.rank)).loss
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)
    with run.gathered():
        run.record(logits=tiny.logits(model, kind), state=model.state_dict())
        if isinstance(run, Sharded) and run.rank == 0:
            model.save_pretrained(Path(folder) / str(run.stage))


@pytest.mark.product
@pytest.mark.parametrize("name", tiny.NAMES)
def test_training_saving_and_reloading(name: str, tmp_path: Path) -> None:
    # assert_matches requires the losses, logits and parameters of the oracle.
    by_rank = assert_matches(functools.partial(train, name=name, folder=str(tmp_path)), 2, STAGES)
    kind = tiny.kinds()[name]
    for stage, result in by_rank[0].items():
        said = result["records"][-1]["logits"]
        plain = kind.build()
        report = plain.load_state_dict(result["records"][-1]["state"])
        assert not report.missing_keys
        assert not report.unexpected_keys
        assert_same(said, tiny.logits(plain, kind), f"state_dict of stage {stage}")
        saved = kind.model.from_pretrained(tmp_path / str(stage))
        assert_same(said, tiny.logits(saved, kind), f"save_pretrained at stage {stage}")


def half_by_stage(name: str) -> list[tuple[list[Tensor], dict[str, Tensor], Tensor]]:
    """Train in bfloat16 at each stage; return losses, parameters, and what the model says."""
    found, kind = [], tiny.kinds()[name]
    for stage in STAGES:
        seed(99)
        model = kind.build()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zero = zs.shard(model, optimizer, stage=stage, precision="bf16", settings=zs.Settings(watchdog_s=WATCHDOG_S))
        losses = []
        for step in range(STEPS):
            seed(step, zero.mesh.rank)
            loss = model(**kind.batch(step, zero.mesh.rank)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        with zero.gathered():
            found.append((losses, values(model), tiny.logits(model, kind)))
    return found


def half_in_one_process(name: str, world: int) -> tuple[list[list[Tensor]], dict[str, Tensor], Tensor]:
    """Train in one process: parameters in bfloat16 of fp32 masters, gradients summed in fp32 in rank order."""
    seed(99)
    kind = tiny.kinds()[name]
    masters = kind.build()
    model = copy.deepcopy(masters).train()
    for p in model.parameters():
        p.data = p.data.bfloat16()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    losses: list[list[Tensor]] = [[] for _ in range(world)]
    for step in range(STEPS):
        for rank in range(world):
            seed(step, rank)
            batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in kind.batch(step, rank).items()}
            loss = model(**batch).loss.float()
            loss.backward()
            losses[rank].append(loss.detach())
            for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                if p.grad is not None:
                    master.grad = p.grad.float() if master.grad is None else master.grad + p.grad
                    p.grad = None
        for master in masters.parameters():
            if master.grad is not None:
                master.grad *= 1 / world
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                p.copy_(master)
    return losses, values(model), logits_of_half(model, kind)


def logits_of_half(model: nn.Module, kind: tiny.Kind) -> Tensor:
    """Return what a model of bfloat16 parameters says, which takes what floats it is given in bfloat16."""
    batch = kind.batch
    cast = dataclasses.replace(
        kind, batch=lambda *at: {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch(*at).items()}
    )
    return tiny.logits(model, cast).float()


@pytest.mark.product
@pytest.mark.parametrize("name", tiny.NAMES)
def test_training_in_bfloat16_equals_one_process_that_casts_alike(name: str) -> None:
    losses, parameters, said = half_in_one_process(name, 2)
    for rank, by_stage in enumerate(run_ranks(half_by_stage, 2, name, timeout_s=TIMEOUT_S)):
        for stage, actual in zip(STAGES, by_stage, strict=True):
            assert_same((losses[rank], parameters, said), actual, f"[rank {rank}/2] stage {stage}")


def one_process(name: str) -> dict[str, Tensor]:
    """Return the values that Transformers gives a model in one process."""
    model = tiny.kinds()[name].build()
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.zero_()
    seed(5)
    model.initialize_weights()
    return values(model)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copy every parameter and buffer, under each of its names."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def from_meta(name: str) -> tuple[dict[str, Tensor], Tensor, set[str]]:
    """Shard a model on the meta device; return its values, what it says, and its units."""
    tiny.VOCABULARY = WORDS
    kind = tiny.kinds()[name]
    with torch.device("meta"):
        model = kind.build()
    run = Sharded(3)
    seed(5 + run.rank)
    run.shard(model, torch.optim.AdamW(model.parameters()))
    with run.gathered():
        return values(model), tiny.logits(model, kind), {unit.name for unit in run.zeros[0].units}


@pytest.mark.product
@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_meta_model_gets_its_own_first_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "VOCABULARY", WORDS)
    expected = one_process(name)
    for actual, said, units in run_ranks(from_meta, 2, name, timeout_s=TIMEOUT_S):
        assert_same(expected, actual)
        assert said.isfinite().all()
        assert units & EMBEDDINGS, f"no embedding among the units {units}"


def loaded_from(folder: str) -> Tensor:
    """Shard a model on the meta device with the weights of a directory; return what it says."""
    kind = tiny.kinds()["llama"]
    with torch.device("meta"):
        model = kind.build()
    zero = zs.shard(model, stage=3, weights=folder, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    with zero.gathered():
        return tiny.logits(model, kind)


def test_a_meta_model_takes_the_weights_of_save_pretrained(tmp_path: Path) -> None:
    kind = tiny.kinds()["llama"]
    seed(3)
    model = kind.build()
    model.save_pretrained(tmp_path)
    for said in run_ranks(loaded_from, 2, str(tmp_path), timeout_s=TIMEOUT_S):
        assert_same(tiny.logits(model, kind), said)


def generate() -> list[list[list[int]]]:
    """Generate texts of another length on each rank, between two steps, at each stage."""
    kind, by_stage = tiny.kinds()["llama"], []
    for stage in STAGES:
        seed(99)
        model = kind.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        texts = []
        for step in range(2):
            model(**kind.batch(step, 0)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with zero.gathered():
                prompt = kind.batch(step, 0)["input_ids"][:1, :3]
                made = model.generate(prompt, max_new_tokens=3 + 2 * zero.mesh.rank, do_sample=False, pad_token_id=0)
            texts.append(made[0].tolist())
        by_stage.append(texts)
    return by_stage


def test_generate_under_gathered_is_the_same_at_every_stage() -> None:
    short, long = run_ranks(generate, 2, timeout_s=TIMEOUT_S)
    assert short.count(short[0]) == long.count(long[0]) == len(STAGES)
    for one, other in zip(short[0], long[0], strict=True):
        assert (len(one), len(other)) == (6, 8)
        assert other[: len(one)] == one


def resize() -> list[tuple[str, bool]]:
    """Try to resize at each stage, outside and under gathered; return errors, and whether the model still works."""
    kind, found = tiny.kinds()["llama"], []
    for stage in STAGES:
        seed(99)
        model = kind.build()
        zero = zs.shard(
            model, torch.optim.AdamW(model.parameters()), stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S)
        )
        for context in (contextlib.nullcontext(), zero.gathered(writeback=True)):
            error = ""
            try:
                with context:
                    model.resize_token_embeddings(80)
            except RuntimeError as caught:
                error = str(caught)
            found.append((error, bool(model(**kind.batch(0, 0)).loss.isfinite())))
    return found


def test_resizing_embeddings_is_refused_with_the_way_to_do_it() -> None:
    for found in run_ranks(resize, 2, timeout_s=TIMEOUT_S):
        assert len(found) == 2 * len(STAGES)
        for error, still_works in found:
            assert re.search(r"resize.* before zs\.shard\(\)", error), error
            assert still_works
