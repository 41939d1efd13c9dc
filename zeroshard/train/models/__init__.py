"""The models that `zeroshard train` trains. Read `gpt.py`."""

from zeroshard.train.models.gpt import GPT, GPTConfig, generate

__all__ = ["GPT", "GPTConfig", "generate"]
