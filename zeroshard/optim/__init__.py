"""Optimizers that declare their needs of a sharded model, and also work without sharding.

Owns plain `torch.optim` optimizers. It must not know the engine. Read `whole.py`, `packed.py` and `sums.py` first: the
declarations that make slices, owners and checkpoints correct.
"""

from zeroshard.optim.adafactor import Adafactor
from zeroshard.optim.adamw8bit import AdamW8bit
from zeroshard.optim.lamb import Lamb
from zeroshard.optim.lion import Lion
from zeroshard.optim.muon import Muon, muon_groups
from zeroshard.optim.whole import whole_matrix

__all__ = ["Adafactor", "AdamW8bit", "Lamb", "Lion", "Muon", "muon_groups", "whole_matrix"]
