"""Optimizers that know what they need of a sharded model, usable without one.

Owns plain `torch.optim` optimizers. It must not know the engine. Read `whole.py` first.
"""

from zeroshard.optim.adamw8bit import AdamW8bit
from zeroshard.optim.whole import whole_matrix

__all__ = ["AdamW8bit", "whole_matrix"]
