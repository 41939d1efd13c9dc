"""The text: its sources, its split, and the order in which it is read."""

import hashlib
from pydoc_data.topics import topics

import pytest
import torch

from zeroshard.train.data import IGNORED, heldout_batches, load_corpus, training_batch


def test_default_corpus_is_pythons_documentation():
    corpus = load_corpus(context=256)
    content = "".join(topics[key] for key in sorted(topics)).encode()
    assert bytes(corpus.train.tolist()) + bytes(corpus.heldout.tolist()) == content
    assert corpus.sha256 == hashlib.sha256(content).hexdigest()
    assert corpus.heldout.numel() == round(len(content) * 0.1)


def test_file_is_read_as_bytes(tmp_path):
    path = tmp_path / "text.txt"
    content = ("äöü\r\n" * 100).encode()
    path.write_bytes(content)
    corpus = load_corpus(str(path), context=8, heldout_fraction=0.25)
    assert bytes(torch.cat([corpus.train, corpus.heldout]).tolist()) == content
    assert corpus.heldout.numel() == len(content) // 4
    assert corpus.name == str(path)


def test_folder_is_joined_in_order_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/1.txt", "c.txt", "a.txt", ".hidden", ".git/x"):
        (tmp_path / name).write_text(f"<{name}>" * 10, "utf-8")
    corpus = load_corpus(str(tmp_path), context=4)
    text = bytes(torch.cat([corpus.train, corpus.heldout]).tolist()).decode()
    assert text == "<a.txt>" * 10 + "<b/1.txt>" * 10 + "<c.txt>" * 10


def test_bad_sources_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path: there is no file or folder '.*/missing'"):
        load_corpus(str(tmp_path / "missing"), context=4)
    with pytest.raises(ValueError, match=r"data\.path: the folder '.*' holds no files"):
        load_corpus(str(tmp_path), context=4)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"'.*empty\.txt' holds 0 bytes, 0 to train on and 0 held out; .* at least 5"):
        load_corpus(str(tmp_path / "empty.txt"), context=4)
    (tmp_path / "short.txt").write_text("0123456789" * 5, "utf-8")
    with pytest.raises(ValueError, match=r"holds 50 bytes, 45 to train on and 5 held out; with model\.context=5 "):
        load_corpus(str(tmp_path / "short.txt"), context=5)
    (tmp_path / "binary.txt").write_bytes(b"text\xff")
    with pytest.raises(ValueError, match=r"binary\.txt' is not text in UTF-8 \(byte 0xff at offset 4\)"):
        load_corpus(str(tmp_path / "binary.txt"), context=4)


def _batch(**place):
    text = torch.arange(251, dtype=torch.uint8).repeat(4)
    return training_batch(text, **{"seed": 3, "step": 5, "batch": 12, "context": 16} | place)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_global_batch_does_not_depend_on_the_rank_count(world_size):
    inputs, targets = _batch()
    parts = [_batch(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)


def test_batch_is_a_function_of_seed_and_step():
    first = _batch()[0]
    assert torch.equal(first, _batch()[0])
    assert not torch.equal(first, _batch(step=6)[0])
    assert not torch.equal(first, _batch(seed=4)[0])


def test_target_is_the_byte_after_its_input():
    inputs, targets = _batch()
    assert inputs.shape == targets.shape == (12, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (inputs + 1) % 251)


def test_training_batches_reach_both_ends_of_the_text():
    text = torch.arange(20, dtype=torch.uint8)
    seen = torch.cat([training_batch(text, seed=0, step=k, batch=8, context=16)[1].flatten() for k in range(50)])
    assert (seen.min(), seen.max()) == (1, 19)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("numel", [200, 97, 13])
def test_each_heldout_byte_but_the_first_is_a_target_once(world_size, numel):
    text = torch.arange(numel, dtype=torch.uint8)
    ranks = [
        list(heldout_batches(text, batch=2, context=8, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    targets = torch.cat([t.flatten() for batches in ranks for _, t in batches])
    inputs = torch.cat([x.flatten() for batches in ranks for x, _ in batches])
    is_scored = targets != IGNORED
    assert sorted(targets[is_scored].tolist()) == list(range(1, numel))
    assert torch.equal(targets[is_scored], inputs[is_scored] + 1)
    assert all(x.shape == t.shape == (2, 8) for batches in ranks for x, t in batches)


def test_heldout_limit():
    text = torch.arange(200, dtype=torch.uint8)
    targets = torch.cat([t.flatten() for _, t in heldout_batches(text, batch=2, context=8, limit_bytes=50)])
    assert sorted(targets[targets != IGNORED].tolist()) == list(range(1, 51))
