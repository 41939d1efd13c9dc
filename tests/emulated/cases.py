"""What is run on emulated CUDA devices; `test_devices.py` and `test_streams.py` say what has to come of it."""

import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from tests.emulated.cuda import Devices
from tests.errors import raised
from zeroshard.core.engine import Engine
from zeroshard.setup.request import Request
from zeroshard.sharding import shard_over
from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Native
from zeroshard.torch_groups import emulated_group
from zeroshard.wire.codec import Codec
from zeroshard.wire.comm import Channel, Comm, Pending, Tag, Vote
from zeroshard.wire.mesh import Axis

RANKS = 4
WIDTH = 64


class Block(nn.Module):
    """A block with buffers of dtypes that NCCL does not know, and of none that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("steps", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("table", torch.arange(6, dtype=torch.int16))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.up(x).relu())


class Model(nn.Module):
    """Blocks, and a head that shares its weight with the first linear layer."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OneOfMany(Comm):
    """The collectives of rank 0 of several ranks that all hold what it holds."""

    def __init__(self, mesh: zs.Mesh, settings: zs.Settings, ledger: Ledger) -> None:
        super().__init__(mesh, ledger, Native())

    def gather(self, full: Tensor, tag: Tag, kind: str = "gather", axis: Axis = "shard") -> Pending:
        rows = full.view(RANKS, -1)
        rows[1:] = rows[:1]
        self.sent_bytes[kind] += rows[1:].nbytes
        return Pending(lambda: None)

    def reduce(self, full: Tensor | None, own: Tensor, codec: Codec, scale: float, tag: Tag) -> Pending:
        assert full is not None
        own.copy_(full.view(RANKS, -1)[0])
        own.mul_(scale * RANKS)
        self.sent_bytes["reduce"] += codec.nbytes(own.numel()) * (RANKS - 1)
        return Pending(lambda: None)

    def reduce_copies(self, own: Tensor, codec: Codec, scale: float, tag: Tag, *, is_ready: bool = True) -> Pending:
        raise NotImplementedError

    def route(self, given: Tensor, taken: Tensor, counts: Sequence[Sequence[int]], tag: Tag, kind: str) -> Pending:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        assert tensor.device == self.mesh.device, what

    def post(self, values: list[int], what: str, channel: Channel) -> Vote:
        return Vote(lambda: values)

    def flag(self, flags: Tensor, what: str) -> None:
        return None

    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        return torch.stack([tensor] * RANKS)


@contextmanager
def process_group(backend: str | None, ranks: int = 1) -> Iterator[None]:
    if backend == "fake":
        with emulated_group(ranks):
            yield
        return
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_among_many(model: nn.Module, *, stage: int = 3, **options: Any) -> tuple[zs.Zero, torch.optim.Optimizer]:
    """Shard as rank 0 of several; the process group must be a fake one."""
    from zeroshard.wire.mesh import current_mesh

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    asked = Request(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=20))
    return shard_over(asked, current_mesh(), OneOfMany), optimizer


def on_devices(model: nn.Module) -> list[str]:
    return sorted({str(tensor.device) for tensor in [*model.parameters(), *model.buffers()]})


# -- where a model goes -----------------------------------------------------------------------------------------------


def moved(devices: Devices) -> dict[str, Any]:
    """Take a model on the CPU over as one of four ranks; then the same model moved as a whole, for comparison."""
    found: dict[str, Any] = {}
    with process_group("fake", RANKS):
        for way in ("unit by unit", "as a whole"):
            model = Model()
            found["model_bytes"] = sum(p.nbytes for p in model.parameters())
            found["unit_bytes"] = sum(p.nbytes for p in model.blocks[0].parameters())
            found["buffer_bytes"] = sum(b.nbytes for b in model.buffers())
            devices.reset()
            before = devices.held_bytes()
            if way == "as a whole":
                model.to("cuda:0")
            zero, _ = shard_among_many(model)
            found[way] = devices.peak_bytes() - before
            found["units"] = len(zero.units)
            found["devices"] = on_devices(model)
            found["kept_bytes"] = devices.held_bytes() - before
            del model, zero, _
    return found


def values(devices: Devices) -> dict[str, bool]:
    """Train what was moved here beside what was moved by hand; both on the emulated device."""
    states = {}
    for way in ("moved by hand", "moved here", "moved here, with states", "on another device"):
        model = Model(depth=2)
        plain = way == "moved by hand"
        if plain:
            model.to("cuda:0")
        if way == "on another device":
            os.environ["LOCAL_RANK"] = "0"
            model.to("cuda:1")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        zero = None
        for step in range(4):
            is_here = zero is not None or plain
            if (step == 2 or way != "moved here, with states") and not is_here:
                zero = zs.shard(model, optimizer, stage=3)
                assert on_devices(model) == ["cuda:0"], on_devices(model)
                is_here = True
            place = "cuda:0" if is_here else "cpu"
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step)).to(place)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        kinds = {key: str(value.device) for state in optimizer.state.values() for key, value in state.items()}
        states[way] = [p.detach().cpu() for p in model.parameters()], kinds
    expected, kinds = states.pop("moved by hand")
    assert kinds["exp_avg"] == "cuda:0"
    assert kinds["step"] == "cpu"
    return {
        way: here == kinds
        and all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, expected, strict=True))
        for way, (found, here) in states.items()
    }


PLACES: dict[str, dict[str, Any]] = {
    "host": {"staging_bytes": 1 << 16},
    "a part": {"states": 0.4},
    "gradients stay": {"gradients": 0.0},
    "parameters": {"parameters": 1.0, "staging_bytes": 1 << 16},
    "parameters alone": {"states": 0.0, "parameters": 0.5},
    "file": {"to": "", "staging_bytes": 1 << 16},
    "a part in a file": {"states": 0.5, "parameters": 1.0, "to": ""},
    "parameters on the host": {"parameters": 1.0, "parameters_to": "host", "to": ""},
    "parameters beside a file": {"parameters": 0.7, "to": "", "staging_bytes": 1 << 16},
}
"""Where state is kept elsewhere; "" is a folder."""


def plain_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def moves(devices: Devices) -> dict[str, list[Any]]:
    """Train with state in other memories, alone and among four; return the events of the last step."""
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for place, given in PLACES.items():
            offload = zs.Offload(**{**given, **({"to": folder} if "to" in given else {})})
            for ranks in (1, RANKS):
                model = plain_blocks()
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                if ranks == 1:
                    zero = zs.shard(model, optimizer, stage=3, offload=offload, precision="bf16")
                else:
                    from zeroshard.wire.mesh import current_mesh

                    asked = Request(model, optimizer, stage=3, offload=offload, precision="bf16")
                    with process_group("fake", ranks):
                        zero = shard_over(asked, current_mesh(), OneOfMany)
                zero.trace.is_detailed = True
                for _ in range(4):
                    for _ in range(2):
                        model(torch.ones(3, WIDTH, device="cuda:0")).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                events = zero.trace.step_events(3)
                found[f"{place}, {ranks}"] = [dataclasses.astuple(event)[1:] for event in events]
    return found


def offloaded(devices: Devices) -> dict[str, Any]:
    """Train with states and parameters on the device, on the host and in a file; all start alike."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        places: dict[str, zs.Offload | None] = {
            "device": None,
            "host": zs.Offload(staging_bytes=1 << 16),
            "a part": zs.Offload(states=0.4),
            "gradients stay": zs.Offload(gradients=0.0),
            "file": zs.Offload(to=folder, staging_bytes=1 << 16),
            "parameters": zs.Offload(parameters=1.0, staging_bytes=1 << 16),
            "parameters beside a file": zs.Offload(parameters=0.7, to=folder, staging_bytes=1 << 16),
            "parameters alone": zs.Offload(states=0.0, parameters=0.5, staging_bytes=1 << 16),
        }
        for precision in ("fp32", "bf16", "fp16"):
            expected: list[Tensor] = []
            for place, offload in places.items():
                torch.manual_seed(0)
                # Without buffers, which no precision casts.
                model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                zero = zs.shard(model, optimizer, stage=3, offload=offload, precision=precision)
                devices.waits = []
                for step in range(4):
                    for micro in range(2):
                        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2 * step + micro))
                        loss = model(x.to("cuda:0")).square().mean()
                        (loss * (float("inf") if (precision, step) == ("fp16", 1) else 1.0)).backward()
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    where = sorted({str(m.grad.device) for m in optimizer.param_groups[0]["params"]})
                    optimizer.step()
                    optimizer.zero_grad()
                waits = list(devices.waits)
                with zero.gathered():
                    values = [p.detach().float().cpu() for p in model.parameters()] + [norm.cpu()]
                expected = expected or values
                found[f"{place}, {precision}"] = {
                    "error": max(float((a - b).abs().max()) for a, b in zip(values, expected, strict=True)),
                    "gradients": where,
                    "states": sorted({str(s["exp_avg"].device) for s in optimizer.state.values()}),
                    "bytes": zero.memory().resident_bytes,
                    "predicted": zero.memory().predicted_bytes,
                    "waits": waits,
                    "text": zero.summary(),
                }
    return found


def given(devices: Devices) -> list[float]:
    """Add to gradients that were assigned on the host and leave the device; return two of their elements."""
    from zeroshard import devices as functions

    def used_on(device: torch.device, use: str, memory: Tensor) -> None:
        assert memory.device.type == "cuda", "record_stream takes memory of a device"

    functions.used_on = used_on
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    zero = zs.shard(model, torch.optim.AdamW(model.parameters()), offload="host")
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    for scale in (0.0, 0.0):
        (model(torch.ones(2, WIDTH, device="cuda:0")).sum() * scale).backward()
    gradient: Any = model[0].weight.grad
    assert str(zero.mesh.device) == "cuda:0"
    return [float(gradient.full_tensor()[0, 0]), float(gradient.full_tensor()[-1, -1])]


def counters(devices: Devices) -> list[str]:
    """Return where step counters of a fused update are, once a model was moved whose states were on the CPU."""
    model = Model(depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    zs.shard(model, optimizer, stage=2)
    return sorted({str(state["step"].device) for state in optimizer.state.values()})


def chosen(devices: Devices) -> dict[str, str]:
    """Return the device of a run's mesh, by what the process and its group are."""
    from zeroshard.wire.mesh import current_mesh

    found = {"one process": str(current_mesh().device)}
    found["one process, model on cuda:1"] = str(zs.shard(Model(1).to("cuda:1")).mesh.device)
    devices.use(1)
    found["set_device(1)"] = str(current_mesh().device)
    devices.use(0)
    os.environ["LOCAL_RANK"] = "1"
    found["LOCAL_RANK=1"] = str(current_mesh().device)
    devices.number = 1
    found["LOCAL_RANK=1, shown one device"] = str(current_mesh().device)
    devices.number = 2
    del os.environ["LOCAL_RANK"]
    for backend in ("gloo", "fake"):
        with process_group(backend):
            found[backend] = str(current_mesh().device)
    devices.number = 0
    found["no device"] = str(current_mesh().device)
    return found


def refused(devices: Devices) -> dict[str, str]:
    """Return what is said where a model cannot train where it is."""
    found = {}
    split = Model(1)
    split.head = nn.Linear(WIDTH, WIDTH).to("cuda:1")
    split.blocks.to("cuda:0")
    found["mixed"] = raised(lambda: zs.shard(split))
    on_device = Model(1).to("cuda:1")
    with process_group("gloo"):
        found["gloo"] = raised(lambda: zs.shard(on_device))
        found["late"] = raised(lambda: zs.init(backend="nccl"))
    with process_group("cpu:gloo"):
        found["no backend"] = raised(lambda: zs.shard(on_device))
    found["untouched"] = " ".join(on_devices(on_device))
    with process_group("fake", RANKS):
        model = Model(1)
        found["fake"] = raised(lambda: zs.shard(model))
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    found["partly meta"] = f"{zs.shard(part).mesh.device} {' '.join(on_devices(part))}"
    return found


# -- streams ----------------------------------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH, device="cuda:0")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def streams(devices: Devices) -> dict[str, Any]:
    """Train on one stream, then on another; spread one forward over two."""
    found: dict[str, Any] = {}
    with process_group("fake", RANKS):
        model = Model(2)
        _, optimizer = shard_among_many(model)
        step(model, optimizer)
        found["one stream"] = list(devices.waits)
        devices.use_stream(7)
        loss = model(torch.ones(2, WIDTH, device="cuda:0")).square().mean()
        devices.use_stream(0)
        found["forward on another"] = list(devices.waits)
        loss.backward()
        optimizer.step()
        found["backward and step"] = list(devices.waits)
        optimizer.zero_grad()

        class Spread(Model):
            def forward(self, x: Tensor) -> Tensor:
                x = self.blocks[0](self.enter(x))
                devices.use_stream(9)
                try:
                    x = self.blocks[1](x)
                finally:
                    devices.use_stream(0)
                return self.head(x)

        for stage in (3, 2):
            spread = Spread(2)
            _, optimizer = shard_among_many(spread, stage=stage)
            found[f"inside, stage {stage}"] = raised(lambda spread=spread, one=optimizer: step(spread, one))
    return found


def reads(devices: Devices) -> dict[str, Any]:
    """Read updated parameters on a side stream, then on the stream of the step; return which streams waited."""
    waited = list[int]()
    plain = OneOfMany.gather

    def gather(self: OneOfMany, full: Tensor, tag: Tag, kind: str = "gather", axis: Axis = "shard") -> Pending:
        pending = plain(self, full, tag, kind, axis)

        def wait() -> bool:
            waited.append(devices.stream())
            return pending.wait()

        return Pending(wait)

    with process_group("fake", RANKS), patch.object(OneOfMany, "gather", gather):
        model = Model(2)
        _, optimizer = shard_among_many(model, stage=2)
        step(model, optimizer)
        found: dict[str, Any] = {"in the step": list(waited)}
        before = len(devices.waits)
        devices.use_stream(7)
        sums = [p.sum() for p in model.parameters()]
        devices.use_stream(0)
        found |= {
            "gathers were waited for on": sorted(set(waited)),
            "streams": devices.waits[before:],
            "sums": len(sums),
        }
    return found


def captures(devices: Devices) -> dict[str, str]:
    """Capture the forward, the backward, the step, of a sharded model."""
    found = {}
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zs.shard(model, optimizer, stage=2)
    x = torch.ones(2, WIDTH, device="cuda:0")
    step(model, optimizer)
    devices.is_capturing_now = True
    found["forward"] = raised(lambda: model(x))
    devices.is_capturing_now = False
    loss = model(x).sum()
    devices.is_capturing_now = True
    found["backward"] = raised(loss.backward)
    devices.is_capturing_now = False
    optimizer.zero_grad()
    model(x).sum().backward()
    devices.is_capturing_now = True
    found["step"] = raised(optimizer.step)
    devices.is_capturing_now = False
    optimizer.step()
    with zero.gathered():
        devices.is_capturing_now = True
        found["gathered"] = raised(lambda: model(x))
    return found


def compiled(devices: Devices) -> dict[str, str]:
    """Compile to CUDA graphs before and after, wholly and in part; nothing of it comes to run."""
    found, mode = {}, "reduce-overhead"
    x = torch.ones(2, WIDTH, device="cuda:0")
    model = Model(2)
    model.blocks[1].compile(mode=mode)
    found["a block, before"] = raised(lambda: zs.shard(model))
    found["the model, before"] = raised(lambda: zs.shard(torch.compile(Model(1), mode=mode)))
    inside = Model(2)
    inside.blocks[1].up = torch.compile(inside.blocks[1].up, mode="max-autotune")
    found["a layer, before"] = raised(lambda: zs.shard(inside))
    later = Model(2)
    zs.shard(later, stage=2)
    later.blocks[0].up.compile(mode=mode)
    found["a layer, after"] = raised(lambda: later(x))
    whole = Model(1)
    zs.shard(whole, stage=2)
    whole_compiled = torch.compile(whole, mode=mode)
    found["the model, after"] = raised(lambda: whole_compiled(x))
    default = Model(1)
    default.compile(backend="eager")
    zs.shard(default, stage=2)
    found["without graphs"] = raised(lambda: default(x))
    return found


# -- threads ----------------------------------------------------------------------------------------------------------


class Hybrid(nn.Module):
    """Two branches of blocks on the device, whose results pass over the CPU on their way to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.ModuleList(Block() for _ in range(3)), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x, x
        for one, other in zip(self.left, self.right, strict=True):
            left, right = one(left), other(right).cpu().mul(1.0).to(x.device)
        return left.cpu().sum() + right.sum().cpu()


def threads(devices: Devices) -> dict[str, Any]:
    """Have autograd's threads call the engine at once, with its lock and, for comparison, without."""
    from zeroshard.core.order import Order

    found: dict[str, Any] = {}
    inside: list[int] = []
    meetings: set[int] = set()
    callers: set[int] = set()
    plain = Order.need

    def slow(order: Order, unit: int) -> None:
        inside.append(threading.get_ident())
        meetings.add(len(set(inside)))
        callers.add(threading.get_ident())
        time.sleep(0.01)  # lets another thread in, if it may
        try:
            plain(order, unit)
        finally:
            inside.remove(threading.get_ident())

    class Open:
        """A lock that keeps nobody out."""

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    Order.need = slow  # type: ignore[method-assign]
    with process_group("fake", RANKS):
        for way in ("locked", "open"):
            model = Hybrid()
            # Hooks of the CPU's nodes: a block's outputs that were handed over to the host.
            zero, optimizer = shard_among_many(model)
            engine: Engine = zero._engine
            if way == "open":
                engine.lock = Open()  # type: ignore[assignment]
            meetings.clear()
            callers.clear()
            outcome = raised(lambda one=(model, optimizer, engine): hybrid_step(*one))
            found[way] = {"meetings": max(meetings), "callers": len(callers), "outcome": outcome}
    return found


def hybrid_step(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    # Nodes of the host whose hooks ask for units while the device's thread is at its own. They are older than those of
    # the model, so the caller's thread comes to them when it has handed the others over.
    chain = torch.ones(2, WIDTH, requires_grad=True) * 1.0
    for number in (3, 2, 1):
        chain = chain * 1.0
        chain.register_hook(lambda grad, number=number: engine._need_in_backward(number))
    total = chain.sum()
    (model(torch.ones(2, WIDTH, device="cuda:0", requires_grad=True)) + total).backward()
    optimizer.step()
    optimizer.zero_grad()
