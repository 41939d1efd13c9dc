"""Transformers by their sizes: bundled shapes, and shapes of a local `config.json`.

Owns names, sizes and the parameters of each unit. It must not know ranks, memory or time, and needs no torch.
`transformer.py` has the operations of such a model.

Source: the models' public configurations; for the ZeRO paper's models its tables 4 to 10 (`paper.py` has those).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, final

from zeroshard.plan.numbers import nearest

__all__ = ["NoShapeError", "Parameters", "SHAPES", "Transformer", "gpt", "read_config", "shape_named", "shape_of"]

Parameters = tuple[tuple[str, int], ...]
"""Names and elements of parameters, in registration order."""


@final
@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer by its sizes.

    Args:
        block: "gpt2" (layer norms, biases, GELU, learned positions) or "llama" (RMS norms, rotary positions, a gate).
        inner: width of the MLP, or of one expert.
        kv_heads: number of heads of keys and values; 0 for `heads`.
        head_width: width of one head; 0 for hidden / heads.
        sequence: maximum sequence length in tokens.
        is_tied: whether the output head shares the embedding's parameter.
        has_qk_norm: whether queries and keys are normalized per head.
        experts, experts_used: number of experts in total and per token; 0 for a dense MLP.
        shared_inner: width of the expert that all tokens use.
        dense_layers, dense_inner: number of leading layers with a dense MLP, and its width.
        latent: sizes of multi-head latent attention: ranks of queries and of keys and values, and the widths of a head
            without positions, with positions, and of values; () for other attention.
        dropout: probability of dropout after attention and MLP, and in attention that is not fused.

    ```python
    import zeroshard as zs

    mine = zs.Transformer(name="mine", layers=24, hidden=2048, heads=16, vocabulary=32000, sequence=4096)
    print(zs.plan(mine, world_size=8, stage=3))
    ```
    """

    name: str
    block: Literal["gpt2", "llama"] = "llama"
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    inner: int = 0
    kv_heads: int = 0
    head_width: int = 0
    sequence: int = 1024
    is_tied: bool = False
    has_bias: bool = False
    has_qk_norm: bool = False
    experts: int = 0
    experts_used: int = 0
    shared_inner: int = 0
    dense_layers: int = 0
    dense_inner: int = 0
    latent: tuple[int, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.block not in ("gpt2", "llama"):
            raise ValueError(f"Transformer.block must be 'gpt2' or 'llama', got {self.block!r}.")
        sizes = [("layers", 1), ("hidden", 1), ("heads", 1), ("vocabulary", 1), ("sequence", 1)]
        sizes += [("inner", 0), ("kv_heads", 0), ("head_width", 0), ("experts", 0), ("shared_inner", 0)]
        sizes += [("dense_layers", 0), ("dense_inner", 0), ("experts_used", min(1, self.experts))]
        for name, least in sizes:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Transformer.{name} must be an integer, got {value!r}.")
            if value < least:
                raise ValueError(f"Transformer.{name} must be at least {least}, got {value}.")
        if self.experts_used > self.experts:
            raise ValueError(f"Transformer.experts_used must be at most experts, got {self.experts_used}.")
        if self.experts and self.dense_layers > 0 and not self.dense_inner:
            raise ValueError("Transformer.dense_inner must be at least 1 with dense_layers above 0, got 0.")
        if self.experts and self.block == "gpt2":
            raise ValueError("Transformer.experts must be 0 with block='gpt2'; experts have gates, as in 'llama'.")
        if self.latent and not (len(self.latent) == 5 and all(isinstance(one, int) and one > 0 for one in self.latent)):
            raise ValueError(f"Transformer.latent must be 5 widths above 0, or (), got {self.latent!r}.")
        if not self.latent and self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"Transformer.heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Transformer.dropout must be from 0 to below 1, got {self.dropout}.")
        object.__setattr__(self, "inner", self.inner or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if not self.head_width and not self.latent and self.hidden % self.heads:
            raise ValueError(f"Transformer.hidden must be a multiple of heads, got {self.hidden} and {self.heads}.")
        object.__setattr__(self, "head_width", self.head_width or self.hidden // self.heads)

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all key heads."""
        return self.kv_heads * self.head_width

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer's MLP is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def units(self) -> Mapping[str, Parameters]:
        """Return the parameters of each unit that `zs.shard` finds, by name; "" is the root, which comes first."""
        h, is_gpt2 = self.hidden, self.block == "gpt2"
        prefix = "transformer." if is_gpt2 else "model."
        norm = prefix + ("ln_f" if is_gpt2 else "norm")
        # Learned positions are small compared with blocks, and stay in the root.
        positions = ((f"{prefix}wpe.weight", self.sequence * h),) if is_gpt2 else ()
        found: dict[str, Parameters] = {"": (*positions, *self._norm(norm))}
        found[prefix + ("wte" if is_gpt2 else "embed_tokens")] = (("weight", self.vocabulary * h),)
        for layer in range(self.layers):
            found[f"{prefix}{'h' if is_gpt2 else 'layers'}.{layer}"] = self.block_parameters(layer)
        if not self.is_tied:
            found["lm_head"] = (("weight", self.vocabulary * h),)
        return MappingProxyType(found)

    def numel(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(numel for unit in self.units().values() for _, numel in unit)

    def used_numel(self) -> int:
        """Return the number of elements that each token uses: without unused experts."""
        unused = sum(self.has_experts(layer) for layer in range(self.layers)) * (self.experts - self.experts_used)
        return self.numel() - unused * 3 * self.hidden * self.inner

    def kind_of(self, layer: int) -> str:
        """Return the kind of a block: "dense" for one without experts in a model that has some, else "block"."""
        return "dense" if self.experts and not self.has_experts(layer) else "block"

    def block_parameters(self, layer: int, tensor: int = 1) -> Parameters:
        """Return the parameters of a block.

        Args:
            tensor: number of ranks of tensor parallelism: the first product is split by outputs, the second by inputs.
        """
        h, names = self.hidden, list[tuple[str, int]]()
        names += self._norm("norm_1")
        names += self._latent(tensor) if self.latent else self._attention(tensor)
        names += self._norm("norm_2")
        if self.has_experts(layer):
            names.append(("router.weight", self.experts * h))
            # As in Transformers: an owner of Muon or Adafactor updates a stack of all experts.
            names += [(name, self.experts * n * h * self.inner // tensor) for name, n in _STACKS.items()]
            names += [(f"shared.{m}.weight", h * self.shared_inner // tensor) for m in _GATED if self.shared_inner]
        elif self.block == "gpt2":
            names += [("up.weight", h * self.inner // tensor), ("up.bias", self.inner // tensor)]
            names += [("down.weight", self.inner * h // tensor), ("down.bias", h)]
        else:
            inner = self.dense_inner if self.experts else self.inner
            names += [(f"{m}.weight", h * inner // tensor) for m in _GATED]
        return tuple(names)

    def sides_of(self, name: str, numel: int) -> tuple[int, ...]:
        """Return the shape of a parameter by its name, up to the order of its sides."""
        if name.endswith(".bias") or "norm" in name or ".ln_" in name:
            return (numel,)
        if name.endswith(tuple(_STACKS)):
            side = self.hidden if name.endswith("gate_up_proj") else numel // (self.experts * self.hidden)
            return self.experts, numel // (self.experts * side), side
        ranks = {"q_b": self.latent[0], "kv_b": self.latent[1]} if self.latent else {}
        side = ranks.get(name.removesuffix(".weight").rpartition(".")[2], self.hidden)
        return numel // side, side

    def _norm(self, name: str) -> Parameters:
        both = (("weight", self.hidden), ("bias", self.hidden))
        return tuple((f"{name}.{key}", numel) for key, numel in both[: 2 if self.block == "gpt2" else 1])

    def _attention(self, tensor: int) -> Parameters:
        h, has_bias = self.hidden, self.has_bias or self.block == "gpt2"
        out = (self.query_width + 2 * self.kv_width) // tensor
        names = [("qkv.weight", h * out)] + [("qkv.bias", out)] * has_bias
        names += [("q_norm.weight", self.head_width), ("k_norm.weight", self.head_width)] * self.has_qk_norm
        names += [("out.weight", self.query_width * h // tensor)] + [("out.bias", h)] * (self.block == "gpt2")
        return tuple(names)

    def _latent(self, tensor: int) -> Parameters:
        h, (q_rank, kv_rank, plain, rotary, value) = self.hidden, self.latent
        heads = self.heads // tensor
        return (
            ("q_a.weight", h * q_rank),
            ("q_a_norm.weight", q_rank),
            ("q_b.weight", q_rank * heads * (plain + rotary)),
            ("kv_a.weight", h * (kv_rank + rotary)),
            ("kv_a_norm.weight", kv_rank),
            ("kv_b.weight", kv_rank * heads * (plain + value)),
            ("out.weight", heads * value * h),
        )


_GATED: Final = ("gate", "up", "down")
_STACKS: Final = MappingProxyType({"experts.gate_up_proj": 2, "experts.down_proj": 1})
"""Parameters of all experts of a block, by how many matrices of an expert each has."""


def gpt(name: str, layers: int, hidden: int, heads: int, vocabulary: int = 50257, sequence: int = 1024) -> Transformer:
    """Return a model of the GPT-2 family."""
    return Transformer(
        name=name, block="gpt2", layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, sequence=sequence,
        is_tied=True, dropout=0.1,
    )  # fmt: skip


SHAPES: Final[Mapping[str, Transformer]] = MappingProxyType(
    {
        one["name"]: Transformer(**one | {"latent": tuple(one.get("latent", ()))})
        for one in json.loads(Path(__file__).with_name("shapes.json").read_text())
    }
)
"""Bundled shapes by name."""


def shape_named(name: str) -> Transformer:
    """Return a bundled shape by name.

    Raises:
        ValueError: no shape has this name.
    """
    if name in SHAPES:
        return SHAPES[name]
    if name.endswith(".json") or os.sep in name:
        raise ValueError(
            f"The path {name!r} does not exist. Pass the path of a config.json, or of its folder, or a shape's name."
        )
    raise ValueError(
        f"No shape is named {name!r}. Known shapes: {', '.join(SHAPES)}. Or pass a config.json or its folder, a "
        f"Transformer, or a model.{nearest(name, SHAPES)}"
    )


_LLAMAS: Final = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
_HEADED: Final = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of Transformers' classes that shapes are: with a head over the vocabulary."""


class NoShapeError(ValueError):
    """A configuration of a type that no shape supports, or that leaves sizes to the defaults of Transformers."""


def read_config(path: str | Path) -> Transformer:
    """Return the shape that a Transformers `config.json` describes.

    Args:
        path: the file, or its folder.

    Raises:
        ValueError: the file does not exist, or no shape supports its `model_type`.
    """
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a readable config.json: {error}") from error
    return shape_of_config(config, file.parent.name or str(file))


def shape_of_config(config: Mapping[str, Any], name: str) -> Transformer:
    """Return the shape that a Transformers configuration describes.

    Raises:
        NoShapeError: no shape supports its `model_type` or its class, or a size is missing.
        ValueError: a size is none, or there is no `model_type`.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{name}: a configuration is a mapping, got {type(config).__name__}.")
    kind = config.get("model_type")
    unknown = [
        key for key in ("attention_bias", "mlp_bias", "mlp_only_layers", "add_cross_attention") if config.get(key)
    ]
    unknown += ["decoder_sparse_step"] * ((config.get("decoder_sparse_step") or 1) != 1)
    unknown += [one for one in (config.get("architectures") or [])[:1] if not str(one).endswith(_HEADED)]
    unknown += ["q_lora_rank=null"] * (kind == "deepseek_v3" and config.get("q_lora_rank", 1) is None)
    if unknown or kind not in ("gpt2", *_LLAMAS, None):
        known = f"supported: gpt2, {', '.join(_LLAMAS)}"
        what = f"have no {unknown[0]}" if unknown else f"support no model_type {kind!r} ({known})"
        raise NoShapeError(f"{name}: shapes {what}. zs.plan and `zeroshard plan` trace the model itself.")
    try:
        if kind == "gpt2":
            shape = gpt(name, config["n_layer"], config["n_embd"], config["n_head"], config["vocab_size"])
            inner, dropout = config.get("n_inner") or 4 * shape.hidden, float(config.get("resid_pdrop", 0.1) or 0)
            is_tied, sequence = bool(config.get("tie_word_embeddings", True)), config.get("n_positions", 1024)
            return replace(shape, inner=inner, dropout=dropout, is_tied=is_tied, sequence=sequence)
        if kind is not None:
            return _of_llama(config, kind, name)
    except KeyError as error:
        raise NoShapeError(f"{name}: the configuration of {kind!r} has no {error.args[0]!r}.") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: the configuration of {kind!r} has an unsupported size: {error}") from error
    raise ValueError(f"{name}: the configuration has no model_type.")


_DEFAULTED: Final = MappingProxyType(
    {
        "mistral": ("num_key_value_heads",),
        "mixtral": ("num_key_value_heads", "num_experts_per_tok"),
        "qwen2": ("num_key_value_heads",),
        "qwen3": ("num_key_value_heads", "head_dim"),
        "qwen3_moe": ("num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size"),
        "deepseek_v3": ("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace"),
    }
)
"""Keys without which Transformers makes a model of its defaults, by type."""


def _of_llama(config: Mapping[str, Any], kind: str, name: str) -> Transformer:
    counts = [config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)]
    is_mixed = "num_experts_per_tok" in _DEFAULTED.get(kind, ())
    for key in (*_DEFAULTED.get(kind, ()), *["num_experts"] * (is_mixed and not counts)):
        config[key]
    experts = counts[0] if counts else 0
    inner = config.get("moe_intermediate_size") if experts else None
    keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = tuple(config[key] for key in keys) if kind == "deepseek_v3" else ()
    return Transformer(
        name=name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or 0,
        head_width=latent[2] + latent[3] if latent else config.get("head_dim") or 0,
        inner=inner or config["intermediate_size"],
        vocabulary=config["vocab_size"],
        sequence=config.get("max_position_embeddings", 4096),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_bias=kind == "qwen2",
        has_qk_norm=kind.startswith("qwen3"),
        experts=experts,
        experts_used=config.get("num_experts_per_tok", 0) if experts else 0,
        shared_inner=(config.get("n_shared_experts") or 0) * (inner or 0),
        dense_layers=config.get("first_k_dense_replace", 0) if experts else 0,
        dense_inner=config["intermediate_size"] if experts else 0,
        latent=latent,
    )


def shape_of(model: Any) -> Transformer:
    """Return the shape that a name, a path or a `Transformer` means.

    Raises:
        ValueError: no shape has this name, and no file this path.
        TypeError: something else.
    """
    if isinstance(model, Transformer):
        return model
    if isinstance(model, str | Path):
        is_path = isinstance(model, Path) or (model not in SHAPES and Path(model).exists())
        return read_config(model) if is_path else shape_named(str(model))
    raise TypeError(
        "plan() takes the name of a shape, the path of a config.json, a Transformer, a configuration of Transformers "
        f"or a module; got {type(model).__name__}."
    )
