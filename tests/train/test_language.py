"""A language model as the loop uses it: what decays, and how it writes."""

import torch

from zeroshard.train.models.gpt import GPTConfig
from zeroshard.train.models.language import generate, make_gpt


def _language(context=16):
    torch.manual_seed(0)
    language = make_gpt(GPTConfig(2, context))
    for block in language.module.blocks:
        for matrix in (block.attention.out, block.mlp.down):
            torch.nn.init.normal_(matrix.weight, std=0.05)
    return language


def test_every_parameter_is_decayed_or_not():
    language = _language()
    decayed, undecayed = list(language.decayed()), list(language.undecayed())
    assert all(p.ndim == 2 for p in decayed)
    assert len(decayed) == 4 * len(language.module.blocks)
    assert any(p is language.module.head.weight for p in undecayed)
    parameters = list(language.module.parameters())
    assert {id(p) for p in decayed} | {id(p) for p in undecayed} == {id(p) for p in parameters}
    assert len(decayed) + len(undecayed) == len(parameters)


def test_generation_continues_the_prompt_beyond_the_context():
    language = _language(context=8)
    prompt = torch.tensor([1, 2, 3])
    tokens = generate(language, prompt, numel=12, seed=5)
    assert torch.equal(tokens[:3], prompt)
    assert tokens.shape == (15,)
    assert torch.equal(tokens, generate(language, prompt, numel=12, seed=5))
    assert not torch.equal(tokens, generate(language, prompt, numel=12, seed=6))


def test_generation_at_temperature_zero_takes_the_likeliest():
    language = _language()
    tokens = generate(language, torch.tensor([1, 2]), numel=4, temperature=0.0)
    for end in range(2, 6):
        assert tokens[end] == language.module(tokens[None, :end])[0, -1].argmax()
