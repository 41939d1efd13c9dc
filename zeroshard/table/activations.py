"""The activations column of the residency table: the treatment of saved tensors between forward and backward.

Owns the cells as data, and their valid combinations. `activations/` implements them. Read `table/cells.py` first.
"""

from abc import ABC
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Final, Literal, final

__all__ = [
    "Activations",
    "Chain",
    "Compressed",
    "Offloaded",
    "PRODUCTS",
    "Partitioned",
    "Recomputed",
    "Treated",
    "fits",
]


PRODUCTS: Final = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""The operations of `torch.ops.aten` whose results `Recomputed(keeps="products")` keeps: most of the time of a forward,
few of its bytes."""


class Treated(ABC):
    """One treatment in a chain, applied to the tensors that autograd saves."""

    word: str

    def __str__(self) -> str:
        return self.word


@final
@dataclass(frozen=True)
class Recomputed(Treated):
    """Activation checkpointing: modules keep only their inputs, and run again in the backward pass.

    Args:
        every: number of consecutive modules that are recomputed together, from the inputs of the first. "sqrt" is the
            square root of the number of modules, which balances kept and recomputed memory.
        keeps: "inputs", or "products" to also keep the results of matrix products, convolutions and attention.

    Source: Chen et al. 2016 (every); Korthikanti et al. 2022 (products).

    ```python
    import torch, zeroshard as zs

    block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    model = torch.nn.Sequential(*(block() for _ in range(4)))
    zero = zs.shard(model, activations=zs.Recomputed(every="sqrt"))
    model(torch.ones(2, 8)).sum().backward()  # each block runs once more
    ```
    """

    every: int | Literal["sqrt"] = 1
    keeps: Literal["inputs", "products"] = "inputs"
    word = "recomputed"

    def __post_init__(self) -> None:
        is_number = isinstance(self.every, int) and not isinstance(self.every, bool) and self.every > 0
        if not (is_number or self.every == "sqrt") or self.keeps not in ("inputs", "products"):
            raise ValueError(f"{self!r}: every must be at least 1, or 'sqrt'; keeps must be 'inputs' or 'products'.")
        if self.every != 1 and self.keeps == "products":
            raise ValueError(f"{self!r}: keeps='products' requires every=1: every module keeps its inputs, too.")

    def __str__(self) -> str:
        every = "" if self.every == 1 else f" every {self.every}"
        return f"{self.word}{every}{' but for products' * (self.keeps == 'products')}"


@final
@dataclass(frozen=True)
class Partitioned(Treated):
    """Each rank along the tensor axis keeps its part of the inputs of recomputed modules.

    Source: Rajbhandari et al. 2020, section 6.1 (P_a).

    ```python
    import zeroshard as zs

    column = zs.Activations((zs.Recomputed(), zs.Partitioned()))  # what "recompute+partition" stands for
    assert str(column) == "recomputed+partitioned"
    ```
    """

    LEAST_NUMEL: ClassVar[int] = 1024
    """Inputs with fewer elements stay full: a message would cost more than the memory is worth."""

    word = "partitioned"

    __str__ = Treated.__str__


@final
@dataclass(frozen=True)
class Compressed(Treated):
    """Saved tensors are stored in fewer bits.

    Args:
        rest: format of tensors that no lossless encoding makes smaller: None keeps them, "bf16", "fp8" and "int8" round
            them; the last two use a scale per block.

    Source: Jain et al. 2018 (Gist).

    ```python
    import zeroshard as zs

    assert str(zs.Compressed("bf16")) == "compressed, rest bf16"
    ```
    """

    rest: Literal["bf16", "fp8", "int8"] | None = None
    word = "compressed"

    def __post_init__(self) -> None:
        if self.rest not in (None, "bf16", "fp8", "int8"):
            raise ValueError(f"Compressed(rest=) must be None, 'bf16', 'fp8' or 'int8'; got {self.rest!r}.")

    def __str__(self) -> str:
        return self.word if self.rest is None else f"{self.word}, rest {self.rest}"


@final
@dataclass(frozen=True)
class Offloaded(Treated):
    """Saved tensors are stored in host memory until shortly before their use.

    Args:
        fraction: fraction of the bytes to offload, above 0 and at most 1; the tensors that backward uses first stay on
            the device.

    ```python
    import zeroshard as zs

    assert str(zs.Offloaded(0.5)) == "50% offloaded"
    ```
    """

    fraction: float = 1.0
    word = "offloaded"

    def __post_init__(self) -> None:
        is_number = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
        if not (is_number and 0 < self.fraction <= 1):
            raise ValueError(f"Offloaded(fraction=) must be above 0 and at most 1; got {self.fraction!r}.")

    def __str__(self) -> str:
        return self.word if self.fraction == 1 else f"{self.fraction:.0%} {self.word}"


ORDER = (Recomputed, Partitioned, Compressed, Offloaded)
Chain = tuple[Treated, ...]
"""Treatments in their order of application."""


@final
@dataclass(frozen=True)
class Activations:
    """A cell of the activations column: the treatment of saved tensors between forward and backward.

    Args:
        chain: treatments of all units that `units` does not name; () keeps activations unchanged.
        units: pairs of a pattern of unit names, with shell wildcards, and the chain of these units; the first match
            applies.

    ```python
    import zeroshard as zs

    column = zs.Activations((zs.Recomputed(),), units=(("head", ()),))
    assert column.of_unit("head") == () and str(column) == "recomputed, head kept"
    ```
    """

    chain: Chain = ()
    units: tuple[tuple[str, Chain], ...] = ()

    def __post_init__(self) -> None:
        for chain in self.chains:
            if (places := [ORDER.index(type(link)) for link in chain]) != sorted(set(places)):
                words = "+".join(kind.word for kind in ORDER)
                raise ValueError(f"activations {_words(chain)}: each treatment may appear once, in the order {words}.")
            if 1 in places and 0 not in places:
                raise ValueError("Only inputs of recomputed modules can be partitioned: 'recompute+partition'.")

    @property
    def chains(self) -> tuple[Chain, ...]:
        """All chains of this cell."""
        return (self.chain, *(chain for _, chain in self.units))

    def of_unit(self, name: str) -> Chain:
        """Return the chain of a unit by name; the root is "" or, in patterns and output, "(root)"."""
        return next((chain for pattern, chain in self.units if fits(name, pattern)), self.chain)

    def __str__(self) -> str:
        return ", ".join([_words(self.chain), *(f"{name} {_words(chain)}" for name, chain in self.units)])


def fits(name: str, pattern: str) -> bool:
    """Return whether a pattern matches the name of a unit."""
    return fnmatchcase(name or "(root)", pattern)


def _words(chain: Chain) -> str:
    return "+".join(map(str, chain)) or "kept"
