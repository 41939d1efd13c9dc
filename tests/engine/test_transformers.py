"""Small models of transformers made from a config, unmodified: losses, parameters and states equal the oracle's."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.oracle import Run, Sharded, assert_matches, randint, seed

VOCABULARY = 67


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        output_router_logits=True,
    )
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=24,
        d_kv=12,
        d_ff=40,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


def ids(step: int, rank: int, micro: int = 0) -> Tensor:
    """Return one rank's token ids: (2, 8), none of them the padding token."""
    return 1 + randint(VOCABULARY - 1, 2, 8, key=(7, step, rank, micro))


def train(run: Run, make: Callable[[], nn.Module]) -> None:
    """Train three steps with the model's own dropout and its own loss."""
    seed(99)
    model = make()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.shard(model, optimizer)
    for step in range(3):
        seed(step, run.rank)
        batch = ids(step, run.rank)
        loss = model(input_ids=batch, labels=batch).loss
        run.backward(loss)
        run.record(loss=loss, unused=[name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()


def train_gpt2(run: Run) -> None:
    train(run, gpt2)


def train_llama(run: Run) -> None:
    train(run, llama)


def train_mixtral(run: Run) -> None:
    train(run, mixtral)


def train_t5(run: Run) -> None:
    train(run, t5)


def train_bert(run: Run) -> None:
    train(run, bert)


def train_recomputed(run: Run) -> None:
    """transformers' own non-reentrant gradient checkpointing."""
    seed(99)
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.shard(model, optimizer)
    for step in range(3):
        batch = ids(step, run.rank)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


def generate(run: Run) -> None:
    """transformers' own `generate`, under `gathered`, between two steps."""
    seed(99)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.shard(model, optimizer)
    for step in range(2):
        batch = ids(step, run.rank)
        run.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with run.gathered():
            run.record(text=model.generate(batch[:1, :3], max_new_tokens=3 + run.rank, do_sample=False, pad_token_id=0))
        model.train()


SCRIPTS = [train_gpt2, train_llama, train_mixtral, train_t5, train_bert, train_recomputed, generate]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), [(script, 2 + place % 2) for place, script in enumerate(SCRIPTS)])
def test_transformers(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


def find_units(name: str) -> list[str]:
    """Return the names of the units that are found without being told."""
    run = Sharded(3)
    model = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "t5": t5, "bert": bert}[name]()
    run.shard(model, torch.optim.AdamW(model.parameters()))
    return [unit.name for unit in run.zeros[0].units]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("gpt2", {"transformer.h.0", "transformer.h.1"}),
        ("llama", {"model.layers.0", "model.layers.1"}),
        ("mixtral", {"model.layers.0", "model.layers.1"}),
        ("t5", {f"{half}.block.{index}" for half in ("encoder", "decoder") for index in (0, 1)}),
        ("bert", {"bert.encoder.layer.0", "bert.encoder.layer.1"}),
    ],
)
def test_each_layer_is_a_unit(name: str, blocks: set[str]) -> None:
    assert blocks <= set(find_units(name))
