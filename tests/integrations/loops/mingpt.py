"""A loop of the shape of minGPT's `trainer.py` (Andrej Karpathy, MIT licence, github.com/karpathy/minGPT).

Its order, its names and the lines that a conversion changes are minGPT's. It trains in one process.
"""

import torch
from torch.utils.data.dataloader import DataLoader

from tests.integrations.loops.toy import GPT, get_batch


class Trainer:
    def __init__(self, model, train_dataset):
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset
        self.device = "cpu"
        self.model = self.model.to(self.device)
        self.losses = []

    def run(self):
        model = self.model

        # setup the optimizer
        self.optimizer = model.configure_optimizers()

        # setup the dataloader
        train_loader = DataLoader(
            self.train_dataset,
            sampler=torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10)),
            shuffle=False,
            batch_size=8,
        )

        model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            # fetch the next batch (x, y) and re-init iterator if needed
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            batch = [t.to(self.device) for t in batch]
            x, y = batch

            # forward the model
            logits, self.loss = model(x, y)

            # backprop and update the parameters
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()

            self.losses.append(self.loss.item())
            self.iter_num += 1
            if self.iter_num >= 10:
                break


torch.manual_seed(3407)
trainer = Trainer(GPT(), list(zip(*get_batch("train", 64), strict=True)))
torch.manual_seed(3407)
trainer.run()
losses_of_steps = trainer.losses
