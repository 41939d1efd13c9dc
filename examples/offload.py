"""Offload: states on the host or in a file

    python examples/offload.py

One process, one argument more: `offload="host"` keeps optimizer states, master weights and gradients in memory of the
host, a folder keeps states and master weights in a file there, and `parameters=` moves parameters as well. On a CPU the
results are equal bit for bit; on a GPU they differ in rounding.
"""

import tempfile

import torch
from torch import nn

import zeroshard as zs


def train(offload: zs.Offload | str | None, steps: int = 5) -> tuple[float, dict[str, int]]:
    """Train; return the last loss, and the bytes between steps by memory."""
    device = zs.init().device
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero = zs.shard(model, optimizer, stage=3, offload=offload)
    for step in range(steps):
        batch = torch.randn(16, 128, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    held = zero.memory().resident_bytes
    elsewhere = {place: int(held.get(place, 0)) for place in ("host", "file")}
    return loss.item(), {"device": int(sum(held.values())) - sum(elsewhere.values()), **elsewhere}


def main() -> dict[str, tuple[float, dict[str, int]]]:
    """Train with states in each place; return losses and bytes by place."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "all on the device": train(None),
            "states on the host": train("host"),
            "states in a file": train(folder),
            "states and parameters on the host": train(zs.Offload(parameters=1.0)),
        }
    for name, (loss, held) in found.items():
        print(f"{name:35} loss {loss:.6f}  " + "  ".join(f"{where} {count:,} B" for where, count in held.items()))
    return found


if __name__ == "__main__":
    main()
