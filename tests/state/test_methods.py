"""Methods besides the model's forward: they train as `forward` does, in any precision; what is not named says how."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, WATCHDOG_S, randn, run_cases

# A scale at which nothing overflows, so that no step is skipped.
FP16 = zs.Precision(torch.float16, grad=torch.float32, master=torch.float32, loss_scale=256.0)
PRECISIONS = ("fp32", "bf16", FP16)


class Towers(nn.Module):
    """Two encoders and a head, each with a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Tower(), Tower()
        self.head = nn.Linear(16, 4)

    def get_text_features(self, x: Tensor) -> Tensor:
        return self.text.encode(x)

    def classify(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.get_text_features(x) + self.image.encode(x))


class Tower(nn.Module):
    """Blocks, and a method that uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(16) for _ in range(2))

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def the_model(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def a_method(model: Any, x: Tensor) -> Tensor:
    return model.get_text_features(x).square().mean() + model(x).square().mean()


def a_method_of_a_module(model: Any, x: Tensor) -> Tensor:
    return model.text.encode(x).square().mean() + model(x).square().mean()


def a_block(model: Any, x: Tensor) -> Tensor:
    return model.text.blocks[1](x).square().mean() + model(x).square().mean()


def a_head_in_chunks(model: Any, x: Tensor) -> Tensor:
    features = model.get_text_features(x)
    return torch.stack([model.head(part).square().mean() for part in features.chunk(2)]).mean()


def a_method_first_in_no_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.get_text_features(x)
    return model.head(model.image.encode(x)).square().mean()


LOSSES = (the_model, a_method, a_method_of_a_module, a_block, a_head_in_chunks, a_method_first_in_no_grad)
METHODS = ("get_text_features", "text.encode", "image.encode", "head.forward")


def losses_and_gradients(
    stage: int, precision: str | zs.Precision, loss_of: Any, methods: tuple[str, ...] = METHODS
) -> tuple[list[float], dict[str, Tensor]]:
    """Train two steps; return the losses, and the gradients of a third. Runs on a rank."""
    model = models.build(Towers)
    optimizer = models.sgd(model)
    if stage >= 0:
        settings = zs.Settings(watchdog_s=WATCHDOG_S, forward_methods=methods)
        zs.shard(model, optimizer, stage=stage, precision=precision, settings=settings)
    losses = []
    for step in range(3):
        x = randn(4, 16, key=(7, step))
        loss = loss_of(model, x)
        assert loss.dtype == torch.float32
        loss.backward()
        losses.append(loss.item())
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, {n: g.clone() if type(g) is Tensor else g.full_tensor() for n, g in grads.items()}


@pytest.mark.product
@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda one: one.__name__)
def test_methods_train_as_forward_does(loss_of: Any) -> None:
    expected, grads = losses_and_gradients(-1, "fp32", loss_of)
    cases = [(stage, precision, loss_of) for stage in STAGES for precision in PRECISIONS]
    for (stage, precision, _), results in run_cases(losses_and_gradients, 2, cases).items():
        for losses, found in results:
            where = f"stage {stage}, {precision}"
            relative = 1e-5 if precision == "fp32" else 4e-2
            assert losses == pytest.approx(expected, rel=relative), where
            assert found.keys() == grads.keys(), where
            for name, grad in grads.items():
                # A loss scale that is applied twice, or not at all, is off by thousands.
                off = (found[name].float() - grad).norm() / grad.norm()
                assert off < relative, f"{where}: {name} is off by {off:.3g}"


def gradients_of_inputs(precision: str | zs.Precision) -> Tensor:
    """Return the gradient of an input, which no loss scale may show in. Runs on a rank."""
    model = models.build(Towers)
    zs.shard(model, models.sgd(model), stage=3, precision=precision, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    x = randn(4, 16, key=(7, 0)).requires_grad_()
    model(x).square().mean().backward()
    assert x.grad is not None
    return x.grad


def test_gradients_of_inputs_are_not_scaled() -> None:
    found = {
        case[0]: results[0] for case, results in run_cases(gradients_of_inputs, 2, [(p,) for p in PRECISIONS]).items()
    }
    for precision in PRECISIONS[1:]:
        torch.testing.assert_close(found[precision], found["fp32"], rtol=5e-2, atol=5e-3)


class ModelEma:
    """As timm's."""

    def __init__(self, model: nn.Module) -> None:
        self.copies = [p.detach().clone() for p in model.parameters()]


def test_methods_that_only_call_blocks_need_no_name() -> None:
    expected = losses_and_gradients(-1, "fp32", a_method_of_a_module)
    for losses, found in run_cases(without_names, 2, [()])[()]:
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for name, grad in expected[1].items():
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)


def without_names() -> tuple[list[float], dict[str, Tensor]]:
    """Run `a_method_of_a_module` where no method was named. Runs on a rank."""
    return losses_and_gradients(3, "fp32", a_method_of_a_module, ())


def read_alone(model: Any, x: Tensor) -> Any:
    return model.classify(x)


def read_head(model: Any, x: Tensor) -> Any:
    return model.head(x)


def read_average(model: Any, x: Tensor) -> Any:
    return torch.optim.swa_utils.AveragedModel(model)


def read_ema(model: Any, x: Tensor) -> Any:
    return ModelEma(model)


def read_save(model: Any, x: Tensor) -> Any:
    return torch.save(list(model.parameters()), "/dev/null")


def read_convert(model: Any, x: Tensor) -> Any:
    return model.half()


def read_optimizer(model: Any, x: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    return optimizer.step()


def read_norm(model: Any, x: Tensor) -> Any:
    return model.head.weight.norm()


def read_vector(model: Any, x: Tensor) -> Any:
    return nn.utils.parameters_to_vector(model.parameters())


def read_apply(model: Any, x: Tensor) -> Any:
    return model.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)


REMEDIES = {
    read_alone: "('classify',))), and it trains as `forward` does. If 'classify' runs backward() itself, name 'head.f",
    read_head: "forward_methods=('head.forward',)",
    read_average: "zero.ema(decay)",
    read_ema: "zero.ema(decay)",
    read_save: "zero.save(path)",
    read_convert: "convert the model before zs.shard()",
    read_optimizer: "zero.attach(optimizer)",
    read_norm: "with zero.gathered():",
    read_vector: "with zero.gathered():",
    read_apply: "`zero_` cannot read its values. Use `with zero.gathered():`",
}


def error_of(read: Any) -> str:
    """Return the error of code that reads released parameters. Runs on a rank."""
    model = models.build(Towers)
    zs.shard(model, stage=3, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        read(model, torch.ones(2, 16))
    return str(caught.value)


def test_errors_say_what_to_write_instead() -> None:
    for (read,), texts in run_cases(error_of, 2, [(read,) for read in REMEDIES]).items():
        assert REMEDIES[read] in texts[0], f"{read.__name__}: {texts[0]}"


def make_from_released() -> list[Any]:
    """Make tensors like released parameters, and convert to what they are. Runs on a rank."""
    model = models.build(Towers)
    optimizer = models.sgd(model)
    zs.shard(model, optimizer, stage=3, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    p = model.head.weight
    before = [id(q) for q in model.parameters()]
    made = [
        p.new_zeros(3), p.new_ones(2), p.new_full((2,), 3.0), p.new_empty(1), p.new_tensor([1.0]), torch.zeros_like(p),
        torch.ones_like(p), torch.full_like(p, 2.0), torch.empty_like(p), torch.rand_like(p), torch.randn_like(p),
        torch.zeros_like(p, dtype=torch.float64), torch.randint_like(p, 3),
    ]  # fmt: skip
    assert model.to("cpu").cpu().float().to(torch.float32).to(p) is model
    model.to(device="cpu:0", dtype=torch.float32)  # torch copies, though it is the same device
    model(torch.ones(2, 16)).sum().backward()
    model.to("cpu").float()
    optimizer.step()
    assert before == [id(q) for q in model.parameters()]
    return [(type(one).__name__, tuple(one.shape), str(one.dtype)) for one in made]


def test_what_reads_no_values_and_what_changes_nothing_is_answered() -> None:
    plain = models.build(Towers).head.weight
    for found in run_cases(make_from_released, 2, [()])[()]:
        assert {kind for kind, _, _ in found} == {"Tensor"}
        assert [shape for _, shape, _ in found[5:]] == [tuple(plain.shape)] * 8
        assert found[11][2] == "torch.float64"


def test_a_method_that_is_not_there_is_refused() -> None:
    for path in ("text.decode", "texts.encode", "nothing"):
        with pytest.raises(ValueError, match=f"forward_methods names '{path}'.*'encoder.encode'"):
            zs.shard(models.build(Towers), settings=zs.Settings(forward_methods=(path,)))


def test_a_copy_has_the_plain_methods() -> None:
    model = models.build(Towers)
    zero = zs.shard(model, settings=zs.Settings(forward_methods=METHODS))
    with zero.gathered():
        copied = copy.deepcopy(model)
    assert "encode" not in vars(copied.text)
    assert "encode" in vars(model.text)
    assert F.mse_loss(copied.text.encode(torch.ones(2, 16)), model.text.encode(torch.ones(2, 16))) == 0
