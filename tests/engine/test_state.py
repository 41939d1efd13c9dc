"""Whole state under `gathered()`, truth outside it: state dicts, writing back, copies, identity, deletion."""

import collections
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests import models
from tests.errors import raised
from tests.oracle import STAGES, TIMEOUT_S, WORLDS, Plain, Run, Sharded, assert_matches, assert_same, at_worlds
from zeroshard.testing import run_ranks


def start(run: Run, kind: type[nn.Module] = models.Stack, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Build and shard a model with AdamW."""
    model = models.build(kind)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, **options)
    return model, optimizer


def step_once(run: Run, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Take one ordinary step."""
    loss = models.stack_loss(model, step, run.rank)
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    run.record(loss=loss)


def state_dicts(run: Run) -> None:
    model, optimizer = start(run)
    for step in range(2):
        step_once(run, model, optimizer, step)
        with run.gathered():
            run.record(model=model.state_dict(), plain=[type(v) is Tensor for v in model.state_dict().values()])
        with run.gathered(states=True):
            run.record(optimizer=optimizer.state_dict())


def tied_state_dict(run: Run) -> None:
    model, optimizer = start(run, models.GPT)
    run.backward(models.gpt_loss(model, 0, run.rank))
    optimizer.step()
    optimizer.zero_grad()
    with run.gathered():
        state = model.state_dict()
        run.record(state=state, is_tied=state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr())


def loaded_model(run: Run) -> None:
    """Load other parameters in the middle of training."""
    model, optimizer = start(run)
    step_once(run, model, optimizer, 0)
    torch.manual_seed(77)
    other = models.Stack().state_dict()
    with run.gathered(writeback=True):
        run.record(report=str(model.load_state_dict(other)))
    with run.gathered():
        run.record(loaded=model.state_dict())
    for step in range(1, 3):
        step_once(run, model, optimizer, step)


def loaded_optimizer(run: Run) -> None:
    """Go back to the states of two steps ago."""
    model, optimizer = start(run)
    step_once(run, model, optimizer, 0)
    with run.gathered(states=True):
        kept = copy.deepcopy(optimizer.state_dict())
    for step in range(1, 3):
        step_once(run, model, optimizer, step)
    with run.gathered(writeback=True, states=True):
        optimizer.load_state_dict(kept)
    for step in range(3, 5):
        step_once(run, model, optimizer, step)


def loaded_from_elsewhere(run: Run) -> None:
    """A fresh model and optimizer resume from state dicts that a plain process wrote, learning rate and all."""
    plain = models.build(models.Stack)
    writer = models.adamw(plain, lr=3e-3)
    for step in range(2):
        models.stack_loss(plain, step, 0).backward()
        writer.step()
        writer.zero_grad()
    model, optimizer = start(run)
    with run.gathered(writeback=True, states=True):
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(writer.state_dict())
    run.record(lr=[group["lr"] for group in optimizer.param_groups])
    for step in range(2, 4):
        step_once(run, model, optimizer, step)


def changed_in_place(run: Run) -> None:
    model, optimizer = start(run)
    step_once(run, model, optimizer, 0)
    with run.gathered(writeback=True), torch.no_grad():
        model.blocks[1].up.weight.mul_(0.5)
        nn.init.constant_(model.head.bias, 0.125)
        model.stem.weight[0].zero_()
        model.blocks[0].down.bias.copy_(torch.arange(models.WIDTH).float())
    for step in range(1, 3):
        step_once(run, model, optimizer, step)


def exponential_average(run: Run) -> None:
    """Keep an average of the weights on the side, from reads under `gathered`."""
    model, optimizer = start(run)
    average: dict[str, Tensor] = {}
    for step in range(3):
        step_once(run, model, optimizer, step)
        with run.gathered(), torch.no_grad():
            for name, p in model.named_parameters():
                average.setdefault(name, torch.zeros_like(p)).lerp_(p, 0.3)
    run.record(average=average, kinds=[type(value) is Tensor for value in average.values()])


def forward_and_backward_are_for_outside(run: Run) -> None:
    """Under `gathered` forwards are plain, also several and uneven; training goes on as before."""
    model, optimizer = start(run)
    for step in range(2):
        with run.gathered(), torch.no_grad():
            for micro in range(1 + run.rank):
                run.record(loss=models.stack_loss(model, 50 + step, run.rank, micro))
        step_once(run, model, optimizer, step)


def gathered_twice(run: Run) -> None:
    model, optimizer = start(run)
    for step in range(2):
        for _ in range(2):
            with run.gathered():
                run.record(weight=model.head.weight)
        step_once(run, model, optimizer, step)


def gathered_while_gradients_wait(run: Run) -> None:
    """Between backward and step: the gradients must survive."""
    model, optimizer = start(run)
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        with run.gathered(states=True):
            run.record(before=model.state_dict(), states=optimizer.state_dict())
        optimizer.step()
        optimizer.zero_grad()


def states_by_parameter(run: Run) -> None:
    """Give each parameter states before the first step, and remove those of one parameter after some steps."""
    model, optimizer = start(run)
    with run.gathered(writeback=True, states=True):
        for p in model.parameters():
            ones = {key: torch.ones_like(p) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(9.0), **ones}
    step_once(run, model, optimizer, 0)
    with run.gathered(writeback=True, states=True):
        run.record(popped=optimizer.state.pop(model.head.weight), kept=[model.stem.weight in optimizer.state])
    for step in range(1, 3):
        step_once(run, model, optimizer, step)


def groups_changed_inside(run: Run) -> None:
    """Move a parameter to another group, and remove the group of the last one, which is added again later."""
    model = models.build(models.Stack)
    rest = [*model.stem.parameters(), *model.blocks.parameters()]
    groups = [{"params": rest}, {"params": [*model.head.parameters()], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    run.shard(model, optimizer)
    step_once(run, model, optimizer, 0)
    with run.gathered(writeback=True, states=True):
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
        del optimizer.param_groups[1]
        optimizer.state[model.head.bias]["momentum_buffer"].fill_(0.25)
    step_once(run, model, optimizer, 1)
    optimizer.add_param_group({"params": [model.head.weight], "lr": 0.05})
    for step in range(2, 4):
        step_once(run, model, optimizer, step)


def states_of_a_removed_group(run: Run) -> None:
    """Read and change the states of the head, whose group was removed, and which is trained again later."""
    model = models.build(models.Stack)
    rest = [*model.stem.parameters(), *model.blocks.parameters()]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": [*model.head.parameters()]}], lr=0.1, momentum=0.9)
    run.shard(model, optimizer)
    step_once(run, model, optimizer, 0)
    del optimizer.param_groups[1]
    model.head.requires_grad_(False)
    step_once(run, model, optimizer, 1)
    for writes in (False, True):
        with run.gathered(writeback=writes, states=True):
            run.record(
                **{name: optimizer.state[p] for name, p in model.named_parameters()}, kept=[len(optimizer.state)]
            )
            if writes:
                optimizer.state[model.head.weight]["momentum_buffer"].fill_(0.25 if run.rank == 0 else 0.5)
    if isinstance(run, Plain):
        optimizer.state[model.head.weight]["momentum_buffer"].fill_(0.25)
    model.head.requires_grad_(True)
    optimizer.add_param_group({"params": [*model.head.parameters()]})
    step_once(run, model, optimizer, 2)


def keys_of_several_types(run: Run) -> None:
    """Keep states under numbers beside those under texts."""
    model, optimizer = start(run)
    step_once(run, model, optimizer, 0)
    with run.gathered(writeback=True, states=True):
        optimizer.state[model.head.weight] |= {0: torch.ones_like(model.head.weight), 1: torch.tensor(2.0)}
    with run.gathered(states=True):
        run.record(states=optimizer.state_dict())
    if isinstance(run, Sharded):
        run.zeros[-1].check_copies()


SCRIPTS = [
    states_by_parameter,
    keys_of_several_types,
    groups_changed_inside,
    states_of_a_removed_group,
    state_dicts,
    tied_state_dict,
    loaded_model,
    loaded_optimizer,
    loaded_from_elsewhere,
    changed_in_place,
    exponential_average,
    forward_and_backward_are_for_outside,
    gathered_twice,
    gathered_while_gradients_wait,
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS))
def test_state(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


USES: list[Callable[[Any, Tensor], Any]] = [
    lambda state, p: state[p],
    lambda state, p: state.get(p),
    lambda state, p: p in state,
    lambda state, p: state.pop(p, None),
    lambda state, p: state.setdefault(p, {}),
    lambda state, p: state.update({p: {}}),
    lambda state, p: state.__ior__({p: {}}),
    lambda state, p: state.__setitem__(p, {}),
    lambda state, p: state.__delitem__(p),
]


def keys_from_outside(stage: int) -> list[str]:
    """Use parameters as keys of the optimizer's state outside `gathered()`; the refusals do not change the training."""
    run = Sharded(stage)
    model, optimizer = start(run)
    found, frozen, own = list[str](), nn.Parameter(torch.ones(1)), optimizer.state
    for step in range(2):
        found += [raised(lambda use=use: use(optimizer.state, model.head.bias)) for use in USES]
        assert "of no model" not in own
        assert own[frozen] == {}
        assert own.pop(frozen) == {}
        step_once(run, model, optimizer, step)
        (state,) = (state for key, state in own.items() if key is optimizer.param_groups[0]["params"][0])
        assert own is optimizer.state
        assert own[optimizer.param_groups[0]["params"][0]] is state
        assert own.get(optimizer.param_groups[0]["params"][0]) is state
    with run.gathered(writeback=True, states=True):
        optimizer.load_state_dict(optimizer.state_dict())
    assert len(copy.deepcopy(optimizer.state)) == len(own)
    found += [raised(lambda use=use: use(optimizer.state, model.head.bias)) for use in USES]
    # Code that replaces the state starts anew; what it writes under parameters is found at the step.
    optimizer.state = collections.defaultdict(dict)
    optimizer.state[model.head.bias] = {"step": torch.tensor(1.0)}
    models.stack_loss(model, 2, run.rank).backward()
    found.append(raised(optimizer.step))
    optimizer.state = collections.defaultdict(dict)
    optimizer.step()
    run.zeros[0].detach()
    assert type(optimizer.state) is collections.defaultdict
    assert optimizer.state[model.head.bias]["step"] == 1
    return found


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_keys_of_states_under_gathered_alone(stage: int) -> None:
    for rank, found in enumerate(run_ranks(keys_from_outside, 2, stage, timeout_s=TIMEOUT_S)):
        assert len(found) == 3 * len(USES) + 1
        for text in found:
            assert text.startswith(f"RuntimeError: [rank {rank}/2] optimizer.state has this rank's slices, and not ")
            assert "'head.bias'" in text
            assert "zero.gathered(states=True, writeback=True)" in text


def copies(run: Run) -> None:
    model, optimizer = start(run)
    step_once(run, model, optimizer, 0)
    with run.gathered():
        copied = copy.deepcopy(model)
        same = [p.detach().clone() for p in model.parameters()]
    assert [type(p) for p in copied.parameters()] == [nn.Parameter] * len(same)
    hooks = [
        table
        for module in copied.modules()
        for table in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    ]
    assert not any(hooks), "the copy still has hooks"
    run.record(copied=dict(copied.named_parameters()), same=same)
    # The copy trains by itself, without the other ranks, and the sharded model does not notice.
    alone = models.adamw(copied)
    for step in range(1 + run.rank):
        models.stack_loss(copied, step, run.rank).backward()
        alone.step()
        alone.zero_grad()
    run.record(trained=dict(copied.named_parameters()))
    step_once(run, model, optimizer, 1)


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
def test_a_copy_made_under_gathered_is_a_plain_model(world: int) -> None:
    assert_matches(copies, world)


def truth(stage: int) -> None:
    """Check at each point of two steps that names, identity, shapes, dtypes and flags are what they were."""
    run = Sharded(stage)
    model = models.build(models.GPT)
    model.blocks[0].norm.requires_grad_(False)
    optimizer = models.adamw(model)

    def look() -> list[Any]:
        return [
            (name, id(p), tuple(p.shape), p.ndim, p.numel(), p.dtype, p.device, p.requires_grad, p.stride(), p.is_leaf)
            for name, p in model.named_parameters(remove_duplicate=False)
        ]

    before = look()
    run.shard(model, optimizer)
    assert look() == before, "after shard"
    for step in range(2):
        loss = models.gpt_loss(model, step, run.rank)
        assert look() == before, "after forward"
        loss.backward()
        assert look() == before, "after backward"
        optimizer.step()
        assert look() == before, "after step"
        optimizer.zero_grad()
        with run.gathered():
            assert look() == before, "under gathered"
        assert look() == before, "after gathered"
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert all(p.shape != torch.Size([0]) for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in models.build(models.GPT).parameters())


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_tell_the_truth_at_all_times(stage: int) -> None:
    run_ranks(truth, 2, stage, timeout_s=TIMEOUT_S)


def equal_on_all_ranks(stage: int) -> dict[str, Tensor]:
    run = Sharded(stage)
    model, optimizer = start(run)
    for step in range(3):
        step_once(run, model, optimizer, step)
    with run.gathered():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_gathered_parameters_are_equal_on_all_ranks(stage: int) -> None:
    first, *others = run_ranks(equal_on_all_ranks, 4, stage, timeout_s=TIMEOUT_S)
    for rank, other in enumerate(others, 1):
        assert_same(first, other, f"[rank {rank}/4]")


def state_dict_on_rank_zero_alone() -> list[str]:
    """Every rank enters `gathered`; only rank 0 takes the state dict out, which sends nothing."""
    run = Sharded(3)
    model, optimizer = start(run)
    step_once(run, model, optimizer, 0)
    with run.gathered(states=True):
        keys = list(model.state_dict()) + list(optimizer.state_dict()) if run.rank == 0 else []
    step_once(run, model, optimizer, 1)
    return keys


def test_one_rank_alone_may_read_under_gathered() -> None:
    keys, nothing = run_ranks(state_dict_on_rank_zero_alone, 2, timeout_s=TIMEOUT_S)
    assert keys == [*models.Stack().state_dict(), "state", "param_groups"]
    assert nothing == []


def delete(stage: int) -> None:
    """Shard, train and drop a model: it, its handle, its optimizer and all large tensors must go."""
    watched: list[weakref.ref[Any]] = []
    gc.collect()
    before = _tensor_bytes()
    train_and_drop(stage, watched)
    gc.collect()
    gc.collect()  # the first one ends modules, and with them the graphs that hold parameters
    alive = [type(reference()).__name__ for reference in watched if reference() is not None]
    assert not alive, f"still alive: {alive}"
    after = _tensor_bytes()
    assert after <= before, f"{after - before} bytes of tensors are still alive"


def keep_output(module: Any, args: Any, output: Tensor) -> None:
    """Keep what has the graph of the forward, as models do that add up a part of their loss later."""
    module.kept = output


def train_and_drop(stage: int, watched: list[weakref.ref[Any]]) -> None:
    run = Sharded(stage)
    model, optimizer = start(run)
    for block in model.blocks:
        block.register_forward_hook(keep_output)
    for step in range(2):
        step_once(run, model, optimizer, step)
    watched += [weakref.ref(target) for target in (model, run.zeros[0], model.blocks[0], model.blocks[0].up.weight)]
    watched.append(weakref.ref(optimizer))


def _tensor_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and type(thing).__name__ != "LogicalGradient":  # which has no storage
            with torch._C.DisableTorchFunctionSubclass():
                storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_deleting_the_model_frees_its_memory(stage: int, world: int) -> None:
    run_ranks(delete, world, stage, timeout_s=TIMEOUT_S, process_group=world > 1)


def shard_after_another() -> list[float]:
    """One model after another in one process: nothing of the first is in the way of the second."""
    losses = []
    for stage in (3, 0, 2, 3):
        run = Sharded(stage)
        model, optimizer = start(run)
        for step in range(2):
            step_once(run, model, optimizer, step)
        losses.append(float(run.records[-1]["loss"]))
        del run, model, optimizer
        gc.collect()
    return losses


def test_models_may_be_sharded_one_after_another() -> None:
    for losses in run_ranks(shard_after_another, 2, timeout_s=TIMEOUT_S):
        assert len(set(losses)) == 1, losses


def full_gradients(run: Run) -> None:
    """The values of a gradient, where the user asks for them."""
    model, _ = start(run)
    for micro in range(2):
        run.backward(models.stack_loss(model, 0, run.rank, micro))
        whole = []
        for p in model.parameters():
            grad = p.grad
            whole.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
        run.record(grads=whole)


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_can_be_read_in_full(world: int) -> None:
    assert_matches(full_gradients, world)
