"""`gathered(whole=True)`: plain whole values of parameters that torch splits over the axis "tensor"."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard as zs
from tests.oracle import TIMEOUT_S, WATCHDOG_S, assert_same, randn, run_cases
from tests.rotation import third
from zeroshard.checkpoint.folders import export
from zeroshard.core.slot import slot_of
from zeroshard.testing import run_ranks
from zeroshard.whole.owned import like_parameter

WORLD, WIDTH = 4, 8


class Net(nn.Module):
    """Two split layers of which one has two names, a norm that is not split, and a layer that is not managed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.again, self.own = nn.ModuleList([self.up]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.own(x) + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def build(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


class Run:
    def __init__(self, stage: int, seed: int = 1, **options: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        self.model = build(seed)
        whole = ColwiseParallel(output_layouts=Replicate())
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "own": whole}
        parallelize_module(self.model, mesh["tensor"], plan)
        mine = [p for name, p in self.model.named_parameters() if not name.startswith("own")]
        self.optimizer = torch.optim.AdamW(mine, lr=0.01)
        settings = zs.Settings(watchdog_s=WATCHDOG_S)
        self.zero = zs.shard(
            self.model, self.optimizer, stage=stage, mesh=mesh, ignored=["own.*"], settings=settings, **options
        )

    def step(self) -> None:
        self.model(randn(3, WIDTH, key=(self.zero.mesh.shard_rank,))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, Tensor) else value


def read(stage: int, folder: str, options: dict[str, Any]) -> None:
    run = Run(stage, **options)
    run.step()
    model, optimizer = run.model, run.optimizer
    before = dict(model.named_parameters())
    with run.zero.gathered(states=True):
        expected = {name: full(value) for name, value in model.state_dict().items()}
        held = [full(value) for s in optimizer.state_dict()["state"].values() for value in s.values()]
    with run.zero.gathered(whole=True, states=True):
        found = model.state_dict()
        assert {type(one) for one in found.values()} == {Tensor}
        assert {type(one) for one in model.parameters()} >= {nn.Parameter}
        assert not any(isinstance(one, DTensor) for one in model.parameters())
        assert model.again[0].weight is model.up.weight
        assert model.up.weight.requires_grad
        assert_same(expected, {name: value.clone() for name, value in found.items()})
        states = [value for s in optimizer.state_dict()["state"].values() for value in s.values()]
        assert not any(isinstance(one, DTensor) for one in states)
        assert_same(held, [full(one) for one in states])
        torch.save({"model": found, "optimizer": optimizer.state_dict()}, f"{folder}/{stage}-{dist.get_rank()}.pt")
        with pytest.raises(RuntimeError, match=r"A forward inside gathered\(whole=True\)"):
            model(torch.ones(1, WIDTH))
        found.clear()
    assert all(before[name] is one for name, one in model.named_parameters())
    run.step()
    plain = build(0)
    loaded = torch.load(f"{folder}/{stage}-{dist.get_rank()}.pt")
    plain.load_state_dict(loaded["model"])
    other = torch.optim.AdamW([p for n, p in plain.named_parameters() if not n.startswith("own")], lr=0.01)
    other.load_state_dict(loaded["optimizer"])
    for place in range(2):
        (plain(randn(3, WIDTH, key=(place,))).square().mean() / 2).backward()
    other.step()
    with run.zero.gathered(whole=True):
        assert_same(
            {n: p.detach() for n, p in plain.named_parameters() if not n.startswith("own")},
            {n: p.detach().clone() for n, p in model.named_parameters() if not n.startswith("own")},
            relative=1e-4 if options else 1e-6,
        )
    texts = [run.zero.mesh.rank for _ in run.zero.on_first_rank(whole=True, states=True)]
    assert texts == [0] * (dist.get_rank() == 0)


def test_plain_values_are_those_of_the_whole_model(tmp_path: Path) -> None:
    cases = [(stage, str(tmp_path), {}) for stage in third([3, 0, 1, 2])] + [(3, str(tmp_path), {"offload": "host"})]
    run_ranks(each, WORLD, read, cases, timeout_s=3 * TIMEOUT_S)


def each(target: Any, cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        target(*case)


def write(stage: int, options: dict[str, Any]) -> None:
    """Load whole values, which only rank 0 has right, and states of a plain optimizer."""
    run, plain = Run(stage, seed=dist.get_rank(), **options), build(7)
    other = torch.optim.AdamW([p for n, p in plain.named_parameters() if not n.startswith("own")], lr=0.01)
    plain(torch.ones(1, WIDTH)).sum().backward()
    other.step()
    is_first = dist.get_rank() == 0
    with run.zero.gathered(whole=True, writeback=True, states=True):
        run.model.load_state_dict(plain.state_dict() if is_first else build(8).state_dict())
        run.optimizer.load_state_dict(other.state_dict())
        with torch.no_grad():
            for state in run.optimizer.state.values():
                state["exp_avg"].mul_(1.0 if is_first else 0.0)
    assert isinstance(run.model.up.weight, DTensor)
    with run.zero.gathered(whole=True, states=True):
        names = [n for n, _ in plain.named_parameters() if not n.startswith("own")]
        expected = {name: plain.get_parameter(name).detach() for name in names}
        assert_same(expected, {name: run.model.get_parameter(name).detach().clone() for name in names})
        # What is not managed is each rank's own, also of what is split: its rows of what it loaded.
        place = run.zero.mesh.shard_rank
        rows = [(plain if (place, part) == (0, 0) else build(8)).own.weight[4 * part : 4 * part + 4] for part in (0, 1)]
        assert torch.equal(run.model.own.weight, torch.cat(rows))
        states = run.optimizer.state_dict()["state"]
        assert_same(other.state_dict()["state"], {key: dict(value) for key, value in states.items()})
    run.step()


def test_whole_values_are_written_back() -> None:
    run_ranks(each, WORLD, write, [(stage, {}) for stage in third([3, 1, 0, 2])], timeout_s=3 * TIMEOUT_S)


def write_uneven(stage: int, whole: bool) -> None:
    """Train a layer of five rows, of which the ranks along "tensor" have three and two, and halve all values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    model, plain = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5)
    plain.load_state_dict(model.state_dict())
    parallelize_module(model, mesh["tensor"], ColwiseParallel(output_layouts=Replicate()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    for _ in range(2):
        model(randn(3, WIDTH, key=(1,))).square().mean().backward()
        plain(randn(3, WIDTH, key=(1,))).square().mean().backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        with zero.gathered(writeback=True, states=True, whole=whole), torch.no_grad():
            for tensor in [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]:
                tensor.mul_(0.5 if zero.mesh.shard_rank == 0 else 3.0)
        with torch.no_grad():
            for tensor in [*plain.parameters(), *(state["exp_avg"] for state in other.state.values())]:
                tensor.mul_(0.5)
    with zero.gathered(whole=True, states=True):
        found = (model.state_dict(), optimizer.state_dict()["state"])
        assert_same((plain.state_dict(), other.state_dict()["state"]), found, relative=1e-5)
        del found


def test_parts_of_different_sizes_are_written_back() -> None:
    cases = [(3, True), *third([(1, False), (0, True), (2, False)])]
    run_ranks(each, WORLD, write_uneven, cases, timeout_s=2 * TIMEOUT_S)


def differ() -> str:
    """Have another state on one rank, in a context that changes no parameter."""
    run = Run(1)
    run.step()
    with pytest.raises(zs.RankMismatchError) as error, run.zero.gathered(whole=True, writeback=True, states=True):
        state = run.optimizer.state[run.model.norm.weight]
        if dist.get_rank():
            state["exp_avg"] = torch.zeros(WIDTH + 1)
    run.step()
    return str(error.value)


def test_a_refused_write_back_changes_no_parameter() -> None:
    for text in run_ranks(differ, WORLD, timeout_s=TIMEOUT_S):
        assert "Buffers or optimizer states differ in names or shapes between ranks" in text


def change(stage: int) -> list[str]:
    run, texts = Run(stage), []
    for what in ("value", "state", "object", "object, writeback"):
        run.step()
        weight = run.model.up.weight
        with pytest.raises(RuntimeError) as error:  # noqa: SIM117
            with run.zero.gathered(whole=True, states=True, writeback="writeback" in what), torch.no_grad():
                if what == "value":
                    run.model.up.weight.add_(1.0)
                elif what == "state":
                    run.optimizer.state[weight]["exp_avg"].add_(1.0)
                else:
                    run.model.up.weight = nn.Parameter(torch.ones(16, WIDTH))
        texts.append(str(error.value))
        assert run.model.up.weight is weight
    run.step()
    return texts


def test_changes_that_would_be_lost_are_errors() -> None:
    for by_rank in run_cases(change, WORLD, [(stage,) for stage in third([3, 2])], timeout_s=2 * TIMEOUT_S).values():
        for value, state, replaced, both in by_rank:
            assert "changed in place under gathered() without writeback=True" in value
            assert "'up.weight' first" in value
            assert "'up.weight/exp_avg' first" in state
            assert "'up.weight' was replaced by another tensor inside gathered(whole=True)" in replaced
            assert "'up.weight' was replaced by another tensor inside gathered(whole=True)" in both


def average(stage: int) -> None:
    """The average of a split model, whole."""
    run = Run(stage)
    mean = run.zero.ema(0.5)
    with run.zero.gathered(whole=True):
        before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.step()
    mean.update()
    with run.zero.gathered(whole=True):
        after = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with mean.swapped(), run.zero.gathered(whole=True):
        found = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    assert_same({name: torch.lerp(before[name], after[name], 0.5) for name in after}, found, relative=1e-6)
    assert not torch.equal(found["up.weight"], after["up.weight"])


def test_averages_of_split_models_are_whole() -> None:
    run_cases(average, WORLD, [(stage,) for stage in third([3, 1])], timeout_s=2 * TIMEOUT_S)


def save_pretrained(folder: str) -> Tensor:
    """Train a model of transformers that is split by its own plan, and save it as transformers does."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    plan = model._resolve_parallel_plans(DistributedConfig(tp_size=2, tp_plan="auto"))[0]
    model = apply_tensor_parallelism(model, mesh["tensor"], plan)
    assert any(isinstance(p, DTensor) for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in zero.on_first_rank(whole=True):
        model.save_pretrained(f"{folder}/saved")
    zero.save(f"{folder}/step-1")
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.timeout(900)
def test_save_pretrained_and_an_export_have_whole_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    logits = run_ranks(save_pretrained, 2, str(tmp_path), timeout_s=4 * TIMEOUT_S)
    export(tmp_path / "step-1", tmp_path / "exported", config=tmp_path / "saved" / "config.json")
    found = []
    for folder in ("saved", "exported"):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        with torch.no_grad():
            found.append(plain(input_ids=torch.arange(12).view(2, 6)).logits)
    assert torch.equal(*found)
    for one in logits:
        torch.testing.assert_close(one, found[0], rtol=1e-4, atol=1e-5)


def test_states_of_rounded_parameters_are_loaded_unrounded() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zs.shard(model, optimizer, precision="bf16")
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    given = {number: {"step": torch.tensor(3.0)} for number in range(2)}
    for number, parameter in enumerate(model.parameters()):
        given[number] |= {key: randn(*parameter.shape, key=(number,)).square() for key in ("exp_avg", "exp_avg_sq")}
    with zero.gathered(states=True, writeback=True):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": given})
    with zero.gathered(states=True):
        assert_same(optimizer.state_dict()["state"], given, "states")


def test_whole_states_have_the_strides_of_their_parameter() -> None:
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(randn(4, 3, key=(1,)).t())
    zs.shard(model)
    slot, values = slot_of(model.weight), randn(3, 4, key=(2,))
    found = like_parameter(slot, values)
    assert torch.equal(found, values) and found.stride() == model.weight.stride() == (1, 3)
    rows = like_parameter(slot, values[0])  # of another shape
    assert torch.equal(rows, values[0]) and rows.data_ptr() != values.data_ptr()


def write_signs() -> list[bool]:
    run = Run(stage=3)
    found = []
    for value in (0.0, -0.0):
        with run.zero.gathered(writeback=True, whole=True), torch.no_grad():
            run.model.up.weight.fill_(value)
        with run.zero.gathered(whole=True):
            found.append(bool(torch.signbit(run.model.up.weight.detach()).all()))
    return found


def test_signs_of_zeros_are_written_back() -> None:
    assert run_ranks(write_signs, WORLD, timeout_s=TIMEOUT_S) == [[False, True]] * WORLD
