"""A loop of the shape of DeepSpeed's getting-started guide (Apache-2.0, github.com/deepspeedai/DeepSpeed).

Its calls and their order are the guide's. Model, batches, optimizer and clipping are those of the loop of FSDP2, so its
losses are, too.
"""

import os

import deepspeed
import torch

from tests.integrations.loops.toy import GPT, get_batch

losses_of_steps = []
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
}


def main():
    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = GPT()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(rank)
    for _ in range(10):
        x, y = get_batch("train")
        loss = engine(x, y)[1]
        engine.backward(loss)
        engine.step()
        losses_of_steps.append(loss.item())

    engine.save_checkpoint(os.environ["OUT_DIR"])


main()
