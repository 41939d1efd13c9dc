"""Islands train as `torchft.local_sgd.DiLoCo` trains them, over gloo, with its manager and its lighthouse.

Torchft is the only public implementation of fragments, delay and mixing beside ours; its `fragment_update_alpha` is our
`mix`. It runs only where it is installed: `pip install torchft==0.2.0`.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.outer.plain import adamw, build, loss_of, nesterov, sharded
from zeroshard.testing import run_ranks

pytest.importorskip("torchft", reason="torchft is not installed: pip install torchft==0.2.0")

TOLERANCE = 1e-12
OPTIONS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "each step": {"every": 1, "optimizer": nesterov},
        "every third": {"every": 3, "optimizer": nesterov},
        "fragments": {"every": 4, "fragments": 2, "optimizer": nesterov},
        "delayed": {"every": 4, "fragments": 2, "delay": 1, "optimizer": nesterov},
        "delayed and mixed": {"every": 4, "fragments": 2, "delay": 1, "mix": 0.5, "optimizer": nesterov},
    }
)


class Part(nn.Module):
    """The parameters of a fragment, by name."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name.replace(".", "_"), model.get_parameter(name))


def theirs(steps: int, names: Sequence[Sequence[str]], outer: Mapping[str, Any], lighthouse: str) -> list[Any]:
    """Train this rank's island with torchft; return its parameters after each step."""
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    # Each island is a launch of its own, with a store of its own.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = build()
    optimizer = adamw(model.parameters())
    parts = [Part(model, some) for some in names]
    manager: Any = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"island {dist.get_rank()}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    found = []
    made = [outer["optimizer"](list(part.parameters())) for part in parts]
    told = {"fragment_sync_delay": outer.get("delay", 0), "fragment_update_alpha": outer.get("mix", 0.0)}
    try:
        with DiLoCo(manager, parts, optimizer, made, outer["every"], **told):
            for step in range(steps):
                loss_of(model, step, dist.get_rank()).backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append({name: value.detach().clone() for name, value in model.named_parameters()})
    finally:
        manager.shutdown()
    return found


def both(name: str, lighthouse: str) -> tuple[Any, Any]:
    """Train with islands of `zs.shard`, then with torchft."""
    steps = 4 * OPTIONS[name]["every"] + 1
    ours, layout = sharded(2, steps, 3, False, OPTIONS[name])
    names = [[name for name, *_ in fragment] for _, fragment in layout]
    return ours[:-1], theirs(steps, names, OPTIONS[name], lighthouse)


@pytest.mark.parametrize("name", OPTIONS)
def test_islands_train_as_those_of_torchft(name: str) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
    try:
        by_rank = run_ranks(both, 2, name, lighthouse.address(), timeout_s=120.0)
    finally:
        lighthouse.shutdown()
    for ours, others in by_rank:
        for step, (mine, expected) in enumerate(zip(ours, others, strict=True)):
            for key, value in expected.items():
                off = (mine[key] - value).abs().max().item()
                assert off <= TOLERANCE, f"{name}, step {step}, {key}: {off}"
