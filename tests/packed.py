"""A layer whose gate and up projection are one weight, split by torch's `_StridedShard`: each rank has rows of both.

transformers splits experts of mixtures so (its styles "packed_colwise" and "moe_tp_experts").
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["Packed", "split_packed"]


class Packed(nn.Module):
    """`experts` gated layers, whose mean is added to the input.

    Shapes: `into` (experts, 2 * hidden, width), `out` (experts, width, hidden); the input (..., width).
    """

    def __init__(self, width: int, hidden: int, experts: int = 2) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.out = nn.Parameter(torch.empty(experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.into, self.out):
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        into, out, inner = self.into, self.out, x
        mesh = into.device_mesh if isinstance(into, DTensor) else None
        if mesh is not None:
            # Each rank's gradient of the input is a part of a sum.
            inner = DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
            into, out = into.to_local(), out.to_local()
        gate, up = torch.einsum("...w,ehw->...eh", inner, into).chunk(2, -1)
        y = torch.einsum("...eh,ewh->...w", F.silu(gate) * up, out) / len(into)
        if mesh is not None:
            y = DTensor.from_local(y, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()
        return x + y


def split_packed(layer: Packed, mesh: DeviceMesh) -> None:
    """Split a layer over the ranks of a mesh of one axis."""
    for name, placement in (("into", _StridedShard(1, split_factor=2)), ("out", Shard(2))):
        whole = getattr(layer, name)
        split = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
        setattr(layer, name, nn.Parameter(split, requires_grad=whole.requires_grad))
