"""The sizes of the small GPT, and how fast it trains, from one number: its depth.

Owns that arithmetic. Imports no torch, so that `zeroshard train --help` is quick. Read `gpt.py` for the model.
"""

from dataclasses import dataclass
from typing import Final, final

__all__ = ["GPTConfig", "HEAD_WIDTH", "check_gpt"]

HEAD_WIDTH: Final = 32
_WIDTH_PER_LAYER: Final = 32
_LEARNING_RATE: Final = 3e-3
_LEARNING_RATE_WIDTH: Final = 128


@final
@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT and how fast to train it, from one dial.

    Args:
        depth: number of blocks.
        context: longest input, in tokens.
        vocabulary: number of tokens; 256 for bytes.

    Raises:
        ValueError: an argument is less than 1.
    """

    depth: int
    context: int = 128
    vocabulary: int = 256

    def __post_init__(self) -> None:
        for name in ("depth", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name} must be at least 1, got {getattr(self, name)}")

    @property
    def width(self) -> int:
        """32 per block: models of one family keep one ratio of width to depth, and so one ratio of costs."""
        return _WIDTH_PER_LAYER * self.depth

    @property
    def heads(self) -> int:
        """One head for each 32 of width, hence one for each block."""
        return self.width // HEAD_WIDTH

    @property
    def batch(self) -> int:
        """Windows of a step: two per block, since the batch that still pays grows as the loss falls.

        Rounded up to fours, so that 1, 2 and 4 ranks get equal shares; other numbers of ranks get shares that differ
        by one window.
        """
        return 4 * -(-self.depth // 2)

    @property
    def learning_rate(self) -> float:
        """Of AdamW at its highest: by one over the square root of the width, as wider sums add up to larger updates."""
        return _LEARNING_RATE * float((_LEARNING_RATE_WIDTH / self.width) ** 0.5)


def check_gpt(config: GPTConfig, tensor: int) -> None:
    """Raise ValueError if a number of ranks along the axis "tensor" cannot split a GPT into equal parts."""
    sizes = {
        f"heads, {config.heads} (model.depth={config.depth})": config.heads,
        f"tokens of model.context, {config.context}": config.context,
        f"tokens of data.tokenizer, {config.vocabulary:,}": config.vocabulary,
    }
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(
                f"run.tensor={tensor} does not divide the number of {name}; give a multiple of {tensor}, or another "
                "run.tensor"
            )
