"""Low-rank adapters of peft on a model of transformers whose own parameters are frozen.

Owns the setting `model.lora`, and the first values of such a model, one module at a time. Must not know the engine or
the loop. Needs peft (the extra `zeroshard[peft]`). Read `lora_of` first.

Note: one module at a time
    The model is built on the meta device, adapters included, and `zs.shard` asks for the values of each module: those
    of the model are read from its files, an A is drawn as peft draws it, a B is zero. So no rank holds the whole model.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from zeroshard.train.extras import need

__all__ = ["add_lora", "check_lora", "first_values", "lora_of"]

_ASK: Final = "write rank=16, or rank=16,alpha=32,dropout=0.05,targets=q_proj+v_proj"
_KINDS: Final[Mapping[str, Callable[[str], Any]]] = MappingProxyType(
    {"rank": int, "alpha": float, "dropout": float, "targets": lambda text: text.split("+")}
)
_PREFIX: Final = "base_model.model."
_BASE: Final = "base_layer."
_WHOLE: Final = ("muon", "adafactor")


def lora_of(asked: str) -> Mapping[str, Any]:
    """Return the parts of the setting; empty without adapters. `alpha` is twice the rank by default.

    Raises:
        ValueError: the text has an unknown part, or a number out of range.

    >>> from zeroshard.train.models.lora import lora_of
    >>> dict(lora_of("rank=4,targets=q_proj+v_proj"))
    {'alpha': 8.0, 'dropout': 0.0, 'targets': ['q_proj', 'v_proj'], 'rank': 4}
    """
    if not asked:
        return {}
    found: dict[str, Any] = {}
    for part in asked.split(","):
        key, _, text = part.strip().partition("=")
        if key not in _KINDS or not text:
            raise ValueError(f"{part.strip()!r} is no part of LoRA; {_ASK}")
        try:
            found[key] = _KINDS[key](text)
        except ValueError:
            raise ValueError(f"{key}={text!r} is not a number; {_ASK}") from None
    if found.get("rank", 0) < 1:
        raise ValueError(f"LoRA needs a rank of at least 1; {_ASK}")
    if not 0 <= found.get("dropout", 0.0) < 1:
        raise ValueError(f"dropout={found['dropout']:g} must be at least 0 and below 1")
    return {"alpha": 2.0 * found["rank"], "dropout": 0.0, "targets": None} | found


def check_lora(asked: str, folder: str, optimizer: str, run: Any) -> None:
    """Raise ValueError if adapters cannot be used with the other settings.

    Args:
        folder: of the model of transformers; empty for a GPT.
        optimizer: `train.optimizer`.
        run: the section `run` of the settings.
    """
    if not asked:
        return
    if not folder:
        raise ValueError(f"model.lora={asked} is for models of transformers: give --model hf:DIR, too")
    if run.tensor > 1 or run.pipe > 1:
        raise ValueError(
            f"model.lora={asked} with run.tensor or run.pipe: adapters are not split; leave out one of them"
        )
    if optimizer in _WHOLE:
        raise ValueError(f"train.optimizer={optimizer} with model.lora: use an element-wise optimizer, such as adamw")


def add_lora(model: Any, asked: str) -> Any:
    """Return a model with adapters; its own parameters are frozen.

    Args:
        model: of transformers, on the meta device, under whose context this is called.

    Raises:
        ValueError: no module has a name among the targets.
        ImportError: peft is missing.
    """
    peft, parts = need("peft", "peft", f"model.lora={asked}"), lora_of(asked)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=parts["rank"],
        lora_alpha=parts["alpha"],
        lora_dropout=parts["dropout"],
        target_modules=parts["targets"],
    )
    try:
        return peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ValueError(f"model.lora={asked}: {error}") from None


def first_values(model: Any, folder: Path | None) -> Callable[[Any], None]:
    """Return the function that gives one module of an adapted model its values: `zs.shard(weights=)`.

    Args:
        folder: of the safetensors files of the model without adapters; None to draw the values.

    Raises:
        ValueError: the files have not all parameters under the names that the model has them by.
    """
    from safetensors import safe_open
    from torch import nn

    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    base, names = model.get_base_model(), dict[int, list[str]]()
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name.removeprefix(_PREFIX).replace(_BASE, ""))
    for of_one in [names[id(p)] for p in model.parameters()] if files else ():
        if not _is_adapter(of_one[0]) and not any(name in files for name in of_one):
            raise ValueError(
                f"model.lora: {folder} has no {of_one[0]!r}: with adapters, files are read under the names that the "
                "model gives its parameters. Write the folder anew: load the model with from_pretrained, and call "
                "save_pretrained."
            )
    # By module and key: the tensors of `zs.shard` are others than those of the model on the meta device.
    stored: dict[int, dict[str, str | None]] = {}
    adapters: dict[int, bool] = {}
    for name, module in model.named_modules():
        own = {key: t for key, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
        stored[id(module)] = {key: next((n for n in names[id(t)] if n in files), None) for key, t in own.items()}
        if own and _is_adapter(f"{name}."):
            adapters[id(module)] = ".lora_B." in f"{name}."

    def initialize(module: Any) -> None:
        found = stored[id(module)]
        if (is_second := adapters.get(id(module))) is not None:
            nn.init.zeros_(module.weight) if is_second else nn.init.kaiming_uniform_(module.weight, math.sqrt(5))
            return
        if not all(found.values()):
            base._init_weights(module)
        for key, name in found.items():
            if name is not None:
                with safe_open(files[name], framework="pt") as file:
                    getattr(module, key).data.copy_(file.get_tensor(name))

    return initialize


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
