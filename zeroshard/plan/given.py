"""Models and optimizers that a plan is given by a text: a function by its import path, a configuration of Transformers.

Owns how such a model is built, on the meta device, the inputs that it is traced with, and its optimizers. It must not
know plans. Needs torch only where there is a module.
"""

import copy
import importlib
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zeroshard.plan.named import OPTIMIZERS
from zeroshard.plan.shape.shapes import NoShapeError, shape_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["IMPORTED", "inputs_of", "longest_of", "module_of", "optimizers_named"]

LABELLED: Final = re.compile(r"LM|Generation|Token")
"""In names of classes of Transformers whose labels are tokens."""
IMPORTED: Final = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
CLASSES: Final = ("ForSeq2SeqLM", "ForSpeechSeq2Seq", "ForMaskedLM", "ForCausalLM", "")
"""Of Transformers, after "AutoModel", where a configuration names no class: a whole model before its decoder alone."""
POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
"""Fields of a configuration with the tokens that a model takes."""


def module_of(model: Any) -> tuple[Any, Any]:
    """Return what is to be planned, and its inputs if it brings some; what is a shape is returned as it is.

    Args:
        model: "package.module:function" calls the function, which returns a module, or a module and its inputs; the
            path of a `config.json` that no shape supports, and a configuration object, build the model of Transformers.

    Raises:
        ValueError: nothing can be imported or built from the text.
    """
    if isinstance(model, str) and (found := IMPORTED.fullmatch(model)) and not Path(model).exists():
        return _called(model, *found.groups())
    if isinstance(model, str | Path):
        try:
            return shape_of(model), None
        except NoShapeError:
            from transformers import AutoConfig

            return _built(AutoConfig.from_pretrained(str(model))), None
    is_configuration = hasattr(model, "model_type") and not hasattr(model, "named_parameters")
    return (_built(model) if is_configuration else model), None


def _called(text: str, module: str, name: str) -> tuple[Any, Any]:
    import torch

    sys.path.insert(0, "")  # as `python -m` has it
    try:
        make = getattr(importlib.import_module(module), name)
        inspect.signature(make).bind()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        how = "of a package that can be imported; the function takes no arguments"
        raise ValueError(f"{text}: {error}. Give package.module:function {how}.") from error
    finally:
        sys.path.remove("")
    with torch.device("meta"):
        made = make()
    made, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not hasattr(made, "named_parameters"):
        raise ValueError(f"{text} returned a {type(made).__name__}, and no module, or module and inputs.")
    return made, inputs


def _built(config: Any) -> Any:
    """Return the model of a configuration, on the meta device: of the class that it names, or of an automatic one.

    Raises:
        ValueError: Transformers builds no model of it.
    """
    import torch
    import transformers

    named = [getattr(transformers, one, None) for one in getattr(config, "architectures", None) or ()]
    automatic = [getattr(transformers, f"AutoModel{one}") for one in CLASSES]
    known = next((one for one in automatic if type(config) in one._model_mapping), automatic[-1])
    config = copy.deepcopy(config)
    # Labels are shifted by the one, and classifiers look for the other; their values change nothing here.
    for name in ("pad_token_id", *["decoder_start_token_id"] * getattr(config, "is_encoder_decoder", False)):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    with torch.device("meta"):
        return next(filter(None, named), known.from_config)(config)


def longest_of(model: "nn.Module") -> int:
    """Return the tokens of a sequence that a model takes by its configuration; 0 if that does not say."""
    config: Any = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in POSITIONS)
    return next((one for one in found if isinstance(one, int) and one > 0), 0)


def inputs_of(model: "nn.Module", batch: int, sequence: int) -> "Mapping[str, Tensor]":
    """Return inputs of a model of Transformers, on the meta device: tokens, an image or a sound, and labels.

    Raises:
        TypeError: the model is not one of Transformers, or takes something else.
    """
    import torch

    config: Any = getattr(model, "config", None)
    kind, takes = getattr(model, "main_input_name", ""), inspect.signature(model.forward).parameters
    sizes, text = dict[str, list[int]](), torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    if hasattr(config, "image_size"):
        sides = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
        sizes["pixel_values"] = [getattr(config, "num_channels", 3), *sides]
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        sizes["input_features"] = [config.num_mel_bins, 2 * config.max_source_positions]
    if kind in sizes:
        labels = {"labels" if "labels" in takes else "decoder_input_ids": text} if hasattr(config, "vocab_size") else {}
        return {kind: torch.zeros(batch, *sizes[kind], device="meta"), **labels}
    wanted = ("input_ids", "labels") if LABELLED.search(type(model).__name__) else ("input_ids",)
    found = {name: text for name in wanted if name in takes and hasattr(config, "vocab_size")}
    if "input_ids" not in found:
        raise TypeError(
            f"plan() of a {type(model).__name__} needs inputs=: the arguments of its forward, with tensors on any "
            "device. On the command line, a package.module:function returns the model and these."
        )
    return found


def optimizers_named(asked: Any, model: Any = None, ignored: Sequence[object] = ()) -> tuple[str, tuple[Any, ...]]:
    """Return the name of the optimizer of a plan, and the optimizers of a module that determine their states.

    Args:
        model: a module; None for a shape.
        ignored: as in `zs.shard`.

    Raises:
        TypeError: the optimizer is neither a name nor a list of optimizers, or the model is a shape and the optimizer
            is not a name.
        ValueError: the name is unknown, or the optimizers do not match the module.
    """
    if isinstance(asked, str) and asked not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {asked!r}.")
    if model is None and not isinstance(asked, str):
        raise TypeError(f"optimizer= of a shape takes a name, one of {', '.join(OPTIMIZERS)}; got {asked!r}.")
    if model is None:
        return asked, ()
    from zeroshard.plan.updates import name_of, optimizers_for  # torch is needed for modules only

    found = optimizers_for(asked, model, ignored)
    return asked if isinstance(asked, str) else name_of(found), found
