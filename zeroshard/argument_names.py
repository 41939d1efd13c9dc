"""The names that arguments of the public functions take, as types: a misspelt name is an error of the type checker.

Owns the types alone. What a name means, and the refusal of others at run time, is in `describe/`; a test compares both.
"""

from typing import Literal

__all__ = ["ActivationsName", "OffloadName", "ParametersName", "PrecisionName", "ResidencyName", "StageName"]

StageName = Literal[0, 1, 2, 3, "auto"]
"""Values of `stage=`."""

ResidencyName = Literal["C1", "C2", "C3", "C4", "C5"]
"""Names of `residency=`: the configurations of the ZeRO paper."""

PrecisionName = Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"]
"""Names of `precision=`."""

ParametersName = Literal["sharded", "until-backward", "until-step", "replicated"]
"""Names of `parameters=`."""

OffloadName = Literal["host", "auto"]
"""Names of `offload=`, beside the path of a folder."""

ActivationsName = Literal[
    "keep",
    "offload",
    "compress",
    "compress+offload",
    "compress-bf16",
    "compress-bf16+offload",
    "compress-fp8",
    "compress-fp8+offload",
    "compress-int8",
    "compress-int8+offload",
    "recompute",
    "recompute+offload",
    "recompute+compress",
    "recompute+compress+offload",
    "recompute+compress-bf16",
    "recompute+compress-bf16+offload",
    "recompute+compress-fp8",
    "recompute+compress-fp8+offload",
    "recompute+compress-int8",
    "recompute+compress-int8+offload",
    "recompute+partition",
    "recompute+partition+offload",
    "recompute+partition+compress",
    "recompute+partition+compress+offload",
    "recompute+partition+compress-bf16",
    "recompute+partition+compress-bf16+offload",
    "recompute+partition+compress-fp8",
    "recompute+partition+compress-fp8+offload",
    "recompute+partition+compress-int8",
    "recompute+partition+compress-int8+offload",
    "recompute-sqrt",
    "recompute-sqrt+offload",
    "recompute-sqrt+compress",
    "recompute-sqrt+compress+offload",
    "recompute-sqrt+compress-bf16",
    "recompute-sqrt+compress-bf16+offload",
    "recompute-sqrt+compress-fp8",
    "recompute-sqrt+compress-fp8+offload",
    "recompute-sqrt+compress-int8",
    "recompute-sqrt+compress-int8+offload",
    "recompute-sqrt+partition",
    "recompute-sqrt+partition+offload",
    "recompute-sqrt+partition+compress",
    "recompute-sqrt+partition+compress+offload",
    "recompute-sqrt+partition+compress-bf16",
    "recompute-sqrt+partition+compress-bf16+offload",
    "recompute-sqrt+partition+compress-fp8",
    "recompute-sqrt+partition+compress-fp8+offload",
    "recompute-sqrt+partition+compress-int8",
    "recompute-sqrt+partition+compress-int8+offload",
    "recompute-rest",
    "recompute-rest+offload",
    "recompute-rest+compress",
    "recompute-rest+compress+offload",
    "recompute-rest+compress-bf16",
    "recompute-rest+compress-bf16+offload",
    "recompute-rest+compress-fp8",
    "recompute-rest+compress-fp8+offload",
    "recompute-rest+compress-int8",
    "recompute-rest+compress-int8+offload",
    "recompute-rest+partition",
    "recompute-rest+partition+offload",
    "recompute-rest+partition+compress",
    "recompute-rest+partition+compress+offload",
    "recompute-rest+partition+compress-bf16",
    "recompute-rest+partition+compress-bf16+offload",
    "recompute-rest+partition+compress-fp8",
    "recompute-rest+partition+compress-fp8+offload",
    "recompute-rest+partition+compress-int8",
    "recompute-rest+partition+compress-int8+offload",
]
"""Names of `activations=`: treatments, joined by "+" in this order."""
