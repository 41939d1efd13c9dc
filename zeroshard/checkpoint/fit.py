"""The comparison of tensors with the model that a `config.json` of transformers describes.

Owns the comparison with transformers' own model, which is made on the meta device: names and shapes, no values. Needs
transformers (the extra `zeroshard[transformers]`) and torch, when it is asked.
"""

import copy
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zeroshard.table.errors import CheckpointError

__all__ = ["check_fit"]


def check_fit(where: str, shapes: Mapping[str, tuple[int, ...]], aliases: Iterable[str], config: Path) -> None:
    """Raise unless a model class of the configuration has exactly these tensors.

    Args:
        where: the checkpoint, for messages.
        shapes: shapes of parameters and buffers, by name.
        aliases: further names of tied parameters.
        config: a `config.json`.

    Raises:
        CheckpointError: transformers is missing, lacks the model, or would initialize weights randomly.
    """
    try:
        transformers, torch = importlib.import_module("transformers"), importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{config}: comparing names with a configuration needs {error.name!r}; install it with: pip install "
            '"zeroshard[transformers]", or export without a configuration.'
        ) from None
    try:
        loaded = transformers.AutoConfig.from_pretrained(str(config), local_files_only=True, trust_remote_code=False)
        classes = _classes_of(transformers, loaded)
    except Exception as error:  # of a file that is not what it should be: KeyError, TypeError, RecursionError, others
        raise CheckpointError(f"{config}: describes no model that transformers knows: {error}") from error
    if not classes:
        raise CheckpointError(f"{config}: transformers has no model of this architecture to compare with.")
    known = shapes.keys() | set(aliases)
    found = [(cls, _differences(torch, cls, loaded, shapes, known)) for cls in classes]
    best, problems = min(found, key=lambda pair: len(pair[1]))
    if problems:
        more = f", and {len(problems) - 3} differences more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{where} does not match {config}, so transformers would initialize weights randomly. Of {best.__name__}, "
            f"{'; '.join(problems[:3])}{more}. Save the model itself, without its wrapper, or export "
            "without a configuration."
        )


def _classes_of(transformers: Any, config: Any) -> list[Any]:
    """Return the model classes that the configuration names; if it names none, all classes that accept it."""
    if config.architectures:
        return [getattr(transformers, name) for name in config.architectures if hasattr(transformers, name)]
    auto = transformers.models.auto.modeling_auto
    mappings = [getattr(auto, name) for name in dir(auto) if name.startswith("MODEL_") and name.endswith("_MAPPING")]
    found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    classes = [cls for one in found for cls in (one if isinstance(one, (tuple, list)) else (one,))]
    return list(dict.fromkeys(classes))


def _differences(
    torch: Any, cls: Any, config: Any, shapes: Mapping[str, tuple[int, ...]], known: set[str]
) -> list[str]:
    """Return the differences from the model's tensors; a tied parameter needs only one of its names."""
    try:
        with torch.device("meta"):
            model = cls(copy.deepcopy(config))
        model.tie_weights()
    except Exception as error:  # a class that does not take this configuration
        return [f"the model cannot be made: {error}"] * (len(shapes) + 1)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    there = {id(parameters[name]) for name in known if name in parameters}
    missing = [name for name in expected if name not in known and id(parameters.get(name)) not in there]
    found = [f"'{name}' is not in the checkpoint" for name in missing]
    found += [f"'{name}' is not in the model" for name in shapes if name not in expected]
    found += [
        f"'{name}' has shape {shape} in the checkpoint and {expected[name]} in the model"
        for name, shape in shapes.items()
        if expected.get(name, shape) != shape
    ]
    return found
