"""Changes in 8 and 4 bits through a mailbox: the bits of the codecs of messages, what rounding loses, and the bytes."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from zeroshard.outer import formula
from zeroshard.outer.island_log import replay
from zeroshard.outer.mailbox_codec import Form
from zeroshard.outer.mailbox_files import PartWriter, read_array
from zeroshard.wire.transports import codec_of

from .islands import at_once, island, mailbox, start_values
from .test_mailbox_exchange import quick_disk, wait_for

__all__ = ["quick_disk"]

pytestmark = pytest.mark.timeout(120)


def drawn(numel: int, dtype: str) -> np.ndarray:
    """Return values of many sizes, among them zeros, and blocks of zeros and of the smallest numbers."""
    values = np.random.default_rng(numel).standard_normal(numel) * 10.0 ** (np.arange(numel) // 256 % 60 - 50)
    values[::7] = 0.0
    values[512:768] = 0.0
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@pytest.mark.parametrize("bits", [8, 4])
def test_messages_are_those_of_islands_in_one_launch(bits: int, dtype: str) -> None:
    form = Form(bits, dtype)
    for numel in (2, 254, 256, 258, 1 << 16, 3 * (1 << 16) + 514):
        values = drawn(numel, dtype)
        codec, message = codec_of(f"scaled{bits}"), torch.empty(form.nbytes(numel), dtype=torch.uint8, device="cpu")
        codec.encode(torch.from_numpy(values.copy()), message)
        assert np.array_equal(form.encode(values), message.numpy())
        expected = torch.cat([*codec.decoded_blocks(message, torch.from_numpy(values).dtype)])
        assert form.decode(message.numpy(), numel).tobytes() == expected.numpy().tobytes()
    odd = np.random.default_rng(0).standard_normal(1001).astype(dtype)
    assert np.abs(form.decode(form.encode(odd), 1001) - odd).max() <= np.abs(odd).max() / 2 ** (bits - 1)


def train(values: np.ndarray, name: str, exchange: int) -> None:
    """Change values in place, as steps would."""
    values += np.random.default_rng(sum(map(ord, name)) + exchange).standard_normal(values.size).astype(values.dtype)


@pytest.mark.parametrize("bits", [8, 4])
def test_islands_that_wait_have_the_bits_of_the_formula(bits: int, tmp_path: Path, quick_disk: None) -> None:
    """The oracle is that of islands in one launch, `formula.py`, with torch's codecs."""
    names, exchanges, numel = ("a", "b"), 4, 300_000
    starts, found = {}, {}

    def run(name: str) -> None:
        values = start_values(name, numel)
        one = island(box, tmp_path, name, values, bits=bits, log=tmp_path / "log")
        starts[name] = one.anchors.copy()
        for exchange in range(exchanges):
            train(values, name, exchange)
            one.after_step()
        found[name] = values.copy(), one.nbytes
        one.close(leaves=True)

    with mailbox(tmp_path) as box:
        at_once(*(partial(run, name) for name in names))
        wait_for(lambda: box.book.base == dict.fromkeys(names, exchanges))
        anchors = read_array(box.book.shelf.anchors(box.book.number, 0), numel, "<f4")

    codec = codec_of(f"scaled{bits}")
    anchor = torch.from_numpy(starts["a"].copy())
    lost = {name: torch.zeros(numel, dtype=torch.float32, device="cpu") for name in names}
    for exchange in range(exchanges):
        messages = []
        for name in names:
            values = anchor.numpy().copy()
            train(values, name, exchange)
            change = torch.from_numpy(values) - anchor
            messages.append(torch.empty(codec.message_numel(numel), dtype=torch.uint8, device="cpu"))
            formula.encoded(change, lost[name], codec, messages[-1])
        mean = torch.empty_like(anchor)
        formula.mean_of(messages, codec, len(names), mean)
        anchor += mean
    for values, nbytes in found.values():
        assert values.tobytes() == anchor.numpy().tobytes()
        assert nbytes == 2 * values.nbytes  # anchors, and what rounding lost
    assert anchors.tobytes() == anchor.numpy().tobytes()
    assert replay(tmp_path / "log" / "a-0").anchors.tobytes() == anchors.tobytes()


def test_few_bits_are_few_bytes_on_the_line_and_on_disk(tmp_path: Path, quick_disk: None) -> None:
    numel, found = 600_000, {}
    for bits in (32, 8, 4):
        folder = tmp_path / str(bits)
        folder.mkdir()
        with mailbox(folder) as box:
            values = start_values("a", numel)
            one = island(box, folder, "a", values, islands=2, bits=bits, staleness=None)
            before = one._source.traffic[0]
            train(values, "a", 0)
            one.after_step()
            wait_for(lambda box=box: bool(box.book._parts))
            wait_for(lambda one=one: one._source._post.look().has_put)
            (path,) = (box.book.shelf.change(1, "a", 0),)
            found[bits] = one._source.traffic[0] - before, path.stat().st_size
            one.close(leaves=True)
    for sent, stored in found.values():
        assert sent <= stored <= sent + 64
    assert found[32][0] / found[8][0] > 3.9 and found[32][0] / found[4][0] > 7.5


def test_islands_of_other_bits_are_refused(tmp_path: Path) -> None:
    with mailbox(tmp_path) as box:
        island(box, tmp_path, "a", start_values("a"), bits=8)
        with pytest.raises(Exception, match="island 'b' has bits=4, the other islands bits=8"):
            island(box, tmp_path, "b", start_values("b"), bits=4)


def test_a_mailbox_that_comes_back_has_the_changes_in_few_bits(tmp_path: Path, quick_disk: None) -> None:
    numel = 300_000
    with mailbox(tmp_path) as box:
        values = start_values("a", numel)
        one = island(box, tmp_path, "a", values, bits=4, staleness=None)
        train(values, "a", 0)
        one.after_step()
        wait_for(lambda: one._source._post.look().has_put)
        one.close()
    with mailbox(tmp_path) as box:
        assert box.book._parts == {(1, "a"): {0}}


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    form = Form(8, "<f4")
    message = form.encode(drawn(600, "<f4"))
    message[-4:] = np.array([np.nan], "<f4").view(np.uint8)
    writer = PartWriter(tmp_path / "part", message.size, form)
    try:
        with pytest.raises(ValueError, match="not finite"):
            writer.add(message.tobytes())
    finally:
        writer.close()
