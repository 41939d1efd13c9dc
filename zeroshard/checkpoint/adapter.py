"""The names of peft in a checkpoint, and those that `PeftModel.from_pretrained` reads.

Owns the knowledge of peft's LoRA: the tensors of an adapter, their names in its files, and the comparison with an
`adapter_config.json`. Without torch and without peft. Read `exchange.py` first.
"""

import re
from collections.abc import Iterable, Mapping, Set
from typing import Any, Final

from zeroshard.checkpoint.ranges import Spec
from zeroshard.table.errors import CheckpointError

__all__ = ["TRAINED", "adapter_names", "is_adapted", "trained_beside"]

TRAINED: Final = "zeroshard.trained"
"""The key among a checkpoint's `extra` of what was trained beside an adapter; only models with adapters have it."""
_PREFIX: Final = "base_model.model."
_OF_LORA = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])\.(?P<adapter>[^.]+)\.weight")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_OF_PEFT = re.compile(r"\.(lora_\w+|base_layer|modules_to_save|original_module)(\.|$)")
_ADVICE: Final = "Or write it from the program: `with zero.gathered(): model.save_pretrained(folder)`."


def is_adapted(names: Iterable[str]) -> bool:
    """Return whether these are the names of a model that peft has changed."""
    return any(_OF_PEFT.search(name) for name in names)


def trained_beside(names: Iterable[str], trained: Iterable[str]) -> dict[str, Any]:
    """Return the trained parameters of a model that no adapter holds, under `TRAINED`; {} of a model without adapters.

    Args:
        names: of all parameters and buffers.
    """
    if not is_adapted(names):
        return {}
    return {TRAINED: sorted(name for name in trained if not (_OF_LORA.fullmatch(name) or _SAVED.fullmatch(name)))}


def adapter_names(
    where: str, specs: Mapping[str, Spec], trained: Iterable[str], config: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return the tensors of the one LoRA adapter, each with its name in `adapter_model.safetensors`.

    Args:
        where: the checkpoint, for messages.
        specs: the parameters and buffers of a model that peft has changed.
        trained: the names of the parameters that were trained.
        config: the configuration of the adapter; None without one.

    Raises:
        CheckpointError: the configuration is missing or belongs to another adapter, or the checkpoint has tensors that
            a LoRA adapter folder cannot hold.
    """
    if config is None or config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{where}: holds a model with adapters of peft, whose weights transformers would initialize randomly. To "
            "write an adapter folder, give the adapter_config.json of a LoRA adapter as config; "
            f"`model.peft_config['default'].save_pretrained(folder)` writes that file. {_ADVICE}"
        )
    for key, plain in (("bias", "none"), ("use_dora", False), ("trainable_token_indices", None)):
        if config.get(key, plain) not in (plain, None):
            raise CheckpointError(f"{where}: cannot export an adapter with {key}={config[key]!r}. {_ADVICE}")
    found: dict[str, str] = {}
    adapters, whole, modules = set(), set(), {"lora_A": set[str](), "lora_B": set[str]()}
    for name, spec in specs.items():
        lora, saved = _OF_LORA.fullmatch(name), _SAVED.fullmatch(name)
        if lora is not None:
            found[name] = f"{lora['module']}.{lora['part']}.weight"
            adapters.add(lora["adapter"])
            modules[lora["part"]].add(lora["module"])
            _check_rank(where, name, spec.shape[lora["part"] == "lora_B"], config)
        elif saved is not None:
            found[name] = f"{saved['module']}.{saved['rest']}"
            whole.add(saved["module"])
            adapters.add(saved["adapter"])
        elif re.search(r"\.lora_\w+(\.|$)", name):
            raise CheckpointError(f"{where}: cannot export '{name}', whose kind of adapter is not supported. {_ADVICE}")
    if len(adapters) != 1 or modules["lora_A"] != modules["lora_B"]:
        raise CheckpointError(
            f"{where}: holds the adapters {sorted(adapters)}; only one complete adapter can be exported. {_ADVICE}"
        )
    _check_modules(where, modules["lora_A"], config, "target_modules")
    _check_modules(where, whole, config, "modules_to_save")
    if lost := sorted(set(trained) & (specs.keys() - found.keys())):
        raise CheckpointError(
            f"{where}: '{lost[0]}' (of {len(lost)}) was trained with the adapter, but an adapter folder cannot "
            f"hold it. {_ADVICE}"
        )
    return {name: file if file.startswith(_PREFIX) else f"{_PREFIX}{file}" for name, file in found.items()}


def _check_rank(where: str, name: str, rank: int, config: Mapping[str, Any]) -> None:
    pattern = config.get("rank_pattern") or {}
    known = {config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())}
    if rank not in known:
        raise CheckpointError(
            f"{where}: '{name}' has LoRA rank {rank}, but the adapter_config.json has {sorted(map(str, known))}. Give "
            "the adapter_config.json of this run."
        )


def _check_modules(where: str, modules: Set[str], config: Mapping[str, Any], key: str) -> None:
    """Raise unless a setting names exactly these modules: peft would initialize others randomly, and skip the rest.

    Args:
        modules: names of the modules that the checkpoint has for the setting.
        key: the setting: a list of the ends of names, or a pattern of whole names.
    """
    wanted = config.get(key) or []
    if wanted == "all-linear":
        return
    patterns = [wanted] if isinstance(wanted, str) else [rf"(.*\.)?{re.escape(str(one))}" for one in wanted]
    plain = {module.removeprefix(_PREFIX) for module in modules}
    strangers = [module for module in sorted(plain) if not any(re.fullmatch(one, module) for one in patterns)]
    idle = [one for one in patterns if not any(re.fullmatch(one, module) for module in plain)]
    if strangers or idle:
        what = f"'{strangers[0]}' is adapted or saved" if strangers else f"no tensor matches '{idle[0]}'"
        raise CheckpointError(
            f"{where}: {what}, but the adapter_config.json has {key}={wanted}. Give the adapter_config.json of "
            "this run."
        )
