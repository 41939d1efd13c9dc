"""Launches of real training that exchange through a mailbox: against one process, and repeated from their logs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.contract.blocks import examples, run_block
from tests.contract.source import REPOSITORY
from zeroshard.outer.island_log import replay
from zeroshard.outer.island_model import ModelShards
from zeroshard.outer.mailbox_wire import MailboxError
from zeroshard.testing import run_ranks

from .islands import at_once, mailbox, secret_in

EVERY, STEPS = 3, 9


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch(island: str, rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * ord(island) + 10 * step + rank))


def train_island(options: zs.Outer, stage: int, precision: Any) -> dict[str, torch.Tensor]:
    """Train an island, or as one of two islands of this launch, and return its weights. Runs on each rank."""
    rank, ranks = (mesh := zs.init()).rank, mesh.world_size
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    together: Any = {} if options.is_alone else {"mesh": 2}
    zero = zs.shard(model, optimizer, stage=stage, precision=precision, outer=options, **together)
    held = zero.memory().resident_bytes
    assert not options.is_alone or sum(nbytes for column, nbytes in held.items() if "host" in column) > 0, held
    for step in range(STEPS):
        island = options.island or "ab"[2 * rank // ranks]
        model(batch(island, zero.mesh.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.finish()
    zero.check_copies()
    with zero.gathered():
        return {name: value.clone() for name, value in model.state_dict().items()}


def launch(options: zs.Outer, ranks: int, stage: int, precision: str = "fp32") -> Any:
    found, *others = run_ranks(train_island, ranks, options, stage, precision, process_group=ranks > 1)
    assert all(torch.equal(found[name], other[name]) for other in others for name in found)
    return found


def plain(ranks: int) -> dict[str, torch.Tensor]:
    """The oracle: two copies in one process, whose changes are added in the order of islands."""
    models = {name: make_model() for name in "ab"}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=0.01) for name, model in models.items()}
    anchors = [parameter.detach().clone() for parameter in models["a"].parameters()]
    for step in range(STEPS):
        for name, model in models.items():
            for rank in range(ranks):
                (model(batch(name, rank, step)).square().mean() / ranks).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for anchor, first, second in zip(anchors, *(m.parameters() for m in models.values()), strict=True):
                    anchor += ((first - anchor) + (second - anchor)) * 0.5
                    first.copy_(anchor)
                    second.copy_(anchor)
    return models["a"].state_dict()


@pytest.mark.parametrize(("ranks", "stage", "bits"), [(1, 3, 32), (2, 1, 32), (2, 3, 32), (2, 3, 8), (2, 1, 4)])
def test_waiting_islands_have_the_bits_of_one_process(ranks: int, stage: int, bits: int, tmp_path: Path) -> None:
    """In few bits, those of islands of one launch: all elements of a rank share a scale."""
    with mailbox(tmp_path) as box:
        asked = partial(
            zs.Outer, islands=2, every=EVERY, bits=bits, address=box.address, secret_file=secret_in(tmp_path)
        )
        first, second = at_once(*(partial(launch, asked(island=name), ranks, stage) for name in "ab"))
    together, expected = launch(zs.Outer(every=EVERY, bits=bits), 2 * ranks, stage), plain(ranks)
    for name, value in expected.items():
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], together[name]), "islands of one launch have other bits"
        if bits < 32:
            assert 0 < (first[name] - value).abs().max() < 0.02  # the changes of three steps are 0.03
        elif ranks == 1:
            assert torch.equal(first[name], value)
        else:
            torch.testing.assert_close(first[name], value, rtol=0, atol=1e-6)


def test_islands_that_do_not_wait_are_repeated_from_their_logs_bit_for_bit(tmp_path: Path) -> None:
    with mailbox(tmp_path) as box:
        asked = partial(
            zs.Outer,
            islands=2,
            every=1,
            staleness=None,
            address=box.address,
            secret_file=secret_in(tmp_path),
            log=tmp_path / "log",
        )
        runs = at_once(*(partial(launch, asked(island=name), 2, 3, "bf16") for name in "ab"))
    assert all(replay(tmp_path / "log" / f"{name}-{rank}").changes > 0 for name in "ab" for rank in (0, 1))
    again = launch(replace(asked(island="a"), log=None, replay=tmp_path / "log"), 2, 3, "bf16")
    assert all(torch.equal(runs[0][name], again[name]) for name in again)


def numbered(frozen: str = "") -> nn.Sequential:
    """Return a model each of whose elements has a value of its own."""
    model, count = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))), 0
    for name, parameter in model.named_parameters():
        parameter.data.copy_(torch.arange(count, count + parameter.numel()).view(4, 4))
        parameter.requires_grad_(name[0] not in frozen)
        count += parameter.numel()
    return model


def cut(model: nn.Module, **options: Any) -> zs.Zero:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return zs.shard(model, torch.optim.SGD(trained, lr=0.1), **options)


CUTS: list[tuple[str, dict[str, Any]]] = [
    ("", {"stage": 3, "units": [nn.Linear]}),
    ("", {"stage": 1, "units": [nn.Linear]}),
    ("", {"stage": 3, "units": [nn.Linear], "parameters": {"0": "replicated"}}),
    ("", {"stage": 3, "units": []}),
    ("", {"stage": 2, "units": []}),
    ("", {"stage": 0, "units": [nn.Linear]}),
    ("0", {"stage": 3, "units": [nn.Linear]}),
    ("2", {"stage": 3, "units": [nn.Linear]}),
]


def described(address: str, secret: str) -> tuple[list[tuple[list[list[float]], Any]], str]:
    """Return what each cut has on each rank, with how islands describe it, and why two islands differ."""
    zs.init()
    found = []
    for frozen, options in CUTS:
        shards = ModelShards(cut(numbered(frozen), **options)._engine)
        found.append((shards.texts(str(shards.read().tolist())), shards.facts))
    outer = partial(zs.Outer, every=1, address=address, secret_file=secret, islands=2)
    first = cut(numbered(), stage=3, units=[nn.Linear], outer=outer(island="a"))
    with pytest.raises(MailboxError) as caught:
        cut(numbered(), stage=3, units=[], outer=outer(island="b"))
    first.detach()
    return found, str(caught.value)


def test_islands_whose_ranks_keep_other_elements_are_refused(tmp_path: Path) -> None:
    with mailbox(tmp_path) as box:
        for found, text in run_ranks(described, 2, box.address, str(secret_in(tmp_path)), timeout_s=60):
            for values, facts in found:
                for other_values, other_facts in found:
                    assert (facts == other_facts) == (values == other_values)
            assert "island 'b' has shards='0.weight[0:16], 1.weight[0:16], ... on rank 0, CRC-32 " in text
            assert "the other islands shards='0.weight[0:16], 1.weight[0:16], 2.weight[0:16], ... on rank 0" in text
            assert "Give islands equal units=, precision= and frozen parameters, and stage 0 all or none." in text


def restarted(options: zs.Outer, folder: str, *, writes: bool) -> tuple[float, str]:
    """Start an island with another value, which is loaded or written; train, and return it and an error."""
    zs.init()
    model = nn.Linear(6, 2)
    optimizer, text = torch.optim.SGD(model.parameters(), lr=0.0), ""
    zero = zs.shard(model, optimizer, stage=3, outer=options)
    for _ in range(2):
        try:
            if writes:
                with zero.gathered(writeback=True), torch.no_grad():
                    model.weight.fill_(5.0)
                zero.save(f"{folder}/saved")
            else:
                zero.load(f"{folder}/saved")
        except RuntimeError as error:
            text = str(error)
        for _ in range(EVERY):
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    zero.finish()
    with zero.gathered():
        return model.weight.mean().item(), text


def test_an_island_that_founds_the_mailbox_founds_it_with_what_it_writes_or_loads(tmp_path: Path) -> None:
    asked = partial(zs.Outer, islands=1, every=EVERY, secret_file=secret_in(tmp_path), island="a")
    for writes in (True, False):
        with mailbox(tmp_path / str(writes)) as box:
            run = partial(restarted, writes=writes)
            for value, text in run_ranks(run, 2, asked(address=box.address), str(tmp_path)):
                assert value == 5.0
                assert ("writeback=True) on an island with a mailbox" in text) == writes


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = examples((REPOSITORY / "docs/mailbox.md").read_text())
    with mailbox(tmp_path) as box:
        for asked, here in (("10.0.0.1:29400", box.address), ('"secret"', repr(str(secret_in(tmp_path))))):
            assert program.count(asked) == 1
            program = program.replace(asked, here)
        run_block(program, "docs/mailbox.md")
