"""A loop of the shape of PyTorch's example of FSDP2 (BSD licence, github.com/pytorch/examples, distributed/FSDP2).

Its order, its names and the lines that a conversion changes are the example's; its options are left out.
"""

import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from tests.integrations.loops.toy import GPT, get_batch

losses_of_steps = []


def main():
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group(backend="gloo")
    torch.manual_seed(0)
    model = GPT()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for _ in range(10):
        x, y = get_batch("train")
        loss = model(x, y)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        losses_of_steps.append(loss.item())

    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)}
    dcp.save(state, checkpoint_id=os.path.join(os.environ["OUT_DIR"], "checkpoint"))
    torch.distributed.destroy_process_group()


main()
