"""Trials find optimizers that slices, or other entries in their groups, would train on other numbers."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from tests import models
from zeroshard.optim.admission import check_optimizers


class Scaled(Optimizer):
    """Multiplies the update of each parameter by a factor, which a test replaces."""

    def __init__(self, params: Any, lr: float = 1e-2, layerwise: bool = False) -> None:
        super().__init__(params, {"lr": lr, "layerwise": layerwise})

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        """Return what the update of a parameter is multiplied by."""
        return p.norm() if group["layerwise"] else 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.factor(p, group) * p.grad, alpha=group["lr"])


class Summed(Scaled):
    """Adapts its rate by a sum over all parameters of its groups, as Prodigy does."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        grads = [one.grad for g in self.param_groups for one in g["params"] if one.grad is not None]
        return sum(int((grad > 0.5).sum()) for grad in grads)


class Distance(Scaled):
    """Estimates a distance from all elements, which becomes the rate only in later steps, as D-Adaptation does."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["d"] = torch.zeros(())

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        group["d"] = group["d"] + p.abs().sum()
        return 1.0 if group["d"] < 1e9 else group["d"]


class Large(Scaled):
    """Needs whole matrices that are large enough, as some factor only these."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        return 2.0 if p.ndim == 2 and min(p.shape) >= 128 else 1.0


class Centred(Scaled):
    """Subtracts the mean over the inputs of a convolution, and leaves matrices as they are, as Ranger does."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        return 1.0 if p.ndim < 4 else 1 - p.mean(dim=(1, 2, 3), keepdim=True)


class Clipped(Scaled):
    """Clips gradients that are large for one step."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        assert p.grad is not None
        return 1.0 if not p.numel() or p.grad.abs().max() < 10 else 1 / p.grad.norm()


class Listed(Scaled):
    """Keeps a list of its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.all:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


class Mapped(Scaled):
    """Keeps a momentum by parameter, or by its identity, in a dict of its own."""

    def __init__(self, params: Any, key: Callable[[Tensor], Any] = lambda p: p) -> None:
        super().__init__(params)
        self.key, self.kept = key, {key(p): torch.zeros_like(p) for group in self.param_groups for p in group["params"]}

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        assert p.grad is not None
        return self.kept[self.key(p)].mul_(0.9).add_(p.grad)


class Schedule:
    """Has the text of any object, with its address."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 / self.calls


class Noting(Scaled):
    """Has a schedule in its groups, and notes there the time of each step and what else a test asks for."""

    def __init__(self, params: Any, note: Callable[[Tensor], Any], schedule: Any = None) -> None:
        super().__init__(params)
        self.defaults |= {"note": note, "schedule": schedule or Schedule()}
        for group in self.param_groups:
            group |= {**self.defaults, **group}

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        group["times"] = [*group.get("times", ()), time.perf_counter()]
        group["noted"] = {"of": group["note"](p)}
        return group["schedule"]()


class Noisy(Scaled):
    """Draws random numbers."""

    def factor(self, p: Tensor, group: dict[str, Any]) -> Any:
        return torch.rand(())


def check(make: Callable[[Any], Optimizer], *, is_cut: bool) -> None:
    model = models.build(models.Stack)
    check_optimizers({}, [make(model.parameters())], None, is_cut=is_cut)


@pytest.mark.parametrize("cls", [Summed, Distance, Large, Clipped])
def test_what_ranks_alone_would_do_otherwise_is_refused(cls: type[Scaled]) -> None:
    with pytest.raises(
        ValueError, match=f"{cls.__name__} is not element-wise.*stage=0.*whole_matrix.*elementwise=True"
    ):
        check(cls, is_cut=True)
    check(cls, is_cut=False)


@pytest.mark.parametrize("note", [lambda p: object(), lambda p: p.detach().clone(), lambda p: [len(p.shape) > 9, 1.5]])
def test_objects_times_and_what_is_of_elements_in_groups_say_nothing(note: Callable[[Tensor], Any]) -> None:
    check_optimizers({}, [Noting(nn.Linear(3, 2).parameters(), note)], None, is_cut=True)


@pytest.mark.parametrize(
    ("note", "values"),
    [
        (lambda p: p.numel(), r"\[24\] with a whole parameter and \[16\] with"),
        (lambda p: [p.new_full((2,), p.numel())], r"\[\[\[24.0, 24.0\]\]\] .* \[\[\[16.0, 16.0\]\]\] "),
        (lambda p: p.ndim == 1, r"\[False\] with a whole parameter and \[True\] with"),
    ],
)
def test_numbers_in_groups_that_slices_change_are_named_with_both_values(
    note: Callable[[Tensor], Any], values: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"Noting is not element-wise.*group\['noted'\] is {values}.*elementwise=True"
    ):
        check_optimizers({}, [Noting(nn.Linear(3, 2).parameters(), note)], None, is_cut=True)


def test_options_of_groups_decide() -> None:
    check(Scaled, is_cut=True)
    check(lambda params: Scaled(params, lr=0.0), is_cut=True)
    for lr in (1e-2, 0.0):  # a warm-up may begin with a rate that moves nothing
        with pytest.raises(ValueError, match="Scaled is not element-wise"):
            check(lambda params, lr=lr: Scaled([{"params": [*params], "layerwise": True}], lr=lr), is_cut=True)


def test_each_number_of_dimensions_is_tried() -> None:
    """A convolution's weight was tried as a matrix."""
    check_optimizers({}, [Centred(nn.Linear(3, 2).parameters())], None, is_cut=True)
    for kind in (nn.Conv2d, nn.Conv3d):
        with pytest.raises(ValueError, match="Centred is not"):
            check_optimizers({}, [Centred(kind(3, 2, 2).parameters())], None, is_cut=True)
        check_optimizers({}, [Scaled(kind(3, 2, 2).parameters())], None, is_cut=True)
        check_optimizers({}, [Centred(kind(3, 2, 2).parameters())], None, is_cut=False)
    check_optimizers(
        {}, [Scaled([nn.Parameter(torch.ones(())), nn.Parameter(torch.ones((1,) * 7))])], None, is_cut=True
    )


class Split(nn.Parameter):
    """Looks like a parameter that an axis "tensor" splits."""

    _local_tensor = None


def test_only_groups_with_split_parameters_must_be_element_wise() -> None:
    weight, split = nn.Parameter(torch.zeros(4, 4)), Split(torch.zeros(4, 4))
    groups: list[dict[str, Any]] = [{"params": [split]}, {"params": [weight], "layerwise": True}]
    for order in (groups, groups[::-1]):
        check_optimizers({}, [Scaled(order)], None, is_cut=False)
        with pytest.raises(ValueError, match="Scaled is not element-wise"):
            check_optimizers({}, [Scaled([{**one, "layerwise": True} for one in order])], None, is_cut=False)


def test_options_of_a_group_added_later_decide() -> None:
    model = models.build(models.Stack)
    model.head.requires_grad_(False)
    optimizer = Scaled([*model.stem.parameters(), *model.blocks.parameters()])
    zs.shard(model, optimizer, stage=1)
    model.head.requires_grad_(True)
    with pytest.raises(ValueError, match="Scaled is not element-wise"):
        optimizer.add_param_group({"params": [*model.head.parameters()], "layerwise": True})
    optimizer.add_param_group({"params": [*model.head.parameters()]})


@pytest.mark.parametrize("stage", [0, 3])
def test_a_list_of_its_own_is_refused(stage: int) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="Listed does not update what is in its groups"):
        zs.shard(model, Listed(model.parameters()), stage=stage, precision="bf16")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("key", [lambda p: p, id])
def test_states_in_a_dict_by_parameter_are_refused(key: Callable[[Tensor], Any], stage: int) -> None:
    model = nn.Linear(3, 2)
    message = r"Mapped\.kept has a Tensor for the parameter 'weight'.*self\.state\[p\]"
    with pytest.raises(ValueError, match=message) as info:
        zs.shard(model, Mapped(model.parameters(), key), stage=stage)
    assert "tensor(" not in str(info.value)
    for is_cut in (False, True):  # a dict that is not an attribute: a trial shows it
        with pytest.raises(ValueError, match=r"Mapped does not update what is in its groups.*self\.state\[p\]"):
            check_optimizers({}, [Mapped(model.parameters(), key)], None, is_cut=is_cut)


KEPT: dict[str, Callable[[list[Tensor]], Any]] = {
    "ids": lambda params: {id(p) for p in params},
    "set": set,
    "frozen": frozenset,
    "listed ids": lambda params: [id(p) for p in params],
    "given": tuple,
    "role": lambda params: dict.fromkeys(params, "plain"),
}


class Keeping(Scaled):
    """Keeps a collection of some parameters that it is given."""

    def __init__(self, params: Any, lr: float = 0.1, kept: Any = ()) -> None:
        super().__init__(params, lr=lr)
        self.kept = kept


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", KEPT)
def test_a_collection_of_parameters_is_refused(kind: str, stage: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = Keeping(model.parameters(), kept=KEPT[kind]([model.bias]))
    with pytest.raises(ValueError, match=r"Keeping\.kept has .*the parameter 'bias'.*self\.state\[p\]"):
        zs.shard(model, optimizer, stage=stage, settings=zs.Settings(elementwise=True))


def test_other_collections_are_not_refused() -> None:
    class Reading(Scaled):
        """Keeps a list of its parameters, which its step does not need."""

        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr=lr)
            self.all = [p for group in self.param_groups for p in group["params"]]

    for stage in (0, 1):
        model = nn.Sequential(nn.Linear(3, 2))
        names = {p: name for name, p in model.named_parameters()}
        for kept in (names, {id(p): f"module.{name}" for p, name in names.items()}, {1, 2}, [None, "bias", 0.5], [[]]):
            optimizer = Keeping(model.parameters(), kept=kept)
            zs.shard(model, optimizer, stage=stage).detach()
        zs.shard(model, Reading(model.parameters()), stage=stage).detach()


def test_a_trial_draws_no_numbers_of_user_code() -> None:
    optimizer = Noisy(nn.Linear(3, 2).parameters())
    before = torch.get_rng_state()
    check_optimizers({}, [optimizer], None, is_cut=False)
    assert torch.equal(before, torch.get_rng_state())
