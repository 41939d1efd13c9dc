"""The optimizers in one process: torch's bits where they are torch's, and what any torch optimizer stands."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from benchmarks.peaks import measure_peak
from tests.oracle import assert_same, randn
from zeroshard.optim.whole import Whole, whole_of

Make = Callable[[Any], torch.optim.Optimizer]
SHAPES = ((40, 30), (64,), (300,), (1,), (0,), (2, 3, 2, 2), ())
MAKE: dict[str, Make] = {
    "Adafactor": lambda p: zs.optim.Adafactor(p, lr=0.02),
    "Adafactor-beta1": lambda p: zs.optim.Adafactor(p, lr=0.02, beta1=0.9),
    "AdamW8bit": lambda p: zs.optim.AdamW8bit(p, lr=0.02),
    "Lamb": lambda p: zs.optim.Lamb(p, lr=0.02, weight_decay=0.1),
    "Lion": lambda p: zs.optim.Lion(p, lr=0.02, weight_decay=0.1),
    "Muon": lambda p: zs.optim.Muon(p, lr=0.02),
}


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(randn(*shape, key=(3, place)).to(dtype)) for place, shape in enumerate(shapes)]


def shapes_for(name: str) -> list[tuple[int, ...]]:
    """torch's own Adafactor divides by the number of elements."""
    return [shape for shape in SHAPES if shape != (0,) or not name.startswith("Adafactor")]


def take_steps(made: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for place, one in enumerate(made):
            one.grad = (randn(*one.shape, key=(4, place, step)) + 0.3).to(one.dtype)
        optimizer.step()


@pytest.fixture(params=list(MAKE))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("ours", "theirs", "shapes"),
    [
        (zs.optim.Adafactor, torch.optim.Adafactor, [(40, 30), (7,), (2, 3, 4), ()]),
        (
            lambda p: zs.optim.Muon(p, lr=0.02),
            lambda p: torch.optim.Muon(p, lr=0.02, adjust_lr_fn="match_rms_adamw"),
            [(40, 30), (30, 40), (8, 8)],
        ),
        (
            lambda p: zs.optim.Muon(p, lr=0.02, adjust_lr_fn="original"),
            lambda p: torch.optim.Muon(p, lr=0.02),
            [(40, 30), (30, 40)],
        ),
        (
            lambda p: zs.optim.Muon([{"params": p, "use_muon": False}], lr=0.02, adamw_betas=(0.9, 0.99)),
            lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1),
            [(40, 30), (7,), ()],
        ),
    ],
    ids=["Adafactor", "Muon", "Muon-original", "Muon's AdamW"],
)
def test_bits_are_torchs(ours: Make, theirs: Make, shapes: list[tuple[int, ...]]) -> None:
    mine, other = parameters(shapes=shapes), parameters(shapes=shapes)
    first, second = ours(mine), theirs(other)
    take_steps(mine, first, 4)
    take_steps(other, second, 4)
    assert_same([*mine], [*other], "parameters")
    for one, two in zip(mine, other, strict=True):
        assert_same(dict(first.state[one]), dict(second.state[two]), "states")


def test_adafactor_keeps_four_bytes_for_each_row_and_column() -> None:
    (matrix,) = made = parameters(shapes=[(40, 30)])
    optimizer = zs.optim.Adafactor(made)
    take_steps(made, optimizer, 1)
    state = optimizer.state[matrix]
    assert sum(value.nbytes for key, value in state.items() if key != "step") == 4 * (40 + 30)


def test_a_first_moment_of_weight_zero_changes_nothing_but_rounding() -> None:
    made, other = parameters(shapes=[(40, 30), (9,)]), parameters(shapes=[(40, 30), (9,)])
    take_steps(made, zs.optim.Adafactor(made, beta1=0.0, weight_decay=0.1), 5)
    take_steps(other, torch.optim.Adafactor(other, weight_decay=0.1), 5)
    for one, two in zip(made, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    third = parameters(shapes=[(40, 30), (9,)])
    take_steps(third, zs.optim.Adafactor(third, beta1=0.9, weight_decay=0.1), 5)
    assert not torch.allclose(third[0], other[0], rtol=1e-3)


def test_lion_is_its_paper() -> None:
    (mine,) = made = parameters(shapes=[(40, 30)])
    weight, moment = mine.detach().clone(), torch.zeros(40, 30)
    optimizer = zs.optim.Lion(made, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(4):
        take_steps(made, optimizer, 1, step)
        grad = mine.grad
        assert grad is not None
        weight = weight - 0.01 * ((0.9 * moment + (1 - 0.9) * grad).sign() + 0.1 * weight)
        moment = 0.99 * moment + (1 - 0.99) * grad
        torch.testing.assert_close(mine.detach(), weight)


def test_lamb_is_its_paper() -> None:
    (mine,) = made = parameters(shapes=[(40, 30)])
    weight = mine.detach().double()
    first, second = torch.zeros(40, 30).double(), torch.zeros(40, 30).double()
    optimizer = zs.optim.Lamb(made, lr=0.01, weight_decay=0.1)
    for step in range(1, 5):
        take_steps(made, optimizer, 1, step)
        assert mine.grad is not None
        grad = mine.grad.double()
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        update = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-6) + 0.1 * weight
        weight = weight - 0.01 * weight.norm() / update.norm() * update
        torch.testing.assert_close(mine.detach().double(), weight, rtol=1e-5, atol=1e-6)


def test_norms_of_lamb_take_little_memory() -> None:
    """torch casts all of a tensor whose norm in fp64 it returns, two numbers in fp32 for each element."""

    def step() -> None:
        parameter = torch.nn.Parameter(torch.ones(1 << 20))
        optimizer = zs.optim.Lamb([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    # A parameter, its gradient, two states, the update and its divisor.
    assert measure_peak(step).peak_bytes < 6.1 * 4 * (1 << 20)


def test_muon_takes_the_matrices_of_a_stack_one_by_one_and_flattens_convolutions() -> None:
    (stack, kernel) = made = parameters(shapes=[(3, 6, 5), (4, 2, 3, 3)])
    matrices = [nn.Parameter(one.detach().clone()) for one in [*stack, kernel.flatten(1)]]
    optimizer, alone = zs.optim.Muon(made, lr=0.02), zs.optim.Muon(matrices, lr=0.02)
    for step in range(3):
        take_steps(made, optimizer, 1, step)
        assert stack.grad is not None
        assert kernel.grad is not None
        for matrix, grad in zip(matrices, [*stack.grad, kernel.grad.flatten(1)], strict=True):
            matrix.grad = grad.clone()
        alone.step()
    assert torch.equal(stack, torch.stack([*matrices[:3]]))
    assert torch.equal(kernel.flatten(1), matrices[3])
    flat = parameters(shapes=[(3, 6, 5)])
    take_steps(flat, zs.optim.Muon([{"params": flat, "is_stacked": False}], lr=0.02), 3)
    assert not torch.allclose(flat[0], stack)


def test_a_parameter_that_is_not_contiguous_is_updated_as_one_that_is(name: str) -> None:
    plain = parameters(shapes=[(6, 4, 5, 3)])
    moved = [nn.Parameter(plain[0].detach().clone().to(memory_format=torch.channels_last))]
    take_steps(plain, MAKE[name](plain), 3)
    optimizer = MAKE[name](moved)
    take_steps(moved, optimizer, 3)
    assert moved[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(moved[0], plain[0], rtol=1e-5, atol=1e-6)


def test_muon_splits_groups_and_refuses_mixed_ones_later() -> None:
    made = parameters(shapes=[(4, 4), (4,), (3, 4), ()])
    optimizer = zs.optim.Muon(made, lr=0.02, adamw_lr=0.001)
    assert [(len(g["params"]), g["use_muon"], g["lr"], g.get("whole", True)) for g in optimizer.param_groups] == [
        (2, True, 0.02, True),
        (2, False, 0.001, False),
    ]
    with pytest.raises(ValueError, match=r"shape \(5,\) is in a group for Muon"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))], "use_muon": False})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5, 2))]})
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.001, 0.001, 0.02]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.embedding.weight


def test_embeddings_heads_and_vectors_go_to_adamw() -> None:
    for model, expected in (
        (Tied(), ["block.0.weight", "block.2.weight"]),
        (nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)), ["1.weight"]),
    ):
        first, second = zs.optim.muon_groups(model, weight_decay=0.3)
        chosen = {id(parameter) for parameter in first["params"]}
        assert [name for name, p in model.named_parameters() if id(p) in chosen] == expected
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert len(first["params"]) + len(second["params"]) == len(trained)
        assert (first["weight_decay"], second["weight_decay"], second["use_muon"]) == (0.3, 0.3, False)
        assert len(zs.optim.Muon([first, second]).param_groups) == 2


def test_optimizers_say_which_tensors_they_need_whole() -> None:
    made = parameters(shapes=[(4, 4)])
    for one in (zs.optim.Adafactor(made), torch.optim.Adafactor(made)):
        whole = whole_of(one)
        assert whole is not None
        assert whole.takes((4,)) and whole.takes((4, 4)) and whole.cost((4, 5)) == 20
    for optimizer, takes_stacks in ((zs.optim.Muon(made), True), (torch.optim.Muon(made), False)):
        whole = whole_of(optimizer)
        assert whole is not None
        assert (whole.takes((4, 4)), whole.takes((4,)), whole.takes((2, 4, 4))) == (True, False, takes_stacks)
        assert whole.cost((4, 6)) == 2 * 4 * 4 * 6 + 4**3
    assert whole_of(copy.deepcopy(zs.optim.Muon(made))) is not None
    assert all(whole_of(MAKE[name](made)) is None for name in ("AdamW8bit", "Lion", "Lamb"))
    adam = torch.optim.Adam(made)
    assert whole_of(adam) is None
    assert zs.optim.whole_matrix(adam, takes=lambda shape: len(shape) == 2) is adam
    assert isinstance(whole_of(adam), Whole)
    with pytest.raises(TypeError, match="takes an optimizer; got list"):
        zs.optim.whole_matrix([adam])  # type: ignore[type-var]
    with pytest.raises(TypeError, match="cost must be a function of a shape"):
        zs.optim.whole_matrix(adam, cost=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_goes_through_a_file_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    made, shapes = parameters(dtype, shapes_for(name)), shapes_for(name)
    optimizer = MAKE[name](made)
    take_steps(made, optimizer, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = parameters(dtype, shapes)
    for other, one in zip(others, made, strict=True):
        other.data.copy_(one.data)
    again = MAKE[name](others)
    again.load_state_dict(torch.load(file))
    assert_same(optimizer.state_dict(), again.state_dict(), "states")
    take_steps(made, optimizer, 2, 3)
    take_steps(others, again, 2, 3)
    assert_same([*made], [*others], "parameters")


def test_packed_states_keep_their_dtypes_whatever_hooks_and_parameters() -> None:
    made = parameters(torch.bfloat16)
    optimizer = zs.optim.AdamW8bit(made)
    take_steps(made, optimizer, 1)
    saved = optimizer.state_dict()
    other = zs.optim.AdamW8bit(parameters(torch.bfloat16))
    seen: list[torch.dtype] = []
    other.register_load_state_dict_pre_hook(lambda _, given: {**given, "state": dict(given["state"])})
    other.register_load_state_dict_post_hook(
        lambda one: seen.extend(v.dtype for v in next(iter(one.state.values())).values())
    )
    other.load_state_dict(saved)
    assert seen == [torch.float32, torch.uint8, torch.float32, torch.uint8, torch.float32]
    assert sum(value.nbytes for value in optimizer.state[made[0]].values()) == 4 + 2 * 1200 + 2 * 4 * 5


def test_moments_of_adamw_are_packed_at_the_next_step() -> None:
    made, other = parameters(), parameters()
    adamw = torch.optim.AdamW(made, lr=0.02)
    take_steps(made, adamw, 3)
    packed = zs.optim.AdamW8bit(other, lr=0.02)
    for one, two in zip(other, made, strict=True):
        one.data.copy_(two.data)
    state = copy.deepcopy(adamw.state_dict()["state"])
    packed.load_state_dict({"state": state, "param_groups": packed.state_dict()["param_groups"]})
    assert packed.state[other[0]]["exp_avg"].dtype == torch.float32
    take_steps(made, adamw, 1, 3)
    take_steps(other, packed, 1, 3)
    assert packed.state[other[0]]["exp_avg"].dtype == torch.uint8
    assert float(packed.state[other[0]]["step"]) == 4.0
    for one, two in zip(other, made, strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.002)


def test_8_bits_follow_adamw() -> None:
    made, other = parameters(), parameters()
    take_steps(made, zs.optim.AdamW8bit(made, lr=0.01), 20)
    take_steps(other, torch.optim.AdamW(other, lr=0.01), 20)
    for one, two in zip(made, other, strict=True):
        apart = (one - two).abs()
        assert not apart.numel() or apart.mean() < 0.05 * 0.01 * 20
    # A small parameter is updated together with others, a large one in pieces: neither changes its bits.
    alone = parameters(shapes=SHAPES[:1])
    take_steps(alone, zs.optim.AdamW8bit(alone, lr=0.01), 20)
    assert torch.equal(alone[0], made[0])


def test_a_large_parameter_is_updated_in_pieces_as_its_parts_are() -> None:
    numel = (1 << 17) + 300
    values, grads = randn(numel, key=(1,)), randn(numel, key=(2,))
    whole = nn.Parameter(values.clone())
    parts = [nn.Parameter(part.clone()) for part in values.split(1 << 16)]
    one, other = zs.optim.AdamW8bit([whole]), zs.optim.AdamW8bit(parts)
    for _ in range(2):
        whole.grad = grads.clone()
        for part, grad in zip(parts, grads.split(1 << 16), strict=True):
            part.grad = grad.clone()
        one.step()
        other.step()
    assert torch.equal(whole, torch.cat([*parts]))


def test_nan_gradients_show(name: str) -> None:
    made = parameters(shapes=[(40, 30)])
    optimizer = MAKE[name](made)
    made[0].grad = torch.full_like(made[0], float("nan"))
    optimizer.step()
    assert not made[0].isfinite().any()


def test_a_parameter_without_a_gradient_is_left_alone(name: str) -> None:
    made = parameters(shapes=[(4, 4), (5, 4)])
    optimizer = MAKE[name](made)
    before = made[1].detach().clone()
    made[0].grad = torch.ones_like(made[0])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(made[1], before)
    assert not optimizer.state[made[1]]


def test_maximize_is_the_negative_gradient(name: str) -> None:
    made, other = parameters(shapes=[(40, 30)]), parameters(shapes=[(40, 30)])
    first, second = MAKE[name](made), MAKE[name](other)
    second.param_groups[0]["maximize"] = True
    for step in range(3):
        grad = randn(40, 30, key=(9, step))
        made[0].grad, other[0].grad = grad.clone(), -grad
        first.step()
        second.step()
    torch.testing.assert_close(made[0], other[0], rtol=1e-6, atol=1e-7)


def test_what_any_optimizer_stands(name: str) -> None:
    """A rate as a tensor, a closure, an empty group, a copy, and a group that comes later."""
    made, other = parameters(shapes=[(40, 30)]), parameters(shapes=[(40, 30)])
    first, second = MAKE[name](made), MAKE[name](other)
    second.param_groups[0]["lr"] = torch.tensor(first.param_groups[0]["lr"], dtype=torch.float64)
    take_steps(made, first, 2)
    take_steps(other, second, 2)
    torch.testing.assert_close(made[0], other[0], rtol=1e-6, atol=1e-7)

    def loss() -> Tensor:
        first.zero_grad()
        value = made[0].square().sum()
        value.backward()
        return value

    before = float(made[0].detach().square().sum())
    found: Any = first.step(loss)
    assert found.item() == pytest.approx(before)
    assert float(made[0].detach().square().sum()) < before
    first.add_param_group({"params": []})
    first.add_param_group({"params": [late := nn.Parameter(torch.ones(3, 2))], "lr": 0.1})
    take_steps([made[0], late], first, 2)
    assert late.detach().ne(1.0).all()
    twin = copy.deepcopy(first)
    twins = [parameter for group in twin.param_groups for parameter in group["params"]]
    take_steps([made[0], late], first, 1, 7)
    take_steps(twins, twin, 1, 7)
    assert_same([made[0], late], twins, "a copy trains on as the original does")


def test_sparse_gradients_are_refused(name: str) -> None:
    table = nn.Embedding(6, 4, sparse=True)
    optimizer = MAKE[name]([table.weight])
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (zs.optim.AdamW8bit, {"lr": -1.0}), (zs.optim.AdamW8bit, {"betas": (0.9, 1.0)}),
        (zs.optim.Lion, {"weight_decay": -1.0}), (zs.optim.Lion, {"betas": (1.0, 0.9)}),
        (zs.optim.Lamb, {"eps": -1.0}), (zs.optim.Lamb, {"betas": (-0.1, 0.9)}),
        (zs.optim.Muon, {"lr": -1.0}), (zs.optim.Muon, {"adjust_lr_fn": "rms"}),
        (zs.optim.Muon, {"adamw_betas": (0.9, 1.0)}), (zs.optim.Adafactor, {"beta1": 1.0}),
        (zs.optim.Adafactor, {"d": 0.5}),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"got|must|should"):
        make(parameters(shapes=[(2, 2)]), **options)


def test_lamb_and_adafactor_train_parameters_of_zeros() -> None:
    """LAMB then takes the update as it is; Adafactor the least size of a parameter, as torch's does."""
    (mine,) = made = [nn.Parameter(torch.zeros(40, 30))]
    take_steps(made, zs.optim.Lamb(made, lr=0.01), 1)
    assert mine.grad is not None
    torch.testing.assert_close(mine.detach(), -0.01 * mine.grad / (mine.grad.abs() + 1e-6))
    (mine,) = made = [nn.Parameter(torch.zeros(40, 30))]
    (other,) = theirs = [nn.Parameter(torch.zeros(40, 30))]
    take_steps(made, zs.optim.Adafactor(made, beta1=0.0), 1)
    take_steps(theirs, torch.optim.Adafactor(theirs), 1)
    torch.testing.assert_close(mine, other)
    assert float(mine.detach().abs().amin()) > 0
