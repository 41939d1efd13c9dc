"""How much of the memory that torch's allocator reserves is fragments, and how much arenas leave of them.

    python -m benchmarks.fragments --output benchmarks/results/fragments.json

Owns the traces, the policies that are compared and the goals; `zeroshard/plan/` owns the simulation. A trace is the
allocations of a real training step, forward, backward and update, several times over, with fake tensors: what is
recorded is when the storage of each tensor comes and goes, and nothing is computed. It takes a few minutes.
"""

import argparse
import math
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.machine import circumstances, write_result
from zeroshard.plan.allocator import Action, Event, Rules, simulate
from zeroshard.train.models.gpt import GPT, GPTConfig

__all__ = ["main"]

SAVED_OPERATORS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)


@final
@dataclass(frozen=True)
class Case:
    """A training whose allocations are recorded.

    Args:
        treatment: kept, block (each block is recomputed), sqrt (groups of blocks are), or selective (each block is,
            but for its matrix products and its attention).
        times: tokens of a sequence, by step.
        precision: fp32, or bf16 for parameters in bf16 with masters in fp32.
        update: foreach or fused, of torch's AdamW.
        is_mixed: whether every other block has an MLP of half the width.
    """

    depth: int
    batch: int
    vocabulary: int
    treatment: str
    times: tuple[int, ...]
    precision: str = "fp32"
    update: str = "foreach"
    is_mixed: bool = False

    @property
    def name(self) -> str:
        """Return what tells this case from the others."""
        parts = [f"gpt-{self.depth}", f"batch {self.batch}", f"vocabulary {self.vocabulary}", self.treatment]
        parts += [self.precision, self.update, "mixed" if self.is_mixed else "equal"]
        return ", ".join([*parts, "times " + " ".join(map(str, self.times))])


@final
@dataclass
class Trace:
    """What was recorded.

    Args:
        events: allocations and frees, in order; keys are numbers.
        kinds: what the long-lived allocations are: parameter, state, gradient or checkpoint.
        steps: number of events before each step, and at the end.
        ends: by key of a gradient or checkpoint, the number of events when a copy of it could have been made, and the
            tensor itself dropped.
        roles: by key of a long-lived allocation, what it is in each step: name of the parameter, number of the block.
    """

    events: list[Event] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)


@final
class Recorder(TorchDispatchMode):
    """Notes each storage that an operator returns, and when it goes."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.is_closed = False
        self._keys: dict[int, int] = {}
        self._watched: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.key_of(leaf)
        return result

    def key_of(self, tensor: Tensor) -> int:
        """Return the key of a tensor's storage; note the storage if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._keys:
            key = self._keys[address] = len(self.trace.events)
            self.trace.events.append(Event(key, storage.nbytes()))
            self._watched[address] = weakref.ref(storage, partial(self._gone, address, key))
        return self._keys[address]

    def note(self, tensor: Tensor, kind: str, role: str) -> int:
        """Say what a tensor is."""
        key = self.key_of(tensor)
        self.trace.kinds.setdefault(key, kind)
        self.trace.roles.setdefault(key, role)
        return key

    def end(self, key: int) -> None:
        """Note that a tensor could be dropped now, if a copy was kept elsewhere."""
        self.trace.ends.setdefault(key, len(self.trace.events))

    def _gone(self, address: int, key: int, _: object) -> None:
        del self._keys[address], self._watched[address]
        if not self.is_closed:
            self.trace.events.append(Event(key, 0, 0, Action.FREE))


def record(case: Case) -> Trace:
    """Train with fake tensors; return what was allocated."""
    trace = Trace()
    with FakeTensorMode(), Recorder(trace) as recorder:
        config = GPTConfig(case.depth, max(case.times), case.vocabulary)
        with default_dtype(torch.bfloat16 if case.precision == "bf16" else torch.float32):
            model = GPT(config)
            for block in list(model.blocks)[::2] if case.is_mixed else []:
                block.mlp.up = nn.Linear(config.width, 2 * config.width, bias=False)
                block.mlp.down = nn.Linear(2 * config.width, config.width, bias=False)
        names = {parameter: name for name, parameter in model.named_parameters()}
        masters = [p.detach().float() for p in names] if case.precision == "bf16" else list(names)
        for parameter, name in names.items():
            recorder.note(parameter, "parameter", name)
            parameter.register_post_accumulate_grad_hook(
                lambda p: recorder.end(recorder.note(p.grad, "gradient", names[p]))
            )
        for master, name in zip(masters, names.values(), strict=True):
            recorder.note(master, "parameter", f"master of {name}")
        optimizer = torch.optim.AdamW(masters, foreach=case.update == "foreach", fused=case.update == "fused")
        for time_ in case.times:
            trace.steps.append(len(trace.events))
            train_step(case, model, optimizer, masters, recorder, time_)
            for number, state in enumerate(optimizer.state.values()):
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        recorder.note(value, "state", f"{name} {number}")
        trace.steps.append(len(trace.events))
        recorder.is_closed = True  # what is still there at the end is not freed
    return trace


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have new tensors in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_step(case: Case, model: GPT, optimizer: Any, masters: list[Tensor], recorder: Recorder, time_: int) -> None:
    """Forward, backward and update."""
    tokens = torch.zeros(case.batch, time_, dtype=torch.int64)
    targets = torch.zeros(case.batch, time_, dtype=torch.int64)
    forward(case, model, tokens, targets, recorder).backward()
    parameters = list(model.parameters())
    if case.precision == "bf16":
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            recorder.note(master.grad, "gradient", f"of master {recorder.trace.roles[recorder.key_of(master)]}")
            parameter.grad = None
    optimizer.step()
    if case.precision == "bf16":
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    optimizer.zero_grad()


def forward(case: Case, model: GPT, tokens: Tensor, targets: Tensor, recorder: Recorder) -> Tensor:
    """Return the loss; as `GPT.forward`, with checkpoints."""
    time_ = tokens.shape[1]
    x, cosine, sine = model.embedding(tokens), model.cosine[:time_], model.sine[:time_]
    blocks = list(model.blocks)
    group = max(1, round(math.sqrt(len(blocks)))) if case.treatment == "sqrt" else 1
    for start in range(0, len(blocks), group):
        run = partial(run_blocks, blocks[start : start + group])
        if case.treatment == "kept":
            x = run(x, cosine, sine)
            continue
        key = recorder.note(x, "checkpoint", f"input {start}")
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
        extra = contexts if case.treatment == "selective" else {}
        x = checkpoint(run, x, cosine, sine, use_reentrant=False, preserve_rng_state=False, **extra)
        recorder.end(key)
    logits = model.head(model.norm(x)).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def run_blocks(blocks: Sequence[nn.Module], x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Pass the stream through blocks."""
    for block in blocks:
        x = block(x, cosine, sine)
    return x


def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is costly to compute."""
    is_saved = operator in SAVED_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
